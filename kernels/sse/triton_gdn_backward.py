"""Backward kernels of the gated delta rule; the mathematics and the names are those of `triton_gdn.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from posttrain.kernels.sse.triton_common import chunk_rows, dot, dot_apart, first_rows, load_rows, state_offsets, store_rows
from posttrain.kernels.sse.triton_gdn import (
    decays,
    load_scalars,
    load_tile,
    load_total,
    load_transposed,
    operand,
    row_factors,
    store_tile,
    turned,
)


@triton.jit(do_not_specialize=["heads", "first_chunk"])
def gdn_adjoint_kernel(
    rows, q, k, do, weight, total, inverse, r, z, heads, first_chunk, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, QDIV: tl.constexpr, KDIV: tl.constexpr,
    ODIV: tl.constexpr, READ: tl.constexpr, HALF: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """r and z (= z0) of every chunk. Grid (H * chunks, V blocks)."""
    head, chunk, v0 = tl.program_id(0) % heads, first_chunk + tl.program_id(0) // heads, tl.program_id(1) * BV
    if tl.load(rows + chunk.to(tl.int64) * C) < 0:
        return
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    high, low, end_high, end_low = load_total(total, chunk, head, heads, C, BC)
    scores_t = tl.zeros([BC, BC], dtype=tl.float32)
    for k0 in range(0, K, BK):
        qv = load_rows(q, row // QDIV, valid, head, heads, K, k0, BK)
        kv = load_rows(k, row // KDIV, valid, head, heads, K, k0, BK)
        scores_t += dot(kv, turned(qv, HALF), HALF)
    solved_t = load_transposed(inverse, chunk, head, heads, C, BC)
    dov = load_rows(do, row // ODIV, valid, head, heads, V, v0, BV)
    read = row_factors(weight, row, valid, scale, READ)
    scores_t *= decays(high, low, True, BC) * read[None, :]
    du = dot_apart(scores_t, dov, tl.zeros([BC, BV], dtype=tl.float32), heads, 1, HALF)
    store_tile(z, dot(solved_t, du, HALF), chunk, head, heads, C, V, v0, BC, BV)
    if v0 == 0:
        solved_t *= tl.exp((end_high - high) + (end_low - low))[None, :]
        for k0 in range(0, K, BK):
            kv = load_rows(k, row // KDIV, valid, head, heads, K, k0, BK)
            store_tile(r, dot(solved_t, kv, HALF), chunk, head, heads, C, K, k0, BC, BK)


@triton.jit
def _walk_back(
    rows, q, k, b, do, weight, total, r, z, dboundary, dstate, first, count, head, heads, v0, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, QDIV: tl.constexpr, KDIV: tl.constexpr, BDIV: tl.constexpr,
    ODIV: tl.constexpr, READ: tl.constexpr, HALF: tl.constexpr,
    BC: tl.constexpr, KW: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = first_rows(rows, first + count - 1, count, C, BC)
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = first + count - 1 - step
        row_of_following = chunk_rows(rows, tl.maximum(chunk - 1, first), C, BC)
        where, mask = state_offsets(chunk, head, heads, K, V, 0, v0, KW, BV)
        tl.store(dboundary + where, dstate.to(dboundary.dtype.element_ty), mask=mask)
        valid = row >= 0
        high, low, end_high, end_low = load_total(total, chunk, head, heads, C, BC)
        from_start = tl.exp(high + low)
        qv = load_rows(q, row // QDIV, valid, head, heads, K, 0, KW)
        kv = load_rows(k, row // KDIV, valid, head, heads, K, 0, KW)
        dov = load_rows(do, row // ODIV, valid, head, heads, V, v0, BV)
        dov *= (from_start * row_factors(weight, row, valid, scale, READ))[:, None]
        rv = load_tile(r, chunk, head, heads, C, K, 0, BC, KW)
        zv = load_tile(z, chunk, head, heads, C, V, v0, BC, BV) + dot(rv, dstate, HALF)
        store_tile(z, zv, chunk, head, heads, C, V, v0, BC, BV)
        zv *= (from_start * load_scalars(b, row // BDIV, valid, head, heads))[:, None]
        dstate = dstate * tl.exp(end_high + end_low) + dot(turned(qv, HALF), dov, HALF) - dot(turned(kv, HALF), zv, HALF)
        row = row_of_following
    return dstate


@triton.jit(do_not_specialize=["heads"])
def gdn_reverse_kernel(
    rows, begin, chunks, q1, k1, b1, q2, k2, b2, do, weight, total, r, z, dfinal, dboundary, dinitial, heads, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, N: tl.constexpr, QDIV: tl.constexpr, KDIV: tl.constexpr,
    BDIV: tl.constexpr, ODIV: tl.constexpr, READ: tl.constexpr, SHARED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, HALF: tl.constexpr,
    BC: tl.constexpr, KW: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dboundary[c] = gradient of the state after chunk c; z0 becomes z. HAS_INITIAL: dfinal is given; HAS_FINAL: dinitial is
    wanted. Grid (streams * H * V blocks)."""
    v_blocks: tl.constexpr = (V + BV - 1) // BV
    v0 = tl.program_id(0) % v_blocks * BV
    head, stream = tl.program_id(0) // v_blocks % heads, tl.program_id(0) // v_blocks // heads
    own, mask = state_offsets(stream, head, heads, K, V, 0, v0, KW, BV)
    if HAS_INITIAL:
        dstate = tl.load(dfinal + own, mask=mask, other=0.0).to(tl.float32)
    else:
        dstate = tl.zeros([KW, BV], dtype=tl.float32)
    first, count = tl.load(begin + stream), tl.load(chunks + stream)
    if SHARED:
        if stream % (1 + N) == 0:
            dstate = _walk_back(
                rows, q1, k1, b1, do, weight, total, r, z, dboundary, dstate, first, count, head, heads, v0, scale,
                K, V, C, 1, 1, 1, 1, False, HALF, BC, KW, BV, STAGES,
            )  # fmt: skip
        else:
            dstate = _walk_back(
                rows, q2, k2, b2, do, weight, total, r, z, dboundary, dstate, first, count, head, heads, v0, scale,
                K, V, C, QDIV, KDIV, BDIV, ODIV, READ, HALF, BC, KW, BV, STAGES,
            )  # fmt: skip
    else:
        dstate = _walk_back(
            rows, q2, k2, b2, do, weight, total, r, z, dboundary, dstate, first, count, head, heads, v0, scale,
            K, V, C, QDIV, KDIV, BDIV, ODIV, READ, HALF, BC, KW, BV, STAGES,
        )  # fmt: skip
    if HAS_FINAL:
        tl.store(dinitial + own, dstate, mask=mask)


@triton.jit
def _within_chunk(
    v, do, u, z, dv, part, row, valid, chunk, head, heads, strength, write, is_first,
    V: tl.constexpr, C: tl.constexpr, VDIV: tl.constexpr, ODIV: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr,
    HALF: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of A, of A transposed, of L, of L transposed (both but for the sign), all [BC, BC] without decays, and z . v of
    every row; where is_first, also dv."""
    scores, scores_t = tl.zeros([BC, BC], dtype=tl.float32), tl.zeros([BC, BC], dtype=tl.float32)
    system, system_t = tl.zeros([BC, BC], dtype=tl.float32), tl.zeros([BC, BC], dtype=tl.float32)
    written = tl.zeros([BC], dtype=tl.float32)
    for v0 in range(0, V, BV):
        dov = load_rows(do, row // ODIV, valid, head, heads, V, v0, BV)
        uv = load_tile(u, chunk, head, heads, C, V, v0, BC, BV)
        zv = load_tile(z, chunk, head, heads, C, V, v0, BC, BV)
        scores += dot(dov, turned(uv, HALF), HALF)
        scores_t += dot(uv, turned(dov, HALF), HALF)
        system += dot(zv, turned(uv, HALF), HALF)
        system_t += dot(uv, turned(zv, HALF), HALF)
        if is_first:
            written += tl.sum(zv * load_rows(v, row // VDIV, valid, head, heads, V, v0, BV), 1)
            result = zv * (strength * write)[:, None]
            if ADD:
                result += load_rows(part, row, valid, head, heads, V, v0, BV)
            if LAST:
                store_rows(dv, result, row, valid, head, heads, V, v0, BV)
            else:
                store_rows(part, result, row, valid, head, heads, V, v0, BV)
    return scores, scores_t, system, system_t, written


@triton.jit(do_not_specialize=["heads", "num_rows", "first_chunk"])
def gdn_gradient_kernel(
    rows, q, k, b, v, do, weight, total, u, z, boundary, dboundary,
    dq, dk, dg, db, dv, part, dweight, heads, num_rows, first_chunk, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, QDIV: tl.constexpr, KDIV: tl.constexpr, BDIV: tl.constexpr,
    VDIV: tl.constexpr, ODIV: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr,
    HALF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of every row from one block of key columns: dq, dk there; dg, db, dweight [K blocks, rows, H] fp32, this block's
    share; dv by the first block, adding up as o does. Grid (H * chunks * K blocks)."""
    # Blocks of one chunk and head run side by side: they share what all columns need.
    blocks: tl.constexpr = (K + BK - 1) // BK
    block, item = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, chunk = item % heads, first_chunk + item // heads
    k0, is_first = block * BK, block == 0
    if tl.load(rows + chunk.to(tl.int64) * C) < 0:
        return
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    strength = load_scalars(b, row // BDIV, valid, head, heads)
    write, read = row_factors(weight, row, valid, 1.0, WRITE), row_factors(weight, row, valid, scale, READ)
    high, low, end_high, end_low = load_total(total, chunk, head, heads, C, BC)
    from_start, to_end = tl.exp(high + low), tl.exp((end_high - high) + (end_low - low))
    scores, scores_t, system, system_t, written = _within_chunk(
        v, do, u, z, dv, part, row, valid, chunk, head, heads, strength, write, is_first,
        V, C, VDIV, ODIV, ADD, LAST, HALF, BC, BV,
    )  # fmt: skip
    qv = load_rows(q, row // QDIV, valid, head, heads, K, k0, BK)
    kv = load_rows(k, row // KDIV, valid, head, heads, K, k0, BK)
    i, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    decay, decay_t = decays(high, low, False, BC), decays(high, low, True, BC)
    scores, scores_t = scores * decay, operand(scores_t * decay_t * read[None, :], HALF)
    system, system_t = tl.where(i > j, -system * decay, 0.0), tl.where(i < j, -system_t * decay_t, 0.0)
    # L's gradient reaches k through both of its indices: with the row factor b_i that is one symmetric matrix times k.
    symmetric = operand(system * strength[:, None] + system_t * strength[None, :], HALF)
    system *= dot(kv, turned(kv, HALF), HALF)
    # What decays of two rows have in common cancels: both sums are of one fp32 matrix, its diagonal left out.
    flow = tl.where(i > j, scores * dot(qv, turned(kv, HALF), HALF), 0.0) * read[:, None] + system * strength[:, None]
    own = tl.sum(flow, 1) - tl.sum(flow, 0)
    dbv = written * write + tl.sum(system, 1)
    scores = operand(scores, HALF)
    dqv, dkv = tl.zeros([BC, BK], dtype=tl.float32), tl.zeros([BC, BK], dtype=tl.float32)
    answer = tl.zeros([BC, BK], dtype=tl.float32)
    kept = tl.zeros([BK], dtype=tl.float32)
    for v0 in range(0, V, BV):
        where, mask = state_offsets(chunk, head, heads, K, V, k0, v0, BK, BV)
        state = tl.load(boundary + where, mask=mask, other=0.0)
        dstate = tl.load(dboundary + where, mask=mask, other=0.0)
        dqv += dot(load_rows(do, row // ODIV, valid, head, heads, V, v0, BV), turned(state, HALF), HALF)
        answer += dot(load_tile(z, chunk, head, heads, C, V, v0, BC, BV), turned(state, HALF), HALF)
        dkv += dot(load_tile(u, chunk, head, heads, C, V, v0, BC, BV), turned(dstate, HALF), HALF)
        kept += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    qv = load_rows(q, row // QDIV, valid, head, heads, K, k0, BK)
    kv = load_rows(k, row // KDIV, valid, head, heads, K, k0, BK)
    dqv *= from_start[:, None]
    answered = tl.sum(answer * kv, 1) * from_start
    own += tl.sum(dqv * qv, 1) * read - answered * strength
    dgv = tl.sum(tl.where(j >= i, own[None, :], (tl.sum(dkv * kv, 1) * to_end)[None, :]), 1)
    dgv += tl.sum(kept, 0) * tl.exp(end_high + end_low)
    dqv += dot(scores, kv, HALF)
    dkv = dkv * to_end[:, None] - answer * (strength * from_start)[:, None]
    dkv = dot_apart(scores_t, qv, dkv, heads, 1, HALF)
    dkv += dot(symmetric, kv, HALF)
    store_rows(dq, dqv * read[:, None], row, valid, head, heads, K, k0, BK)
    store_rows(dk, dkv, row, valid, head, heads, K, k0, BK)
    where = (block * num_rows + row).to(tl.int64) * heads + head
    tl.store(dg + where, dgv, mask=valid)
    tl.store(db + where, dbv - answered, mask=valid)
    if READ or WRITE:
        sent = tl.zeros([BC], dtype=tl.float32)
        if READ:
            sent += tl.sum(dqv * qv, 1) * scale
        if WRITE:
            sent += written * strength
        tl.store(dweight + where, sent, mask=valid)
