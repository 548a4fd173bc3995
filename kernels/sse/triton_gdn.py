"""The gated delta rule on the chunk grid in Triton.

For one chunk with start state S, rows q, k, v, scalars a row b (write strength), G (log decay, accumulated, inclusive; G_C at the
end), x (write factor of v) and y (read factor, the scale in it), the rows write corrections u that solve a triangular system:

    L_ij = b_i (k_i . k_j) exp(G_i - G_j), j < i            T = (I + L)^-1            u = T b (x v - exp(G) k S) = u0 - w S
    S' = exp(G_C) S + (k exp(G_C - G))^T u                  o = y (exp(G) q S + A u),  A_ij = (q_i . k_j) exp(G_i - G_j), j <= i

Forward: T, u0 and w of all chunks in parallel (prepare), a scan along every stream, all outputs in parallel. Backward, with D
the gradient of the state after the chunk: implicit differentiation of the system needs one more vector a row, T^T times u's
gradient,

    z = T^T (A^T y do + k exp(G_C - G) D) = z0 + r D        gradient of S: exp(G_C) D + (exp(G) q)^T y do - (b exp(G) k)^T z
    gradients of the system's right side and of L: z and -z u^T

so z0 and r come from all chunks in parallel (adjoint), then a reverse scan, then every gradient in parallel. Row
factors are applied to fp32 results, not to the operands of products. Decays enter as exp(G_i - G_j) with j <= i, so none is too
strong; G is summed in fp64 and kept as two fp32 numbers.

Names: BC, BK, BV are block sizes (C, K, V padded to powers of two, K and V cut into blocks); KW is all of K in one block; HALF:
products in bf16, else fp32 emulated by tf32; *DIV: the source row of a row is row // DIV. Tiles: w, r [NC,H,C,K],
u, z [NC,H,C,V], inverse (T) [NC,H,C,C], boundary, dboundary [NC,H,K,V] in bf16 where HALF, else fp32; total [NC,H,2,C] fp32.
A transposed product of an accumulator is computed as such, never by `tl.trans` of the accumulator: some Triton versions up to
3.7.0 miscompile that on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posttrain.kernels.sse.triton_common import chunk_rows, dot, dot_apart, first_rows, load_rows, state_offsets, store_rows


@triton.jit
def load_tile(ptr, chunk, head, heads, C: tl.constexpr, D: tl.constexpr, offset, BC: tl.constexpr, BD: tl.constexpr):
    """[BC, BD] of a chunk's [C, D] from column `offset` on, in fp32, zero outside."""
    row, column = tl.arange(0, BC), offset + tl.arange(0, BD)
    base = (chunk.to(tl.int64) * heads + head) * (C * D)
    mask = (row < C)[:, None] & (column < D)[None, :]
    return tl.load(ptr + base + row[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, value, chunk, head, heads, C: tl.constexpr, D: tl.constexpr, offset, BC: tl.constexpr, BD: tl.constexpr):
    row, column = tl.arange(0, BC), offset + tl.arange(0, BD)
    base = (chunk.to(tl.int64) * heads + head) * (C * D)
    mask = (row < C)[:, None] & (column < D)[None, :]
    tl.store(ptr + base + row[:, None] * D + column[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_transposed(ptr, chunk, head, heads, C: tl.constexpr, BC: tl.constexpr):
    """A chunk's [C, C] transposed, in fp32."""
    row, column = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    base = (chunk.to(tl.int64) * heads + head) * (C * C)
    return tl.load(ptr + base + column * C + row, mask=(row < C) & (column < C), other=0.0).to(tl.float32)


@triton.jit
def operand(a, HALF: tl.constexpr):
    """a as a product takes it: half the registers until then, and nothing but a copy if it was loaded as bf16."""
    if HALF:
        return a.to(tl.bfloat16)
    else:
        return a


@triton.jit
def turned(a, HALF: tl.constexpr):
    """a transposed, for a product; a must be loaded, not an accumulator."""
    return tl.trans(operand(a, HALF))


@triton.jit
def row_factors(weight, row, valid, factor, GATED: tl.constexpr):
    """factor, times the router's weight of each row where GATED, [BC]."""
    factors = tl.zeros([row.shape[0]], dtype=tl.float32) + factor
    if GATED:
        factors *= tl.load(weight + row, mask=valid, other=0.0)
    return factors


@triton.jit
def load_scalars(ptr, source, valid, head, heads):
    """One number a row of a [rows, H] tensor, in fp32, zero where there is no row."""
    return tl.load(ptr + source.to(tl.int64) * heads + head, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def load_total(total, chunk, head, heads, C: tl.constexpr, BC: tl.constexpr):
    """G of every row as (high, low) [BC], rows past C repeating the last, and the same of the chunk's end."""
    base = total + (chunk.to(tl.int64) * heads + head) * (2 * C)
    position = tl.minimum(tl.arange(0, BC), C - 1)
    return tl.load(base + position), tl.load(base + C + position), tl.load(base + C - 1), tl.load(base + 2 * C - 1)


@triton.jit
def decays(high, low, TRANSPOSED: tl.constexpr, BC: tl.constexpr):
    """exp(G_i - G_j) where j <= i, else 0: [i, j], or [j, i]."""
    i, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    difference = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    if TRANSPOSED:
        return tl.where(i <= j, tl.exp(tl.where(i <= j, -difference, 0.0)), 0.0)
    else:
        return tl.where(i >= j, tl.exp(tl.where(i >= j, difference, 0.0)), 0.0)


@triton.jit
def unit_lower_inverse(lower, BC: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangular fp32 [BC, BC]: substitution in the diagonal blocks of 16, all at once, then
    pairs of blocks merge. Powers of `lower` are never formed: they grow like binomials where keys repeat, and their sum cancels.
    """
    blocks: tl.constexpr = BC // 16
    own = tl.arange(0, blocks)[:, None, None, None] == tl.arange(0, blocks)[None, None, :, None]
    diagonal = tl.sum(tl.where(own, tl.reshape(lower, [blocks, 16, blocks, 16]), 0.0), 2)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    solved = tl.where(row == column, 1.0, 0.0) + tl.zeros([blocks, 16, 16], dtype=tl.float32)
    for n in range(15):
        factor = tl.sum(tl.where(column == n, diagonal, 0.0), 2)
        known = tl.sum(tl.where(row == n, solved, 0.0), 1)
        solved -= factor[:, :, None] * known[:, None, :]
    if BC >= 32:
        solved = _merge(lower, solved, BC, 16)
    if BC >= 64:
        solved = _merge(lower, solved, BC, 32)
    if BC >= 128:
        solved = _merge(lower, solved, BC, 64)
    return tl.reshape(solved, [BC, BC])


@triton.jit
def _merge(lower, solved, BC: tl.constexpr, SIZE: tl.constexpr):
    """Inverses of the diagonal blocks of SIZE, [BC/SIZE, SIZE, SIZE] -> of twice the size: [[A, 0], [B, C]]^-1 =
    [[A', 0], [-C' B A', C']]."""
    pairs: tl.constexpr = BC // (2 * SIZE)
    side = tl.arange(0, 2)
    own = tl.arange(0, pairs)[:, None, None, None] == tl.arange(0, pairs)[None, None, :, None]
    both = tl.sum(tl.where(own, tl.reshape(lower, [pairs, 2 * SIZE, pairs, 2 * SIZE]), 0.0), 2)
    left = tl.sum(tl.where(side[None, None, :, None] == 0, tl.reshape(both, [pairs, 2 * SIZE, 2, SIZE]), 0.0), 2)
    is_second = side[None, :, None, None] == 1
    between = tl.sum(tl.where(is_second, tl.reshape(left, [pairs, 2, SIZE, SIZE]), 0.0), 1)
    each = tl.reshape(solved, [pairs, 2, SIZE, SIZE])
    first, second = tl.sum(tl.where(is_second, 0.0, each), 1), tl.sum(tl.where(is_second, each, 0.0), 1)
    cross = -_product(_product(second, between, pairs, SIZE), first, pairs, SIZE)
    i, j = side[None, :, None, None, None], side[None, None, None, :, None]
    own_side = tl.where(i == 0, first[:, None, :, None, :], second[:, None, :, None, :])
    result = tl.where(i == j, own_side, tl.where(i > j, cross[:, None, :, None, :], 0.0))
    return tl.reshape(result, [pairs, 2 * SIZE, 2 * SIZE])


@triton.jit
def _product(a, b, pairs: tl.constexpr, SIZE: tl.constexpr):
    """[pairs, SIZE, SIZE] products in plain fp32: too small for the tensor cores to pay."""
    if pairs == 1:
        # One pair as a matrix: the warps share it, where they would share out pairs.
        one = tl.dot(tl.reshape(a, [SIZE, SIZE]), tl.reshape(b, [SIZE, SIZE]), input_precision="ieee")
        return tl.reshape(one, [1, SIZE, SIZE])
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=["heads", "first_chunk"])
def gdn_prepare_kernel(
    rows, k, g, b, v, weight, total, inverse, w, u, heads, first_chunk,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KDIV: tl.constexpr, GDIV: tl.constexpr, BDIV: tl.constexpr,
    VDIV: tl.constexpr, WRITE: tl.constexpr, KEEP: tl.constexpr, HALF: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """total, w, u (= u0) and, where KEEP, inverse of every chunk. Grid (H * chunks)."""
    head, chunk = tl.program_id(0) % heads, first_chunk + tl.program_id(0) // heads
    if tl.load(rows + chunk.to(tl.int64) * C) < 0:
        return
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    strength = load_scalars(b, row // BDIV, valid, head, heads)
    summed = tl.cumsum(load_scalars(g, row // GDIV, valid, head, heads).to(tl.float64), 0)
    high = summed.to(tl.float32)
    low = (summed - high.to(tl.float64)).to(tl.float32)
    position = tl.arange(0, BC)
    base = total + (chunk.to(tl.int64) * heads + head) * (2 * C)
    tl.store(base + position, high, mask=position < C)
    tl.store(base + C + position, low, mask=position < C)
    products = tl.zeros([BC, BC], dtype=tl.float32)
    for k0 in range(0, K, BK):
        kv = load_rows(k, row // KDIV, valid, head, heads, K, k0, BK)
        products = dot_apart(kv, turned(kv, HALF), products, heads, 1, HALF)
    i, j = position[:, None], position[None, :]
    lower = tl.where(i > j, products * decays(high, low, False, BC), 0.0) * strength[:, None]
    solved = unit_lower_inverse(lower, BC)
    if KEEP:
        store_tile(inverse, solved, chunk, head, heads, C, C, 0, BC, BC)
    keys = solved * (strength * tl.exp(high + low))[None, :]
    for k0 in range(0, K, BK):
        kv = load_rows(k, row // KDIV, valid, head, heads, K, k0, BK)
        store_tile(w, dot(keys, kv, HALF), chunk, head, heads, C, K, k0, BC, BK)
    values = solved * (strength * row_factors(weight, row, valid, 1.0, WRITE))[None, :]
    for v0 in range(0, V, BV):
        vv = load_rows(v, row // VDIV, valid, head, heads, V, v0, BV)
        store_tile(u, dot(values, vv, HALF), chunk, head, heads, C, V, v0, BC, BV)


@triton.jit
def _walk(
    rows, k, w, u, total, boundary, state, first, count, head, heads, v0,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KDIV: tl.constexpr, HALF: tl.constexpr,
    BC: tl.constexpr, KW: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The row numbers of a chunk are loaded a step before its rows: what is loaded inside a step is not looked through.
    row = first_rows(rows, first, count, C, BC)
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = first + step
        row_of_following = chunk_rows(rows, tl.minimum(chunk + 1, first + count - 1), C, BC)
        where, mask = state_offsets(chunk, head, heads, K, V, 0, v0, KW, BV)
        tl.store(boundary + where, state.to(boundary.dtype.element_ty), mask=mask)
        high, low, end_high, end_low = load_total(total, chunk, head, heads, C, BC)
        kv = load_rows(k, row // KDIV, row >= 0, head, heads, K, 0, KW)
        wv = load_tile(w, chunk, head, heads, C, K, 0, BC, KW)
        correction = load_tile(u, chunk, head, heads, C, V, v0, BC, BV) - dot(wv, state, HALF)
        store_tile(u, correction, chunk, head, heads, C, V, v0, BC, BV)
        to_end = tl.exp((end_high - high) + (end_low - low))
        state = state * tl.exp(end_high + end_low) + dot(turned(kv, HALF), correction * to_end[:, None], HALF)
        row = row_of_following
    return state


@triton.jit(do_not_specialize=["heads"])
def gdn_scan_kernel(
    rows, begin, chunks, k1, k2, w, u, total, initial, boundary, final, heads,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, N: tl.constexpr, KDIV: tl.constexpr, SHARED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, HALF: tl.constexpr,
    BC: tl.constexpr, KW: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """boundary[c] = state before chunk c; u0 becomes u. Grid (streams * H * V blocks), the shared stream of a sequence first, as
    the longest. initial, final: [streams, H, K, V]; final fp32."""
    v_blocks: tl.constexpr = (V + BV - 1) // BV
    v0 = tl.program_id(0) % v_blocks * BV
    head, stream = tl.program_id(0) // v_blocks % heads, tl.program_id(0) // v_blocks // heads
    own, mask = state_offsets(stream, head, heads, K, V, 0, v0, KW, BV)
    if HAS_INITIAL:
        state = tl.load(initial + own, mask=mask, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([KW, BV], dtype=tl.float32)
    first, count = tl.load(begin + stream), tl.load(chunks + stream)
    # A branch, not a chosen pointer, which would cost the loads their alignment.
    if SHARED:
        if stream % (1 + N) == 0:
            state = _walk(
                rows, k1, w, u, total, boundary, state, first, count, head, heads, v0, K, V, C, 1, HALF, BC, KW, BV, STAGES
            )
        else:
            state = _walk(
                rows, k2, w, u, total, boundary, state, first, count, head, heads, v0, K, V, C, KDIV, HALF, BC, KW, BV, STAGES
            )
    else:
        state = _walk(
            rows, k2, w, u, total, boundary, state, first, count, head, heads, v0, K, V, C, KDIV, HALF, BC, KW, BV, STAGES
        )
    if HAS_FINAL:
        tl.store(final + own, state, mask=mask)


@triton.jit(do_not_specialize=["heads", "first_chunk"])
def gdn_output_kernel(
    rows, q, k, weight, total, u, boundary, part, out, heads, first_chunk, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, QDIV: tl.constexpr, KDIV: tl.constexpr,
    READ: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr, HALF: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o of every row. ADD: on top of what `part` holds (fp32); LAST: the result goes to `out`, else to `part`.
    Grid (H * chunks, V blocks)."""
    head, chunk, v0 = tl.program_id(0) % heads, first_chunk + tl.program_id(0) // heads, tl.program_id(1) * BV
    if tl.load(rows + chunk.to(tl.int64) * C) < 0:
        return
    row = chunk_rows(rows, chunk, C, BC)
    valid = row >= 0
    high, low, _, _ = load_total(total, chunk, head, heads, C, BC)
    scores = tl.zeros([BC, BC], dtype=tl.float32)
    result = tl.zeros([BC, BV], dtype=tl.float32)
    for k0 in range(0, K, BK):
        qv = load_rows(q, row // QDIV, valid, head, heads, K, k0, BK)
        kv = load_rows(k, row // KDIV, valid, head, heads, K, k0, BK)
        where, mask = state_offsets(chunk, head, heads, K, V, k0, v0, BK, BV)
        state = tl.load(boundary + where, mask=mask, other=0.0)
        scores += dot(qv, turned(kv, HALF), HALF)
        result += dot(qv, state, HALF)
    uv = load_tile(u, chunk, head, heads, C, V, v0, BC, BV)
    result = result * tl.exp(high + low)[:, None] + dot(scores * decays(high, low, False, BC), uv, HALF)
    result *= row_factors(weight, row, valid, scale, READ)[:, None]
    if ADD:
        result += load_rows(part, row, valid, head, heads, V, v0, BV)
    if LAST:
        store_rows(out, result, row, valid, head, heads, V, v0, BV)
    else:
        store_rows(part, result, row, valid, head, heads, V, v0, BV)
