"""RMS normalisation, forward and backward, alone, of a sum or gated. A program takes whole rows; the backward computes the norm
again from what was normed.

The weight's gradient is summed by a fixed number of programs, each over its own rows in order, and their sums are added last:
no atomics, the same bits in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.triton_launch import Launch, aligned, cdiv, power_of_two

# Numbers that a program holds at a time; narrow rows are taken several at once.
TILE = 4096
# Programs of the backward pass: two fit on each of the 132 multiprocessors of an H200, with the rows of two more steps on
# their way.
PROGRAMS, STAGES = 264, 3


@triton.jit(do_not_specialize=["rows"])
def rms_norm_forward_kernel(
    X, DELTA, GATE, W, Y, SUM, rows, eps,
    ADDED: tl.constexpr, GATED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ADDED: SUM = X + DELTA, and that is normed, rounded as it is stored. GATED: Y is multiplied by silu(GATE)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        rounded = (x + tl.load(DELTA + at, mask=inside, other=0.0).to(tl.float32)).to(SUM.dtype.element_ty)
        tl.store(SUM + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    w = tl.load(W + column, mask=column < D, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] * w[None, :]
    if GATED:
        gate = tl.load(GATE + at, mask=inside, other=0.0).to(tl.float32)
        y = y * (gate * tl.sigmoid(gate))
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "blocks"])
def rms_norm_backward_kernel(
    X, GATE, W, G, GSUM, DX, DGATE, DW, rows, blocks, eps,
    SUMMED: tl.constexpr, GATED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """X is what was normed, G the gradient of Y, GSUM (SUMMED) that of X itself; DW [programs, D] fp32 takes each program's share
    of the weight's gradient."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    w = tl.load(W + column, mask=column < D, other=0.0).to(tl.float32)
    share = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for block in tl.range(program, blocks, tl.num_programs(0), num_stages=STAGES):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        unit = x * scale
        if GATED:
            gate = tl.load(GATE + at, mask=inside, other=0.0).to(tl.float32)
            s = tl.sigmoid(gate)
            dgate = g * unit * w[None, :] * s * (1 + gate * (1 - s))
            tl.store(DGATE + at, dgate.to(DGATE.dtype.element_ty), mask=inside)
            g = g * (gate * s)
        share += g * unit
        g = g * w[None, :]
        dx = scale * (g - unit * (tl.sum(g * unit, axis=1) / D)[:, None])
        if SUMMED:
            dx += tl.load(GSUM + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(DW + program.to(tl.int64) * D + column, tl.sum(share, axis=0), mask=column < D)


def _tile(width: int) -> dict[str, int]:
    padded = power_of_two(width)
    return {"D": width, "ROWS": max(1, TILE // padded), "WIDTH": padded}


_forward_launch, _backward_launch = Launch(rms_norm_forward_kernel), Launch(rms_norm_backward_kernel)


def _forward(x: Tensor, weight: Tensor, eps: float, *, delta: Tensor | None, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """-> y, and what was normed. All contiguous; x stands in for the tensors that are not there."""
    dtype = x.dtype if delta is None else torch.promote_types(x.dtype, delta.dtype)
    y, tile = torch.empty_like(x, dtype=dtype), _tile(x.shape[-1])
    total = x if delta is None else torch.empty_like(y)
    rows = x.numel() // x.shape[-1]
    tensors = (x, x if delta is None else delta, x if gate is None else gate, weight, y, total)
    options = {"ADDED": delta is not None, "GATED": gate is not None, **tile, "num_warps": 8}
    _forward_launch((cdiv(rows, tile["ROWS"]),), tensors, (rows, eps), options)
    return y, total


def _backward(
    x: Tensor, weight: Tensor, eps: float, grad: Tensor, *, gate: Tensor | None = None, grad_sum: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """-> gradients of what was normed, of the weight, and of the gate."""
    grad, tile, width = aligned(grad), _tile(x.shape[-1]), x.shape[-1]
    rows = x.numel() // width
    blocks = cdiv(rows, tile["ROWS"])
    programs = min(blocks, PROGRAMS)
    dx = torch.empty_like(x)
    dgate = None if gate is None else torch.empty_like(gate)
    shares = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    passed = x if grad_sum is None else aligned(grad_sum)
    tensors = (x, x if gate is None else gate, weight, grad, passed, dx, dx if dgate is None else dgate, shares)
    options = {"SUMMED": grad_sum is not None, "GATED": gate is not None, **tile, "STAGES": STAGES, "num_warps": 8}
    _backward_launch((programs,), tensors, (rows, blocks, eps), options)
    return dx, shares.sum(0).to(weight.dtype), dgate


class TritonRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, gate: Tensor | None) -> Tensor:
        x, weight, gate = aligned(x), aligned(weight), None if gate is None else aligned(gate)
        y, _ = _forward(x, weight, eps, delta=None, gate=gate)
        ctx.save_for_backward(x, weight, *(() if gate is None else (gate,)))
        ctx.eps = eps
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, *gate = ctx.saved_tensors
        dx, dweight, dgate = _backward(x, weight, ctx.eps, grad, gate=gate[0] if gate else None)
        return dx, dweight, None, dgate


class TritonAddRMSNorm(torch.autograd.Function):
    """x + delta and its norm, whose gradients are added in the backward pass of the norm."""

    @staticmethod
    def forward(ctx, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, weight, delta = aligned(x), aligned(weight), None if delta is None else aligned(delta)
        y, total = _forward(x, weight, eps, delta=delta, gate=None)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.dtypes = eps, (x.dtype, None if delta is None else delta.dtype)
        return total, y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_sum: Tensor, grad: Tensor):
        total, weight = ctx.saved_tensors
        dx, dweight, _ = _backward(total, weight, ctx.eps, grad, grad_sum=grad_sum)
        own, others = ctx.dtypes
        return dx.to(own), None if others is None else dx.to(others), dweight, None
