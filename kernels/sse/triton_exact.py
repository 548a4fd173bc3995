"""GLA whose every row is added up as decoding adds it up, bit for bit: strict mode's forward, in prefill and in training.

The states at the chunks' starts come from the same scan as ever, kept as decoding reads them. Then a program takes a chunk, a
head and a block of V, and goes through the chunk's rows one after another with the functions of `gla_decode_kernel`, in tiles of
the same shape held by as many warps: a sum has one order where its tile lies in the same registers. A block of the state stays in
registers while all rows read it; their sums wait in `part`, as fp32. `tests/kernels/test_sse_exact.py` compares the bits on the
device, `tests/kernels/test_exact_compiles.py` the layouts of all sums without one.

Twice K V + (rows before) (K + V) operations a row and head in fp32 vectors, 58 GFLOP for 32,768 tokens of SSE-H-2B's layer (two
rows a token, 18 heads of 128, C = 64), and memory for keys, values and sums of 1.2 GB, freed at once. Gradients are the ordinary
operator's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.recompute import value_of
from posttrain.kernels.sse.checks import Inputs
from posttrain.kernels.sse.triton_common import chunk_rows, exp, is_empty, row_factor, state_offsets, sum_terms
from posttrain.kernels.sse.triton_decode import (
    MIDDLE_SPLIT_LIMIT,
    NOTHING_LEFT,
    faded_key,
    join,
    read_own,
    read_pending,
    read_row,
    read_state,
)
from posttrain.kernels.sse.triton_gla_launch import Call, Kind, Sizes, make_call, start_states
from posttrain.kernels.sse.triton_options import DecodeOptions, append_constants
from posttrain.kernels.sse.triton_plan import DevicePlan, build_device_plan
from posttrain.kernels.triton_launch import Launch, compiled_together, power_of_two


@triton.jit(do_not_specialize=["heads", "first_chunk", "gated"])
def gla_exact_keys_kernel(
    rows, k, g, y, weight, faded, values, heads, first_chunk, gated,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr,
    WK: tl.constexpr, WV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A chunk's ks [NC, H, C, K] and values [NC, H, C, V] as decoding leaves them in its slot. Grid (chunks * H)."""
    head, chunk = tl.program_id(0) % heads, (first_chunk + tl.program_id(0) // heads).to(tl.int64)
    if is_empty(rows, chunk, C):
        return
    matrix, c, v = chunk * heads + head, tl.arange(0, WK), tl.arange(0, WV)
    count = tl.sum((chunk_rows(rows, chunk, C, BC) >= 0).to(tl.int32), 0)
    sum_g = tl.zeros([WK], dtype=tl.float32)
    for n in range(0, count):
        row = tl.load(rows + chunk * C + n).to(tl.int64)
        x = (row // XDIV * heads + head) * K + c
        sum_g += tl.load(g + x, mask=c < K, other=0.0).to(tl.float32)
        key = tl.load(k + x, mask=c < K, other=0.0).to(tl.float32)
        write = row_factor(weight, row, row >= 0, 1.0, gated)
        tl.store(faded + (matrix * C + n) * K + c, faded_key(key, write, sum_g).to(faded.dtype.element_ty), mask=c < K)
        value = tl.load(y + (row // YDIV * heads + head) * V + v, mask=v < V, other=0.0).to(tl.float32)
        tl.store(values + (matrix * C + n) * V + v, value.to(values.dtype.element_ty), mask=v < V)


@triton.jit
def _load_start(boundary, where, mask):
    """The state as decoding sees it: an upper plane or, where that reads both, fp32."""
    if boundary.dtype.element_ty == tl.int16:
        return join(tl.load(boundary + where, mask=mask, other=0), 0)
    else:
        return tl.load(boundary + where, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["heads", "first_chunk", "limit", "read_gate", "write_gate"])
def gla_exact_kernel(
    rows, q, k, g, weight, boundary, faded, values, part, heads, first_chunk, limit, read_gate, write_gate, scale,
    J: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr,
    ODIV: tl.constexpr, WK: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """part [tokens * J, H, V] fp32: the outputs of a token's J rows, the kind's own from FIRST on. Rows from `limit` on are
    pending ones, whose outputs nobody asks for. Grid (chunks * H, V blocks)."""
    head, chunk = tl.program_id(0) % heads, (first_chunk + tl.program_id(0) // heads).to(tl.int64)
    if is_empty(rows, chunk, C):
        return
    matrix, v = chunk * heads + head, tl.program_id(1) * BV + tl.arange(0, BV)
    count = tl.sum((chunk_rows(rows, chunk, C, BC) >= 0).to(tl.int32), 0)
    for k0 in range(0, K, BK):
        where, mask = state_offsets(chunk, head, heads, K, V, k0, tl.program_id(1) * BV, BK, BV)
        state = _load_start(boundary, where, mask)
        c = k0 + tl.arange(0, BK)
        tile_g = tl.zeros([BK], dtype=tl.float32)
        for n in range(0, count):
            row = tl.load(rows + chunk * C + n).to(tl.int64)
            x = (row // XDIV * heads + head) * K + c
            tile_g += tl.load(g + x, mask=c < K, other=0.0).to(tl.float32)
            if row < limit:
                read = row_factor(weight, row, row >= 0, scale, read_gate)
                tile_q = tl.load(q + x, mask=c < K, other=0.0).to(tl.float32) * read
                out = part + ((row // ODIV * J + FIRST + row % ODIV) * heads + head) * V + v
                before = tl.load(out, mask=(v < V) & (k0 > 0), other=0.0)
                tl.store(out, before + read_state(state, tile_q, tile_g), mask=v < V)
    tl.debug_barrier()
    c = tl.arange(0, WK)
    sum_g = tl.zeros([WK], dtype=tl.float32)
    for n in range(0, count):
        row = tl.load(rows + chunk * C + n).to(tl.int64)
        x = (row // XDIV * heads + head) * K + c
        g_row = tl.load(g + x, mask=c < K, other=0.0).to(tl.float32)
        sum_g += g_row
        if row < limit:
            q_row = tl.load(q + x, mask=c < K, other=0.0).to(tl.float32) * row_factor(weight, row, row >= 0, scale, read_gate)
            k_row = tl.load(k + x, mask=c < K, other=0.0).to(tl.float32)
            own = tl.load(values + (matrix * C + n) * V + v, mask=v < V, other=0.0).to(tl.float32)
            out = part + ((row // ODIV * J + FIRST + row % ODIV) * heads + head) * V + v
            result = tl.load(out, mask=v < V, other=0.0)
            if tl.min(sum_g, 0) < -MIDDLE_SPLIT_LIMIT:
                fade, t = g_row, n - 1
                while (t >= 0) & (tl.max(tl.where(c < K, fade, NOTHING_LEFT), 0) > NOTHING_LEFT):
                    earlier = tl.load(rows + chunk * C + t).to(tl.int64)
                    at = (earlier // XDIV * heads + head) * K + c
                    key = tl.load(k + at, mask=c < K, other=0.0).to(tl.float32)
                    key = key * row_factor(weight, earlier, earlier >= 0, 1.0, write_gate)
                    value = tl.load(values + (matrix * C + t) * V + v, mask=v < V, other=0.0).to(tl.float32)
                    result = read_row(result, q_row, key, fade, value)
                    fade += tl.load(g + at, mask=c < K, other=0.0).to(tl.float32)
                    t -= 1
            else:
                result += read_pending(faded, values, matrix, n, q_row * exp(sum_g), v, C, K, V, WK, BV, BT, STAGES)
            write = row_factor(weight, row, row >= 0, 1.0, write_gate)
            tl.store(out, read_own(result, q_row, k_row, write, own), mask=v < V)


_KEYS, _ROWS = Launch(gla_exact_keys_kernel), Launch(gla_exact_kernel)


def stored_exactly(sizes: Sizes) -> torch.dtype:
    """What start states are kept in: as decoding reads them, an upper plane for products in bf16, else fp32."""
    return torch.int16 if sizes.HALF else torch.float32


def mix_by_rows(c: Call, plan: DevicePlan, boundary: Tensor, tokens: int) -> Tensor:
    """o [tokens, H, V] from the states at the chunks' starts (`stored_exactly`), of the first `tokens` tokens of the call."""
    s, has_shared = c.sizes, len(c.kinds) > 1
    shape = (plan.rows.shape[0], c.heads, s.C)
    faded = c.v.new_empty(*shape, s.K, dtype=c.kinds[-1].k.dtype)
    values = c.v.new_empty(*shape, s.V)
    width = c.routes + has_shared
    part = c.v.new_empty(tokens * width, c.heads, s.V, dtype=torch.float32)
    for n, kind in enumerate(c.kinds):
        first = has_shared if n == len(c.kinds) - 1 else 0
        _mix_kind(c, kind, plan, boundary, faded, values, part, tokens, dict(J=width, FIRST=int(first)))
    return sum_terms(part, tokens, width, c.heads * s.V, c.v.dtype).view(tokens, c.heads, s.V)


def _mix_kind(
    c: Call, kind: Kind, plan: DevicePlan, boundary: Tensor, faded: Tensor, values: Tensor, part: Tensor, tokens: int,
    places: dict[str, int],
) -> None:  # fmt: skip
    s = c.sizes
    sizes = dict(K=s.K, V=s.V, C=s.C, XDIV=kind.x_div, WK=power_of_two(s.K), BC=power_of_two(s.C))
    constants = sizes | dict(YDIV=kind.y_div, WV=power_of_two(s.V), num_warps=1)
    tensors = (plan.rows, kind.k, kind.g, kind.v, c.weight, faded, values)
    _KEYS((kind.num_chunks * c.heads,), tensors, (c.heads, kind.first_chunk, int(kind.write)), constants)
    constants = sizes | places | dict(ODIV=kind.o_div) | append_constants(DecodeOptions(), s.V)
    tensors = (plan.rows, kind.q, kind.k, kind.g, c.weight, boundary, faded, values, part)
    numbers = (c.heads, kind.first_chunk, tokens * kind.o_div, int(kind.read), int(kind.write), c.scale)
    _ROWS((kind.num_chunks * c.heads, -(-s.V // constants["BV"])), tensors, numbers, constants)


def run_exact_gla(x: Inputs, ordinary: Callable[[Inputs], Tensor]) -> Tensor:
    """Checked GLA inputs -> o [T, H, V]. ordinary: the operator whose gradients are used."""
    names = ("q1", "k1", "g1", "q2", "k2", "g2", "v", "v2", "weight")
    tensors = [None if n == "v2" and x.same_values else getattr(x, n) for n in names]

    def filled(given: tuple[Tensor | None, ...]) -> Inputs:
        found = dict(zip(names, given, strict=True))
        if x.same_values:
            v = found["v"]
            assert v is not None
            found["v2"] = v[:, None]
        return replace(x, **found)

    def exact(*given: Tensor | None) -> Tensor:
        a = filled(given)
        key = ("exact", a.v.device.index, a.q1 is None, a.q2.dtype, a.g2.dtype, a.v.dtype, a.q2.shape[1:], a.v.shape[-1])
        rest = (a.same_values or a.v2.shape[1], a.index.shape[1], a.has_initial_state, a.num_partitions, a.chunk_size)
        return compiled_together(_launches, a, key=(*key, *rest))

    if not torch.is_grad_enabled():
        return exact(*tensors)
    return value_of(exact, lambda *given: ordinary(filled(given)), *tensors)


def _launches(x: Inputs) -> Tensor:
    routes = max(a.shape[1] for a in (x.q2, x.k2, x.g2))
    q2, k2, g2 = (a.expand(-1, routes, -1, -1) for a in (x.q2, x.k2, x.g2))
    c = make_call(
        x.q1, x.k1, x.g1, q2, k2, g2, x.v, None if x.same_values else x.v2, x.weight, x.index,
        x.initial_state if x.has_initial_state else None, x.num_partitions, x.scale, x.gate, x.chunk_size,
        x.cu_seqlens.shape[0] - 1,
    )  # fmt: skip
    plan = build_device_plan(
        x.index, x.cu_seqlens, num_partitions=x.num_partitions, chunk_size=x.chunk_size, shared=x.q1 is not None
    )
    boundary, _, _ = start_states(c, plan, end=False, stored=stored_exactly(c.sizes))
    return mix_by_rows(c, plan, boundary, x.v.shape[0])
