"""Elementwise functions whose bits do not depend on how many other numbers share the call, on CPU.

PyTorch's CPU kernels handle the end of a thread's range with scalar `exp`, whose last bit can differ from the vector one's.
`elementwise` pads the tensor so that no range ends inside a vector. GPU kernels are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# The unrolled vector loop steps over two AVX-512 registers: 32 floats, 64 half-precision numbers.
_VECTOR = 64
# at::internal::GRAIN_SIZE: below it an elementwise kernel runs on one thread.
_GRAIN = 32768


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
