"""Row-invariant building blocks: on CPU a token's bits do not depend on how many other tokens share the call.

Two things break that invariance in PyTorch's CPU kernels, and both are avoided here.
- A matrix product with few rows takes another code path (a matrix-vector kernel, or a split of the inner dimension across
  threads). `Linear` pads such inputs with zero rows.
- Elementwise kernels handle the end of a thread's range with scalar `exp`, whose last bit can differ from the vector one's.
  `elementwise` pads the tensor so that no range ends inside a vector.
GPU kernels are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Fewest rows whose product has the bits that it has among more rows; measured on AVX-512 and AVX2, 1 to 4 threads.
MIN_ROWS = 16
# The unrolled vector loop steps over two AVX-512 registers: 32 floats, 64 half-precision numbers.
_VECTOR = 64
# at::internal::GRAIN_SIZE: below it an elementwise kernel runs on one thread.
_GRAIN = 32768


class Linear(nn.Linear):
    """`nn.Linear` whose output row depends on its input row alone, bit for bit, on CPU. x [..., in] -> [..., out].

    `zero_init` asks the model's initialisation for a zero weight.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, zero_init: bool = False, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, bias=bias, **kwargs)
        self.zero_init = zero_init

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        if rows < MIN_ROWS:
            flat = F.pad(flat, (0, 0, 0, MIN_ROWS - rows))
            out = F.linear(flat, self.weight, self.bias)[:rows]
        else:
            out = F.linear(flat, self.weight, self.bias)
        return out.view(*x.shape[:-1], out.shape[-1])


def elementwise(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`fn(x)` for an elementwise `fn`, with bits that do not depend on the shape of `x` (see the module's text)."""
    numel = x.numel()
    if x.device.type != "cpu" or numel == 0:
        return fn(x)
    threads = 1 if numel < _GRAIN else min(torch.get_num_threads(), -(-numel // _GRAIN))
    # A padded tensor is cut into `threads` equal ranges, so each must be whole vectors.
    step = _VECTOR * threads
    if numel % step == 0 and x.is_contiguous():
        return fn(x)
    flat = F.pad(x.reshape(-1), (0, -numel % step))
    return fn(flat)[:numel].view(x.shape)


def silu(x: Tensor) -> Tensor:
    return elementwise(F.silu, x)


class RMSNorm(nn.Module):
    """x [..., D] / sqrt(mean(x^2) + eps) * weight [D], computed in fp32 and returned in the dtype of x."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); x [T, hidden] -> [T, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
