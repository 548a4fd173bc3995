"""silu(gate) * up, forward and backward, one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def swiglu_forward_kernel(A, B, Y, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    a = tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, (a * tl.sigmoid(a) * b).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(A, B, G, DA, DB, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    a = tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(DA + at, (g * b * s * (1 + a * (1 - s))).to(DA.dtype.element_ty), mask=inside)
    tl.store(DB + at, (g * a * s).to(DB.dtype.element_ty), mask=inside)


class TritonSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        swiglu_forward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, y, gate.numel(), BLOCK=BLOCK, num_warps=8)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), BLOCK),)
        swiglu_backward_kernel[grid](gate, up, grad.contiguous(), dgate, dup, gate.numel(), BLOCK=BLOCK, num_warps=8)
        return dgate, dup
