"""One new token for each of B sequences: J = (shared) + R rows a sequence, no loop over sequences.

Touches only the pools' rows of the partitions in use; a chunk that fills is folded with the trainer's arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.kernels.sse.checks import Inputs
from posttrain.kernels.sse.chunked_gdn import gdn_products
from posttrain.kernels.sse.scores import SPLIT_GROWTH, SPLIT_LIMIT, decay_after

if TYPE_CHECKING:
    from posttrain.kernels.sse.decode import ChunkState


def one_token_gla(x: Inputs, state: ChunkState, slots: Tensor) -> Tensor:
    """-> o [B,H,V] before the scale; state updated."""
    rows, weight = _rows(x, slots)
    q, k, g = (_pick(a, b, x) for a, b in ((x.q1, x.q2), (x.k1, x.k2), (x.g1, x.g2)))
    v = _pick(x.v, x.v2, x)
    if weight is not None:
        q = q * weight if x.gate in ("both", "read") else q
        k = k * weight if x.gate in ("both", "write") else k
    pools = {name: a.flatten(0, 1) for name, a in state.pending.items()}
    count = state.count.view(-1).index_select(0, rows)
    sums = state.total.flatten(0, 1).index_select(0, rows).add_(g)
    total = sums.to(x.dtype)
    decay = torch.exp(total)
    ks = k * decay.reciprocal().clamp_(max=SPLIT_GROWTH)
    qs = q * decay
    _write(pools, rows, count, {"k": k, "g": g, "v": v})
    pools["ks"][rows, :, :, count] = ks
    boundary = state.boundary.flatten(0, 1)
    scores = _weighted_rows(pools["ks"], rows, qs)
    strong = (total.amin((-1, -2)) < -SPLIT_LIMIT).nonzero()[:, 0]
    if strong.numel():
        scores[strong] = _strong_scores(q[strong], pools["k"][rows[strong]], pools["g"][rows[strong]])
    o = _weighted_rows(pools["v"], rows, scores).add_(_weighted_rows(boundary, rows, qs))
    state.total.flatten(0, 1).index_copy_(0, rows, sums)
    state.count.view(-1).index_copy_(0, rows, count + 1)
    full = (count == x.chunk_size - 1).nonzero()[:, 0]
    if full.numel():
        target = rows[full]
        boundary[target] = fold_gla(
            boundary[target], pools["k"][target], pools["g"][target], pools["v"][target], pools["ks"][target], total[full]
        )
        _clear(state, target)
    return o.view(slots.shape[0], -1, *v.shape[1:]).sum(1)


def _weighted_rows(pool: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """sum_d weights[n,h,d] pool[rows[n],h,d] for weights [n,H,D] and pool [.,H,D,E] -> [n,H,E].

    An embedding bag reads the rows where they lie; gathering them for a batched product costs twice the time on a CPU.
    """
    n, heads, width = weights.shape
    index = (rows[:, None] * (heads * width) + torch.arange(heads * width, device=rows.device)).view(n * heads, width)
    flat = pool.flatten(0, 2)
    out = torch.nn.functional.embedding_bag(index, flat, per_sample_weights=weights.reshape(n * heads, width), mode="sum")
    return out.view(n, heads, -1)


def _strong_scores(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """q [n,H,K] against its chunk k, g [n,H,C,K], each key decayed by the rows after it -> [n,H,C]."""
    return torch.einsum("nhk,nhck->nhc", q, k * torch.exp(decay_after(g)))


def fold_gla(start: Tensor, k: Tensor, g: Tensor, v: Tensor, ks: Tensor, total: Tensor) -> Tensor:
    """The state after a full chunk, as `chunked.scan` has it: start [n,H,K,V], rows [n,H,C,.], ks [n,H,K,C], total [n,H,K]."""
    d = torch.exp(total)
    flat_v = v.flatten(0, 1)
    rows = ks.flatten(0, 1).transpose(1, 2).contiguous()  # the layout that the trainer's product reads, for its bits
    increment = torch.bmm(rows.transpose(1, 2), flat_v).mul_(d.flatten(0, 1)[..., None])
    strong = (total.flatten(0, 1).amin(-1) < -SPLIT_LIMIT).nonzero()[:, 0]
    if strong.numel():
        flat_k, flat_g = k.flatten(0, 1)[strong], g.flatten(0, 1)[strong]
        increment[strong] = torch.bmm((flat_k * torch.exp(decay_after(flat_g))).transpose(1, 2), flat_v[strong])
    return start * d[..., None] + increment.view(start.shape)


def one_token_gdn(x: Inputs, state: ChunkState, slots: Tensor) -> Tensor:
    """As `one_token_gla`. A pending row's correction u never changes, so only the new one is solved for."""
    assert x.b2 is not None
    rows, weight = _rows(x, slots)
    q, k, g, b = (_pick(a, c, x) for a, c in ((x.q1, x.q2), (x.k1, x.k2), (x.g1, x.g2), (x.b1, x.b2)))
    v = _pick(x.v, x.v2, x)
    if weight is not None:
        q = q * weight if x.gate in ("both", "read") else q
        v = v * weight if x.gate in ("both", "write") else v
    pools = {name: a.flatten(0, 1) for name, a in state.pending.items()}
    count = state.count.view(-1).index_select(0, rows)
    sums = state.total.flatten(0, 1).index_select(0, rows).add_(g)
    boundary = state.boundary.flatten(0, 1)
    pending_g = pools["g"].index_select(0, rows).double()
    decay = torch.exp(sums[..., None] - pending_g.cumsum(-1)).to(x.dtype).flatten(0, 1)[:, None]
    asked = torch.stack([k, q], dim=2).flatten(0, 1)
    found = torch.bmm(asked, boundary.index_select(0, rows).flatten(0, 1)).mul_(
        torch.exp(sums).to(x.dtype).flatten()[:, None, None]
    )
    scores = torch.bmm(asked, pools["k"].index_select(0, rows).flatten(0, 1).transpose(1, 2)).mul_(decay)
    found = found.baddbmm_(scores, pools["u"].index_select(0, rows).flatten(0, 1)).view(*k.shape[:2], 2, -1)
    u = b[..., None] * (v - found[:, :, 0])
    o = found[:, :, 1] + (q * k).sum(-1, keepdim=True) * u
    _write(pools, rows, count, {"k": k, "g": g, "b": b, "v": v, "u": u})
    state.total.flatten(0, 1).index_copy_(0, rows, sums)
    state.count.view(-1).index_copy_(0, rows, count + 1)
    full = (count == x.chunk_size - 1).nonzero()[:, 0]
    if full.numel():
        target = rows[full]
        boundary[target] = fold_gdn(
            boundary[target], pools["k"][target], pools["g"][target], pools["b"][target], pools["v"][target]
        )
        _clear(state, target)
    return o.view(slots.shape[0], -1, *v.shape[1:]).sum(1)


def fold_gdn(start: Tensor, k: Tensor, g: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """The state after a full chunk, as `chunked_gdn.GDNScan` computes it: start [n,H,K,V], rows [n,H,C,...]."""
    _, _, kd, d, u0, w = gdn_products(torch.zeros_like(k), k, g, b, v)
    return start * d[..., None, None] + torch.matmul(kd.transpose(-1, -2), u0 - torch.matmul(w, start))


def _rows(x: Inputs, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Flat (slot, partition) of every row [B*J], and the router's weight [B*J,1,1] (None where the gate leaves it out)."""
    partition = 1 + x.index
    weight = x.weight.to(x.dtype)
    if x.q1 is not None:
        partition = torch.nn.functional.pad(partition, (1, 0))
        weight = torch.nn.functional.pad(weight, (1, 0), value=1.0)
    rows = slots[:, None] * (1 + x.num_partitions) + partition
    return rows.reshape(-1), None if x.gate == "none" else weight.reshape(-1, 1, 1)


def _pick(first: Tensor | None, second: Tensor, x: Inputs) -> Tensor:
    """first [B,H,.] (the shared rows) and second [B,1|R,H,.] -> [B*J,H,.] in the order of `_rows`."""
    routed = second.expand(-1, x.index.shape[1], *second.shape[2:])
    both = routed if x.q1 is None or first is None else torch.cat([first[:, None], routed], dim=1)
    return both.flatten(0, 1).to(x.dtype)


def _write(pools: dict[str, Tensor], rows: Tensor, count: Tensor, new: dict[str, Tensor]) -> None:
    """Puts new [B*J,H,...] behind the `count` pending rows of each (slot, partition); pools [slots*(1+N),H,C,...]."""
    heads, size = pools["k"].shape[1:3]
    place = ((rows[:, None] * heads + torch.arange(heads, device=rows.device)) * size + count[:, None]).view(-1)
    for name, row in new.items():
        pools[name].flatten(0, 2).index_copy_(0, place, row.flatten(0, 1).to(pools[name].dtype))


def _clear(state: ChunkState, rows: Tensor) -> None:
    for a in (*state.pending.values(), state.total, state.count):
        a.flatten(0, 1)[rows] = 0
