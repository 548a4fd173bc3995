"""The operators as their definition reads: one token at a time, in fp32 (float64 when given float64), by plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posttrain.kernels.sse.checks import Inputs


def run_reference(x: Inputs) -> tuple[Tensor, Tensor]:
    """Runs checked inputs; see `sse` and `sse_gdn` for the meaning of every tensor.

    Returns:
        o [T, H, V] in v's dtype, final_state [S, 1+N, H, K, V] in fp32 (float64 for float64 inputs).
    """
    dtype = torch.float64 if x.v.dtype == torch.float64 else torch.float32
    step: Callable[..., tuple[Tensor, Tensor]] = _gdn_step if x.is_gdn else _gla_step
    bounds, routes = x.cu_seqlens.tolist(), x.index.tolist()
    outputs, finals = [], []
    for s in range(len(bounds) - 1):
        state = [x.initial_state[s, p].to(dtype) for p in range(1 + x.num_partitions)]
        for t in range(bounds[s], bounds[s + 1]):
            out = torch.zeros(x.v.shape[1:], dtype=dtype, device=x.v.device)
            if x.q1 is not None:
                one = torch.ones((), dtype=dtype, device=x.v.device)
                row: list[Any] = [None if a is None else a[t].to(dtype) for a in (x.q1, x.k1, x.g1, x.b1, x.v)]
                state[0], read = step(state[0], *row, write=one)
                out = out + read
            for r, partition in enumerate(routes[t]):
                row = [None if a is None else _routed(a, t, r).to(dtype) for a in (x.q2, x.k2, x.g2, x.b2, x.v2)]
                weight = x.weight[t, r].to(dtype)
                write = weight if x.gate in ("both", "write") else torch.ones_like(weight)
                state[1 + partition], read = step(state[1 + partition], *row, write=write)
                out = out + (weight * read if x.gate in ("both", "read") else read)
            outputs.append(x.scale * out)
        finals.append(torch.stack(state))
    o = torch.stack(outputs) if outputs else x.v * 0
    final = torch.stack(finals) if finals else x.initial_state.to(dtype)
    return o.to(x.v.dtype), final


def _routed(a: Tensor, t: int, r: int) -> Tensor:
    """Row of a routed projection, [T, R, ...] with a projection a partition and [T, ...] otherwise (told by `Inputs`)."""
    return a[t, r if a.shape[1] > 1 else 0]


def _gla_step(state: Tensor, q: Tensor, k: Tensor, g: Tensor, b: None, v: Tensor, *, write: Tensor) -> tuple[Tensor, Tensor]:
    """state [H, K, V]; q, k, g [H, K]; v [H, V]: decay every key channel, write, then read."""
    state = torch.exp(g)[..., None] * state + (write * k)[..., None] * v[..., None, :]
    return state, torch.einsum("hk,hkv->hv", q, state)


def _gdn_step(state: Tensor, q: Tensor, k: Tensor, g: Tensor, b: Tensor, v: Tensor, *, write: Tensor) -> tuple[Tensor, Tensor]:
    """As `_gla_step` with g, b [H]: decay, then correct the state's answer for k towards write * v by the fraction b."""
    state = torch.exp(g)[:, None, None] * state
    error = write * v - torch.einsum("hk,hkv->hv", k, state)
    state = state + (b[:, None] * k)[..., None] * error[..., None, :]
    return state, torch.einsum("hk,hkv->hv", q, state)
