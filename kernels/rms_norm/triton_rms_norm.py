"""RMS normalisation, forward and backward. A program takes whole rows; the backward recomputes the norm from x.

The weight's gradient is summed by a fixed number of programs, each over its own rows in order, and their sums are added last:
no atomics, the same bits in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers that a program holds at a time; narrow rows are taken several at once.
TILE = 4096
# Programs of the backward pass: three fit on each of the 132 multiprocessors of an H200.
PROGRAMS = 396


@triton.jit
def rms_norm_forward_kernel(X, W, Y, rows, eps, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(W + column, mask=column < D, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] * w[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    X, W, G, DX, DW, rows, blocks, eps, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """G is the gradient of the output; DW [programs, D] fp32 takes each program's share of the weight's gradient."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    w = tl.load(W + column, mask=column < D, other=0.0).to(tl.float32)
    share = tl.zeros([WIDTH], dtype=tl.float32)
    for block in range(program, blocks, tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        unit = x * scale
        share += tl.sum(g * unit, axis=0)
        g = g * w[None, :]
        dx = scale * (g - unit * (tl.sum(g * unit, axis=1) / D)[:, None])
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(DW + program.to(tl.int64) * D + column, share, mask=column < D)


def _tile(width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    return {"D": width, "ROWS": max(1, TILE // padded), "WIDTH": padded}


class TritonRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        y, tile = torch.empty_like(x), _tile(x.shape[-1])
        rows = x.numel() // x.shape[-1]
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        rms_norm_forward_kernel[grid](x, weight, y, rows, eps, **tile, num_warps=8)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad, tile, width = grad.contiguous(), _tile(x.shape[-1]), x.shape[-1]
        rows = x.numel() // width
        blocks = triton.cdiv(rows, tile["ROWS"])
        programs = min(blocks, PROGRAMS)
        dx = torch.empty_like(x)
        shares = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        rms_norm_backward_kernel[(programs,)](x, weight, grad, dx, shares, rows, blocks, ctx.eps, **tile, num_warps=8)
        return dx, shares.sum(0).to(weight.dtype), None
