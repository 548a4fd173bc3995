"""Which implementation the small fused operators use: Triton on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

FusedBackend = Literal["torch", "triton"]

_HAS_TRITON = find_spec("triton") is not None
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A plain global: activation checkpointing runs the forward again in autograd's thread, which has a context of its own.
_forced: FusedBackend | None = None


@contextmanager
def use_fused_backend(backend: FusedBackend | None) -> Iterator[None]:
    """What `backend=None` means inside the block, in every thread; None is the best one for the tensors at hand."""
    global _forced
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def takes_triton(x: Tensor, backend: FusedBackend | None) -> bool:
    """Whether an operator called with `backend` on x should run its Triton kernels.

    Raises:
        ValueError: the backend is unknown, or cannot take x.
    """
    backend = backend or _forced
    possible = _HAS_TRITON and x.dtype in _DTYPES
    if backend is None:
        return possible and x.is_cuda
    if backend not in ("torch", "triton"):
        raise ValueError(f"backend={backend!r}, but it must be 'torch', 'triton' or None")
    if backend == "triton" and not possible:
        raise ValueError(f"backend='triton' needs Triton and float32, bfloat16 or float16 inputs, got {x.dtype}")
    return backend == "triton"
