"""Any number of tokens into the slots of a `TritonChunkState`: the forward of `triton_gla` on the sequences' own chunk grid.

The pending rows of the slots come behind the call's rows, T + S (1+N) C in all, and the plan puts them first in their streams'
first chunks; empty slots have none, and are spared the copies. The scan runs over the full chunks only, so that its final states
are the new boundaries; `gla_keep_kernel` puts them and the rows after them into the slots, and gives the unfinished chunk its
start state. Nothing is read back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.sse.checks import Inputs
from posttrain.kernels.sse.triton_common import split, state_offsets, stored_state
from posttrain.kernels.sse.triton_decode import append_key, load_new
from posttrain.kernels.sse.triton_exact import mix_by_rows, stored_exactly
from posttrain.kernels.sse.triton_gla_launch import Call, make_call, mix, start_states
from posttrain.kernels.sse.triton_plan import DevicePlan, build_device_plan
from posttrain.kernels.triton_launch import Launch, aligned, compiled_together, power_of_two

if TYPE_CHECKING:
    from posttrain.kernels.sse.triton_decode_pool import TritonChunkState


@triton.jit(do_not_specialize=["heads", "gated"])
def gla_keep_kernel(
    slots, begin, full, rest, rows, final, boundary, k1, g1, v1, k2, g2, v2, weight,
    high, low, keys, decays, values, faded, factors, total, heads, gated,
    SHARED: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    XDIV: tl.constexpr, YDIV: tl.constexpr, WK: tl.constexpr, WV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A stream's state and unfinished rows to its slot, as tokens one by one would leave them. Grid (S * (1+N) * H)."""
    stream, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    is_shared = stream % (1 + N) == 0
    target = tl.load(slots + stream // (1 + N)) * (1 + N) + stream % (1 + N)
    chunk = (tl.load(begin + stream) + tl.load(full + stream)).to(tl.int64)
    count = tl.load(rest + stream)
    for k0 in tl.static_range(0, K, BK):
        where, mask = state_offsets(stream, head, heads, K, V, k0, 0, BK, WV)
        state = tl.load(final + where, mask=mask, other=0.0)
        upper, lower = split(state)
        slot_where, _ = state_offsets(target, head, heads, K, V, k0, 0, BK, WV)
        tl.store(high + slot_where, upper, mask=mask)
        tl.store(low + slot_where, lower, mask=mask)
        chunk_where, _ = state_offsets(chunk, head, heads, K, V, k0, 0, BK, WV)
        tl.store(boundary + chunk_where, stored_state(state, boundary), mask=mask & (count > 0))
    matrix = target * heads + head
    c, v = tl.arange(0, WK), tl.arange(0, WV)
    sum_g = tl.zeros([WK], dtype=tl.float32)
    for n in range(0, count):
        row = tl.load(rows + chunk * C + n).to(tl.int64)
        x1, x2 = (row * heads + head) * K, (row // XDIV * heads + head) * K
        k = load_new(k1, k2, x1, x2, c, c < K, is_shared, SHARED)
        g = load_new(g1, g2, x1, x2, c, c < K, is_shared, SHARED)
        y1, y2 = (row * heads + head) * V, (row // YDIV * heads + head) * V
        value = load_new(v1, v2, y1, y2, v, v < V, is_shared, SHARED)
        write = tl.load(weight + row, mask=(is_shared == 0) & (gated != 0), other=1.0)
        sum_g = g + sum_g
        append_key(keys, decays, faded, matrix, n, k, g, write, sum_g, C, K, WK)
        tl.store(values + (matrix * C + n) * V + v, value.to(values.dtype.element_ty), mask=v < V)
        tl.store(factors + target * C + n, write)
    tl.store(total + (matrix * 2 + count % 2) * K + c, sum_g, mask=(c < K) & (count > 0))


@triton.jit
def gla_count_kernel(
    slots, begin, chunks, rows, count, full, rest, N: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, FRESH: tl.constexpr
):  # fmt: skip
    """Full chunks of a stream and the rows behind them; its slot's count with the new rows. Grid (S * (1+N))."""
    stream, position = tl.program_id(0), tl.arange(0, BLOCK)
    place = count + tl.load(slots + stream // (1 + N)) * (1 + N) + stream % (1 + N)
    held = 0 if FRESH else tl.load(place)
    there = tl.load(chunks + stream)
    last = (tl.load(begin + stream) + there - 1).to(tl.int64)
    row = tl.load(rows + last * C + position, mask=(position < C) & (there > 0), other=-1)
    filled = tl.sum((row >= 0).to(tl.int32), 0)
    unfinished = (there > 0) & (filled < C)
    whole, left = there - unfinished.to(tl.int32), tl.where(unfinished, filled, 0)
    tl.store(full + stream, whole)
    tl.store(rest + stream, left)
    tl.store(place, tl.where(there > 0, held - held % C + whole * C + left, held))


_KEEP, _COUNT = Launch(gla_keep_kernel), Launch(gla_count_kernel)


def prefill(x: Inputs, state: TritonChunkState, slots: Tensor, *, exact: bool = False, fresh: bool = False) -> Tensor:
    """x's sequences continue in their slots, int64 [S] on the device, distinct -> o [T, H, V]. x is checked.

    exact: every row is computed as `step` computes it; fresh: the slots are empty, and nothing is fetched from them."""
    key = ("prefill", x.v.device.index, x.q1 is None, x.q2.dtype, x.g2.dtype, x.v.dtype, x.q2.shape[1:], x.g2.shape[1:])
    rest = (x.same_values or x.v2.shape[1], x.v.shape[-1], x.index.shape[1], x.num_partitions, x.chunk_size, exact, fresh)
    return compiled_together(_prefill, x, state, slots, exact, fresh, key=(*key, *rest))


def _prefill(x: Inputs, state: TritonChunkState, slots: Tensor, exact: bool, fresh: bool) -> Tensor:
    tokens, size, slots = x.v.shape[0], x.chunk_size, aligned(slots)
    plan = build_device_plan(
        x.index, x.cu_seqlens, num_partitions=x.num_partitions, chunk_size=size, shared=x.q1 is not None,
        pending=None if fresh else state.count.index_select(0, slots) % size,
    )  # fmt: skip
    full, rest = torch.empty_like(plan.chunks), torch.empty_like(plan.chunks)
    constants = dict(N=x.num_partitions, C=size, BLOCK=power_of_two(size), FRESH=fresh)
    _COUNT((plan.begin.numel(),), (slots, plan.begin, plan.chunks, plan.rows, state.count, full, rest), (), constants)
    c = _fresh_call(x, slots) if fresh else _call(x, state, slots, plan)
    stored = stored_exactly(c.sizes) if exact else None
    boundary, final, chunks = start_states(c, replace(plan, chunks=full), end=True, stored=stored)
    _keep(c, plan, full, rest, final, boundary, state, slots)
    return mix_by_rows(c, plan, boundary, tokens) if exact else mix(c, chunks, boundary)[:tokens]


def _fresh_call(x: Inputs, slots: Tensor) -> Call:
    """The forward's call of sequences that begin."""
    routes = max(a.shape[1] for a in (x.q2, x.k2, x.g2))
    q2, k2, g2 = (a.expand(-1, routes, -1, -1) for a in (x.q2, x.k2, x.g2))
    return make_call(
        x.q1, x.k1, x.g1, q2, k2, g2, x.v, None if x.same_values else x.v2, x.weight, x.index, None,
        x.num_partitions, x.scale, x.gate, x.chunk_size, slots.shape[0],
    )  # fmt: skip


def _call(x: Inputs, state: TritonChunkState, slots: Tensor, plan: DevicePlan) -> Call:
    """The forward's call with the slots' pending rows behind those of x, the queries of the pending rows zero."""
    held = {n: state.pending[n].index_select(0, slots).transpose(2, 3).flatten(0, 2) for n in ("k", "g", "v")}
    held["q"] = torch.zeros_like(held["k"])

    def shared(a: Tensor | None, name: str) -> Tensor | None:
        return None if a is None else torch.cat([a, held[name].to(a.dtype)])

    routes = max(a.shape[1] for a in (x.q2, x.k2, x.g2))

    def routed(a: Tensor, name: str, routes: int) -> Tensor:
        rows = held[name].to(a.dtype)[:, None]
        return torch.cat([a.expand(-1, routes, -1, -1), rows.expand(-1, routes, -1, -1)])

    factor = state.pending["factor"].index_select(0, slots).reshape(-1, 1).expand(-1, x.index.shape[1])
    weight = torch.cat([x.weight.float(), factor])
    v = shared(x.v, "v")
    assert v is not None
    c = make_call(
        shared(x.q1, "q"), shared(x.k1, "k"), shared(x.g1, "g"),
        routed(x.q2, "q", routes), routed(x.k2, "k", routes), routed(x.g2, "g", routes),
        v, None if x.same_values else routed(x.v2, "v", x.v2.shape[1]),
        weight, torch.empty_like(weight, dtype=torch.int64), state.boundary_of(slots), x.num_partitions, x.scale, x.gate,
        x.chunk_size, slots.shape[0],
    )  # fmt: skip
    ranges = [(0, plan.shared_chunks)] * (len(c.kinds) - 1) + [(plan.shared_chunks, plan.routed_chunks)]
    kinds = [replace(kind, first_chunk=a, num_chunks=n) for kind, (a, n) in zip(c.kinds, ranges, strict=True)]
    return replace(c, kinds=kinds)


def _keep(
    c: Call, plan: DevicePlan, full: Tensor, rest: Tensor, final: Tensor, boundary: Tensor, state: TritonChunkState, slots: Tensor
) -> None:
    first, routed, s = c.kinds[0], c.kinds[-1], c.sizes
    pools = (
        state.high, state.low, *(state.pending[n] for n in ("k", "g", "v", "ks", "factor")), state.total
    )  # fmt: skip
    tensors = (
        slots, plan.begin, full, rest, plan.rows, final, boundary,
        first.k, first.g, first.v, routed.k, routed.g, routed.v, c.weight, *pools,
    )  # fmt: skip
    constants = dict(
        SHARED=len(c.kinds) > 1, N=plan.begin.shape[1] - 1, K=s.K, V=s.V, C=s.C, XDIV=routed.x_div, YDIV=routed.y_div,
        WK=power_of_two(s.K), WV=power_of_two(s.V), BK=min(32, power_of_two(s.K)),
    )  # fmt: skip
    _KEEP((plan.begin.numel() * c.heads,), tensors, (c.heads, int(routed.write)), constants)
