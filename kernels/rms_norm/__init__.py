"""RMS normalisation over the last dimension: one read and one write a pass on a GPU."""

from __future__ import annotations

from torch import Tensor

from posttrain.kernels.backend import FusedBackend, on_device_of, takes_triton
from posttrain.kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm"]

# The widest rows that the Triton kernels take: a program holds whole rows.
MAX_WIDTH = 16384


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: FusedBackend | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once; differentiable in x and weight.

    Args:
        x: [..., D]; D up to 16384 in Triton: with None, wider rows take PyTorch. weight: [D], of any floating-point dtype.
        backend: "torch", "triton", or None for the best one here.

    Returns:
        [..., D] in x's dtype. A row's numbers depend on the row alone.

    Raises:
        ValueError: weight is not [D]; the backend cannot take x.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [D] = {list(x.shape[-1:])}, got {list(weight.shape)}")
    if takes_triton(x, backend, max_width=MAX_WIDTH) and x.numel():
        from posttrain.kernels.rms_norm.triton_rms_norm import TritonRMSNorm

        with on_device_of(x):
            return TritonRMSNorm.apply(x, weight, eps)
    return rms_norm_reference(x, weight, eps)
