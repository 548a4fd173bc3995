"""What stands between a sparse-state layer's projections and its decode step, of few tokens in one launch: key maps, silu of the
values, log decays, and the router's choice. Apart they are eight launches of two microseconds each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.kernels.backend import FusedBackend, on_device_of, takes_triton
from posttrain.kernels.pair_map import Map, log_decay, pair_map
from posttrain.kernels.sse.routing import route

__all__ = ["DecodeInputs", "decode_inputs"]


class DecodeInputs(NamedTuple):
    """q1, k1, q2, k2 [T, H, K], v [T, H, V]; g1, g2 [T, H, K] fp32; weight [T, R] fp32 and index [T, R] int64, as of `route`."""

    q1: Tensor
    k1: Tensor
    q2: Tensor
    k2: Tensor
    v: Tensor
    g1: Tensor
    g2: Tensor
    weight: Tensor
    index: Tensor


def decode_inputs(
    q: Tensor,
    dq: Tensor,
    k: Tensor,
    dk: Tensor,
    v: Tensor,
    gate1: Tensor,
    gate2: Tensor,
    router: Tensor,
    *,
    selected: int,
    key_map: Map,
    normalizer: float,
    backend: FusedBackend | None = None,
) -> DecodeInputs:
    """(silu(q), silu(q + dq)), (f(k), f(k + dk)), silu(v), the log decays of both gates and the router's choice; no gradients.

    Args:
        q, dq, k, dk, gate1, gate2: [T, H, K]; v: [T, H, V], of one dtype. router: [T, N] logits.
        selected: R. key_map, normalizer: as in `pair_map` and `log_decay`.
        backend: "torch", "triton", or None for the best one here. Sums over a head have another order than in `pair_map`.

    Raises:
        ValueError: shapes or dtypes differ, or the backend cannot take them.
    """
    alike = (q, dq, k, dk, gate1, gate2)
    if q.ndim != 3 or any(a.shape != q.shape or a.dtype != q.dtype for a in alike) or v.dtype != q.dtype:
        given = [(list(a.shape), a.dtype) for a in (*alike, v)]
        raise ValueError(f"q, dq, k, dk and the gates must be [T, H, K] and v [T, H, V], of one dtype, got {given}")
    if v.ndim != 3 or v.shape[:2] != q.shape[:2] or router.ndim != 2 or router.shape[0] != q.shape[0]:
        raise ValueError(f"v must be [T, H, V] and router [T, N], got {list(v.shape)} and {list(router.shape)}")
    if not 1 <= selected <= router.shape[1]:
        raise ValueError(f"selected={selected}, but it must be in [1, {router.shape[1]}] (the number of partitions)")
    if takes_triton(q, backend) and q.numel():
        from posttrain.kernels.decode_inputs.triton_decode_inputs import launch_decode_inputs

        with on_device_of(q):
            return DecodeInputs(*launch_decode_inputs(alike, v, router, selected, key_map == "softmax", normalizer))
    (q1, q2), (k1, k2) = pair_map(q, dq, "silu", backend="torch"), pair_map(k, dk, key_map, backend="torch")
    g1, g2 = (log_decay(gate, normalizer, backend="torch") for gate in (gate1, gate2))
    _, weight, index = route(router, selected)
    return DecodeInputs(q1, k1, q2, k2, torch.nn.functional.silu(v), g1, g2, weight, index)
