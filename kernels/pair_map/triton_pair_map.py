"""The pointwise maps of a sparse-state layer, forward and backward, one pass each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.triton_launch import Launch, aligned, cdiv, power_of_two

# Numbers of one tensor that a program holds.
TILE = 2048


@triton.jit
def softmax_rows(x, column, K: tl.constexpr):
    x = tl.where((column < K)[None, :], x, float("-inf"))
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def _softmax_gradient(x, g, column, K: tl.constexpr):
    y = softmax_rows(x, column, K)
    return y * (g - tl.sum(y * g, axis=1)[:, None])


@triton.jit
def _silu_gradient(x, g):
    s = tl.sigmoid(x)
    return g * s * (1 + x * (1 - s))


@triton.jit(do_not_specialize=["rows"])
def pair_map_forward_kernel(
    X, D, Y1, Y2, rows, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SOFTMAX: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    at = row[:, None] * K + column[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    z = x + tl.load(D + at, mask=inside, other=0.0).to(tl.float32)
    if SOFTMAX:
        y1 = softmax_rows(x, column, K)
        y2 = softmax_rows(z, column, K)
    else:
        y1 = x * tl.sigmoid(x)
        y2 = z * tl.sigmoid(z)
    tl.store(Y1 + at, y1.to(Y1.dtype.element_ty), mask=inside)
    tl.store(Y2 + at, y2.to(Y2.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def pair_map_backward_kernel(
    X, D, G1, G2, DX, DD, rows, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SOFTMAX: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    at = row[:, None] * K + column[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    z = x + tl.load(D + at, mask=inside, other=0.0).to(tl.float32)
    g1 = tl.load(G1 + at, mask=inside, other=0.0).to(tl.float32)
    g2 = tl.load(G2 + at, mask=inside, other=0.0).to(tl.float32)
    if SOFTMAX:
        d1 = _softmax_gradient(x, g1, column, K)
        d2 = _softmax_gradient(z, g2, column, K)
    else:
        d1 = _silu_gradient(x, g1)
        d2 = _silu_gradient(z, g2)
    tl.store(DX + at, (d1 + d2).to(DX.dtype.element_ty), mask=inside)
    tl.store(DD + at, d2.to(DD.dtype.element_ty), mask=inside)


@triton.jit
def log_sigmoid(x):
    """min(x, 0) - log(1 + exp(-|x|)); where the exponential is small, 1 + it would lose its digits, and three terms suffice."""
    e = tl.exp(-tl.abs(x))
    tail = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (1.0 / 3.0))), tl.log(1.0 + e))
    return tl.minimum(x, 0.0) - tail


@triton.jit(do_not_specialize=["units"])
def log_decay_forward_kernel(X, Y, units, inverse, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < units.to(tl.int64) * UNIT
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, log_sigmoid(x) * inverse, mask=inside)


@triton.jit(do_not_specialize=["units"])
def log_decay_backward_kernel(X, G, DX, units, inverse, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < units.to(tl.int64) * UNIT
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DX + at, (g * inverse * tl.sigmoid(-x)).to(DX.dtype.element_ty), mask=inside)


_pair_forward, _pair_backward = Launch(pair_map_forward_kernel), Launch(pair_map_backward_kernel)
_decay_forward, _decay_backward = Launch(log_decay_forward_kernel), Launch(log_decay_backward_kernel)


def _rows(x: Tensor, softmax: bool) -> tuple[tuple[int], int, dict[str, Any]]:
    """-> grid, rows and options of the kernels over [..., K]."""
    width = power_of_two(x.shape[-1])
    each, rows = max(1, TILE // width), x.numel() // x.shape[-1]
    options = {"K": x.shape[-1], "ROWS": each, "WIDTH": width, "SOFTMAX": softmax, "num_warps": 4}
    return (cdiv(rows, each),), rows, options


def _numbers(x: Tensor) -> tuple[tuple[int], int, dict[str, Any]]:
    """-> grid, units and options of the kernels over all numbers: units of 16 where possible, so that accesses are vectors."""
    unit = 1 if x.numel() % 16 else 16
    return (cdiv(x.numel(), TILE),), x.numel() // unit, {"UNIT": unit, "BLOCK": TILE, "num_warps": 4}


class TritonPairMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, delta: Tensor, softmax: bool):
        x, delta = aligned(x), aligned(delta)
        y1, y2 = torch.empty_like(x), torch.empty_like(x)
        grid, rows, options = _rows(x, softmax)
        _pair_forward(grid, (x, delta, y1, y2), (rows,), options)
        ctx.save_for_backward(x, delta)
        ctx.softmax = softmax
        return y1, y2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad1: Tensor, grad2: Tensor):
        x, delta = ctx.saved_tensors
        dx, ddelta = torch.empty_like(x), torch.empty_like(x)
        grid, rows, options = _rows(x, ctx.softmax)
        _pair_backward(grid, (x, delta, aligned(grad1), aligned(grad2), dx, ddelta), (rows,), options)
        return dx, ddelta, None


class TritonLogDecay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, normalizer: float) -> Tensor:
        logits = aligned(logits)
        y = torch.empty_like(logits, dtype=torch.float32)
        ctx.save_for_backward(logits)
        ctx.inverse = 1.0 / normalizer
        grid, units, options = _numbers(logits)
        _decay_forward(grid, (logits, y), (units, ctx.inverse), options)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        (logits,) = ctx.saved_tensors
        dx = torch.empty_like(logits)
        grid, units, options = _numbers(logits)
        _decay_backward(grid, (logits, aligned(grad), dx), (units, ctx.inverse), options)
        return dx, None
