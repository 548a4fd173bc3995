"""Rotary position embedding of packed heads, in one pass on a GPU."""

from __future__ import annotations

from torch import Tensor

from posttrain.kernels.backend import FusedBackend, on_device_of, run_function, takes_triton
from posttrain.kernels.rotary.reference import rotary_reference

__all__ = ["rotary"]


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, backend: FusedBackend | None = None) -> Tensor:
    """Rotates x in fp32; the pair of channel i is i + D/2, as in Llama and Qwen. Differentiable in x.

    Args:
        x: [T, H, D], D even. cos, sin: [T, 1, D/2] fp32.
        backend: "torch", "triton", or None for the best one here.

    Returns:
        [T, H, D] in x's dtype.

    Raises:
        ValueError: shapes do not fit; the backend cannot take x.
    """
    want = (x.shape[0], 1, x.shape[-1] // 2)
    if x.ndim != 3 or x.shape[-1] % 2 or cos.shape != want or sin.shape != want:
        raise ValueError(
            f"x must be [T, H, D] with D even and cos, sin [T, 1, D/2], got {list(x.shape)}, {list(cos.shape)}, {list(sin.shape)}"
        )
    if takes_triton(x, backend) and x.numel():
        from posttrain.kernels.rotary.triton_rotary import TritonRotary

        with on_device_of(x):
            return run_function(TritonRotary, x, cos, sin)
    return rotary_reference(x, cos, sin)
