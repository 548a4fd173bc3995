"""RMS normalisation over the last dimension: one read and one write a pass on a GPU."""

from __future__ import annotations

from torch import Tensor

from posttrain.kernels.backend import FusedBackend, takes_triton
from posttrain.kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: FusedBackend | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once; differentiable in x and weight.

    Args:
        x: [..., D]; D up to 16384 in Triton. weight: [D], of any floating-point dtype.
        backend: "torch", "triton", or None for the best one here.

    Returns:
        [..., D] in x's dtype. A row's numbers depend on the row alone.

    Raises:
        ValueError: weight is not [D]; the backend cannot take x.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [D] = {list(x.shape[-1:])}, got {list(weight.shape)}")
    if takes_triton(x, backend) and x.numel():
        from posttrain.kernels.rms_norm.triton_rms_norm import MAX_WIDTH, TritonRMSNorm

        if x.shape[-1] <= MAX_WIDTH:
            return TritonRMSNorm.apply(x, weight, eps)
    return rms_norm_reference(x, weight, eps)
