"""Launches of the GLA kernels, `triton_gla.py` and `triton_gla_backward.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from posttrain.kernels.sse.triton_common import sum_terms
from posttrain.kernels.sse.triton_gla import (
    gla_decay_kernel,
    gla_edge_kernel,
    gla_mix_kernel,
    gla_mix_strong_kernel,
    gla_scan_kernel,
)
from posttrain.kernels.sse.triton_gla_backward import (
    gla_gradient_kernel,
    gla_gradient_strong_kernel,
    gla_score_gradient_kernel,
)
from posttrain.kernels.sse.triton_limits import block_of
from posttrain.kernels.sse.triton_plan import DevicePlan, plan_sizes
from posttrain.kernels.sse.triton_token_sum import TokenSum
from posttrain.kernels.triton_launch import Launch, aligned, cdiv, interpreted, power_of_two

# Blocks of K and V, and options, measured on an H200 with K = V = 128 and chunks of 64. A warp group of four holds 64 rows; with
# eight warps and half the registers, products and gradients took longer. The scan's rows are key channels.
LAUNCHES: dict[str, tuple[int, int, dict[str, int]]] = {
    "decay": (128, 128, dict(num_warps=1)),
    "edge": (64, 128, dict(num_warps=4)),
    "scan": (64, 64, dict(num_warps=4, STAGES=3)),
    "mix": (128, 128, dict(num_warps=4)),
    "mix backward": (64, 128, dict(num_warps=4)),
    "mix strong": (64, 128, dict(num_warps=4, num_stages=1)),
    "score gradient": (128, 128, dict(num_warps=8)),
    "gradient": (64, 64, dict(num_warps=4)),
    "gradient strong": (64, 64, dict(num_warps=4, num_stages=1)),
}
_DECAY, _EDGE, _SCAN = Launch(gla_decay_kernel), Launch(gla_edge_kernel), Launch(gla_scan_kernel)
_MIX, _MIX_STRONG = Launch(gla_mix_kernel), Launch(gla_mix_strong_kernel)
_SCORES = Launch(gla_score_gradient_kernel)
_GRADIENT, _GRADIENT_STRONG = Launch(gla_gradient_kernel), Launch(gla_gradient_strong_kernel)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Constants of a call that the kernels share; names as in `triton_gla`."""

    K: int
    V: int
    C: int
    BC: int
    HALF: bool
    GLOW: bool

    @classmethod
    def choose(cls, q: Tensor, k: Tensor, g: Tensor, v: Tensor, chunk_size: int) -> Sizes:
        half = all(a.dtype == torch.bfloat16 for a in (q, k, v)) and not interpreted()
        size = max(16, power_of_two(chunk_size))
        return cls(K=q.shape[-1], V=v.shape[-1], C=chunk_size, BC=size, HALF=half, GLOW=g.dtype != torch.bfloat16)

    @property
    def stored(self) -> torch.dtype:
        """Of what only products read: states at the chunks' starts, gradients of scores."""
        return torch.bfloat16 if self.HALF else torch.float32

    @cached_property
    def flags(self) -> int:
        return power_of_two(cdiv(self.K, self.block(self.K, LAUNCHES["decay"][0])))

    def block(self, size: int, largest: int) -> int:
        """The block that covers `size` columns, at most `largest`, half of it where numbers or chunks are twice as long."""
        cut = (1 if self.HALF else 2) * (2 if self.BC > 64 else 1)
        return block_of(size, largest // cut, rows=self.BC, half=self.HALF)

    @property
    def levels(self) -> int:
        return self.BC.bit_length() - 1


@cache
def constants_of(name: str, sizes: Sizes) -> dict[str, Any]:
    """Constants and options of a kernel's launch, not to be changed in place. Longer chunks take twice the warps."""
    key_block, value_block, options = LAUNCHES[name]
    own = {f.name: getattr(sizes, f.name) for f in fields(sizes)}
    own |= dict(BK=sizes.block(sizes.K, key_block), BV=sizes.block(sizes.V, value_block)) | options
    if sizes.BC > 64:
        own["num_warps"] *= 2
    own["FLAGS"] = sizes.flags
    unused = _UNUSED.get(name, ())
    return {n: value for n, value in own.items() if n not in unused}


# Constants that a kernel does not take.
_UNUSED = {
    "decay": ("V", "HALF", "GLOW", "BV"),
    "edge": ("V", "BV", "FLAGS"),
    "scan": ("GLOW", "FLAGS"),
    "score gradient": ("K", "GLOW", "FLAGS", "BK"),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The rows of the shared or of the routed partitions: their tensors and where their chunks are.

    q, k, g [T or T*R, H, K], v [T or T*R, H, V]; x_div, y_div: source row of a row is row // div; o_div: its token.
    """

    q: Tensor
    k: Tensor
    g: Tensor
    v: Tensor
    x_div: int
    y_div: int
    o_div: int
    read: bool
    write: bool
    first_chunk: int
    num_chunks: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call's tensors and what follows from them; the routed kind is the last."""

    kinds: list[Kind]
    weight: Tensor
    v: Tensor
    initial: Tensor | None
    scale: float
    sizes: Sizes

    @property
    def heads(self) -> int:
        return self.v.shape[1]

    @property
    def routes(self) -> int:
        return self.kinds[-1].o_div


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The plan, and what every chunk knows of its decay: log decay to the middle and to the end [NC,H,2,K], and flags of decays
    too strong for the plain product [NC,H,FLAGS]."""

    plan: DevicePlan
    decay: Tensor
    strong: Tensor


def make_call(
    q1, k1, g1, q2, k2, g2, v, v2, weight, index, initial, num_partitions, scale, gate, chunk_size, sequences
) -> Call:  # fmt: skip
    """The arguments are the operator's; q2, k2 and g2 have the same number of routes."""
    tokens, routes = index.shape
    shared_chunks, routed_chunks = plan_sizes(tokens, routes, sequences, num_partitions, chunk_size, q1 is not None)
    v = aligned(v)
    values, value_div = (v, routes) if v2 is None else (aligned(v2).flatten(0, 1), routes // v2.shape[1])
    kinds = []
    if q1 is not None:
        shared = Kind(
            q=aligned(q1), k=aligned(k1), g=aligned(g1), v=v, x_div=1, y_div=1, o_div=1, read=False, write=False,
            first_chunk=0, num_chunks=shared_chunks, num_rows=tokens,
        )  # fmt: skip
        kinds.append(shared)
    q2, k2, g2 = (aligned(a) for a in (q2, k2, g2))
    routed = Kind(
        q=q2.flatten(0, 1), k=k2.flatten(0, 1), g=g2.flatten(0, 1), v=values,
        x_div=routes // q2.shape[1], y_div=value_div, o_div=routes,
        read=gate in ("both", "read"), write=gate in ("both", "write"),
        first_chunk=shared_chunks, num_chunks=routed_chunks, num_rows=tokens * routes,
    )  # fmt: skip
    return Call(
        kinds=[*kinds, routed], weight=aligned(weight.float()), v=v, scale=scale,
        initial=None if initial is None else aligned(initial), sizes=Sizes.choose(q2, k2, g2, v, chunk_size),
    )  # fmt: skip


def start_states(c: Call, plan: DevicePlan, *, end: bool, stored: torch.dtype | None = None) -> tuple[Tensor, Tensor, Chunks]:
    """-> states at the chunks' starts [NC,H,K,V], final states (empty unless `end`), and what the chunks know of their decay.

    stored: the starts' dtype, in place of what products read; int16: the upper plane that decoding reads."""
    shape, device = (plan.rows.shape[0], c.heads), c.v.device
    chunks = Chunks(
        plan=plan,
        decay=torch.empty(*shape, 2, c.sizes.K, dtype=torch.float32, device=device),
        strong=torch.zeros(*shape, c.sizes.flags, dtype=torch.int32, device=device),
    )
    constants = constants_of("decay", c.sizes)
    for kind in c.kinds:
        grid = (kind.num_chunks * c.heads, cdiv(c.sizes.K, constants["BK"]))
        tensors, numbers = (plan.rows, kind.g, chunks.decay, chunks.strong), (c.heads, kind.first_chunk)
        _DECAY(grid, tensors, numbers, constants | dict(XDIV=kind.x_div))
    boundary, final = _scan(c, chunks, c.initial, end=end, stored=stored)
    return boundary, final, chunks


def end_gradients(c: Call, chunks: Chunks, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor, Tensor]:
    """-> gradients of the states at the chunks' ends [NC,H,K,V] and of the initial states (empty without)."""
    return _scan(c, chunks, dfinal, do, end=c.initial is not None)


def _scan(
    c: Call, chunks: Chunks, start: Tensor | None, do: Tensor | None = None, *, end: bool, stored: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Along the streams, or with `do` back -> states at the chunks' starts (gradients at their ends) [NC,H,K,V] in the stored
    dtype, and at the streams' other end [S,1+N,H,K,V] fp32 or an empty tensor."""
    s, plan, backward = c.sizes, chunks.plan, do is not None
    shape, device = (plan.rows.shape[0], c.heads), c.v.device
    edge = torch.empty(*shape, s.C, s.K, dtype=s.stored, device=device)
    constants = constants_of("edge", s) | dict(BACKWARD=backward)
    for kind in c.kinds:
        x, gated, factor = (kind.q, kind.read, c.scale) if backward else (kind.k, kind.write, 1.0)
        tensors = (plan.rows, x, kind.g, c.weight, edge)
        grid = (kind.num_chunks * c.heads, cdiv(s.K, constants["BK"]))
        _EDGE(grid, tensors, (c.heads, kind.first_chunk, int(gated), factor), constants | dict(XDIV=kind.x_div))
    boundary = torch.empty(*shape, s.K, s.V, dtype=stored or s.stored, device=device)
    final = torch.empty((*plan.begin.shape, c.heads, s.K, s.V) if end else (0,), dtype=torch.float32, device=device)
    first, routed = c.kinds[0], c.kinds[-1]
    values = (first.v, routed.v) if do is None else (do, do)
    tensors = (
        plan.rows, plan.begin, plan.chunks, edge, *values, chunks.decay, final if start is None else start, boundary, final
    )  # fmt: skip
    constants = constants_of("scan", s) | dict(
        N=plan.begin.shape[1] - 1, YDIV=routed.o_div if backward else routed.y_div,
        SHARED=len(c.kinds) > 1, BACKWARD=backward, HAS_INITIAL=start is not None, HAS_FINAL=end,
    )  # fmt: skip
    blocks = cdiv(s.K, constants["BK"]) * cdiv(s.V, constants["BV"])
    _SCAN((plan.begin.numel() * c.heads * blocks,), tensors, (c.heads,), constants)
    return boundary, final


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """The outputs' gradient do [T,H,V] and its products with a chunk's values: dscores [NC,H,2,C,C] bf16 or [NC,H,1,C,C] fp32,
    below the diagonal; own [NC,H,C] fp32, on it."""

    do: Tensor
    dscores: Tensor
    own: Tensor


def upstream(c: Call, chunks: Chunks, do: Tensor) -> Upstream:
    s, shape = c.sizes, (chunks.plan.rows.shape[0], c.heads)
    own = torch.empty(*shape, s.C, dtype=torch.float32, device=do.device)
    dscores = own.new_empty(*shape, 2 if s.HALF else 1, s.C, s.C, dtype=s.stored)
    constants = constants_of("score gradient", s)
    for kind in c.kinds:
        tensors, numbers = (chunks.plan.rows, do, kind.v, dscores, own), (c.heads, kind.first_chunk)
        _SCORES((kind.num_chunks * c.heads,), tensors, numbers, constants | dict(YDIV=kind.y_div, ODIV=kind.o_div))
    return Upstream(do=do, dscores=dscores, own=own)


def mix(c: Call, chunks: Chunks, state: Tensor, do: Tensor | None = None) -> Tensor:
    """o from the start states, or with `do` the gradient of v (shared by the routes) from those of the end states -> [T,H,V]."""
    out = TokenSum(c.v, routes=c.routes, has_shared=len(c.kinds) > 1)
    for n, kind in enumerate(c.kinds):
        part, add, last = out.target(is_shared=n < len(c.kinds) - 1)
        _mix_kind(c, kind, chunks, state, part, out.total, do, add=add, last=last)
    return out.finish()


def mix_apart(c: Call, chunks: Chunks, dend: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of v and v2 [T,1|R,H,V] where the routed partitions have values of their own."""
    found = []
    for kind in c.kinds:
        dv = kind.v.new_empty((kind.num_rows, *c.v.shape[1:]))
        _mix_kind(c, kind, chunks, dend, dv, dv, do, add=False, last=True)
        found.append(dv)
    routed = c.kinds[-1]
    return found[0] if len(found) > 1 else torch.zeros_like(c.v), sum_routes(found[-1], c.routes, routed.y_div)


def _mix_kind(
    c: Call, kind: Kind, chunks: Chunks, state: Tensor, part: Tensor, out: Tensor, do: Tensor | None, *, add: bool, last: bool
) -> None:
    s = c.sizes
    y, y_div = (kind.v, kind.y_div) if do is None else (do, kind.o_div)
    own = dict(BACKWARD=do is not None, XDIV=kind.x_div, YDIV=y_div, LEVELS=s.levels)
    constants = constants_of("mix" if do is None else "mix backward", s) | own
    tensors = (
        chunks.plan.rows, kind.q, kind.k, kind.g, y, c.weight, state, chunks.decay, chunks.strong, part, out
    )  # fmt: skip
    gates = (int(kind.read), int(kind.write))
    grid = (kind.num_chunks * c.heads, cdiv(s.V, constants["BV"]))
    _MIX(grid, tensors, (c.heads, kind.first_chunk, *gates, c.scale), constants | dict(ADD=add, LAST=last))
    numbers = (c.heads, kind.first_chunk, kind.num_chunks, *gates, int(add), int(last), c.scale)
    _MIX_STRONG(_strong_grid(c, kind), tensors, numbers, constants_of("mix strong", s) | own)


def _strong_grid(c: Call, kind: Kind) -> tuple[int]:
    """Programs of a launch that usually finds nothing to do."""
    return (min(264, c.heads * kind.num_chunks),)


def row_gradients(
    c: Call, kind: Kind, chunks: Chunks, boundary: Tensor, dend: Tensor, up: Upstream
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dq, dk, dg [rows, H, K], dweight [rows] fp32 (zero without a gate)."""
    s = c.sizes
    rest = dict(XDIV=kind.x_div, YDIV=kind.y_div, ODIV=kind.o_div, LEVELS=s.levels)
    constants, strong = constants_of("gradient", s) | rest, constants_of("gradient strong", s) | rest
    blocks, gated = cdiv(s.K, constants["BK"]), kind.read or kind.write
    dq, dk, dg = (a.new_empty((kind.num_rows, *a.shape[1:])) for a in (kind.q, kind.k, kind.g))
    dweight = up.own.new_empty((blocks, kind.num_rows, c.heads) if gated else (0,))
    tensors = (
        chunks.plan.rows, kind.q, kind.k, kind.g, kind.v, up.do, c.weight, boundary, dend, chunks.decay, up.dscores, up.own,
        chunks.strong, dq, dk, dg, dweight,
    )  # fmt: skip
    numbers, gates = (kind.num_rows, c.heads, kind.first_chunk), (int(kind.read), int(kind.write), c.scale)
    _GRADIENT((kind.num_chunks * c.heads * blocks,), tensors, (*numbers, *gates), constants)
    _GRADIENT_STRONG(_strong_grid(c, kind), tensors, (*numbers, kind.num_chunks, *gates), strong)
    if not gated:
        return dq, dk, dg, up.own.new_zeros(kind.num_rows)
    by_head = sum_terms(dweight, 1, blocks, kind.num_rows * c.heads, torch.float32)
    return dq, dk, dg, sum_terms(by_head, kind.num_rows, c.heads, 1, torch.float32)


def sum_routes(rows: Tensor, routes: int, div: int) -> Tensor:
    """[T*R, H, D] -> [T, 1|R, H, D]: summed over the routes where they share a source row."""
    tokens = rows.shape[0] // routes
    if div == 1:
        return rows.view(tokens, routes, *rows.shape[1:])
    return sum_terms(rows, tokens, routes, rows.shape[1:].numel(), rows.dtype).view(tokens, 1, *rows.shape[1:])
