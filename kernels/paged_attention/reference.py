"""The pages of each sequence gathered, then softmax attention in fp32; and the writing of a token's rows by index."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_rows(positions: Tensor, rows: int, window: int | None) -> Tensor:
    """Which of a slot's `rows` rows the token at `positions` [B] sees -> bool [B, rows]; with a window they are a ring."""
    row, last = torch.arange(rows, device=positions.device)[None], positions[:, None]
    if window is None:
        return row <= last
    behind = (last - row) % rows
    return (behind < window) & (behind <= last)


def paged_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    window: int | None,
    scale: float,
) -> Tensor:
    """See `posttrain.kernels.paged_attention`; float64 stays float64."""
    batch, heads, dim = q.shape
    kv_heads, page = keys.shape[1:3]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    pages = table.long().index_select(0, slots.clamp(min=0))
    own_keys, own_values = (a[pages].transpose(1, 2).reshape(batch, kv_heads, -1, dim).to(wide) for a in (keys, values))
    seen = visible_rows(positions, pages.shape[1] * page, window)[:, None, None]
    grouped = q.to(wide).view(batch, kv_heads, heads // kv_heads, dim)
    scores = torch.matmul(grouped, own_keys.transpose(2, 3)).mul(scale).masked_fill(~seen, float("-inf"))
    own_values = own_values.masked_fill(~seen.transpose(2, 3), 0)  # pages that nobody wrote may hold anything
    o = torch.matmul(torch.softmax(scores, -1), own_values).view(batch, heads, dim).to(q.dtype)
    return o.masked_fill((slots < 0)[:, None, None], 0)


def paged_write_reference(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    ring: bool,
) -> None:
    """See `posttrain.kernels.paged_attention`."""
    page = keys.shape[2]
    places = positions % (table.shape[1] * page) if ring else positions
    pages = table[slots.clamp(min=0), places // page].long().masked_fill(slots < 0, 0)
    # Under autocast the projections are narrower than the pool, which assignment by index does not convert.
    keys[pages, :, places % page] = k.to(keys.dtype)
    values[pages, :, places % page] = v.to(values.dtype)
