"""GLA on the chunk grid in plain PyTorch, with a hand-written backward pass.

For one chunk of one head with start state S, rows q, k, v and accumulated decay G (inclusive), d = exp(G_C):

    A  = tril(q exp(G) (k exp(-G))^T)         o  = A v + (q exp(G)) S
    S' = d (S + (k exp(-G))^T v)

Everything but S -> S' is one batched product over all chunks and heads; the scan is one step a chunk ordinal, all streams at
once. Matrices whose decay is too strong for exp(-G) take `scores.nested_scores` and end-of-chunk decays instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.kernels.sse.checks import Inputs, without_autocast
from posttrain.kernels.sse.grid import GridMap, read_gated, write_gated
from posttrain.kernels.sse.plan import ChunkPlan, Select, build_plan
from posttrain.kernels.sse.scores import SPLIT_GROWTH, SPLIT_LIMIT, decay_after, nested_scores, nested_scores_backward


def run_chunked(x: Inputs) -> tuple[Tensor, Tensor]:
    """Runs checked GLA inputs -> o [T,H,V] in v's dtype, final_state [S,1+N,H,K,V]."""
    plan = build_plan(
        x.index,
        x.cu_seqlens,
        num_partitions=x.num_partitions,
        chunk_size=x.chunk_size,
        shared=x.q1 is not None,
        longest=x.longest,
    )
    m = GridMap(x, plan)
    q, k, g, v = rows_on_grid(x, m)
    initial = x.initial_state.to(x.dtype).flatten(0, 1)
    o, final = _ChunkedGLA.apply(q, k, g, v, initial, plan)
    return (m.gather(o) * x.scale).to(x.v.dtype), final.view(x.initial_state.shape)


def rows_on_grid(x: Inputs, m: GridMap) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, g [NC,H,C,K] and v [NC,H,C,V], the router's weight multiplied in where the gate says so."""
    return (
        m.scatter(x.q1, read_gated(x, x.q2)).to(x.dtype),
        m.scatter(x.k1, write_gated(x, x.k2)).to(x.dtype),
        m.scatter(x.g1, x.g2).to(x.dtype),
        m.scatter_values(x).to(x.dtype),
    )


def split_rows(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, g [B,C,K] -> q exp(G), k exp(-G), exp(G), exp(-G), and [B,C] whether the split form is safe for a row.

    exp(-G) is cut at SPLIT_GROWTH, which changes no safe row.
    """
    total = torch.cumsum(g, dim=-2)
    safe = total.amin(-1) >= -SPLIT_LIMIT
    decay = total.exp_()
    growth = decay.reciprocal().clamp_(max=SPLIT_GROWTH)
    return q * decay, k * growth, decay, growth, safe


def unsafe_matrices(safe: Tensor) -> Select | None:
    """Which matrices need the nested form, from safe [B, C]; all of them on a GPU, where asking would make the host wait."""
    if safe.device.type != "cpu":
        return slice(None)
    bad = (~safe.all(-1)).nonzero()[:, 0]
    return bad if bad.numel() else None


class Products(NamedTuple):
    """What a chunk gives without its start state; B = chunks * heads.

    qs = q exp(G), ks = k exp(-G), decay = exp(G), growth = exp(-G), each [B,C,K]; scores [B,C,C]; increment [B,K,V], what its
    rows add to the state at its end. safe [B,C]: rows of the split form; unsafe: the matrices with other rows, whose scores
    and increment are the nested form's; after: exp of their `decay_after`.
    """

    qs: Tensor
    ks: Tensor
    decay: Tensor
    growth: Tensor
    scores: Tensor
    increment: Tensor
    safe: Tensor
    unsafe: Select | None
    after: Tensor | None


def chunk_products(q: Tensor, k: Tensor, g: Tensor, v: Tensor) -> Products:
    """q, k, g [B,C,K], v [B,C,V]; training and decoding share it."""
    qs, ks, decay, growth, safe = split_rows(q, k, g)
    scores = torch.bmm(qs, ks.transpose(1, 2)).tril_()
    increment = torch.bmm(ks.transpose(1, 2), v).mul_(decay[:, -1, :, None])
    unsafe, after = unsafe_matrices(safe), None
    if unsafe is not None:
        ok = safe[unsafe]
        scores[unsafe] = torch.where(ok[..., None], scores[unsafe], nested_scores(q[unsafe], k[unsafe], g[unsafe]))
        after = torch.exp(decay_after(g[unsafe]))
        end = torch.bmm((k[unsafe] * after).transpose(1, 2), v[unsafe])
        increment[unsafe] = torch.where(ok[:, -1, None, None], increment[unsafe], end)
    return Products(qs, ks, decay, growth, scores, increment, safe, unsafe, after)


def scan(d: Tensor, increment: Tensor, initial: Tensor, plan: ChunkPlan) -> tuple[Tensor, Tensor]:
    """S' = d S + increment along every stream.

    d [NC,H,K], increment [NC,H,K,V] (overwritten), initial [streams,H,K,V] -> the state at the start of every chunk [NC,H,K,V]
    (the same storage), the final states [streams,H,K,V].
    """
    state = initial.index_select(0, plan.order)
    for chunks, streams in plan.steps:
        before = state[streams].clone()
        state[streams] = before * d[chunks][..., None] + increment[chunks]
        increment[chunks] = before
        if not plan.exact:
            increment[-1] = 0  # ended streams come back to this chunk and must find nothing to add
    return increment, state.index_select(0, plan.rank)


class _ChunkedGLA(torch.autograd.Function):
    """q, k, g [NC,H,C,K], v [NC,H,C,V], initial [streams,H,K,V] -> o [NC,H,C,V] (unscaled), final [streams,H,K,V]."""

    @staticmethod
    def forward(ctx, q, k, g, v, initial, plan):
        flat = [a.flatten(0, 1) for a in (q, k, g, v)]
        p = chunk_products(*flat)
        grid = (*q.shape[:2], q.shape[-1], v.shape[-1])
        boundary, final = scan(p.decay[:, -1].view(grid[:3]), p.increment.view(grid), initial, plan)
        boundary = boundary.flatten(0, 1)
        o = torch.bmm(p.scores, flat[3])
        o.baddbmm_(p.qs, boundary)
        ctx.plan, ctx.unsafe, ctx.shape = plan, p.unsafe, grid
        ctx.save_for_backward(*flat, p.qs, p.ks, p.decay, p.growth, p.scores, p.safe, p.after, boundary, final)
        return o.view(v.shape), final

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        with without_autocast(do):
            return _ChunkedGLA._backward(ctx, do, dfinal)

    @staticmethod
    def _backward(ctx, do, dfinal):
        q, k, g, v, qs, ks, decay, growth, scores, safe, after, boundary, final = ctx.saved_tensors
        unsafe = ctx.unsafe
        do = do.flatten(0, 1)
        from_output = torch.bmm(qs.transpose(1, 2), do)
        dstate, dtotal_end, dinitial = _scan_backward(decay[:, -1], from_output, boundary, final, dfinal, ctx.shape, ctx.plan)
        decayed = dstate * decay[:, -1, :, None]
        dscores = torch.bmm(do, v.transpose(1, 2)).tril_()
        nested = None
        if unsafe is not None:
            nested = _Nested(unsafe, q, k, g, v, safe, after, dstate, dscores, decayed)
        dv = torch.bmm(scores.transpose(1, 2), do).baddbmm_(ks, decayed)
        dq = torch.bmm(dscores, ks).baddbmm_(do, boundary.transpose(1, 2)).mul_(decay)
        dk = torch.bmm(dscores.transpose(1, 2), qs).baddbmm_(v, decayed.transpose(1, 2)).mul_(growth)
        if nested is not None:
            nested.add_decayed(dq, dk, dv)
        dtotal = (q * dq).addcmul_(k, dk, value=-1)
        if nested is not None:
            nested.add_undecayed(dq, dk, dtotal, dtotal_end, boundary, decay)
        dtotal[:, -1] += dtotal_end
        dg = dtotal.flip(1).cumsum_(1).flip(1)
        keys, values = (*ctx.shape[:2], *q.shape[1:]), (*ctx.shape[:2], *v.shape[1:])
        return dq.view(keys), dk.view(keys), dg.view(keys), dv.view(values), dinitial, None


class _Nested:
    """The backward pass of the nested form. Takes its share out of dscores and decayed, which the split form reads.

    A row's product with itself, and the last row's write into the end state, know no decay. They are added to dq and dk only
    after dG = q dq - k dk was made: under a strong decay their rounding would cover dG's tiny values.
    """

    def __init__(self, unsafe, q, k, g, v, safe, after, dstate, dscores, decayed):
        self.unsafe, self.q, self.k = unsafe, q[unsafe], k[unsafe]
        ok = safe[unsafe]
        own = dscores.diagonal(dim1=1, dim2=2)
        self.own = own[unsafe].unsqueeze(-1).clone()
        own[unsafe] = 0
        self.dq, self.dk = nested_scores_backward(self.q, self.k, g[unsafe], dscores[unsafe] * ~ok[..., None])
        dscores[unsafe] *= ok[..., None]
        self.strong = ~ok[:, -1, None, None]
        self.dend = dstate[unsafe] * self.strong
        decayed[unsafe] *= ~self.strong
        self.dk_end = torch.bmm(v[unsafe], self.dend.transpose(1, 2)) * after
        self.dv = torch.bmm(self.k * after, self.dend)

    def add_decayed(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        dq[self.unsafe] += self.dq
        dk[self.unsafe] += self.dk
        dv[self.unsafe] += self.dv

    def add_undecayed(self, dq: Tensor, dk: Tensor, dtotal: Tensor, dtotal_end: Tensor, boundary: Tensor, decay: Tensor) -> None:
        dq[self.unsafe] += self.own * self.k
        dk[self.unsafe] += self.own * self.q + self.dk_end
        flow = self.k * self.dk_end
        flow[:, -1] = 0
        dtotal[self.unsafe] -= flow
        kept = decay[self.unsafe][:, -1] * (boundary[self.unsafe] * self.dend).sum(-1) + flow.sum(1)
        dtotal_end[self.unsafe] = torch.where(self.strong[..., 0], kept, dtotal_end[self.unsafe])


def _scan_backward(
    d: Tensor, from_output: Tensor, boundary: Tensor, final: Tensor, dfinal: Tensor, shape: tuple[int, ...], plan: ChunkPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `scan`: -> gradient of every chunk's end state [B,K,V], of log d [B,K], and of the initial states.

    from_output [B,K,V] is the gradient that a chunk's own output sends to its start state.
    """
    d, from_output, boundary = d.view(shape[:3]), from_output.view(shape), boundary.view(shape)
    dstate = dfinal.index_select(0, plan.order)
    after = final.index_select(0, plan.order)
    dend, dlog = torch.empty_like(from_output), torch.empty_like(d)
    for chunks, streams in reversed(plan.steps):
        current = dstate[streams]
        dend[chunks] = current
        dlog[chunks] = (current * after[streams]).sum(-1)
        dstate[streams] = current * d[chunks][..., None] + from_output[chunks]
        before = boundary[chunks]
        if isinstance(chunks, Tensor):  # a stream that has ended by this step visits the padding chunk: its end state stands
            before = torch.where((chunks < boundary.shape[0] - 1)[:, None, None, None], before, after)
        after[streams] = before
    return dend.flatten(0, 1), dlog.flatten(0, 1), dstate.index_select(0, plan.rank)
