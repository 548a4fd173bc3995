"""The backward pass of `triton_gla.py`: gradients of queries, keys and decays. That of the values is its mix kernel's."""

from __future__ import annotations

import triton
import triton.language as tl

from posttrain.kernels.sse.triton_common import (
    chunk_rows,
    dot,
    dot_apart,
    exp,
    is_empty,
    load_rows,
    rounded,
    row_factor,
    row_sums,
    score_offsets,
    state_offsets,
    store_rows,
    upper_bits,
)
from posttrain.kernels.sse.triton_gla import any_strong, from_middle, halves, is_strong, load_decays, same_pair


@triton.jit(do_not_specialize=["heads", "first_chunk"])
def gla_score_gradient_kernel(
    rows, do, v, dscores, own, heads, first_chunk, V: tl.constexpr, C: tl.constexpr, YDIV: tl.constexpr, ODIV: tl.constexpr,
    HALF: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The products do_i . v_j: in dscores [NC,H,2,C,C] those of j < i, upper bits and the rest, both bf16 (not HALF:
    [NC,H,1,C,C] fp32), in own [NC,H,C] fp32 those of j = i. Grid (chunks * H)."""
    head, chunk = tl.program_id(0) % heads, first_chunk + tl.program_id(0) // heads
    if is_empty(rows, chunk, C):
        return
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    i, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    product = tl.zeros([BC, BC], dtype=tl.float32)
    for v0 in tl.static_range(0, V, BV):
        dov = load_rows(do, row // ODIV, valid, head, heads, V, v0, BV)
        product += dot(dov, tl.trans(load_rows(v, row // YDIV, valid, head, heads, V, v0, BV)), HALF)
    below = tl.where(i > j, product, 0.0)
    where, inside = score_offsets(chunk, head, heads, C, 2 if HALF else 1, BC)
    if HALF:
        high = upper_bits(below)
        tl.store(dscores + where, high.to(tl.bfloat16), mask=inside)
        tl.store(dscores + where + C * C, (below - high).to(tl.bfloat16), mask=inside)
    else:
        tl.store(dscores + where, below, mask=inside)
    position = tl.arange(0, BC)
    itself = tl.sum(tl.where(i == j, product, 0.0), 1)
    tl.store(own + (chunk.to(tl.int64) * heads + head) * C + position, itself, mask=position < C)


@triton.jit
def _score_dot(high, low, b, heads, TAG: tl.constexpr, FINE: tl.constexpr, HALF: tl.constexpr):
    """(high + low) b, with 16 bits of b where FINE; TAG and the next number are taken, see `dot_apart`."""
    total = tl.zeros(b.shape, dtype=tl.float32)
    if HALF:
        if FINE:
            top = upper_bits(b)
            total = dot_apart(high, b - top, total, heads, TAG, HALF)
            total = dot_apart(low, top, total, heads, TAG + 1, HALF)
            return total + dot(high, top, HALF)
        else:
            total = dot_apart(low, b, total, heads, TAG, HALF)
            return total + dot(high, b, HALF)
    else:
        return dot(high, b, HALF)


@triton.jit
def _query_side(
    head, chunk, k0, row, read, write, itself, high, low, relative, q, k, g, do, boundary, dboundary, decay, dq, heads, read_gate,
    scale, STRONG: tl.constexpr, K: tl.constexpr, V: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr,
    HALF: tl.constexpr, GLOW: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Writes dq; do's source row is row // YDIV. -> what the queries send into dg [BC, BK], the end state's share of dg [BK], and
    the queries' share of the weight's gradient [BC]."""
    valid, source = row >= 0, row // XDIV
    i, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    dqv = tl.zeros([BC, BK], dtype=tl.float32)
    kept = tl.zeros([BK], dtype=tl.float32)
    to_middle, total = load_decays(decay, chunk, head, heads, K, k0, BK)
    for v0 in tl.static_range(0, V, BV):
        dov = load_rows(do, row // YDIV, valid, head, heads, V, v0, BV)
        where, mask = state_offsets(chunk, head, heads, K, V, k0, v0, BK, BV)
        state = tl.load(boundary + where, mask=mask, other=0.0)
        dqv = dot_apart(dov, tl.trans(state), dqv, heads, 11 + v0, HALF)
        kept += tl.sum(state.to(tl.float32) * tl.load(dboundary + where, mask=mask, other=0.0).to(tl.float32), 1)
    kept *= exp(total)
    kv = load_rows(k, source, valid, head, heads, K, k0, BK) * write[:, None]
    if STRONG:
        gv = load_rows(g, source, valid, head, heads, K, k0, BK)
        qv = load_rows(q, source, valid, head, heads, K, k0, BK) * read[:, None]
        dqv *= exp(row_sums((j <= i).to(tl.float32), gv, heads, 0, HALF, GLOW))
        for level in range(LEVELS):
            second, factor = halves(gv, level, heads, HALF, GLOW, BC)
            lower = tl.where(second, 0.0, kv * factor)
            near = same_pair(level, BC)
            sent = _score_dot(tl.where(near, high, 0.0), tl.where(near, low, 0.0), lower, heads, 7, False, HALF)
            dqv += tl.where(second, sent * factor, 0.0)
    else:
        growth = exp(relative)
        sent = _score_dot(high, low, kv * exp(-relative), heads, 7, False, HALF)
        dqv = dqv * (growth * exp(to_middle)[None, :]) + sent * growth
        qv = load_rows(q, source, valid, head, heads, K, k0, BK) * read[:, None]
    flow = qv * dqv
    dqv += itself[:, None] * kv
    store_rows(dq, dqv * read[:, None], row, valid, head, heads, K, k0, BK)
    of_weight = tl.zeros([BC], dtype=tl.float32)
    if read_gate != 0:
        of_weight += tl.sum(load_rows(q, source, valid, head, heads, K, k0, BK) * dqv, 1) * scale
    return flow, kept, of_weight


@triton.jit
def _key_side(
    head, chunk, k0, row, read, write, itself, high, low, relative, flow, q, k, g, v, dboundary, decay, dk, heads, write_gate,
    STRONG: tl.constexpr, K: tl.constexpr, V: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr,
    HALF: tl.constexpr, GLOW: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Writes dk; v's source row is row // YDIV. -> flow less what the keys receive from the chunk's queries (not STRONG: and less
    what they send into the end state), what they send into the end state [BC, BK], the same summed over the rows [BK], and
    their share of the weight's gradient [BC]."""
    valid, source = row >= 0, row // XDIV
    i, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    dkv = tl.zeros([BC, BK], dtype=tl.float32)
    for v0 in tl.static_range(0, V, BV):
        yv = load_rows(v, row // YDIV, valid, head, heads, V, v0, BV)
        where, mask = state_offsets(chunk, head, heads, K, V, k0, v0, BK, BV)
        dstate = tl.load(dboundary + where, mask=mask, other=0.0)
        dkv = dot_apart(yv, tl.trans(dstate), dkv, heads, 11 + V + v0, HALF)
    kv = load_rows(k, source, valid, head, heads, K, k0, BK) * write[:, None]
    if STRONG:
        gv = load_rows(g, source, valid, head, heads, K, k0, BK)
        qv = load_rows(q, source, valid, head, heads, K, k0, BK) * read[:, None]
        dkv *= exp(row_sums((j > i).to(tl.float32), gv, heads, 0, HALF, GLOW))
        to_state = kv * dkv
        for level in range(LEVELS):
            second, factor = halves(gv, level, heads, HALF, GLOW, BC)
            upper = tl.where(second, qv * factor, 0.0)
            near = same_pair(level, BC)
            above, rest = tl.where(near, tl.trans(high), 0.0), tl.where(near, tl.trans(low), 0.0)
            sent = tl.where(second, 0.0, _score_dot(above, rest, upper, heads, 9, True, HALF))
            dkv += sent * factor
            flow -= rounded(kv * factor, HALF) * sent
    else:
        to_middle, total = load_decays(decay, chunk, head, heads, K, k0, BK)
        shrink = exp(-relative)
        dkv *= shrink * exp(total - to_middle)[None, :]
        to_state = kv * dkv
        flow -= to_state
        qv = load_rows(q, source, valid, head, heads, K, k0, BK) * read[:, None]
        sent = _score_dot(tl.trans(high), tl.trans(low), qv * exp(relative), heads, 9, True, HALF)
        kv = load_rows(k, source, valid, head, heads, K, k0, BK, True) * write[:, None]
        # The keys' factors are rounded as in the queries' product: what one row sends and another receives cancels in dg.
        flow -= rounded(kv * shrink, HALF) * sent
        dkv += sent * shrink
    summed = tl.sum(to_state, 0)
    dkv += itself[:, None] * qv
    store_rows(dk, dkv * write[:, None], row, valid, head, heads, K, k0, BK)
    of_weight = tl.zeros([BC], dtype=tl.float32)
    if write_gate != 0:
        of_weight += tl.sum(load_rows(k, source, valid, head, heads, K, k0, BK) * dkv, 1)
    return flow, to_state, summed, of_weight


@triton.jit
def _gradients_of_chunk(
    head, chunk, k0, rows, q, k, g, v, do, weight, boundary, dboundary, decay, dscores, own, dq, dk, dg, dweight,
    num_rows, heads, read_gate, write_gate, scale, STRONG: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr, ODIV: tl.constexpr,
    HALF: tl.constexpr, GLOW: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of a chunk in key columns [k0, k0 + BK): the side of the queries first, then the side of the keys, which reads
    its rows again, because registers are what a program is short of."""
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    i, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    read, write = row_factor(weight, row, valid, scale, read_gate), row_factor(weight, row, valid, 1.0, write_gate)
    # A row's product with itself knows no decay: it is added after dg was made, where it would only leave rounding.
    position = tl.arange(0, BC)
    itself = tl.load(own + (chunk.to(tl.int64) * heads + head) * C + position, mask=position < C, other=0.0)
    where, mask = score_offsets(chunk, head, heads, C, 2 if HALF else 1, BC)
    flow, to_state = tl.zeros([BC, BK], dtype=tl.float32), tl.zeros([BC, BK], dtype=tl.float32)
    kept, of_weight = tl.zeros([BK], dtype=tl.float32), tl.zeros([BC], dtype=tl.float32)
    relative = flow
    if not STRONG:
        relative = from_middle(load_rows(g, row // XDIV, valid, head, heads, K, k0, BK), heads, 0, HALF, GLOW, BC)
    if heads > -2:  # so that products before it do not reach those for dg, see `dot_apart`
        high = tl.load(dscores + where, mask=mask, other=0.0)
        low = tl.load(dscores + where + C * C, mask=mask, other=0.0) if HALF else high
        flow, kept, of_weight = _query_side(
            head, chunk, k0, row, read, write, itself, high, low, relative, q, k, g, do, boundary, dboundary, decay, dq, heads,
            read_gate, scale, STRONG, K, V, XDIV, ODIV, HALF, GLOW, BC, BK, BV, LEVELS,
        )  # fmt: skip
        flow, to_state, summed, of_keys = _key_side(
            head, chunk, k0, row, read, write, itself, high, low, relative, flow, q, k, g, v, dboundary, decay, dk, heads,
            write_gate, STRONG, K, V, XDIV, YDIV, HALF, GLOW, BC, BK, BV, LEVELS,
        )  # fmt: skip
        of_weight += of_keys
        if not STRONG:
            kept += summed
    if (read_gate + write_gate) != 0:
        where_weight = ((k0 // BK) * num_rows + row).to(tl.int64) * heads + head
        tl.store(dweight + where_weight, of_weight, mask=valid)
    dgv = row_sums((j >= i).to(tl.float32), flow, heads, 3, HALF, True)
    if STRONG:
        dgv += row_sums((j < i).to(tl.float32), to_state, heads, 6, HALF, True)
    store_rows(dg, dgv + kept[None, :], row, valid, head, heads, K, k0, BK)


@triton.jit(do_not_specialize=["num_rows", "heads", "first_chunk", "read_gate", "write_gate"])
def gla_gradient_kernel(
    rows, q, k, g, v, do, weight, boundary, dboundary, decay, dscores, own, strong, dq, dk, dg, dweight,
    num_rows, heads, first_chunk, read_gate, write_gate, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr, ODIV: tl.constexpr,
    HALF: tl.constexpr, GLOW: tl.constexpr,
    FLAGS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg [rows, H, K]; dweight [K blocks, rows, H] where a gate is on. Grid (chunks * H * K blocks)."""
    # Programs of one chunk and head run side by side: they share do, v and the gradients of scores.
    blocks: tl.constexpr = (K + BK - 1) // BK
    item = tl.program_id(0) // blocks
    head, chunk = item % heads, first_chunk + item // heads
    if is_empty(rows, chunk, C):
        return
    if is_strong(strong, chunk, head, heads, FLAGS):
        return
    _gradients_of_chunk(
        head, chunk, tl.program_id(0) % blocks * BK, rows, q, k, g, v, do, weight, boundary, dboundary, decay, dscores, own,
        dq, dk, dg, dweight, num_rows, heads, read_gate, write_gate, scale,
        False, K, V, C, XDIV, YDIV, ODIV, HALF, GLOW, BC, BK, BV, LEVELS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "heads", "first_chunk", "num_chunks", "read_gate", "write_gate"])
def gla_gradient_strong_kernel(
    rows, q, k, g, v, do, weight, boundary, dboundary, decay, dscores, own, strong, dq, dk, dg, dweight,
    num_rows, heads, first_chunk, num_chunks, read_gate, write_gate, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr, ODIV: tl.constexpr,
    HALF: tl.constexpr, GLOW: tl.constexpr,
    FLAGS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """`gla_gradient_kernel` for the chunks of strong decay. Grid (programs), which share the chunks and heads out."""
    share = tl.cdiv(num_chunks * heads, tl.num_programs(0))
    begin = first_chunk * heads + tl.program_id(0) * share
    end = tl.minimum(begin + share, (first_chunk + num_chunks) * heads)
    if any_strong(strong, begin, end, FLAGS):
        for item in range(begin, end):
            head, chunk = item % heads, item // heads
            if is_strong(strong, chunk, head, heads, FLAGS):
                for k0 in range(0, K, BK):
                    _gradients_of_chunk(
                        head, chunk, k0, rows, q, k, g, v, do, weight, boundary, dboundary, decay, dscores, own,
                        dq, dk, dg, dweight, num_rows, heads, read_gate, write_gate, scale, True,
                        K, V, C, XDIV, YDIV, ODIV, HALF, GLOW, BC, BK, BV, LEVELS,
                    )  # fmt: skip
