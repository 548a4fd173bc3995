"""`recurrent.advance` as one kernel: each touched state is read once and written once, in its page.

A program owns the columns [K, BV] of one head of one sequence and goes through the touched partitions. fp32 throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from posttrain.vllm_plugin.recurrent import Pages

# Columns of a program: 128 x 32 states are 128 registers a thread with one warp.
COLUMNS = 32


@triton.jit
def _advance(
    pool, blocks, partitions, live, q, k, g, b, v, o, page,
    J: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, IS_GDN: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.arange(0, BK)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (rows < K)[:, None] & (columns < V)[None, :]
    block = tl.load(blocks + sequence)
    out = tl.zeros([BV], dtype=tl.float32)
    for j in tl.static_range(J):
        touch = sequence * J + j
        partition = tl.load(partitions + touch)
        at = pool + block * page + (partition * H + head) * K * V + rows[:, None] * V + columns[None, :]
        state = tl.load(at, mask=inside & (tl.load(live + touch) > 0), other=0.0)
        row = touch * H + head
        keys = tl.load(k + row * K + rows, mask=rows < K, other=0.0)
        queries = tl.load(q + row * K + rows, mask=rows < K, other=0.0)
        values = tl.load(v + row * V + columns, mask=columns < V, other=0.0)
        if IS_GDN:
            state = state * tl.exp(tl.load(g + row))
            values = tl.load(b + row) * (values - tl.sum(keys[:, None] * state, axis=0))
        else:
            state = state * tl.exp(tl.load(g + row * K + rows, mask=rows < K, other=0.0))[:, None]
        state = state + keys[:, None] * values[None, :]
        tl.store(at, state, mask=inside)
        out += tl.sum(queries[:, None] * state, axis=0)
    tl.store(o + (sequence * H + head) * V + columns, out, mask=columns < V)


def advance_triton(
    pages: Pages, partitions: Tensor, live: Tensor, q: Tensor, k: Tensor, g: Tensor, v: Tensor, b: Tensor | None
) -> Tensor:
    """See `recurrent.advance`; `live` bool [B, J] says which of the touched states hold anything."""
    sequences, touches, heads, key_dim = k.shape
    value_dim = v.shape[-1]
    pool = pages.pool
    if pool.stride()[1:] != (heads * key_dim * value_dim, key_dim * value_dim, value_dim, 1):
        raise ValueError(f"a block's states must be contiguous, got strides {pool.stride()}")
    o = torch.empty(sequences, heads, value_dim, dtype=torch.float32, device=pool.device)
    if sequences == 0:
        return o
    q, k, g, v = (a.contiguous() for a in (q, k, g, v))
    columns = min(COLUMNS, triton.next_power_of_2(value_dim))
    grid = (sequences, heads, triton.cdiv(value_dim, columns))
    _advance[grid](
        pool, pages.blocks, partitions.contiguous(), live.to(torch.int32), q, k, g, g if b is None else b.contiguous(), v, o,
        pool.stride(0), J=touches, H=heads, K=key_dim, V=value_dim, BK=triton.next_power_of_2(key_dim), BV=columns,
        IS_GDN=b is not None, num_warps=1,
    )  # fmt: skip
    return o
