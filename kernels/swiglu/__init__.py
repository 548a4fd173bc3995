"""silu(gate) * up, the middle of a SwiGLU block, in one pass on a GPU."""

from __future__ import annotations

from torch import Tensor

from posttrain.kernels.backend import FusedBackend, on_device_of, run_function, takes_triton
from posttrain.kernels.swiglu.reference import swiglu_reference

__all__ = ["swiglu"]


def swiglu(gate: Tensor, up: Tensor, *, backend: FusedBackend | None = None) -> Tensor:
    """silu(gate) * up, differentiable in both.

    Args:
        gate, up: of one shape and dtype.
        backend: "torch", "triton", or None for the best one here.

    Returns:
        a tensor of the same shape and dtype. Triton rounds once, PyTorch also after silu.

    Raises:
        ValueError: shapes or dtypes differ; the backend cannot take them.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {list(gate.shape)} {gate.dtype} and up {list(up.shape)} {up.dtype} must be alike")
    if takes_triton(gate, backend) and gate.numel():
        from posttrain.kernels.swiglu.triton_swiglu import TritonSwiGLU

        with on_device_of(gate):
            return run_function(TritonSwiGLU, gate, up)
    return swiglu_reference(gate, up)
