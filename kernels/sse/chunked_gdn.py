"""The gated delta rule on the chunk grid in plain PyTorch: the WY form with a triangular solve.

For one chunk of one head with start state S, accumulated log decay G (a scalar a row) and write strength b, the corrections
u that the rows write (S_i = exp(G_i) S + sum_{j<=i} exp(G_i - G_j) k_j^T u_j) solve a unit lower-triangular system,

    (I + tril(b k k^T exp(G_i - G_j), -1)) u = b (v - exp(G) k S),   so that   u = u0 - w S

with u0 and w independent of S. Decays enter as exp(G_i - G_j) with j <= i, so no decay is too strong. G is summed in float64:
it is one number a row, and differences of large sums would cost fp32 its precision.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.kernels.sse.checks import Inputs, without_autocast
from posttrain.kernels.sse.grid import GridMap, read_gated, write_gated, writes_gated
from posttrain.kernels.sse.plan import ChunkPlan, build_plan


def run_chunked_gdn(x: Inputs) -> tuple[Tensor, Tensor]:
    """Runs checked gated-delta inputs -> o [T,H,V] in v's dtype, final_state [S,1+N,H,K,V]."""
    plan = build_plan(
        x.index,
        x.cu_seqlens,
        num_partitions=x.num_partitions,
        chunk_size=x.chunk_size,
        shared=x.q1 is not None,
        longest=x.longest,
    )
    m = GridMap(x, plan)
    q, k, g, b, v = gdn_rows_on_grid(x, m)
    qd, attention, kd, d, u0, w = gdn_products(q, k, g, b, v)
    boundary, u, final = GDNScan.apply(d, kd, u0, w, x.initial_state.to(x.dtype).flatten(0, 1), plan)
    o = torch.matmul(qd, boundary) + torch.matmul(attention, u)
    return (m.gather(o) * x.scale).to(x.v.dtype), final.view(x.initial_state.shape)


def gdn_rows_on_grid(x: Inputs, m: GridMap) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k [NC,H,C,K], g, b [NC,H,C], v [NC,H,C,V], the router's weight multiplied into v and q where the gate says so."""
    assert x.b2 is not None
    q = m.scatter(x.q1, read_gated(x, x.q2)).to(x.dtype)
    k = m.scatter(x.k1, x.k2).to(x.dtype)
    v = (m.scatter(x.v if m.shared else None, write_gated(x, x.v2)) if writes_gated(x) else m.scatter_values(x)).to(x.dtype)
    routes = max(x.g2.shape[1], x.b2.shape[1])
    routed = torch.stack([a.to(x.dtype).expand(-1, routes, -1) for a in (x.g2, x.b2)], dim=-1)
    shared = None if x.g1 is None or x.b1 is None else torch.stack([x.g1.to(x.dtype), x.b1.to(x.dtype)], dim=-1)
    g, b = m.scatter(shared, routed).unbind(-1)
    return q, k, g, b, v


def gdn_products(q: Tensor, k: Tensor, g: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Everything of a chunk that does not need its start state, leading dimensions [..., C, .].

    Returns:
        qd = q exp(G) [..., C, K]; attention = tril(q k^T exp(G_i - G_j)) [..., C, C]; kd = k exp(G_C - G) [..., C, K];
        d = exp(G_C) [...]; u0 [..., C, V]; w [..., C, K].
    """
    dtype, value_dim = q.dtype, v.shape[-1]
    total = torch.cumsum(g.double(), dim=-1)
    decay = torch.exp((total[..., :, None] - total[..., None, :]).tril()).to(dtype)
    both = torch.matmul(torch.cat([q, k], dim=-2), k.transpose(-1, -2))
    q_k, k_k = both.split(q.shape[-2], dim=-2)
    attention = (q_k * decay).tril()
    since_start = torch.exp(total).to(dtype)[..., None]
    system = (k_k * decay * b[..., None]).tril(-1)
    right = torch.cat([v, k * since_start], dim=-1) * b[..., None]
    solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u0, w = solution.split([value_dim, k.shape[-1]], dim=-1)
    kd = k * torch.exp(total[..., -1:] - total).to(dtype)[..., None]
    return q * since_start, attention, kd, torch.exp(total[..., -1]).to(dtype), u0, w


class GDNScan(torch.autograd.Function):
    """u = u0 - w S, S' = d S + kd^T u along every stream.

    d [NC,H], kd, w [NC,H,C,K], u0 [NC,H,C,V], initial [streams,H,K,V] -> start state of every chunk [NC,H,K,V], u [NC,H,C,V],
    final states [streams,H,K,V].
    """

    @staticmethod
    def forward(ctx, d, kd, u0, w, initial, plan: ChunkPlan):
        state = initial.index_select(0, plan.order)
        boundary = initial.new_empty(*d.shape, *initial.shape[2:])
        u = torch.empty_like(u0, memory_format=torch.contiguous_format)
        for chunks, streams in plan.steps:
            before = state[streams]
            boundary[chunks] = before
            u[chunks] = correction = u0[chunks] - torch.matmul(w[chunks], before)
            state[streams] = before * d[chunks][..., None, None] + torch.matmul(kd[chunks].transpose(-1, -2), correction)
        ctx.plan = plan
        ctx.save_for_backward(d, kd, w, boundary, u)
        return boundary, u, state.index_select(0, plan.rank)

    @staticmethod
    @once_differentiable
    def backward(ctx, dboundary, du, dfinal):
        with without_autocast(du):
            return GDNScan._backward(ctx, dboundary, du, dfinal)

    @staticmethod
    def _backward(ctx, dboundary, du, dfinal):
        d, kd, w, boundary, u = ctx.saved_tensors
        dstate = dfinal.index_select(0, ctx.plan.order)
        du = du.clone()
        dend = torch.empty_like(boundary)
        for chunks, streams in reversed(ctx.plan.steps):
            current = dstate[streams]
            dend[chunks] = current
            total = du[chunks] + torch.matmul(kd[chunks], current)
            du[chunks] = total
            dstate[streams] = (
                dboundary[chunks] + current * d[chunks][..., None, None] - torch.matmul(w[chunks].transpose(-1, -2), total)
            )
        dd = (boundary * dend).sum((-1, -2))
        dkd = torch.matmul(u, dend.transpose(-1, -2))
        dw = -torch.matmul(du, boundary.transpose(-1, -2))
        return dd, dkd, du, dw, dstate.index_select(0, ctx.plan.rank), None
