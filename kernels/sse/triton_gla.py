"""GLA on the chunk grid in Triton.

Forward: the keys of all chunks decayed to the chunks' ends, in parallel, then a scan over the chunks of each stream that leaves
the state at the start of every chunk, then all outputs in parallel. Backward: the same with the gradient of the state, from the
queries and in reverse, then all gradients.
For one chunk with start state S, end-state gradient D, rows q (scaled, read gate applied), k (write gate applied), v, upstream
gradient do, and accumulated log decay G (inclusive, G_C at the end):

    A_ij = sum_c q_ic k_jc exp(G_ic - G_jc), j <= i        o  = (q exp(G)) S + A v
    S' = exp(G_C) S + (k exp(G_C - G))^T v
    D_before = exp(G_C) D + (q exp(G))^T do                dv = A^T do + (k exp(G_C - G)) D
    dq = exp(G) (do S^T) + sum_j dA_ij k_j exp(G_i - G_j)  dk = exp(G_C - G) (v D^T) + sum_i dA_ij q_i exp(G_i - G_j)

Rows are gathered by index and never reordered in memory. Sums of decays are products with 0/1 matrices, so that differences
of accumulated decays are never formed: a chunk whose total decay stays above -MIDDLE_SPLIT_LIMIT takes one product split at its
middle, any other the nested halves of `scores.py`, in kernels of their own (they need twice the registers, and are rarely
called for). The choice depends on the chunk and head alone.

A launch covers the chunks of one kind, shared or routed. Names: BC, BK, BV are block sizes (C padded to a power of two, K and V
cut into blocks); HALF: products in bf16, else fp32 emulated by tf32; GLOW: g has more digits than bf16; FLAGS: entries of
`strong` a chunk and head; *DIV: the source row of a row is row // DIV. Not zero: read_gate, write_gate: the router's weight
goes into q, into k; add: on top of what `part` holds (fp32); last: the result goes to the output, else to `part`. Few of these
are constants, so that shared and routed partitions run the same compiled kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posttrain.kernels.sse.triton_common import (
    chunk_rows,
    dot,
    dot_apart,
    exp,
    fine_dot,
    is_empty,
    load_rows,
    row_factor,
    row_sums,
    state_offsets,
    store_rows,
    stored_state,
    tile_offsets,
)

# exp(60)^2 stays below fp32's (and bf16's) largest number with room for the sums, and rounding 60 costs 4e-6 of a product.
MIDDLE_SPLIT_LIMIT = tl.constexpr(60.0)


@triton.jit
def from_middle(g, heads, TAG: tl.constexpr, HALF: tl.constexpr, LOW: tl.constexpr, BC: tl.constexpr):
    """Log decay of each row relative to the chunk's middle row [BC, BK]: negative after it, positive before. It comes out of a
    branch, as results of `dot_apart` do; TAG and the next number are taken."""
    i, t = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    relative = tl.zeros([BC, g.shape[1]], dtype=tl.float32)
    if heads > -TAG:
        which = (t <= i).to(tl.float32) - (t <= BC // 2).to(tl.float32)
        relative = row_sums(which, g, heads, TAG + 1, HALF, LOW)
    return relative


@triton.jit
def load_decays(decay, chunk, head, heads, K: tl.constexpr, k0, BK: tl.constexpr):
    """Log decay of a chunk from its start to its middle row, and to its end, both [BK], from [NC, H, 2, K]."""
    k = k0 + tl.arange(0, BK)
    base = decay + (chunk.to(tl.int64) * heads + head) * 2 * K
    return tl.load(base + k, mask=k < K, other=0.0), tl.load(base + K + k, mask=k < K, other=0.0)


@triton.jit
def halves(g, level, heads, HALF: tl.constexpr, LOW: tl.constexpr, BC: tl.constexpr):
    """Blocks of 2**level rows, taken in pairs: which rows lie in the second of a pair, and exp of each row's decay from or to
    the cut between the two, both exponents never positive."""
    i, t = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    size = 1 << level
    second = (i // size) % 2 == 1
    cut = (i // (2 * size)) * (2 * size) + size - 1
    between = tl.where(second, (t > cut) & (t <= i), (t > i) & (t <= cut))
    return second, exp(row_sums(between.to(tl.float32), g, heads, 0, HALF, LOW))


@triton.jit
def same_pair(level, BC: tl.constexpr):
    size = 2 << level
    return tl.arange(0, BC)[:, None] // size == tl.arange(0, BC)[None, :] // size


@triton.jit
def nested_scores(
    q, k, g, heads, TRANSPOSED: tl.constexpr, HALF: tl.constexpr, LOW: tl.constexpr, BC: tl.constexpr, LEVELS: tl.constexpr
):
    """A [i, j], or its transpose, for decays of any strength."""
    i, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    scores = tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
    for level in range(LEVELS):
        second, decay = halves(g, level, heads, HALF, LOW, BC)
        upper, lower = tl.where(second, q * decay, 0.0), tl.where(second, 0.0, k * decay)
        if TRANSPOSED:
            part = dot(lower, tl.trans(upper), HALF)
        else:
            part = dot(upper, tl.trans(lower), HALF)
        scores += tl.where(same_pair(level, BC), part, 0.0)
    return scores


@triton.jit
def is_strong(strong, chunk, head, heads, FLAGS: tl.constexpr):
    flags = tl.load(strong + (chunk.to(tl.int64) * heads + head) * FLAGS + tl.arange(0, FLAGS))
    return tl.max(flags, 0) != 0


@triton.jit
def any_strong(strong, begin, end, FLAGS: tl.constexpr):
    """Whether one of the (chunk, head) pairs [begin, end) is flagged."""
    found = tl.zeros([256], dtype=tl.int32)
    for start in range(begin * FLAGS, end * FLAGS, 256):
        where = start + tl.arange(0, 256)
        found |= tl.load(strong + where, mask=where < end * FLAGS, other=0)
    return tl.max(found, 0) != 0


@triton.jit(do_not_specialize=["heads", "first_chunk"])
def gla_decay_kernel(
    rows, g, decay, strong, heads, first_chunk, K: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr,
    FLAGS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A chunk's log decay to its middle row and to its end [NC,H,2,K] and, where it is too strong for the plain product in a
    block of K, a 1 into strong [NC,H,FLAGS]. Grid (chunks * H, K blocks)."""
    head, chunk = tl.program_id(0) % heads, first_chunk + tl.program_id(0) // heads
    if is_empty(rows, chunk, C):
        return
    k, matrix = tl.program_id(1) * BK + tl.arange(0, BK), chunk.to(tl.int64) * heads + head
    to_middle, total = tl.zeros([BK], dtype=tl.float32), tl.zeros([BK], dtype=tl.float32)
    # One row after another, as a generator adds up a chunk that it has not seen the end of.
    for i in tl.range(0, C, loop_unroll_factor=16):
        row = tl.load(rows + chunk.to(tl.int64) * C + i)
        where = ((row // XDIV).to(tl.int64) * heads + head) * K + k
        total += tl.load(g + where, mask=(row >= 0) & (k < K), other=0.0).to(tl.float32)
        to_middle = tl.where(i == BC // 2, total, to_middle)
    to_middle = to_middle if C > BC // 2 else total
    tl.store(decay + matrix * 2 * K + k, to_middle, mask=k < K)
    tl.store(decay + (matrix * 2 + 1) * K + k, total, mask=k < K)
    tl.store(strong + matrix * FLAGS + tl.program_id(1), (tl.min(total, 0) < -MIDDLE_SPLIT_LIMIT).to(tl.int32))


@triton.jit(do_not_specialize=["heads", "first_chunk", "gated"])
def gla_edge_kernel(
    rows, x, g, weight, edge, heads, first_chunk, gated, factor, K: tl.constexpr, C: tl.constexpr,
    XDIV: tl.constexpr, BACKWARD: tl.constexpr, HALF: tl.constexpr, GLOW: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """edge [NC,H,C,K]: a chunk's x = k decayed to the chunk's end, or (backward) x = q from its start, as products take them.
    Grid (chunks * H, K blocks)."""
    head, chunk = tl.program_id(0) % heads, first_chunk + tl.program_id(0) // heads
    if is_empty(rows, chunk, C):
        return
    k0 = tl.program_id(1) * BK
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    gv = load_rows(g, row // XDIV, valid, head, heads, K, k0, BK)
    xv = load_rows(x, row // XDIV, valid, head, heads, K, k0, BK) * row_factor(weight, row, valid, factor, gated)[:, None]
    i, t = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    between = (t <= i) if BACKWARD else (t > i)
    where, mask = tile_offsets(chunk, head, heads, C, K, k0, BC, BK)
    decayed = xv * exp(row_sums(between.to(tl.float32), gv, heads, 0, HALF, GLOW))
    tl.store(edge + where, decayed.to(edge.dtype.element_ty), mask=mask)


@triton.jit
def _walk(
    rows, edge, y, decay, boundary, state, first, count, head, heads, k0, v0,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, YDIV: tl.constexpr, BACKWARD: tl.constexpr,
    HALF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A stream's chunks in order, or backward from the last; the loads of the next chunks run ahead. -> the state after them."""
    k = k0 + tl.arange(0, BK)
    # The row numbers of a chunk are loaded a step before its rows: what is loaded inside a step is not looked through.
    row = chunk_rows(rows, tl.where(count > 0, first + (count - 1 if BACKWARD else 0), 0), C, BC)
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = first + (count - 1 - step if BACKWARD else step)
        following = tl.maximum(chunk - 1, first) if BACKWARD else tl.minimum(chunk + 1, first + count - 1)
        row_of_following = chunk_rows(rows, following, C, BC)
        where, mask = tile_offsets(chunk, head, heads, C, K, k0, BC, BK)
        decayed = tl.load(edge + where, mask=mask & (row >= 0)[:, None], other=0.0)
        yv = load_rows(y, row // YDIV, row >= 0, head, heads, V, v0, BV)
        kept = exp(tl.load(decay + ((chunk.to(tl.int64) * heads + head) * 2 + 1) * K + k, mask=k < K, other=0.0))
        where, mask = state_offsets(chunk, head, heads, K, V, k0, v0, BK, BV)
        tl.store(boundary + where, stored_state(state, boundary), mask=mask)
        state = state * kept[:, None] + dot(tl.trans(decayed), yv, HALF)
        row = row_of_following
    return state


@triton.jit(do_not_specialize=["heads"])
def gla_scan_kernel(
    rows, begin, chunks, edge, y1, y2, decay, initial, boundary, final, heads,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, N: tl.constexpr, YDIV: tl.constexpr,
    SHARED: tl.constexpr, BACKWARD: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    HALF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """boundary[c] = state before chunk c (backward: gradient of the state after it); a chunk adds edge^T y to what is kept,
    y = v or (backward) y = do.

    Grid (S * (1+N) * H * blocks of the state), the shared stream of a sequence (SHARED: of y1) before its others, as the
    longest. initial, final: [S*(1+N), H, K, V] fp32."""
    v_blocks: tl.constexpr = (V + BV - 1) // BV
    blocks: tl.constexpr = (K + BK - 1) // BK * v_blocks
    block, item = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    k0, v0 = block // v_blocks * BK, block % v_blocks * BV
    stream, head = item // heads, item % heads
    own, mask = state_offsets(stream, head, heads, K, V, k0, v0, BK, BV)
    if HAS_INITIAL:
        state = tl.load(initial + own, mask=mask, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([BK, BV], dtype=tl.float32)
    first, count = tl.load(begin + stream), tl.load(chunks + stream)
    if count == 0:
        if HAS_FINAL:
            tl.store(final + own, state, mask=mask)
        return
    # A branch, not a chosen pointer, which would cost the loads their alignment.
    if SHARED:
        if stream % (1 + N) == 0:
            state = _walk(
                rows, edge, y1, decay, boundary, state, first, count, head, heads, k0, v0,
                K, V, C, 1, BACKWARD, HALF, BC, BK, BV, STAGES,
            )  # fmt: skip
        else:
            state = _walk(
                rows, edge, y2, decay, boundary, state, first, count, head, heads, k0, v0,
                K, V, C, YDIV, BACKWARD, HALF, BC, BK, BV, STAGES,
            )  # fmt: skip
    else:
        state = _walk(
            rows, edge, y2, decay, boundary, state, first, count, head, heads, k0, v0,
            K, V, C, YDIV, BACKWARD, HALF, BC, BK, BV, STAGES,
        )  # fmt: skip
    if HAS_FINAL:
        tl.store(final + own, state, mask=mask)


@triton.jit
def add_up(part, out, value, row, valid, head, heads, V: tl.constexpr, v0, BV: tl.constexpr, add, last):
    value += load_rows(part, row, valid & (add != 0), head, heads, V, v0, BV)
    if last != 0:
        store_rows(out, value, row, valid, head, heads, V, v0, BV)
    else:
        store_rows(part, value, row, valid, head, heads, V, v0, BV)


@triton.jit
def _mixed_rows(
    head, chunk, v0, rows, q, k, g, y, weight, state, decay, part, out, heads, read_gate, write_gate, add, last, scale,
    STRONG: tl.constexpr, BACKWARD: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr,
    HALF: tl.constexpr, GLOW: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Columns [v0, v0 + BV) of a chunk: o = A v + (q exp(G)) S, or (backward) dv = A^T do + (k exp(G_C - G)) D."""
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    read, write = row_factor(weight, row, valid, scale, read_gate), row_factor(weight, row, valid, 1.0, write_gate)
    i, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    scores = tl.zeros([BC, BC], dtype=tl.float32)
    result = tl.zeros([BC, BV], dtype=tl.float32)
    for k0 in tl.static_range(0, K, BK):
        qv = load_rows(q, row // XDIV, valid, head, heads, K, k0, BK) * read[:, None]
        kv = load_rows(k, row // XDIV, valid, head, heads, K, k0, BK) * write[:, None]
        gv = load_rows(g, row // XDIV, valid, head, heads, K, k0, BK)
        where, mask = state_offsets(chunk, head, heads, K, V, k0, v0, BK, BV)
        block = tl.load(state + where, mask=mask, other=0.0)
        if STRONG:
            scores += nested_scores(qv, kv, gv, heads, BACKWARD, HALF, GLOW, BC, LEVELS)
            if BACKWARD:
                edge = kv * exp(row_sums((j > i).to(tl.float32), gv, heads, 0, HALF, GLOW))
            else:
                edge = qv * exp(row_sums((j <= i).to(tl.float32), gv, heads, 0, HALF, GLOW))
        else:
            relative = from_middle(gv, heads, 0, HALF, GLOW, BC)
            to_middle, total = load_decays(decay, chunk, head, heads, K, k0, BK)
            qs, ks = qv * exp(relative), kv * exp(-relative)
            if BACKWARD:
                scores = dot_apart(ks, tl.trans(qs), scores, heads, 2, HALF)
                edge = ks * exp(total - to_middle)[None, :]
            else:
                scores = dot_apart(qs, tl.trans(ks), scores, heads, 2, HALF)
                edge = qs * exp(to_middle)[None, :]
        result = dot_apart(edge, block, result, heads, 3, HALF)
    scores = tl.where((j >= i) if BACKWARD else (i >= j), scores, 0.0)
    yv = load_rows(y, row // YDIV, valid, head, heads, V, v0, BV)
    if BACKWARD:
        # In o the rounding of the scores is lost beside the output's own; in dv it would be the largest of all.
        result = fine_dot(scores, yv, result, heads, 4, HALF)
    else:
        result += dot(scores, yv, HALF)
    add_up(part, out, result, row, valid, head, heads, V, v0, BV, add, last)


@triton.jit(do_not_specialize=["heads", "first_chunk", "read_gate", "write_gate"])
def gla_mix_kernel(
    rows, q, k, g, y, weight, state, decay, strong, part, out, heads, first_chunk,
    read_gate, write_gate, scale, ADD: tl.constexpr, LAST: tl.constexpr, BACKWARD: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr,
    HALF: tl.constexpr, GLOW: tl.constexpr,
    FLAGS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """o [rows, H, V] from y = v and the start states, or (backward) dv from y = do and the gradients of the end states.
    Grid (chunks * H, V blocks)."""
    head, chunk = tl.program_id(0) % heads, first_chunk + tl.program_id(0) // heads
    if is_empty(rows, chunk, C):
        return
    if is_strong(strong, chunk, head, heads, FLAGS):
        return
    _mixed_rows(
        head, chunk, tl.program_id(1) * BV, rows, q, k, g, y, weight, state, decay, part, out, heads,
        read_gate, write_gate, ADD, LAST, scale, False, BACKWARD, K, V, C, XDIV, YDIV, HALF, GLOW, BC, BK, BV, LEVELS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "first_chunk", "num_chunks", "read_gate", "write_gate", "add", "last"])
def gla_mix_strong_kernel(
    rows, q, k, g, y, weight, state, decay, strong, part, out, heads, first_chunk, num_chunks,
    read_gate, write_gate, add, last, scale, BACKWARD: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr,
    HALF: tl.constexpr, GLOW: tl.constexpr,
    FLAGS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """`gla_mix_kernel` for the chunks of strong decay. Grid (programs), which share the chunks and heads out."""
    share = tl.cdiv(num_chunks * heads, tl.num_programs(0))
    begin = first_chunk * heads + tl.program_id(0) * share
    end = tl.minimum(begin + share, (first_chunk + num_chunks) * heads)
    if any_strong(strong, begin, end, FLAGS):
        for item in range(begin, end):
            head, chunk = item % heads, item // heads
            if is_strong(strong, chunk, head, heads, FLAGS):
                for v0 in range(0, V, BV):
                    _mixed_rows(
                        head, chunk, v0, rows, q, k, g, y, weight, state, decay, part, out, heads,
                        read_gate, write_gate, add, last, scale, True, BACKWARD,
                        K, V, C, XDIV, YDIV, HALF, GLOW, BC, BK, BV, LEVELS,
                    )  # fmt: skip
