"""The pointwise maps of a sparse-state layer, forward and backward, one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of one tensor that a program holds.
TILE = 2048


@triton.jit
def _softmax(x, column, K: tl.constexpr):
    x = tl.where((column < K)[None, :], x, float("-inf"))
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def _softmax_gradient(x, g, column, K: tl.constexpr):
    y = _softmax(x, column, K)
    return y * (g - tl.sum(y * g, axis=1)[:, None])


@triton.jit
def _silu_gradient(x, g):
    s = tl.sigmoid(x)
    return g * s * (1 + x * (1 - s))


@triton.jit
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
        y1 = _softmax(x, column, K)
        y2 = _softmax(z, column, K)
    else:
        y1 = x * tl.sigmoid(x)
        y2 = z * tl.sigmoid(z)
    tl.store(Y1 + at, y1.to(Y1.dtype.element_ty), mask=inside)
    tl.store(Y2 + at, y2.to(Y2.dtype.element_ty), mask=inside)


@triton.jit
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
def log_decay_forward_kernel(X, Y, numel, inverse, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < numel, other=0.0).to(tl.float32)
    # min(x, 0) - log(1 + exp(-|x|)); where the exponential is small, 1 + it would lose its digits, and three terms suffice.
    e = tl.exp(-tl.abs(x))
    tail = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (1.0 / 3.0))), tl.log(1.0 + e))
    y = (tl.minimum(x, 0.0) - tail) * inverse
    tl.store(Y + at, y, mask=at < numel)


@triton.jit
def log_decay_backward_kernel(X, G, DX, numel, inverse, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < numel, other=0.0).to(tl.float32)
    g = tl.load(G + at, mask=at < numel, other=0.0).to(tl.float32)
    tl.store(DX + at, (g * inverse * tl.sigmoid(-x)).to(DX.dtype.element_ty), mask=at < numel)


def _tile(x: Tensor) -> dict[str, int]:
    width = triton.next_power_of_2(x.shape[-1])
    return {"K": x.shape[-1], "ROWS": max(1, TILE // width), "WIDTH": width}


class TritonPairMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, delta: Tensor, softmax: bool):
        x, delta = x.contiguous(), delta.contiguous()
        y1, y2, tile = torch.empty_like(x), torch.empty_like(x), _tile(x)
        rows = x.numel() // x.shape[-1]
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        pair_map_forward_kernel[grid](x, delta, y1, y2, rows, **tile, SOFTMAX=softmax, num_warps=4)
        ctx.save_for_backward(x, delta)
        ctx.softmax = softmax
        return y1, y2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad1: Tensor, grad2: Tensor):
        x, delta = ctx.saved_tensors
        dx, ddelta, tile = torch.empty_like(x), torch.empty_like(x), _tile(x)
        rows = x.numel() // x.shape[-1]
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        pair_map_backward_kernel[grid](
            x, delta, grad1.contiguous(), grad2.contiguous(), dx, ddelta, rows, **tile, SOFTMAX=ctx.softmax, num_warps=4
        )
        return dx, ddelta, None


class TritonLogDecay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, normalizer: float) -> Tensor:
        logits = logits.contiguous()
        y = torch.empty_like(logits, dtype=torch.float32)
        ctx.save_for_backward(logits)
        ctx.inverse = 1.0 / normalizer
        grid = (triton.cdiv(logits.numel(), TILE),)
        log_decay_forward_kernel[grid](logits, y, logits.numel(), ctx.inverse, BLOCK=TILE, num_warps=4)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        (logits,) = ctx.saved_tensors
        dx = torch.empty_like(logits)
        grid = (triton.cdiv(logits.numel(), TILE),)
        log_decay_backward_kernel[grid](logits, grad.contiguous(), dx, logits.numel(), ctx.inverse, BLOCK=TILE, num_warps=4)
        return dx, None
