"""Unpad -> pack -> one forward -> put back: the index arithmetic, made on the host.

TRL keeps a batch as prompts [B, P] padded on the left and completions [B, C] padded on the right. The model wants the real
tokens alone, one sequence after the other. A row contributes prompt + completion but for its last token, which predicts
nothing that is scored:

    prompt p0 p1 | completion c0 c1 c2   ->   inputs p0 p1 c0 c1, targets -100 c0 c1 c2

Rows without a completion token (masked ones) contribute nothing, but one row always stays, so that every process of a
distributed run makes the same forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Where the tokens of one packed forward come from, and where its log-probabilities go. All tensors are on the host.

    Attributes:
        take: int64 [T], packed position -> flat position in the padded [B, P + C] ids.
        target: int64 [T], packed position -> flat position of the next token in [B, P + C], -1 where nothing is scored.
        read: int64 [M], packed positions that are scored.
        write: int64 [M], their flat positions in the padded [B, C] completions.
        cu_seq_lens: int32 [S + 1].
        longest: tokens of the longest packed sequence.
        rows: the S rows of the batch that were packed, in order.
    """

    take: torch.Tensor
    target: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    cu_seq_lens: torch.Tensor
    longest: int
    rows: tuple[int, ...]


def plan_packs(
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    prompt_width: int,
    completion_width: int,
    max_tokens: int | None = None,
) -> list[Pack]:
    """Packs that cover every completion token of the batch once; a single one unless `max_tokens` splits it between rows.

    Args:
        prompt_lengths, completion_lengths: real tokens of each row; a completion of 0 is masked.
        prompt_width, completion_width: P and C of the padded batch.
        max_tokens: packed tokens of one forward at most; a longer row goes alone.
    """
    if min(prompt_lengths) < 1:
        raise ValueError("a prompt has no token; at least one is needed to predict the first completion token")
    rows = [row for row, length in enumerate(completion_lengths) if length > 0] or [0]
    bins: list[list[int]] = [[]]
    filled = 0
    for row in rows:
        size = prompt_lengths[row] + max(completion_lengths[row] - 1, 0)
        if bins[-1] and max_tokens is not None and filled + size > max_tokens:
            bins.append([])
            filled = 0
        bins[-1].append(row)
        filled += size
    return [_plan(rows, prompt_lengths, completion_lengths, prompt_width, completion_width) for rows in bins]


def _plan(
    rows: Sequence[int], prompts: Sequence[int], completions: Sequence[int], prompt_width: int, completion_width: int
) -> Pack:
    take, target, read, write, bounds = [], [], [], [], [0]
    for row in rows:
        prompt, completion = prompts[row], completions[row]
        size = prompt + max(completion - 1, 0)
        first = row * (prompt_width + completion_width) + prompt_width - prompt
        positions = torch.arange(first, first + size)
        scored = torch.arange(prompt - 1, size) if completion else torch.arange(0)
        next_tokens = torch.full((size,), -1)
        next_tokens[scored] = positions[scored] + 1
        take.append(positions)
        target.append(next_tokens)
        read.append(scored + bounds[-1])
        write.append(torch.arange(completion) + row * completion_width)
        bounds.append(bounds[-1] + size)
    return Pack(
        take=torch.cat(take),
        target=torch.cat(target),
        read=torch.cat(read),
        write=torch.cat(write),
        cu_seq_lens=torch.tensor(bounds, dtype=torch.int32),
        longest=max(after - before for before, after in pairwise(bounds)),
        rows=tuple(rows),
    )


def pack_inputs(pack: Pack, input_ids: torch.Tensor) -> dict[str, Any]:
    """Model arguments of one packed forward, with `shift_labels` [1, T] (next tokens, -100 where nothing is scored).

    Args:
        input_ids: padded ids [B, P + C].
    """
    device = input_ids.device
    flat = input_ids.reshape(-1)
    take = pack.take.to(device, non_blocking=True)
    target = pack.target.to(device, non_blocking=True)
    labels = torch.where(target >= 0, flat[target.clamp(min=0)], -100)
    return {
        "input_ids": flat[take].unsqueeze(0),
        "shift_labels": labels.unsqueeze(0),
        "cu_seq_lens_q": pack.cu_seq_lens,
        "cu_seq_lens_k": pack.cu_seq_lens,
        "max_length_q": pack.longest,
        "max_length_k": pack.longest,
    }


def pack_router_indices(pack: Pack, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Router choices [L, T, R] of one packed forward from those of every row of the batch, each [L, >= its packed tokens, R]."""
    bounds = pack.cu_seq_lens.tolist()
    sizes = [after - before for before, after in pairwise(bounds)]
    for row, size in zip(pack.rows, sizes, strict=True):
        if indices[row].shape[1] < size:
            raise ValueError(f"router choices of row {row} cover {indices[row].shape[1]} tokens, but {size} are trained on")
    return torch.cat([indices[row][:, :size] for row, size in zip(pack.rows, sizes, strict=True)], dim=1)


def put_back(pack: Pack, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` [B, C] with the scored `values` [1, T] written into their places; differentiable in both."""
    device = values.device
    if not len(pack.read):
        # Everything is masked: a zero that still hangs on the model, so that `backward` works.
        return out + 0.0 * values.sum()
    read = pack.read.to(device, non_blocking=True)
    write = pack.write.to(device, non_blocking=True)
    return out.reshape(-1).index_copy(0, write, values.reshape(-1)[read].to(out.dtype)).reshape(out.shape)
