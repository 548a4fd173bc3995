"""silu(gate) * up, forward and backward, one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.triton_launch import Launch, aligned, cdiv

BLOCK = 2048


@triton.jit(do_not_specialize=["units"])
def swiglu_forward_kernel(A, B, Y, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < units.to(tl.int64) * UNIT
    a = tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, (a * tl.sigmoid(a) * b).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["units"])
def swiglu_backward_kernel(A, B, G, DA, DB, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < units.to(tl.int64) * UNIT
    a = tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(DA + at, (g * b * s * (1 + a * (1 - s))).to(DA.dtype.element_ty), mask=inside)
    tl.store(DB + at, (g * a * s).to(DB.dtype.element_ty), mask=inside)


_forward_launch, _backward_launch = Launch(swiglu_forward_kernel), Launch(swiglu_backward_kernel)


def _size(x: Tensor) -> tuple[int, dict[str, int]]:
    """The number of elements in units, of 16 where possible: accesses are vectors then, whatever their number."""
    unit = 1 if x.numel() % 16 else 16
    return x.numel() // unit, {"UNIT": unit, "BLOCK": BLOCK, "num_warps": 8}


class TritonSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = aligned(gate), aligned(up)
        y, (units, options) = torch.empty_like(gate), _size(gate)
        _forward_launch((cdiv(gate.numel(), BLOCK),), (gate, up, y), (units,), options)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        dgate, dup, (units, options) = torch.empty_like(gate), torch.empty_like(up), _size(gate)
        _backward_launch((cdiv(gate.numel(), BLOCK),), (gate, up, aligned(grad), dgate, dup), (units,), options)
        return dgate, dup
