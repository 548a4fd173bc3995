"""RMS normalisation over the last dimension, alone, gated, or of a sum: one read and one write a tensor and pass on a GPU."""

from __future__ import annotations

from torch import Tensor

from posttrain.kernels.backend import FusedBackend, on_device_of, run_function, takes_triton
from posttrain.kernels.rms_norm.reference import rms_norm_reference

__all__ = ["add_rms_norm", "rms_norm"]

# The widest rows that the Triton kernels take: a program holds whole rows.
MAX_WIDTH = 16384


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, gate: Tensor | None = None, backend: FusedBackend | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, times silu(gate) where given, in fp32, rounded once; differentiable in all three.

    Args:
        x: [..., D]; D up to 16384 in Triton: with None, wider rows take PyTorch. weight: [D], of any floating-point dtype.
        gate: shaped as x.
        backend: "torch", "triton", or None for the best one here.

    Returns:
        [..., D] in x's dtype. A row's numbers depend on the row alone.

    Raises:
        ValueError: weight is not [D]; gate is not shaped as x; the backend cannot take x.
    """
    _check(x, weight, gate, "gate")
    if takes_triton(x, backend, max_width=MAX_WIDTH) and x.numel():
        from posttrain.kernels.rms_norm.triton_rms_norm import TritonRMSNorm

        with on_device_of(x):
            return run_function(TritonRMSNorm, x, weight, eps, gate)
    return rms_norm_reference(x, weight, eps, gate)


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, backend: FusedBackend | None = None
) -> tuple[Tensor, Tensor]:
    """(x + delta, its `rms_norm`), bit for bit what the two would give apart, without reading the sum again.

    With delta=None the first is x, and what is gained is the backward pass: the two gradients of x are added where the norm's is
    computed. delta is shaped as x, the sum in the wider dtype of the two; the rest as in `rms_norm`.
    """
    _check(x, weight, delta, "delta")
    if takes_triton(x, backend, max_width=MAX_WIDTH) and x.numel():
        from posttrain.kernels.rms_norm.triton_rms_norm import TritonAddRMSNorm

        with on_device_of(x):
            return run_function(TritonAddRMSNorm, x, delta, weight, eps)
    total = x if delta is None else x + delta
    return total, rms_norm_reference(total, weight, eps)


def _check(x: Tensor, weight: Tensor, beside: Tensor | None, name: str) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [D] = {list(x.shape[-1:])}, got {list(weight.shape)}")
    if beside is not None and beside.shape != x.shape:
        raise ValueError(f"{name} must be shaped as x, {list(x.shape)}, got {list(beside.shape)}")
