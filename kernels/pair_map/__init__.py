"""The pointwise work before a sparse-state layer: f(x) and f(x + delta) in one pass, and log decays from gate logits.

The shared partition's queries and keys are f(x), the routed ones f(x + delta) with a low-rank delta; f is silu, or a softmax
over each head's channels.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from posttrain.kernels.backend import FusedBackend, on_device_of, run_function, takes_triton
from posttrain.kernels.pair_map.reference import log_decay_reference, pair_map_reference

Map = Literal["silu", "softmax"]

__all__ = ["Map", "log_decay", "pair_map"]


def pair_map(x: Tensor, delta: Tensor, fn: Map, *, backend: FusedBackend | None = None) -> tuple[Tensor, Tensor]:
    """(f(x), f(x + delta)), differentiable in both.

    Args:
        x, delta: [T, H, K], of one dtype.
        fn: "silu", or "softmax" over K.
        backend: "torch", "triton", or None for the best one here.

    Returns:
        two [T, H, K] in x's dtype. Arithmetic is fp32; Triton does not round x + delta.

    Raises:
        ValueError: shapes or dtypes differ, fn is unknown, or the backend cannot take x.
    """
    if fn not in ("silu", "softmax"):
        raise ValueError(f"fn={fn!r}, but it must be 'silu' or 'softmax'")
    if x.ndim != 3 or x.shape != delta.shape or x.dtype != delta.dtype:
        raise ValueError(f"x {list(x.shape)} {x.dtype} and delta {list(delta.shape)} {delta.dtype} must both be [T, H, K]")
    if takes_triton(x, backend) and x.numel():
        from posttrain.kernels.pair_map.triton_pair_map import TritonPairMap

        with on_device_of(x):
            return run_function(TritonPairMap, x, delta, fn == "softmax")
    return pair_map_reference(x, delta, fn)


def log_decay(logits: Tensor, normalizer: float, *, backend: FusedBackend | None = None) -> Tensor:
    """logsigmoid(logits) / normalizer in fp32 (also the result), whatever the dtype of `logits`; differentiable.

    Raises:
        ValueError: the backend cannot take the logits.
    """
    if takes_triton(logits, backend) and logits.numel():
        from posttrain.kernels.pair_map.triton_pair_map import TritonLogDecay

        with on_device_of(logits):
            return run_function(TritonLogDecay, logits, normalizer)
    return log_decay_reference(logits, normalizer)
