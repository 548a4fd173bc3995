"""Rotary position embedding; the backward pass is the rotation by the opposite angle."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs of channels that a program rotates.
TILE = 2048


# A number of rows that the compiler knows would make another kernel, with other roundings perhaps.
@triton.jit(do_not_specialize=["rows"])
def rotary_kernel(
    X, COS, SIN, Y, rows, table_stride, sign,
    H: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows are (token, head); `sign` is 1, or -1 for the opposite angle."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < HALF)[None, :]
    table = (row // H)[:, None] * table_stride + column[None, :]
    cos = tl.load(COS + table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(SIN + table, mask=inside, other=0.0).to(tl.float32) * sign
    at = row[:, None] * (2 * HALF) + column[None, :]
    a = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(X + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, (a * cos - b * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(Y + at + HALF, (b * cos + a * sin).to(Y.dtype.element_ty), mask=inside)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    tokens, heads, dim = x.shape
    x = x.contiguous()
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    y, width = torch.empty_like(x), triton.next_power_of_2(dim // 2)
    rows = max(1, TILE // width)
    rotary_kernel[(triton.cdiv(tokens * heads, rows),)](
        x, cos, sin, y, tokens * heads, cos.stride(0), sign, H=heads, HALF=dim // 2, ROWS=rows, WIDTH=width, num_warps=4
    )
    return y


class TritonRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        return _rotate(grad, *ctx.saved_tensors, -1.0), None, None
