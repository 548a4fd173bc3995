"""Launches of the gated delta rule's kernels, `triton_gdn.py` and `triton_gdn_backward.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.kernels.sse.triton_common import sum_terms
from posttrain.kernels.sse.triton_gdn import gdn_output_kernel, gdn_prepare_kernel, gdn_scan_kernel
from posttrain.kernels.sse.triton_gdn_backward import gdn_adjoint_kernel, gdn_gradient_kernel, gdn_reverse_kernel
from posttrain.kernels.sse.triton_limits import block_of
from posttrain.kernels.sse.triton_options import GDN, ChunkOptions
from posttrain.kernels.sse.triton_plan import DevicePlan, plan_sizes
from posttrain.kernels.sse.triton_token_sum import TokenSum
from posttrain.kernels.triton_launch import Launch, aligned, cdiv, interpreted, power_of_two

_prepare, _scan, _output = (Launch(k) for k in (gdn_prepare_kernel, gdn_scan_kernel, gdn_output_kernel))
_adjoint, _reverse, _gradient = (Launch(k) for k in (gdn_adjoint_kernel, gdn_reverse_kernel, gdn_gradient_kernel))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Constants of a call that all kernels share, under the kernels' names; block sizes and warps for Hopper follow from them."""

    K: int
    V: int
    C: int
    BC: int
    HALF: bool

    @classmethod
    def choose(cls, q: Tensor, k: Tensor, v: Tensor, chunk_size: int) -> Sizes:
        half = all(a.dtype == torch.bfloat16 for a in (q, k, v)) and not interpreted()
        # A state's K rows are one block: where they fill warp groups, chunks must be wide enough for those (`block_of`).
        least = 64 if q.shape[-1] > 32 else 16
        return cls(K=q.shape[-1], V=v.shape[-1], C=chunk_size, BC=max(least, power_of_two(chunk_size)), HALF=half)

    @property
    def stored(self) -> torch.dtype:
        """Of states and tiles between kernels: what a product would round them to."""
        return torch.bfloat16 if self.HALF else torch.float32

    def block(self, width: int, largest: int) -> int:
        """The block that covers `width` columns, at most `largest`."""
        return block_of(width, largest, rows=self.BC, half=self.HALF)

    def parallel(self, options: ChunkOptions) -> dict[str, Any]:
        """Of a kernel over chunks; fp32 operands take twice the shared memory, twice over for their two parts.

        The warps, stages and registers asked for are for chunks of at most 64 rows in bf16; others take what fits them."""
        cut = (1 if self.HALF else 2) * (2 if self.BC > 64 else 1)
        blocks = dict(BK=self.block(self.K, options.BK // cut), BV=self.block(self.V, options.BV // cut))
        if self.HALF and self.BC <= 64:
            launch = dict(num_warps=options.num_warps, num_stages=options.num_stages, maxnreg=options.maxnreg)
        else:
            # Two stages of chunks longer than 64 exceed a Hopper multiprocessor's shared memory.
            launch = dict(num_warps=8, num_stages=2 if self.BC <= 64 else 1, maxnreg=None)
        return {f.name: getattr(self, f.name) for f in fields(self)} | blocks | launch

    def sequential(self) -> dict[str, Any]:
        """Of a kernel along streams, which holds all K rows of a state; few columns, since the steps wait for each other."""
        width = self.block(self.K, 256)
        columns = 32 if self.HALF and self.BC <= 64 else 16
        # Loads of the next chunks run ahead where shared memory holds three of them.
        stages = 3 if self.HALF and width * self.BC <= 128 * 64 else 1
        warps = 4 if width * self.BC <= 128 * 64 else 8
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return own | dict(KW=width, BV=self.block(self.V, columns), STAGES=stages, num_warps=warps)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The rows of the shared or of the routed partitions: their tensors and where their chunks are.

    q, k [T or T*R, H, K], g, b [T or T*R, H], v [T or T*R, H, V]; *_div: source row of a row is row // div; o_div: its token.
    """

    q: Tensor
    k: Tensor
    g: Tensor
    b: Tensor
    v: Tensor
    q_div: int
    k_div: int
    g_div: int
    b_div: int
    v_div: int
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
    partitions: int
    sizes: Sizes

    @property
    def heads(self) -> int:
        return self.v.shape[1]

    @property
    def routes(self) -> int:
        return self.kinds[-1].o_div

    @property
    def num_chunks(self) -> int:
        return sum(kind.num_chunks for kind in self.kinds)

    def tiles(self, width: int) -> Tensor:
        """An uninitialised [NC, H, C, width]."""
        return self.v.new_empty(self.num_chunks, self.heads, self.sizes.C, width, dtype=self.sizes.stored)

    def states(self) -> Tensor:
        """An uninitialised [NC, H, K, V]."""
        return self.v.new_empty(self.num_chunks, self.heads, self.sizes.K, self.sizes.V, dtype=self.sizes.stored)


def make_call(
    q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight, index, initial, num_partitions, scale, gate, chunk_size, sequences
) -> Call:  # fmt: skip
    tokens, routes = index.shape
    shared_chunks, routed_chunks = plan_sizes(tokens, routes, sequences, num_partitions, chunk_size, q1 is not None)
    v, kinds = aligned(v), []
    if q1 is not None:
        kinds.append(
            Kind(
                **dict(zip("qkgb", (aligned(a) for a in (q1, k1, g1, b1)), strict=True)), v=v, read=False, write=False,
                **{f"{n}_div": 1 for n in "qkgbvo"}, first_chunk=0, num_chunks=shared_chunks, num_rows=tokens,
            )
        )  # fmt: skip
    second = dict(q=q2, k=k2, g=g2, b=b2, v=v[:, None] if v2 is None else v2)
    kinds.append(
        Kind(
            **{n: aligned(a).flatten(0, 1) for n, a in second.items()},
            **{f"{n}_div": routes // a.shape[1] for n, a in second.items()}, o_div=routes,
            read=gate in ("both", "read"), write=gate in ("both", "write"),
            first_chunk=shared_chunks, num_chunks=routed_chunks, num_rows=tokens * routes,
        )
    )  # fmt: skip
    return Call(
        kinds=kinds, weight=aligned(weight.float()), v=v, initial=None if initial is None else aligned(initial),
        scale=scale, partitions=num_partitions, sizes=Sizes.choose(q2, k2, v, chunk_size),
    )  # fmt: skip


def states(c: Call, plan: DevicePlan, *, end: bool, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> total, inverse (empty unless kept), start states of the chunks, u, final states (empty unless `end`)."""
    s, heads = c.sizes, c.heads
    total = c.v.new_empty(c.num_chunks, heads, 2, s.C, dtype=torch.float32)
    inverse = c.tiles(s.C) if keep else c.v.new_empty(0, dtype=s.stored)
    w, u, boundary = c.tiles(s.K), c.tiles(s.V), c.states()
    for kind in c.kinds:
        tensors = (plan.rows, kind.k, kind.g, kind.b, kind.v, c.weight, total, inverse, w, u)
        _prepare((heads * kind.num_chunks,), tensors, (heads, kind.first_chunk), dict(
            KDIV=kind.k_div, GDIV=kind.g_div, BDIV=kind.b_div, VDIV=kind.v_div, WRITE=kind.write, KEEP=keep,
            **s.parallel(GDN.prepare),
        ))  # fmt: skip
    final = total.new_empty((*plan.begin.shape, heads, s.K, s.V) if end else (0,))
    shape, last = s.sequential(), c.kinds[-1]
    initial = final if c.initial is None else c.initial
    tensors = (plan.rows, plan.begin, plan.chunks, c.kinds[0].k, last.k, w, u, total, initial, boundary, final)
    _scan((plan.begin.numel() * heads * cdiv(s.V, shape["BV"]),), tensors, (heads,), dict(
        N=c.partitions, KDIV=last.k_div, SHARED=len(c.kinds) > 1, HAS_INITIAL=c.initial is not None, HAS_FINAL=end, **shape,
    ))  # fmt: skip
    return total, inverse, boundary, u, final


def outputs(c: Call, plan: DevicePlan, total: Tensor, u: Tensor, boundary: Tensor) -> Tensor:
    shape, out = c.sizes.parallel(GDN.output), TokenSum(c.v, routes=c.routes, has_shared=len(c.kinds) > 1)
    for n, kind in enumerate(c.kinds):
        part, add, last = out.target(is_shared=n < len(c.kinds) - 1)
        grid = (c.heads * kind.num_chunks, cdiv(c.sizes.V, shape["BV"]))
        tensors = (plan.rows, kind.q, kind.k, c.weight, total, u, boundary, part, out.total)
        _output(grid, tensors, (c.heads, kind.first_chunk, c.scale), dict(
            QDIV=kind.q_div, KDIV=kind.k_div, READ=kind.read, ADD=add, LAST=last, **shape,
        ))  # fmt: skip
    return out.finish()


def reverse(
    c: Call, plan: DevicePlan, total: Tensor, inverse: Tensor, do: Tensor, dfinal: Tensor | None, want_initial: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> z, gradients of the states after the chunks, of the initial states (empty unless wanted)."""
    s, heads = c.sizes, c.heads
    r, z, dboundary = c.tiles(s.K), c.tiles(s.V), c.states()
    shape = s.parallel(GDN.adjoint)
    for kind in c.kinds:
        grid = (heads * kind.num_chunks, cdiv(s.V, shape["BV"]))
        tensors = (plan.rows, kind.q, kind.k, do, c.weight, total, inverse, r, z)
        _adjoint(grid, tensors, (heads, kind.first_chunk, c.scale), dict(
            QDIV=kind.q_div, KDIV=kind.k_div, ODIV=kind.o_div, READ=kind.read, **shape,
        ))  # fmt: skip
    dinitial = total.new_empty((*plan.begin.shape, heads, s.K, s.V) if want_initial else (0,))
    shape, one, two = s.sequential(), c.kinds[0], c.kinds[-1]
    tensors = (
        plan.rows, plan.begin, plan.chunks, one.q, one.k, one.b, two.q, two.k, two.b, do, c.weight, total, r, z,
        dinitial if dfinal is None else dfinal, dboundary, dinitial,
    )  # fmt: skip
    _reverse((plan.begin.numel() * heads * cdiv(s.V, shape["BV"]),), tensors, (heads, c.scale), dict(
        N=c.partitions, QDIV=two.q_div, KDIV=two.k_div, BDIV=two.b_div, ODIV=two.o_div, READ=two.read,
        SHARED=len(c.kinds) > 1, HAS_INITIAL=dfinal is not None, HAS_FINAL=want_initial, **shape,
    ))  # fmt: skip
    return z, dboundary, dinitial


def gradients(
    c: Call,
    plan: DevicePlan,
    total: Tensor,
    u: Tensor,
    z: Tensor,
    boundary: Tensor,
    dboundary: Tensor,
    do: Tensor,
    separate: bool,
) -> tuple[list[dict[str, Tensor]], Tensor | None, Tensor | None]:
    """-> per kind the gradients by name (v where the kinds' values are separate), of v where they are not, of the weight."""
    s = c.sizes
    # Two blocks of values or more, where they fit: of one block the compiler would load everything ahead, past its registers.
    # Products in fp32 give a warp 16 rows: more warps would hold the rows' sums twice, and write them to the same shared memory.
    shape = s.parallel(replace(GDN.gradient, BV=min(GDN.gradient.BV, power_of_two(s.V) // 2)))
    if not s.HALF or s.BC > 64:
        shape["num_warps"] = 16 if s.HALF else max(1, s.BC // 16)
    blocks = cdiv(s.K, shape["BK"])
    dv = None if separate else TokenSum(c.v, routes=c.routes, has_shared=len(c.kinds) > 1)
    found, dweight = [], None
    for n, kind in enumerate(c.kinds):
        rows, gated = kind.num_rows, kind.read or kind.write
        grads = {
            name: c.v.new_empty(rows, *source.shape[1:], dtype=source.dtype if div == 1 else torch.float32)
            for name, source, div in (("q", kind.q, kind.q_div), ("k", kind.k, kind.k_div), ("v", kind.v, kind.v_div))
            if name != "v" or separate
        }
        dg, db, sent = (c.v.new_empty(blocks, n, c.heads, dtype=torch.float32) for n in (rows, rows, rows if gated else 0))
        if dv is None:
            part, out, add, last = grads["v"], grads["v"], False, True
        else:
            (part, add, last), out = dv.target(is_shared=n < len(c.kinds) - 1), dv.total
        tensors = (
            plan.rows, kind.q, kind.k, kind.b, kind.v, do, c.weight, total, u, z, boundary, dboundary,
            grads["q"], grads["k"], dg, db, out, part, sent,
        )  # fmt: skip
        _gradient((c.heads * kind.num_chunks * blocks,), tensors, (c.heads, rows, kind.first_chunk, c.scale), dict(
            QDIV=kind.q_div, KDIV=kind.k_div, BDIV=kind.b_div, VDIV=kind.v_div, ODIV=kind.o_div,
            READ=kind.read, WRITE=kind.write, ADD=add, LAST=last, **shape,
        ))  # fmt: skip
        grads["g"], grads["b"] = (sum_terms(a, 1, blocks, rows * c.heads, torch.float32) for a in (dg, db))
        if gated:
            dweight = sum_terms(sum_terms(sent, 1, blocks, rows * c.heads, torch.float32), rows, c.heads, 1, torch.float32)
        found.append({name: _over_routes(a, getattr(kind, name), getattr(kind, f"{name}_div")) for name, a in grads.items()})
    return found, None if dv is None else dv.finish(), dweight


def _over_routes(rows: Tensor, source: Tensor, div: int) -> Tensor:
    """Gradient of a source row from those of its `div` rows, in the source's shape and dtype."""
    return sum_terms(rows, source.shape[0], div, source[:1].numel(), source.dtype).view(source.shape)
