"""One program a token and head, the router's choice with the first head of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.pair_map.triton_pair_map import log_sigmoid, softmax_rows
from posttrain.kernels.triton_launch import Launch, aligned, power_of_two


@triton.jit
def _load(a, at, mask):
    return tl.load(a + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(a, at, value, mask):
    tl.store(a + at, value.to(a.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["heads"])
def decode_inputs_kernel(
    Q, DQ, KEYS, DK, GATE1, GATE2, VALUES, ROUTER, Q1, Q2, K1, K2, G1, G2, OUT, WEIGHT, INDEX, heads, inverse,
    K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, R: tl.constexpr, WK: tl.constexpr, WV: tl.constexpr, WN: tl.constexpr,
    SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Grid (T * H)."""
    row = tl.program_id(0)
    c, v = tl.arange(0, WK), tl.arange(0, WV)
    at, inside = row.to(tl.int64) * K + c, c < K
    q = _load(Q, at, inside)
    z = q + _load(DQ, at, inside)
    _store(Q1, at, q * tl.sigmoid(q), inside)
    _store(Q2, at, z * tl.sigmoid(z), inside)
    k = _load(KEYS, at, inside)
    z = k + _load(DK, at, inside)
    if SOFTMAX:
        k1 = tl.reshape(softmax_rows(k[None, :], c, K), [WK])
        k2 = tl.reshape(softmax_rows(z[None, :], c, K), [WK])
    else:
        k1, k2 = k * tl.sigmoid(k), z * tl.sigmoid(z)
    _store(K1, at, k1, inside)
    _store(K2, at, k2, inside)
    _store(G1, at, log_sigmoid(_load(GATE1, at, inside)) * inverse, inside)
    _store(G2, at, log_sigmoid(_load(GATE2, at, inside)) * inverse, inside)
    value_at = row.to(tl.int64) * V + v
    value = _load(VALUES, value_at, v < V)
    _store(OUT, value_at, value * tl.sigmoid(value), v < V)
    if row % heads == 0:
        token, partition = (row // heads).to(tl.int64), tl.arange(0, WN)
        logit = tl.load(ROUTER + token * N + partition, mask=partition < N, other=-float("inf")).to(tl.float32)
        share = tl.exp(logit - tl.max(logit, 0))
        share = share / tl.sum(share, 0)
        for r in tl.static_range(R):
            largest = tl.max(share, 0)
            # The lowest of equals; where logits are NaN, none is equal.
            chosen = tl.minimum(tl.min(tl.where(share == largest, partition, WN), 0), N - 1)
            tl.store(WEIGHT + token * R + r, largest)
            tl.store(INDEX + token * R + r, chosen.to(tl.int64))
            share = tl.where(partition == chosen, -1.0, share)


_LAUNCH = Launch(decode_inputs_kernel)


def launch_decode_inputs(
    alike: Sequence[Tensor], v: Tensor, router: Tensor, selected: int, softmax: bool, normalizer: float
) -> tuple[Tensor, ...]:
    """alike: q, dq, k, dk, gate1, gate2 -> the fields of `DecodeInputs`."""
    (tokens, heads, width), partitions = alike[0].shape, router.shape[1]
    q1, q2, k1, k2 = (torch.empty_like(alike[0], memory_format=torch.contiguous_format) for _ in range(4))
    g1, g2 = (torch.empty(tokens, heads, width, dtype=torch.float32, device=v.device) for _ in range(2))
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    weight = torch.empty(tokens, selected, dtype=torch.float32, device=v.device)
    index = torch.empty(tokens, selected, dtype=torch.int64, device=v.device)
    constants = dict(
        K=width, V=v.shape[2], N=partitions, R=selected, WK=power_of_two(width), WV=power_of_two(v.shape[2]),
        WN=power_of_two(partitions), SOFTMAX=softmax, num_warps=1,
    )  # fmt: skip
    tensors = (*(aligned(a) for a in alike), aligned(v), aligned(router), q1, q2, k1, k2, g1, g2, out, weight, index)
    _LAUNCH((tokens * heads,), tensors, (heads, 1.0 / normalizer), constants)
    return q1, k1, q2, k2, out, g1, g2, weight, index
