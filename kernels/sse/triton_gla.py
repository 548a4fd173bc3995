"""GLA on the chunk grid in Triton.

Forward: every chunk's increment to the state in parallel, one streaming scan over the chunks of each stream that leaves the
state at the start of every chunk, then all outputs in parallel. Backward: the same with the gradient of the state, in reverse.
For one chunk with start state S, end-state gradient D, rows q (scaled, read gate applied), k (write gate applied), v, upstream
gradient do, and accumulated log decay G (inclusive, G_C at the end):

    S' = exp(G_C) S + (k exp(G_C - G))^T v                 o  = (q exp(G)) S + A v,  A_ij = sum_c q_ic k_jc exp(G_ic - G_jc), j <= i
    D_before = exp(G_C) D + (q exp(G))^T do                dv = A^T do + (k exp(G_C - G)) D
    dq = exp(G) (do S^T) + sum_j dA_ij k_j exp(G_i - G_j)  dk = exp(G_C - G) (v D^T) + sum_i dA_ij q_i exp(G_i - G_j)

Rows are gathered by index and never reordered in memory. Sums of decays are products with 0/1 matrices, so that differences
of accumulated decays are never formed: a chunk whose total decay stays above -SPLIT_LIMIT takes one product split at its
middle, any other the nested halves of `scores.py`, in kernels of their own (they need twice the registers, and are rarely
called for). The choice depends on the chunk and head alone.

A launch covers the chunks of one kind, shared or routed. Names: BC, BK, BV are block sizes (C padded to a power of two, K and V
cut into blocks); HALF: products in bf16, else fp32 emulated by tf32; GLOW: g has more digits than bf16; FLAGS: entries of
`strong` a chunk and head; *DIV: the source row of a row is row // DIV; READ, WRITE: the router's weight goes into q, into k;
ADD: on top of what `part` holds (fp32); LAST: the result goes to the output, else to `part`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# exp(60)^2 stays below fp32's (and bf16's) largest number with room for the sums, and rounding 60 costs 4e-6 of a product.
SPLIT_LIMIT = tl.constexpr(60.0)


@triton.jit
def dot(a, b, HALF: tl.constexpr):
    if HALF:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")


@triton.jit
def rounded(a, HALF: tl.constexpr):
    """a as a product sees it, in fp32."""
    if HALF:
        return a.to(tl.bfloat16).to(tl.float32)
    else:
        return a


@triton.jit
def row_sums(which, a, HALF: tl.constexpr, LOW: tl.constexpr):
    """which [M, BC] of -1, 0, 1, times a [BC, BK] fp32, exact to at least 16 bits of each element of a."""
    if HALF:
        mask = which.to(tl.bfloat16)
        high = a.to(tl.bfloat16)
        total = tl.dot(mask, high)
        if LOW:
            total += tl.dot(mask, (a - high.to(tl.float32)).to(tl.bfloat16))
        return total
    else:
        return tl.dot(which.to(tl.float32), a, input_precision="tf32x3")


@triton.jit
def load_rows(ptr, source, valid, head, heads, D: tl.constexpr, offset, BD: tl.constexpr):
    """Rows [BC, BD] of a [rows, H, D] tensor from column `offset` on, in fp32, zero where there is none."""
    column = offset + tl.arange(0, BD)
    where = (source.to(tl.int64) * heads + head)[:, None] * D + column[None, :]
    return tl.load(ptr + where, mask=valid[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_rows_transposed(ptr, source, valid, head, heads, D: tl.constexpr, offset, BD: tl.constexpr):
    """As `load_rows`, [BD, BC]."""
    column = offset + tl.arange(0, BD)
    where = (source.to(tl.int64) * heads + head)[None, :] * D + column[:, None]
    return tl.load(ptr + where, mask=valid[None, :] & (column < D)[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, value, row, valid, head, heads, D: tl.constexpr, offset, BD: tl.constexpr):
    column = offset + tl.arange(0, BD)
    where = (row.to(tl.int64) * heads + head)[:, None] * D + column[None, :]
    tl.store(ptr + where, value.to(ptr.dtype.element_ty), mask=valid[:, None] & (column < D)[None, :])


@triton.jit
def state_offsets(chunk, head, heads, K: tl.constexpr, V: tl.constexpr, k0, v0, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets and mask of block (k0, v0) of a chunk's [K, V] matrix in [NC, H, K, V]."""
    k, v = k0 + tl.arange(0, BK), v0 + tl.arange(0, BV)
    base = (chunk.to(tl.int64) * heads + head) * K * V
    return base + k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]


@triton.jit
def score_offsets(chunk, head, heads, C: tl.constexpr, BC: tl.constexpr):
    """Offsets and mask of a chunk's [C, C] matrix in [NC, H, C, C]."""
    i = tl.arange(0, BC)
    where = (chunk.to(tl.int64) * heads + head) * C * C + i[:, None] * C + i[None, :]
    return where, (i < C)[:, None] & (i < C)[None, :]


@triton.jit
def chunk_rows(rows, chunk, C: tl.constexpr, BC: tl.constexpr):
    position = tl.arange(0, BC)
    return tl.load(rows + chunk.to(tl.int64) * C + position, mask=position < C, other=-1)


@triton.jit
def split_at_middle(g, HALF: tl.constexpr, LOW: tl.constexpr, BC: tl.constexpr):
    """Log decay of each row relative to the chunk's middle row [BC, BK], and up to the middle and after it, both [BK]."""
    i, t = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    relative = row_sums((t <= i).to(tl.float32) - (t <= BC // 2).to(tl.float32), g, HALF, LOW)
    to_middle = tl.sum(tl.where(i <= BC // 2, g, 0.0), 0)
    return relative, to_middle, tl.sum(tl.where(i > BC // 2, g, 0.0), 0)


@triton.jit
def halves(g, level, HALF: tl.constexpr, LOW: tl.constexpr, BC: tl.constexpr):
    """Blocks of 2**level rows, taken in pairs: which rows lie in the second of a pair, and exp of each row's decay from or to
    the cut between the two, both exponents never positive."""
    i, t = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    size = 1 << level
    second = (i // size) % 2 == 1
    cut = (i // (2 * size)) * (2 * size) + size - 1
    between = tl.where(second, (t > cut) & (t <= i), (t > i) & (t <= cut))
    return second, tl.exp(row_sums(between.to(tl.float32), g, HALF, LOW))


@triton.jit
def same_pair(level, BC: tl.constexpr):
    size = 2 << level
    return tl.arange(0, BC)[:, None] // size == tl.arange(0, BC)[None, :] // size


@triton.jit
def nested_scores(
    q, k, g, TRANSPOSED: tl.constexpr, HALF: tl.constexpr, LOW: tl.constexpr, BC: tl.constexpr, LEVELS: tl.constexpr
):
    """A [i, j], or its transpose, for decays of any strength."""
    i, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    scores = tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
    for level in range(LEVELS):
        second, decay = halves(g, level, HALF, LOW, BC)
        upper, lower = tl.where(second, q * decay, 0.0), tl.where(second, 0.0, k * decay)
        if TRANSPOSED:
            part = dot(lower, tl.trans(upper), HALF)
        else:
            part = dot(upper, tl.trans(lower), HALF)
        scores += tl.where(same_pair(level, BC), part, 0.0)
    return scores


@triton.jit
def gla_increment_kernel(
    rows, x, g, y, v, weight, increment, decay, strong, dscores, own, heads, first_chunk, factor,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    XDIV: tl.constexpr, YDIV: tl.constexpr, VDIV: tl.constexpr, WEIGHTED: tl.constexpr,
    BACKWARD: tl.constexpr, HALF: tl.constexpr, GLOW: tl.constexpr,
    FLAGS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """increment [NC,H,K,V] fp32 = sum over rows of (x decayed)^T y: x = k to the chunk's end and y = v, or (backward) x = q
    from its start and y = do. The forward also writes the chunk's log decay [NC,H,K] and, where it is too strong for the plain
    product in a block of K, a 1 into strong [NC,H,FLAGS]; the backward the products do_i . v_j, in dscores [NC,H,C,C] those of
    j < i, in own [NC,H,C] fp32 those of j = i. Grid (H, chunks, K blocks * V blocks)."""
    head, chunk = tl.program_id(0), first_chunk + tl.program_id(1)
    if tl.load(rows + chunk.to(tl.int64) * C) < 0:
        return
    v_blocks: tl.constexpr = (V + BV - 1) // BV
    k0, v0 = tl.program_id(2) // v_blocks * BK, tl.program_id(2) % v_blocks * BV
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    xt = load_rows_transposed(x, row // XDIV, valid, head, heads, K, k0, BK)
    gt = load_rows_transposed(g, row // XDIV, valid, head, heads, K, k0, BK)
    yv = load_rows(y, row // YDIV, valid, head, heads, V, v0, BV)
    t, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    between = (t <= j) if BACKWARD else (t > j)
    decayed = tl.exp(column_sums(gt, between, HALF, GLOW))
    scale = tl.zeros([BC], dtype=tl.float32) + factor
    if WEIGHTED:
        scale *= tl.load(weight + row, mask=valid, other=0.0)
    result = dot(xt * scale[None, :] * decayed, yv, HALF)
    where, mask = state_offsets(chunk, head, heads, K, V, k0, v0, BK, BV)
    tl.store(increment + where, result, mask=mask)
    if not BACKWARD:
        if v0 == 0:
            k, total = k0 + tl.arange(0, BK), tl.sum(gt, 1)
            matrix = chunk.to(tl.int64) * heads + head
            tl.store(decay + matrix * K + k, total, mask=k < K)
            tl.store(strong + matrix * FLAGS + k0 // BK, (tl.min(total, 0) < -SPLIT_LIMIT).to(tl.int32))
    elif tl.program_id(2) == 0:
        product = tl.zeros([BC, BC], dtype=tl.float32)
        for v1 in tl.static_range(0, V, BV):
            yv = load_rows(y, row // YDIV, valid, head, heads, V, v1, BV)
            product += dot(yv, tl.trans(load_rows(v, row // VDIV, valid, head, heads, V, v1, BV)), HALF)
        where_score, inside = score_offsets(chunk, head, heads, C, BC)
        tl.store(dscores + where_score, tl.where(t > j, product, 0.0).to(dscores.dtype.element_ty), mask=inside)
        i = tl.arange(0, BC)
        itself = tl.sum(tl.where(t == j, product, 0.0), 1)
        tl.store(own + (chunk.to(tl.int64) * heads + head) * C + i, itself, mask=i < C)


@triton.jit
def column_sums(a, which, HALF: tl.constexpr, LOW: tl.constexpr):
    """a [BK, BC] times which [BC, M]: `row_sums` for transposed rows."""
    if HALF:
        mask = which.to(tl.bfloat16)
        high = a.to(tl.bfloat16)
        total = tl.dot(high, mask)
        if LOW:
            total += tl.dot((a - high.to(tl.float32)).to(tl.bfloat16), mask)
        return total
    else:
        return tl.dot(a, which.to(tl.float32), input_precision="tf32x3")


@triton.jit
def gla_scan_kernel(
    begin, chunks, increment, decay, initial, boundary, final, heads,
    K: tl.constexpr, V: tl.constexpr, BACKWARD: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """boundary[c] = state before chunk c (backward: gradient of the state after it); state <- exp(decay) state + increment.
    Grid (S * (1+N), H, blocks of the state). initial, final: [S*(1+N), H, K, V] fp32."""
    stream, head = tl.program_id(0), tl.program_id(1)
    v_blocks: tl.constexpr = (V + BV - 1) // BV
    k0, v0 = tl.program_id(2) // v_blocks * BK, tl.program_id(2) % v_blocks * BV
    own, mask = state_offsets(stream, head, heads, K, V, k0, v0, BK, BV)
    k = k0 + tl.arange(0, BK)
    if HAS_INITIAL:
        state = tl.load(initial + own, mask=mask, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([BK, BV], dtype=tl.float32)
    first, count = tl.load(begin + stream), tl.load(chunks + stream)
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = first + (count - 1 - step if BACKWARD else step)
        where, _ = state_offsets(chunk, head, heads, K, V, k0, v0, BK, BV)
        kept = tl.exp(tl.load(decay + (chunk.to(tl.int64) * heads + head) * K + k, mask=k < K, other=0.0))
        added = tl.load(increment + where, mask=mask, other=0.0)
        tl.store(boundary + where, state.to(boundary.dtype.element_ty), mask=mask)
        state = state * kept[:, None] + added
    if HAS_FINAL:
        tl.store(final + own, state, mask=mask)


@triton.jit
def is_strong(strong, chunk, head, heads, FLAGS: tl.constexpr):
    flags = tl.load(strong + (chunk.to(tl.int64) * heads + head) * FLAGS + tl.arange(0, FLAGS))
    return tl.max(flags, 0) != 0


@triton.jit
def any_strong(strong, first, last, FLAGS: tl.constexpr):
    """Whether one of the (chunk, head) pairs [first, last) is flagged."""
    found = tl.zeros([256], dtype=tl.int32)
    for start in range(first * FLAGS, last * FLAGS, 256):
        where = start + tl.arange(0, 256)
        found |= tl.load(strong + where, mask=where < last * FLAGS, other=0)
    return tl.max(found, 0) != 0


@triton.jit
def is_empty(rows, chunk, C: tl.constexpr):
    return tl.load(rows + chunk.to(tl.int64) * C) < 0


@triton.jit
def read_factor(weight, row, valid, scale, READ: tl.constexpr):
    factor = tl.zeros([row.shape[0]], dtype=tl.float32) + scale
    if READ:
        factor *= tl.load(weight + row, mask=valid, other=0.0)
    return factor


@triton.jit
def write_factor(weight, row, valid, WRITE: tl.constexpr):
    factor = tl.zeros([row.shape[0]], dtype=tl.float32) + 1.0
    if WRITE:
        factor *= tl.load(weight + row, mask=valid, other=0.0)
    return factor


@triton.jit
def add_up(
    part, out, value, row, valid, head, heads, V: tl.constexpr, v0, BV: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr
):
    if ADD:
        value += load_rows(part, row, valid, head, heads, V, v0, BV)
    if LAST:
        store_rows(out, value, row, valid, head, heads, V, v0, BV)
    else:
        store_rows(part, value, row, valid, head, heads, V, v0, BV)


@triton.jit
def _mixed_rows(
    head, chunk, v0, rows, q, k, g, y, weight, state, part, out, heads, scale, STRONG: tl.constexpr, BACKWARD: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr, HALF: tl.constexpr, GLOW: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Columns [v0, v0 + BV) of a chunk: o = A v + (q exp(G)) S, or (backward) dv = A^T do + (k exp(G_C - G)) D."""
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    read, write = read_factor(weight, row, valid, scale, READ), write_factor(weight, row, valid, WRITE)
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
            scores += nested_scores(qv, kv, gv, BACKWARD, HALF, GLOW, BC, LEVELS)
            if BACKWARD:
                edge = kv * tl.exp(row_sums((j > i).to(tl.float32), gv, HALF, GLOW))
            else:
                edge = qv * tl.exp(row_sums((j <= i).to(tl.float32), gv, HALF, GLOW))
        else:
            relative, to_middle, after = split_at_middle(gv, HALF, GLOW, BC)
            qs, ks = qv * tl.exp(relative), kv * tl.exp(-relative)
            if BACKWARD:
                scores += dot(ks, tl.trans(qs), HALF)
                edge = ks * tl.exp(after)[None, :]
            else:
                scores += dot(qs, tl.trans(ks), HALF)
                edge = qs * tl.exp(to_middle)[None, :]
        result += dot(edge, block, HALF)
    scores = tl.where((j >= i) if BACKWARD else (i >= j), scores, 0.0)
    result += dot(scores, load_rows(y, row // YDIV, valid, head, heads, V, v0, BV), HALF)
    add_up(part, out, result, row, valid, head, heads, V, v0, BV, ADD, LAST)


@triton.jit
def gla_mix_kernel(
    rows, q, k, g, y, weight, state, strong, part, out, heads, first_chunk, scale, BACKWARD: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr, HALF: tl.constexpr, GLOW: tl.constexpr,
    FLAGS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """o [rows, H, V] from y = v and the start states, or (backward) dv from y = do and the gradients of the end states.
    Grid (H, chunks, V blocks)."""
    head, chunk = tl.program_id(0), first_chunk + tl.program_id(1)
    if is_empty(rows, chunk, C):
        return
    if is_strong(strong, chunk, head, heads, FLAGS):
        return
    _mixed_rows(
        head, chunk, tl.program_id(2) * BV, rows, q, k, g, y, weight, state, part, out, heads, scale,
        False, BACKWARD, K, V, C, XDIV, YDIV, READ, WRITE, ADD, LAST, HALF, GLOW, BC, BK, BV, LEVELS,
    )  # fmt: skip


@triton.jit
def gla_mix_strong_kernel(
    rows, q, k, g, y, weight, state, strong, part, out, heads, first_chunk, num_chunks, scale, BACKWARD: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr, HALF: tl.constexpr, GLOW: tl.constexpr,
    FLAGS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """`gla_mix_kernel` for the chunks of strong decay. Grid (programs), which share the chunks and heads out."""
    share = tl.cdiv(num_chunks * heads, tl.num_programs(0))
    first = first_chunk * heads + tl.program_id(0) * share
    last = tl.minimum(first + share, (first_chunk + num_chunks) * heads)
    if any_strong(strong, first, last, FLAGS):
        for item in range(first, last):
            head, chunk = item % heads, item // heads
            if is_strong(strong, chunk, head, heads, FLAGS):
                for v0 in range(0, V, BV):
                    _mixed_rows(
                        head, chunk, v0, rows, q, k, g, y, weight, state, part, out, heads, scale,
                        True, BACKWARD, K, V, C, XDIV, YDIV, READ, WRITE, ADD, LAST, HALF, GLOW, BC, BK, BV, LEVELS,
                    )  # fmt: skip


@triton.jit
def _gradients_of_chunk(
    head, chunk, k0, rows, q, k, g, v, do, weight, boundary, dboundary, decay, dscores, own, dq, dk, dg, dweight, num_rows, heads, scale,
    STRONG: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr, ODIV: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, HALF: tl.constexpr, GLOW: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of a chunk in key columns [k0, k0 + BK): the side of the queries first, then the side of the keys, which reads
    its rows again, because registers are what a program is short of."""
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    source = row // XDIV
    i, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    read, write = read_factor(weight, row, valid, scale, READ), write_factor(weight, row, valid, WRITE)

    dqv = tl.zeros([BC, BK], dtype=tl.float32)
    kept = tl.zeros([BK], dtype=tl.float32)
    for v0 in tl.static_range(0, V, BV):
        dov = load_rows(do, row // ODIV, valid, head, heads, V, v0, BV)
        where, mask = state_offsets(chunk, head, heads, K, V, k0, v0, BK, BV)
        state = tl.load(boundary + where, mask=mask, other=0.0)
        dqv += dot(dov, tl.trans(state), HALF)
        kept += tl.sum(state.to(tl.float32) * tl.load(dboundary + where, mask=mask, other=0.0).to(tl.float32), 1)
    where, mask = score_offsets(chunk, head, heads, C, BC)
    scores = tl.load(dscores + where, mask=mask, other=0.0)
    # A row's product with itself knows no decay: it is added after dg was made, where it would only leave rounding.
    position = tl.arange(0, BC)
    itself = tl.load(own + (chunk.to(tl.int64) * heads + head) * C + position, mask=position < C, other=0.0)
    gv = load_rows(g, source, valid, head, heads, K, k0, BK)
    kv = load_rows(k, source, valid, head, heads, K, k0, BK) * write[:, None]
    qr = load_rows(q, source, valid, head, heads, K, k0, BK)
    qv = qr * read[:, None]
    if STRONG:
        dqv *= tl.exp(row_sums((j <= i).to(tl.float32), gv, HALF, GLOW))
        flow = qv * dqv
        for level in range(LEVELS):
            second, factor = halves(gv, level, HALF, GLOW, BC)
            lower = tl.where(second, 0.0, kv * factor)
            sent = tl.where(second, dot(tl.where(same_pair(level, BC), scores, 0.0), lower, HALF), 0.0)
            dqv += sent * factor
            flow += rounded(qv * factor, HALF) * sent
    else:
        relative, to_middle, _ = split_at_middle(gv, HALF, GLOW, BC)
        growth = tl.exp(relative)
        sent = dot(scores, kv * tl.exp(-relative), HALF)
        dqv *= growth * tl.exp(to_middle)[None, :]
        # The rounded factors of both sides' products: what one row sends and another receives cancels exactly in dg.
        flow = qv * dqv + rounded(qv * growth, HALF) * sent
        dqv += sent * growth
    dqv += itself[:, None] * kv
    store_rows(dq, dqv * read[:, None], row, valid, head, heads, K, k0, BK)
    of_weight = tl.zeros([BC], dtype=tl.float32)
    if READ:
        of_weight += tl.sum(qr * dqv, 1) * scale

    dkv = tl.zeros([BC, BK], dtype=tl.float32)
    for v0 in tl.static_range(0, V, BV):
        yv = load_rows(v, row // YDIV, valid, head, heads, V, v0, BV)
        where, mask = state_offsets(chunk, head, heads, K, V, k0, v0, BK, BV)
        dkv += dot(yv, tl.trans(tl.load(dboundary + where, mask=mask, other=0.0)), HALF)
    where, mask = score_offsets(chunk, head, heads, C, BC)
    scores = tl.load(dscores + tl.trans(where), mask=mask, other=0.0)
    gv = load_rows(g, source, valid, head, heads, K, k0, BK)
    qv = load_rows(q, source, valid, head, heads, K, k0, BK) * read[:, None]
    kr = load_rows(k, source, valid, head, heads, K, k0, BK)
    kv = kr * write[:, None]
    if STRONG:
        dkv *= tl.exp(row_sums((j > i).to(tl.float32), gv, HALF, GLOW))
        to_state = kv * dkv
        for level in range(LEVELS):
            second, factor = halves(gv, level, HALF, GLOW, BC)
            upper = tl.where(second, qv * factor, 0.0)
            sent = tl.where(second, 0.0, dot(tl.where(same_pair(level, BC), scores, 0.0), upper, HALF))
            dkv += sent * factor
            flow -= rounded(kv * factor, HALF) * sent
    else:
        relative, _, after = split_at_middle(gv, HALF, GLOW, BC)
        shrink = tl.exp(-relative)
        sent = dot(scores, qv * tl.exp(relative), HALF)
        dkv *= shrink * tl.exp(after)[None, :]
        to_state = kv * dkv
        flow -= rounded(kv * shrink, HALF) * sent
        dkv += sent * shrink
    dkv += itself[:, None] * qv
    store_rows(dk, dkv * write[:, None], row, valid, head, heads, K, k0, BK)
    if WRITE:
        of_weight += tl.sum(kr * dkv, 1)
    if READ or WRITE:
        where_weight = ((k0 // BK) * num_rows + row).to(tl.int64) * heads + head
        tl.store(dweight + where_weight, of_weight, mask=valid)
    kk = k0 + tl.arange(0, BK)
    total = tl.load(decay + (chunk.to(tl.int64) * heads + head) * K + kk, mask=kk < K, other=0.0)
    kept *= tl.exp(total)
    if STRONG:
        dgv = row_sums((j >= i).to(tl.float32), flow, HALF, True) + row_sums((j < i).to(tl.float32), to_state, HALF, True)
    else:
        dgv = row_sums((j >= i).to(tl.float32), flow - to_state, HALF, True)
        kept += tl.sum(to_state, 0)
    dgv += kept[None, :]
    store_rows(dg, dgv, row, valid, head, heads, K, k0, BK)


@triton.jit
def gla_gradient_kernel(
    rows, q, k, g, v, do, weight, boundary, dboundary, decay, dscores, own, strong, dq, dk, dg, dweight, num_rows, heads, first_chunk, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr, ODIV: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, HALF: tl.constexpr, GLOW: tl.constexpr,
    FLAGS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg [rows, H, K]; dweight [K blocks, rows, H] where a gate is on. Grid (H, chunks, K blocks)."""
    head, chunk = tl.program_id(0), first_chunk + tl.program_id(1)
    if is_empty(rows, chunk, C):
        return
    if is_strong(strong, chunk, head, heads, FLAGS):
        return
    _gradients_of_chunk(
        head, chunk, tl.program_id(2) * BK, rows, q, k, g, v, do, weight, boundary, dboundary, decay, dscores, own,
        dq, dk, dg, dweight, num_rows, heads, scale,
        False, K, V, C, XDIV, YDIV, ODIV, READ, WRITE, HALF, GLOW, BC, BK, BV, LEVELS,
    )  # fmt: skip


@triton.jit
def gla_gradient_strong_kernel(
    rows, q, k, g, v, do, weight, boundary, dboundary, decay, dscores, own, strong, dq, dk, dg, dweight, num_rows, heads, first_chunk,
    num_chunks, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, XDIV: tl.constexpr, YDIV: tl.constexpr, ODIV: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, HALF: tl.constexpr, GLOW: tl.constexpr,
    FLAGS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """`gla_gradient_kernel` for the chunks of strong decay. Grid (programs), which share the chunks and heads out."""
    share = tl.cdiv(num_chunks * heads, tl.num_programs(0))
    first = first_chunk * heads + tl.program_id(0) * share
    last = tl.minimum(first + share, (first_chunk + num_chunks) * heads)
    if any_strong(strong, first, last, FLAGS):
        for item in range(first, last):
            head, chunk = item % heads, item // heads
            if is_strong(strong, chunk, head, heads, FLAGS):
                for k0 in range(0, K, BK):
                    _gradients_of_chunk(
                        head, chunk, k0, rows, q, k, g, v, do, weight, boundary, dboundary, decay, dscores, own, dq, dk, dg, dweight,
                        num_rows, heads, scale, True,
                        K, V, C, XDIV, YDIV, ODIV, READ, WRITE, HALF, GLOW, BC, BK, BV, LEVELS,
                    )  # fmt: skip
