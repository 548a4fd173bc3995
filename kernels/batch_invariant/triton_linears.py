"""Several products of few rows in one launch: a decode step's projections, each too small to keep a GPU busy by itself.

A tile of weights belongs to one of the products and is computed as `triton_linear` computes it, with the same bits: the tiles of
all products lie one after another in the grid. At one row a 2,304-wide layer's projections are 36 tiles each, of 132
multiprocessors; together they are 300.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.batch_invariant import MOST, MOST_ROWS
from posttrain.kernels.batch_invariant.triton_linear import INTERPRETED, Tile, unit_of
from posttrain.kernels.batch_invariant.triton_product import form_of, product
from posttrain.kernels.triton_launch import Launch, aligned, cdiv, interpreted


@triton.jit(do_not_specialize=[f"{name}{i}" for name in ("s", "k", "n") for i in range(MOST)] + ["rows", "biased"])
def linears_kernel(
    X0, X1, X2, X3, X4, X5, X6, X7, X8, X9, W0, W1, W2, W3, W4, W5, W6, W7, W8, W9,
    B0, B1, B2, B3, B4, B5, B6, B7, B8, B9, Y0, Y1, Y2, Y3, Y4, Y5, Y6, Y7, Y8, Y9,
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, k0, k1, k2, k3, k4, k5, k6, k7, k8, k9,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, rows, biased,
    UNIT_S: tl.constexpr, UNIT_K: tl.constexpr, UNIT_N: tl.constexpr, WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Yi [rows, N] = Xi [rows, K] Wi [N, K]^T + Bi where bit i of `biased` is set. Xi has rows s UNIT_S apart, K = k UNIT_K and
    N = n UNIT_N. WHOLE: BK divides every K. Grid (tiles of all products * tiles of rows); products beyond the last have N = 0."""
    across = tl.cdiv(rows, BM)
    tile, number = tl.program_id(0) // across, 0
    X, W, B, Y, s, ks, ns = X0, W0, B0, Y0, s0, k0, n0
    tile -= tl.cdiv(n0 * UNIT_N, BN)
    if tile >= 0:
        X, W, B, Y, s, ks, ns, number = X1, W1, B1, Y1, s1, k1, n1, 1
        tile -= tl.cdiv(n1 * UNIT_N, BN)
    if tile >= 0:
        X, W, B, Y, s, ks, ns, number = X2, W2, B2, Y2, s2, k2, n2, 2
        tile -= tl.cdiv(n2 * UNIT_N, BN)
    if tile >= 0:
        X, W, B, Y, s, ks, ns, number = X3, W3, B3, Y3, s3, k3, n3, 3
        tile -= tl.cdiv(n3 * UNIT_N, BN)
    if tile >= 0:
        X, W, B, Y, s, ks, ns, number = X4, W4, B4, Y4, s4, k4, n4, 4
        tile -= tl.cdiv(n4 * UNIT_N, BN)
    if tile >= 0:
        X, W, B, Y, s, ks, ns, number = X5, W5, B5, Y5, s5, k5, n5, 5
        tile -= tl.cdiv(n5 * UNIT_N, BN)
    if tile >= 0:
        X, W, B, Y, s, ks, ns, number = X6, W6, B6, Y6, s6, k6, n6, 6
        tile -= tl.cdiv(n6 * UNIT_N, BN)
    if tile >= 0:
        X, W, B, Y, s, ks, ns, number = X7, W7, B7, Y7, s7, k7, n7, 7
        tile -= tl.cdiv(n7 * UNIT_N, BN)
    if tile >= 0:
        X, W, B, Y, s, ks, ns, number = X8, W8, B8, Y8, s8, k8, n8, 8
        tile -= tl.cdiv(n8 * UNIT_N, BN)
    if tile >= 0:
        X, W, B, Y, s, ks, ns, number = X9, W9, B9, Y9, s9, k9, n9, 9
        tile -= tl.cdiv(n9 * UNIT_N, BN)
    S, K, N = s * UNIT_S, ks * UNIT_K, ns * UNIT_N
    m = tl.program_id(0) % across * BM + tl.arange(0, BM)
    n = (tile + tl.cdiv(N, BN)) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows beyond the end are others again: no mask in the loop, and they are not stored.
    x_at = (m % rows).to(tl.int64)[:, None] * S + k[None, :]
    w_at = (n % N).to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([BN, BM], dtype=tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        if WHOLE:
            x, w = tl.load(X + x_at + first), tl.load(W + w_at + first)
        else:
            inside = (k < K - first)[None, :]
            x, w = tl.load(X + x_at + first, mask=inside, other=0.0), tl.load(W + w_at + first, mask=inside, other=0.0)
        total = product(w, x, total, FORM)
    if HAS_BIAS:
        mask = (n < N) & ((biased >> number) % 2 == 1)
        total += tl.load(B + n, mask=mask, other=0.0).to(tl.float32)[:, None]
    where = m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(Y + where, total.to(Y.dtype.element_ty), mask=(m < rows)[None, :] & (n < N)[:, None])


_LINEARS = Launch(linears_kernel)


# By rows, with up to that many of them: for inner sizes of several blocks, and of one, whose loads cannot run ahead.
_TILES = {
    16: (Tile(BM=16, BN=64, BK=128, STAGES=8, num_warps=4), Tile(BM=16, BN=64, BK=128, STAGES=4, num_warps=4)),
    32: (Tile(BM=32, BN=64, BK=128, STAGES=5, num_warps=4), Tile(BM=32, BN=64, BK=128, STAGES=4, num_warps=4)),
    64: (Tile(BM=64, BN=64, BK=128, STAGES=5, num_warps=4), Tile(BM=64, BN=64, BK=128, STAGES=4, num_warps=4)),
    128: (Tile(BM=128, BN=64, BK=64, STAGES=6, num_warps=4), Tile(BM=128, BN=64, BK=64, STAGES=4, num_warps=4)),
    MOST_ROWS: (Tile(BM=128, BN=64, BK=64, STAGES=4, num_warps=4), Tile(BM=128, BN=64, BK=64, STAGES=4, num_warps=4)),
}


def tile_for_several(rows: int, longest: int) -> Tile:
    """For up to MOST_ROWS rows and inner sizes of up to `longest`; measured on an H200."""
    if interpreted():
        return INTERPRETED
    return next(tiles for most, tiles in _TILES.items() if rows <= most)[longest <= 128]


def launch_linears(
    xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], tile: Tile | None = None
) -> list[Tensor]:
    """x [M, K] of each product, whose rows may lie apart, weight [N, K] -> [M, N] in the dtype of x."""
    rows = xs[0].shape[0]
    ys = [x.new_empty(rows, weight.shape[0]) for x, weight in zip(xs, weights, strict=True)]
    if not rows:
        return ys
    tile = tile or tile_for_several(rows, max(x.shape[1] for x in xs))
    xs = [x if x.stride(1) == 1 and x.data_ptr() % 16 == 0 else aligned(x) for x in xs]
    weights = [aligned(weight) for weight in weights]
    held = [weight if bias is None else aligned(bias) for bias, weight in zip(biases, weights, strict=True)]
    strides = [x.stride(0) for x in xs]
    inner, columns = [x.shape[1] for x in xs], [weight.shape[0] for weight in weights]
    units = [min(unit_of(size) for size in sizes) for sizes in (strides, inner, columns)]
    biased = sum(1 << i for i, bias in enumerate(biases) if bias is not None)
    constants = dict(
        UNIT_S=units[0], UNIT_K=units[1], UNIT_N=units[2], WHOLE=all(size % tile.BK == 0 for size in inner),
        HAS_BIAS=biased > 0, FORM=form_of(xs[0].dtype), BM=tile.BM, BN=tile.BN, BK=tile.BK, STAGES=tile.STAGES,
        num_warps=tile.num_warps,
    )  # fmt: skip

    tensors = tuple(a for part in (xs, weights, held, ys) for a in _filled(part, part[0]))
    sizes = zip((strides, inner, columns), units, strict=True)
    numbers = [n for part, unit in sizes for n in _filled([size // unit for size in part], 0)]
    tiles = sum(cdiv(size, tile.BN) for size in columns)
    _LINEARS((tiles * cdiv(rows, tile.BM),), tensors, (*numbers, rows, biased), constants)
    return ys


def _filled(values: Sequence, fill: object) -> list:
    return [*values, *[fill] * (MOST - len(values))]
