"""x @ w^T with one order of sums for any number of rows.

A tile holds BN rows of the weight by BM rows of x, weights on the left: the left operand of a warp group's product has 64 rows or
more, the right one as few as 16, so that one instruction serves a decode step and a packed batch, and only its width differs.
Each entry is sum over K in steps of 16, in order, in one fp32 accumulator; no tile splits K. Which tile computes an entry, and
where in it, then makes no difference (`tests/kernels/test_batch_invariant.py` compares all of them, bit for bit, on the device).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.batch_invariant.triton_product import form_of, product
from posttrain.kernels.triton_launch import Launch, aligned, cdiv, interpreted


@dataclass(frozen=True, kw_only=True)
class Tile:
    """BM rows of x, BN rows of the weight, BK of their columns at a time; loads of STAGES steps under way."""

    BM: int
    BN: int
    BK: int
    STAGES: int
    num_warps: int


# For few rows the weights are read once, at 64 rows a program, which gives a 2,304-wide layer 36 programs with 100 KB under way
# each; for many, the largest tiles that leave every multiprocessor one.
FEW = {
    16: Tile(BM=16, BN=64, BK=128, STAGES=8, num_warps=4),
    32: Tile(BM=32, BN=64, BK=128, STAGES=6, num_warps=4),
    64: Tile(BM=64, BN=64, BK=128, STAGES=6, num_warps=4),
}
MANY = (
    Tile(BM=256, BN=128, BK=64, STAGES=3, num_warps=8),
    Tile(BM=128, BN=128, BK=64, STAGES=4, num_warps=8),
    Tile(BM=128, BN=64, BK=64, STAGES=4, num_warps=4),
)
# Too few rows and columns for those to keep the device busy.
SPARSE = Tile(BM=128, BN=64, BK=64, STAGES=6, num_warps=4)
TILES = (*FEW.values(), *MANY, SPARSE)
# Programs from which on a larger tile is worth it.
ENOUGH = 100
# Small models' products are a tile or a few.
INTERPRETED = Tile(BM=16, BN=64, BK=32, STAGES=1, num_warps=4)


def tile_for(rows: int, columns: int) -> Tile:
    """The tile for `rows` rows of x and `columns` rows of the weight."""
    if interpreted():
        return INTERPRETED
    for most, tile in FEW.items():
        if rows <= most:
            return tile
    for tile in MANY:
        if rows > tile.BM // 2 and cdiv(rows, tile.BM) * cdiv(columns, tile.BN) >= ENOUGH:
            return tile
    return FEW[32] if rows <= 96 else SPARSE if rows <= 256 else MANY[-1]


@triton.jit(do_not_specialize=["rows", "columns", "inner"])
def linear_kernel(
    X, W, BIAS, Y, rows, columns, inner, UNIT_N: tl.constexpr, UNIT_K: tl.constexpr, WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y [rows, N] = X [rows, K] W [N, K]^T + BIAS. N = columns UNIT_N, K = inner UNIT_K: what they are multiples of is known.

    WHOLE: BK divides K. FORM: see `triton_product`. Grid (tiles): GROUP tiles of rows go along the
    weights together, so that both are found in the cache."""
    N, K = columns * UNIT_N, inner * UNIT_K
    across = tl.cdiv(N, BN)
    group = tl.program_id(0) // (GROUP * across)
    size = tl.minimum(tl.cdiv(rows, BM) - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    m = (group * GROUP + within % size) * BM + tl.arange(0, BM)
    n = (within // size) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows beyond the end are others again: no mask in the loop, and they are not stored.
    x_at = (m % rows).to(tl.int64)[:, None] * K + k[None, :]
    w_at = (n % N).to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([BN, BM], dtype=tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        if WHOLE:
            x, w = tl.load(X + x_at + k0), tl.load(W + w_at + k0)
        else:
            inside = (k < K - k0)[None, :]
            x, w = tl.load(X + x_at + k0, mask=inside, other=0.0), tl.load(W + w_at + k0, mask=inside, other=0.0)
        total = product(w, x, total, FORM)
    if HAS_BIAS:
        total += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    where = m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(Y + where, total.to(Y.dtype.element_ty), mask=(m < rows)[None, :] & (n < N)[:, None])


_LINEAR = Launch(linear_kernel)


def unit_of(size: int) -> int:
    """The largest power of two up to 16 that divides `size`."""
    return min(16, size & -size)


def launch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """x [M, K], weight [N, K] -> [M, N]; `tile`: another than the best one, for tests."""
    (rows, inner), columns = x.shape, weight.shape[0]
    y = torch.empty(rows, columns, dtype=out_dtype, device=x.device)
    if not y.numel():
        return y
    tile = tile or tile_for(rows, columns)
    x, weight = aligned(x), aligned(weight)
    n, k = unit_of(columns), unit_of(inner)
    constants = dict(
        UNIT_N=n, UNIT_K=k, WHOLE=inner % tile.BK == 0, HAS_BIAS=bias is not None,
        FORM=form_of(x.dtype), BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=8, STAGES=tile.STAGES,
        num_warps=tile.num_warps,
    )  # fmt: skip
    tensors = (x, weight, weight if bias is None else aligned(bias), y)
    grid = (cdiv(rows, tile.BM) * cdiv(columns, tile.BN),)
    _LINEAR(grid, tensors, (rows, columns // n, inner // k), constants)
    return y


class ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return launch_linear(x, weight, bias, out_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        dbias = grad.sum(0, dtype=torch.float32).to(weight.dtype) if ctx.has_bias and to_bias else None
        grad = grad.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return grad @ weight if to_x else None, grad.t() @ x if to_weight else None, dbias, None
