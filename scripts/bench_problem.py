"""What the kernel benchmark feeds every variant: packed inputs as a layer makes them, and the calls of ours and of the peers.

A variant is built from a `Problem` into a `Call`: a function without arguments that returns o [T, H, D], and the inputs whose
gradients are asked for. Shapes: T packed tokens, H heads, D key and value width, N partitions, R routed, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.kernels.sse import route, sse, sse_gdn

SSE_INPUTS = ("q1", "k1", "g1", "q2", "k2", "g2", "v")
GDN_INPUTS = ("q1", "k1", "g1", "b1", "q2", "k2", "g2", "b2", "v")


class Call(NamedTuple):
    """forward() -> o [T, H, D]; leaves: the inputs that want gradients, by name; up: o's upstream gradient."""

    forward: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    up: Tensor

    def both(self) -> tuple[Tensor, ...]:
        """Forward and backward: o, then the gradients in the order of the leaves."""
        o = self.forward()
        return (o.detach(), *torch.autograd.grad(o, list(self.leaves.values()), self.up.view(o.shape)))

    def inference(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def named(self) -> dict[str, Tensor]:
        """o and d<leaf>."""
        return dict(zip(("o", *(f"d{name}" for name in self.leaves)), self.both()))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """tensors: the operator's floating inputs by name, `weight` [T, R] fp32 last; index [T, R] int64; up [T, H, D].
    lengths: of the sequences; what they add up to is T."""

    tensors: dict[str, Tensor]
    index: Tensor
    up: Tensor
    lengths: tuple[int, ...]
    partitions: int

    @property
    def cu_seqlens(self) -> Tensor:
        """[S+1] on the CPU, as the operators like it."""
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def double(self) -> Problem:
        """The same numbers in float64, as new leaves."""
        tensors = {n: a.detach().double().requires_grad_() for n, a in self.tensors.items()}
        return replace(self, tensors=tensors, up=self.up.double())

    def sequence(self, s: int) -> Problem:
        """The s-th sequence alone, as new leaves."""
        start = sum(self.lengths[:s])
        rows = slice(start, start + self.lengths[s])
        tensors = {n: a.detach()[rows].clone().requires_grad_() for n, a in self.tensors.items()}
        return replace(
            self, tensors=tensors, index=self.index[rows].clone(), up=self.up[rows].clone(), lengths=(self.lengths[s],)
        )


def make_problem(
    lengths: tuple[int, ...], *, heads: int, dim: int, partitions: int, device: torch.device, dtype: torch.dtype,
    g_dtype: torch.dtype, routed: int = 1, is_gdn: bool = False, seed: int = 0,
) -> Problem:  # fmt: skip
    """GLA: softmax keys, SiLU queries and values, decay logsigmoid(x)/16. GDN: normalised q and k, write strength sigmoid(x).

    Problems that differ in `partitions` alone share all tensors but weight and index.
    """
    tokens, draw = sum(lengths), torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    tensors: dict[str, Tensor] = {}
    for name in GDN_INPUTS if is_gdn else SSE_INPUTS:
        scalar = is_gdn and name[0] in "gb"
        a = normal(tokens, heads) if scalar else normal(tokens, heads, dim)
        if name[0] == "g":
            a = F.logsigmoid(a) / 16
        elif name[0] == "b":
            a = torch.sigmoid(a)
        elif is_gdn and name[0] in "qk":
            a = F.normalize(a, dim=-1)
        else:
            a = torch.softmax(a, dim=-1) if name[0] == "k" else F.silu(a)
        tensors[name] = a.to(g_dtype if name[0] == "g" else dtype)
    up = normal(tokens, heads, dim).to(dtype)
    _, weight, index = route(normal(tokens, partitions), routed)
    tensors["weight"] = weight
    tensors = {n: a.detach().requires_grad_() for n, a in tensors.items()}
    return Problem(tensors=tensors, index=index, up=up, lengths=lengths, partitions=partitions)


def build_ours(p: Problem, backend: str, *, keep_states: bool = True, chunk_size: int = 64) -> Call:
    """The SSE operator, GLA or gated delta rule by the problem's inputs."""
    operator = sse_gdn if "b1" in p.tensors else sse
    positional = [*p.tensors.values(), p.index]
    options = dict(
        cu_seqlens=p.cu_seqlens, num_partitions=p.partitions, backend=backend, output_final_state=False,
        keep_states=keep_states, chunk_size=chunk_size,
    )  # fmt: skip
    return Call(lambda: operator(*positional, **options)[0], dict(p.tensors), p.up)  # type: ignore[arg-type]


def build_ours_plain(p: Problem, backend: str, *, chunk_size: int = 64) -> Call:
    """Plain GLA by our operator: no shared partition, one routed one without a weight; the function that `build_gla` computes."""
    q, k, g, v = (p.tensors[n] for n in ("q1", "k1", "g1", "v"))
    weight, index = torch.ones_like(p.tensors["weight"][:, :1]).detach(), torch.zeros_like(p.index[:, :1])
    options = dict(
        cu_seqlens=p.cu_seqlens, num_partitions=1, gate="none", backend=backend, output_final_state=False, chunk_size=chunk_size
    )

    def forward() -> Tensor:
        return sse(None, None, None, q, k, g, v, weight, index, **options)[0]  # type: ignore[arg-type]

    return Call(forward, {"q": q, "k": k, "g": g, "v": v}, p.up)


def build_gla(p: Problem) -> Call:
    """flash-linear-attention's plain linear attention on the shared partition's inputs."""
    from fla.ops.gla import chunk_gla

    q, k, g, v = (p.tensors[n] for n in ("q1", "k1", "g1", "v"))
    cu_seqlens = p.cu_seqlens.to(v.device) if len(p.lengths) > 1 else None

    def forward() -> Tensor:
        return chunk_gla(q[None], k[None], v[None], g[None], cu_seqlens=cu_seqlens)[0][0]

    return Call(forward, {"q": q, "k": k, "g": g, "v": v}, p.up)


class _Take(torch.autograd.Function):
    """Rows in another order: x [M, ...] -> [M * routes, ...], the i-th of them x[order[i] // routes].

    The permutation's inverse makes the backward a gather too; autograd's own is an accumulation with atomics or a sort.
    """

    @staticmethod
    def forward(ctx, x, order, inverse, routes):
        ctx.save_for_backward(inverse)
        ctx.routes = routes
        return x.index_select(0, order // routes if routes > 1 else order)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        rows = grad.index_select(0, inverse)
        return (rows if ctx.routes == 1 else rows.unflatten(0, (-1, ctx.routes)).sum(1)), None, None, None


def build_composed(p: Problem) -> Call:
    """SSE from fla's chunk_gla in the paper's varlen scheme: routed rows sorted by (sequence, partition), a sequence a stream.

    Sorting and the waits for the device that fla needs to list the chunks are part of the call.
    """
    from fla.ops.gla import chunk_gla

    t, routes = p.tensors, p.index.shape[1]
    device = p.index.device
    cu_seqlens = p.cu_seqlens.to(device)
    lengths, shared_bounds = cu_seqlens.diff(), cu_seqlens if len(p.lengths) > 1 else None
    streams = torch.arange(len(p.lengths) * p.partitions + 1, device=device)

    def forward() -> Tensor:
        key = p.index
        if len(p.lengths) > 1:
            sequence = torch.repeat_interleave(lengths, output_size=key.shape[0])  # [T], the sequence of a token
            key = key + sequence[:, None] * p.partitions
        sorted_key, order = torch.sort(key.flatten(), stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=device))
        bounds = torch.searchsorted(sorted_key, streams)
        q, k, g, v = (_Take.apply(t[n], order, inverse, routes) for n in ("q2", "k2", "g2", "v"))
        weight = _Take.apply(t["weight"].flatten(), order, inverse, 1).to(v.dtype)[:, None, None]
        routed = chunk_gla((q * weight)[None], (k * weight)[None], v[None], g[None], cu_seqlens=bounds)[0][0]
        routed = _Take.apply(routed, inverse, order, 1)
        if routes > 1:
            routed = routed.unflatten(0, (-1, routes)).sum(1)
        shared = chunk_gla(t["q1"][None], t["k1"][None], t["v"][None], t["g1"][None], cu_seqlens=shared_bounds)[0][0]
        return shared + routed

    return Call(forward, dict(t), p.up)


def build_masking(p: Problem) -> Call:
    """SSE from fla's chunk_gla by masking: one whole pass a partition, with the rows of others zero and not decaying."""
    from fla.ops.gla import chunk_gla

    if len(p.lengths) > 1:
        raise ValueError("the masking variant is built for one sequence")
    t = p.tensors

    def forward() -> Tensor:
        o = chunk_gla(t["q1"][None], t["k1"][None], t["v"][None], t["g1"][None])[0][0]
        for partition in range(p.partitions):
            here = p.index == partition
            weight = (t["weight"] * here).sum(1).to(t["v"].dtype)[:, None, None]
            g = t["g2"] * here.any(1)[:, None, None]
            o = o + chunk_gla((t["q2"] * weight)[None], (t["k2"] * weight)[None], t["v"][None], g[None])[0][0]
        return o

    return Call(forward, dict(t), p.up)


def build_attention(p: Problem) -> Call:
    """cuDNN's causal softmax attention, same heads and width."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (p.tensors[n] for n in ("q1", "k1", "v"))

    def forward() -> Tensor:
        heads_first = (a[None].transpose(1, 2) for a in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = F.scaled_dot_product_attention(*heads_first, is_causal=True)
        return o.transpose(1, 2)[0]

    return Call(forward, {"q": q, "k": k, "v": v}, p.up)


def build_fla_gdn(p: Problem) -> Call:
    """flash-linear-attention's plain gated delta rule on the shared partition's inputs.

    Its backward refuses Hopper with Triton 3.4 to 3.7.0, which compile one of its kernels wrongly (issue 640 there). The refusal
    is switched off: the gradients may be wrong, the time is that of the same kernels.
    """
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.TRITON_ABOVE_3_7_1 = True

    q, k, g, b, v = (p.tensors[n] for n in ("q1", "k1", "g1", "b1", "v"))

    def forward() -> Tensor:
        return chunk_gated_delta_rule(q[None], k[None], v[None], g[None], b[None])[0][0]

    return Call(forward, {"q": q, "k": k, "g": g, "b": b, "v": v}, p.up)
