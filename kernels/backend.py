"""Which implementation the small fused operators use: Triton on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any, Literal

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


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of x. In a backward pass autograd has set it."""
    if not x.is_cuda or (not torch.compiler.is_compiling() and torch.cuda.current_device() == x.device.index):
        return nullcontext()
    return torch.cuda.device(x.device)


class _NoGraph:
    """In place of autograd's context where no backward pass follows."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass


def run_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply`; without gradients its forward alone, which costs the host half: a prefill waits for the host."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*arguments)
    return function.forward(_NoGraph(), *arguments)


def takes_triton(x: Tensor, backend: FusedBackend | None, *, max_width: int | None = None) -> bool:
    """Whether an operator called with `backend` on x [..., D] should run its Triton kernels, which take D up to `max_width`.

    Raises:
        ValueError: the backend is unknown, or cannot take x.
    """
    backend = backend or _forced
    possible = _HAS_TRITON and x.dtype in _DTYPES
    too_wide = max_width is not None and x.shape[-1] > max_width
    if backend is None:
        return possible and x.is_cuda and not too_wide
    if backend not in ("torch", "triton"):
        raise ValueError(f"backend={backend!r}, but it must be 'torch', 'triton' or None")
    if backend == "triton" and not possible:
        raise ValueError(f"backend='triton' needs Triton and float32, bfloat16 or float16 inputs, got {x.dtype}")
    if backend == "triton" and too_wide:
        raise ValueError(f"backend='triton' takes rows of up to {max_width}, got {x.shape[-1]}; use backend='torch' or None")
    if backend == "triton" and not (x.is_cuda or _interpreted()):
        raise ValueError(
            f"backend='triton' needs tensors on a GPU, got {x.device.type}; move them there, use backend='torch' or None, "
            "or set TRITON_INTERPRET=1 before Triton is imported"
        )
    return backend == "triton"


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
