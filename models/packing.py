"""From a batch, packed or padded, to the packed tokens that the layers see, and back.

Layers work on [T, hidden]: the real tokens of all sequences, one after the other. Padding is removed before the first layer, so
it can never reach a state, a router or the balance loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the packed tokens came from.

    Attributes:
        shape: (B, columns) of the input.
        lengths: real tokens of each sequence, empty sequences included.
        tokens: int64 [T], indices of the real tokens in the flattened [B * columns] input, or None where every one is real.
    """

    shape: tuple[int, int]
    lengths: list[int]
    tokens: Tensor | None = None

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def pack(self, x: Tensor) -> Tensor:
        """[B, columns, ...] -> [T, ...]."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.tokens is None else flat.index_select(0, self.tokens)

    def unpack(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, columns, ...], zeros at padding."""
        if self.tokens is not None:
            full = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
            x = full.index_copy(0, self.tokens, x)
        return x.view(*self.shape, *x.shape[1:])

    def last_rows(self, x: Tensor) -> Tensor:
        """Packed row of the last real token of each sequence, [S, ...]; zeros for an empty one. x [T, ...]."""
        ends = torch.tensor(self.lengths, device=x.device).cumsum(0) - 1
        out = x.index_select(0, ends.clamp(min=0))
        empty = torch.tensor([n == 0 for n in self.lengths], device=x.device)
        return out.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), 0)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Sequences that a recurrent layer computes in one call. One-token continuations are a part of their own: they take the
    decode path, and would not if they shared a call with longer ones, so their bits would depend on their company.

    rows: int64, their packed tokens, or None for all of them; cu_seqlens [S+1] on the host, or None: one token each; slots [S]
    where they continue slots, fresh where these are all empty.
    """

    cu_seqlens: Tensor | None
    rows: Tensor | None = None
    slots: Tensor | None = None
    fresh: bool = False


def make_parts(lengths: list[int], slots: Tensor | None, device: torch.device, starts: Sequence[int] = ()) -> tuple[Part, ...]:
    """One part without `slots` or where all lengths are alike in being 1 or not; else the one-token sequences and the others.
    `starts`: tokens that each slot holds."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    if slots is None or max(lengths) == 1 or min(lengths) > 1:
        return (Part(cu_seqlens=cu_seqlens, slots=slots, fresh=not any(starts)),)
    counts = torch.tensor(lengths)
    of_row = counts.repeat_interleave(counts)
    parts = []
    fresh = not any(start for start, n in zip(starts, lengths, strict=True) if n > 1)
    for chosen, in_row, empty in ((counts == 1, of_row == 1, False), (counts > 1, of_row > 1, fresh)):
        cu = torch.nn.functional.pad(counts[chosen].cumsum(0), (1, 0))
        parts.append(
            Part(cu_seqlens=cu, rows=in_row.nonzero().squeeze(-1).to(device), slots=slots[chosen.to(device)], fresh=empty)
        )
    return tuple(parts)


def make_packing(
    shape: tuple[int, int],
    *,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    position_ids: Tensor | None,
) -> Packing:
    """Sequence boundaries of an input of `shape` (B, columns), from the first of these that is given.

    cu_seq_lens_q [S+1]: packed, B = 1. A CPU tensor costs nothing; one on the device is read once.
    attention_mask [B, >= columns]: 1 marks real tokens; its last `columns` columns count (a cache holds the earlier ones).
    position_ids [1, columns]: a new sequence starts where the position does not continue (what padding-free collators send).
    None of them: every row is one sequence.
    """
    batch, columns = shape
    if cu_seq_lens_q is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q needs packed input of shape [1, T], got [{batch}, {columns}]")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("give either cu_seq_lens_q (packed input) or an attention_mask with padding, not both")
        bounds = cu_seq_lens_q.tolist()
        lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        if not lengths or bounds[0] != 0 or bounds[-1] != columns or min(lengths) < 0:
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the {columns} tokens of the input, got {bounds[:8]}... {bounds[-1:]}"
            )
        return Packing(shape=shape, lengths=lengths)
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < columns:
            raise ValueError(
                f"attention_mask must be [{batch}, {columns}] (or wider, where a cache holds earlier tokens), "
                f"got {list(attention_mask.shape)}; masks of more dimensions are not supported"
            )
        real = attention_mask[:, -columns:].bool()
        lengths = real.sum(-1).tolist()
        if sum(lengths) == batch * columns:
            return Packing(shape=shape, lengths=lengths)
        return Packing(shape=shape, lengths=lengths, tokens=real.reshape(-1).nonzero().squeeze(-1))
    if batch == 1 and position_ids is not None and columns > 1:
        pos = position_ids.reshape(-1)[-columns:]
        starts = [0, *((pos[1:] != pos[:-1] + 1).nonzero().squeeze(-1) + 1).tolist(), columns]
        return Packing(shape=shape, lengths=[b - a for a, b in zip(starts, starts[1:], strict=False)])
    return Packing(shape=shape, lengths=[columns] * batch)
