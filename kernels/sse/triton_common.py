"""What the Triton kernels share: products, sums of decays, and rows gathered by index.

HALF: products take bf16 operands, else fp32 emulated by tf32. Sums of decays are products with 0/1 matrices, so that differences
of accumulated decays are never formed. Nothing here reads bf16 without widening it first: the interpreter computes wrongly in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.triton_launch import Launch, cdiv


@triton.jit
def exp(x):
    """One instruction and a product; `tl.exp` also takes care of results below fp32's smallest normal number."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def dot(a, b, HALF: tl.constexpr):
    if HALF:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")


@triton.jit
def dot_apart(a, b, total, heads, TAG: tl.constexpr, HALF: tl.constexpr):
    """total + a b, out of a branch that is always taken, since heads > 0.

    Where a product's result reaches another product, Triton lays all warps along its rows, and those beyond four to 64 rows
    compute the same. It does not look through branches. TAG: another number (0 or more) at every place in a kernel, or the
    branches would be merged.
    """
    if heads > -TAG:
        total += dot(a, b, HALF)
    return total


@triton.jit
def upper_bits(a):
    """a cut to the bits of bf16, in fp32; what is left, again in bf16, makes 16 bits of a together."""
    return (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def rounded(a, HALF: tl.constexpr):
    """a as a product sees it, in fp32; where bf16 has no nearest, away from zero. A conversion there and back takes longer."""
    if HALF:
        return ((a.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)
    else:
        return a


@triton.jit
def split(state):
    """fp32 -> (high, low), 16 bits each."""
    bits = state.to(tl.int32, bitcast=True)
    # the sum would carry a NaN of all ones over into a zero
    high = tl.where(state != state, bits >> 16, (bits + 0x8000) >> 16)
    return high.to(tl.int16), (bits - (high << 16)).to(tl.int16)


@triton.jit
def stored_state(state, like):
    """A state as it is kept in the tensor `like`: in its dtype or, where that is int16, the upper plane of `split`."""
    if like.dtype.element_ty == tl.int16:
        return split(state)[0]
    else:
        return state.to(like.dtype.element_ty)


@triton.jit
def fine_dot(a, b, total, heads, TAG: tl.constexpr, HALF: tl.constexpr):
    """total + a b, with 16 bits of a; TAG as in `dot_apart`."""
    if HALF:
        high = upper_bits(a)
        total = dot_apart(a - high, b, total, heads, TAG, HALF)
        return total + dot(high, b, HALF)
    else:
        return total + dot(a, b, HALF)


@triton.jit
def row_sums(which, a, heads, TAG: tl.constexpr, HALF: tl.constexpr, LOW: tl.constexpr):
    """which [M, BC] of -1, 0, 1, times a [BC, BK] fp32, exact to 16 bits of each element of a."""
    if HALF:
        if LOW:
            high = upper_bits(a)
            rest = dot_apart(which, a - high, tl.zeros(a.shape, dtype=tl.float32), heads, TAG, HALF)
            return rest + dot(which, high, HALF)
        else:
            return dot(which, a, HALF)
    else:
        return tl.dot(which, a, input_precision="tf32x3")


@triton.jit
def load_rows(ptr, source, valid, head, heads, D: tl.constexpr, offset, BD: tl.constexpr, AGAIN: tl.constexpr = False):
    """Rows [BC, BD] of a [rows, H, D] tensor from column `offset` on, in fp32, zero where there is none.

    AGAIN: rows that were loaded long before, which the compiler would otherwise hold in registers; another hint to the cache
    makes it another load."""
    column = offset + tl.arange(0, BD)
    where = (source.to(tl.int64) * heads + head)[:, None] * D + column[None, :]
    mask = valid[:, None] & (column < D)[None, :]
    if AGAIN:
        return tl.load(ptr + where, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    else:
        return tl.load(ptr + where, mask=mask, other=0.0).to(tl.float32)


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
def tile_offsets(chunk, head, heads, C: tl.constexpr, D: tl.constexpr, d0, BC: tl.constexpr, BD: tl.constexpr):
    """Offsets and mask of columns from d0 on of a chunk's [C, D] tile in [NC, H, C, D]."""
    i, d = tl.arange(0, BC)[:, None], d0 + tl.arange(0, BD)[None, :]
    return (chunk.to(tl.int64) * heads + head) * C * D + i * D + d, (i < C) & (d < D)


@triton.jit
def score_offsets(chunk, head, heads, C: tl.constexpr, PLANES: tl.constexpr, BC: tl.constexpr):
    """Offsets and mask of a chunk's first [C, C] matrix in [NC, H, PLANES, C, C]."""
    i = tl.arange(0, BC)
    where = (chunk.to(tl.int64) * heads + head) * PLANES * C * C + i[:, None] * C + i[None, :]
    return where, (i < C)[:, None] & (i < C)[None, :]


@triton.jit
def chunk_rows(rows, chunk, C: tl.constexpr, BC: tl.constexpr):
    position = tl.arange(0, BC)
    return tl.load(rows + chunk.to(tl.int64) * C + position, mask=position < C, other=-1)


@triton.jit
def first_rows(rows, chunk, count, C: tl.constexpr, BC: tl.constexpr):
    """`chunk_rows` of where a walk over `count` chunks begins; nothing is read for none: without tokens `rows` is empty."""
    position = tl.arange(0, BC)
    return tl.load(rows + chunk.to(tl.int64) * C + position, mask=(position < C) & (count > 0), other=-1)


@triton.jit
def is_empty(rows, chunk, C: tl.constexpr):
    return tl.load(rows + chunk.to(tl.int64) * C) < 0


@triton.jit
def row_factor(weight, row, valid, factor, gated):
    """factor, times the router's weight of each row where gated is not zero."""
    return factor * tl.load(weight + row, mask=valid & (gated != 0), other=1.0)


@triton.jit(do_not_specialize=["inner", "count"])
def sum_kernel(x, other, y, inner, count, N: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    """y [A, B] = sum over the middle of x [A, N, B], in order (+ other [A, B]); B = inner, count = A * B."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = item < count
    first = item // inner * inner * N + item % inner
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for n in range(N):
        total += tl.load(x + first + n * inner, mask=mask, other=0.0).to(tl.float32)
    if OTHER:
        total += tl.load(other + item, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + item, total.to(y.dtype.element_ty), mask=mask)


_SUM = Launch(sum_kernel)


def sum_terms(x: Tensor, lead: int, terms: int, inner: int, dtype: torch.dtype, other: Tensor | None = None) -> Tensor:
    """x seen as [lead, terms, inner], summed over the terms in order (+ other), -> [lead * inner] in dtype.

    PyTorch's own sums choose their order by the sizes of all dimensions, which would let a sequence's numbers depend on T.
    """
    if terms == 1 and other is None:
        return x.flatten().to(dtype)
    y = torch.empty(lead * inner, dtype=dtype, device=x.device)
    if y.numel():
        constants = dict(N=terms, OTHER=other is not None, BLOCK=1024)
        _SUM((cdiv(y.numel(), 1024),), (x, x if other is None else other, y), (inner, y.numel()), constants)
    return y
