"""Cross-entropy over packed tokens without [T, vocabulary] logits: chunks of rows.

On a GPU the head's gradients are made in the forward pass (`posttrain.kernels.linear_cross_entropy`); elsewhere, and for a head
that is more than a plain product, chunks are recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.kernels.linear_cross_entropy import CHUNK_ROWS as FUSED_CHUNK_ROWS
from posttrain.kernels.linear_cross_entropy import linear_cross_entropy
from posttrain.models.linear import is_plain

IGNORE = -100
# Rows whose logits exist at once: 1024 rows of a 152K vocabulary are 0.6 GB in fp32.
CHUNK_ROWS = 1024


def shift_labels(labels: Tensor, lengths: Sequence[int]) -> Tensor:
    """Target of each packed token [T]: the label of the next token of its own sequence, IGNORE at a sequence's last token."""
    out = F.pad(labels[1:], (0, 1), value=IGNORE)
    ends = torch.tensor(lengths).cumsum(0) - 1
    ends = ends[torch.tensor(lengths) > 0].to(labels.device)
    return out.index_fill(0, ends, IGNORE)


def _chunk_loss(hidden: Tensor, targets: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
    return F.cross_entropy(lm_head(hidden).float(), targets, ignore_index=IGNORE, reduction="sum")


def alike(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A head's operands on a GPU in the dtype that autocast would give them, or else the wider of theirs."""
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else torch.promote_types(hidden.dtype, weight.dtype)
    return hidden.to(dtype), weight.to(dtype)


def _fused_loss(hidden: Tensor, targets: Tensor, weight: Tensor, chunk_rows: int) -> Tensor:
    """Sum over the tokens, fp32, in the precision that autocast would give the head."""
    hidden, weight = alike(hidden, weight)
    return linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORE, chunk_rows=chunk_rows).float()


def _takes_fused(hidden: Tensor, lm_head: Callable[[Tensor], Tensor]) -> bool:
    return hidden.is_cuda and is_plain(lm_head)


def chunked_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    *,
    num_items: Tensor | int | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Sum of the cross-entropy of hidden [T, hidden] against targets [T], divided by `num_items` (default: those that count).

    At most [chunk_rows, vocabulary] logits exist at a time, in the forward and in the backward pass; None is each path's default:
    4096 rows where the gradients are made in the forward pass, 1024 where chunks are recomputed. A batch without any target gives
    0, still connected to `hidden`.
    """
    if hidden.device.type == "cpu":
        # Dropping the prompt's rows halves the work; on a GPU it would make the host wait for the mask.
        rows = (targets != IGNORE).nonzero().squeeze(-1)
        hidden, targets = hidden.index_select(0, rows), targets.index_select(0, rows)
    if _takes_fused(hidden, lm_head):
        total = _fused_loss(hidden, targets, lm_head.weight, FUSED_CHUNK_ROWS if chunk_rows is None else chunk_rows)
    else:
        chunk_rows = CHUNK_ROWS if chunk_rows is None else chunk_rows
        total = hidden.sum() * 0.0
        total = total.float()
        for h, t in zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True):
            if torch.is_grad_enabled():
                total = total + checkpoint(_chunk_loss, h, t, lm_head, use_reentrant=False)
            else:
                total = total + _chunk_loss(h, t, lm_head)
    if num_items is None:
        num_items = (targets != IGNORE).sum().clamp(min=1)
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(total.device)
    return total / num_items
