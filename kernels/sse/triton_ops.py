"""`sse` on a GPU: launches of the Triton kernels as `torch.library` operators, which torch.compile and checkpointing see through.

A forward is a plan (`triton_plan.py`), and for each kind of partition, shared and routed, the kernels of `triton_gla.py`.
A token has one shared row and R routed rows. With one route, the routed launch adds its output to the shared one's; with more,
every row has its own place and the rows of a token are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Optional

import torch
import triton
from torch import Tensor

from posttrain.kernels.sse.checks import Inputs
from posttrain.kernels.sse.triton_gla import (
    gla_gradient_kernel,
    gla_gradient_strong_kernel,
    gla_increment_kernel,
    gla_mix_kernel,
    gla_mix_strong_kernel,
    gla_scan_kernel,
)
from posttrain.kernels.sse.triton_plan import DevicePlan, build_device_plan, plan_sizes

MAX_CHUNK, MAX_WIDTH = 128, 256


def unsupported(x: Inputs) -> str | None:
    """Why the Triton backend cannot run these inputs; None where it can."""
    if not (x.v.is_cuda or interpreted()):
        return f"the inputs are on {x.v.device.type}; Triton kernels need a CUDA device (or TRITON_INTERPRET=1)"
    if x.v.dtype == torch.float64:
        return "the inputs are float64; the kernels compute in fp32"
    if x.chunk_size > MAX_CHUNK:
        return f"chunk_size={x.chunk_size}, but the kernels take at most {MAX_CHUNK}"
    for name, width in (("K", x.q2.shape[-1]), ("V", x.v.shape[-1])):
        if width > MAX_WIDTH:
            return f"{name}={width}, but the kernels take at most {MAX_WIDTH}"
    return None


@cache
def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def run_triton(x: Inputs, *, output_final_state: bool = True, keep_states: bool = True) -> tuple[Tensor, Tensor | None]:
    """Runs checked GLA inputs -> o [T,H,V] in v's dtype, final_state [S,1+N,H,K,V] fp32 or None.

    keep_states: the chunks' start states stay in memory for the backward pass, else they are computed again.
    """
    seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    # An operator costs the host as much as several launches: only who looks at operators pays for it.
    run = torch.ops.posttrain.sse_gla_forward if seen else _EagerGLA.apply
    o, final, *_ = run(
        x.q1, x.k1, x.g1, x.q2, x.k2, x.g2, x.v, None if x.same_values else x.v2, x.weight, x.index, x.cu_seqlens,
        x.initial_state if x.has_initial_state else None,
        x.num_partitions, x.scale, x.gate, x.chunk_size, output_final_state, keep_states,
    )  # fmt: skip
    return o, final if output_final_state else None


# Blocks of K and V, and options, measured on an H200 with K = V = 128 and chunks of 64. A warp group of four holds 64 rows; more
# warps would only hold copies of them. The increment's rows are key channels.
LAUNCHES: dict[str, tuple[int, int, dict[str, int]]] = {
    "increment": (128, 128, dict(num_warps=8)),
    "mix": (64, 128, dict(num_warps=4)),
    "gradient": (64, 64, dict(num_warps=4)),
}


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Constants of a call that the kernels share; names as in `triton_gla`."""

    K: int
    V: int
    C: int
    BC: int
    HALF: bool
    GLOW: bool

    @classmethod
    def of(cls, q: Tensor, g: Tensor, v: Tensor, chunk_size: int) -> Blocks:
        half = v.dtype == torch.bfloat16 and q.dtype == torch.bfloat16 and not interpreted()
        size = max(16, triton.next_power_of_2(chunk_size))
        return cls(K=q.shape[-1], V=v.shape[-1], C=chunk_size, BC=size, HALF=half, GLOW=g.dtype != torch.bfloat16)

    @property
    def state_dtype(self) -> torch.dtype:
        """Of what only products read: states at the chunks' starts, gradients of scores."""
        return torch.bfloat16 if self.HALF else torch.float32

    @property
    def flags(self) -> int:
        return triton.next_power_of_2(triton.cdiv(self.K, self.width(self.K, LAUNCHES["increment"][0])))

    def width(self, size: int, largest: int) -> int:
        """The block that covers `size` columns, at most `largest`, half of it where numbers or chunks are twice as long.

        Warp-group products get blocks of 64 bf16 columns at least: with 32, Triton 3.6 and 3.7 let them read past the end of
        shared memory (triton-lang/triton, issue 11366), seen here as illegal accesses and results that did not repeat.
        """
        least = 64 if self.HALF and self.BC >= 64 else 16
        largest = largest // (1 if self.HALF else 2) // (2 if self.BC > 64 else 1)
        return max(least, min(largest, triton.next_power_of_2(size)))

    def shape(self, name: str) -> dict[str, Any]:
        """Constants and options of a kernel's launch; longer chunks take twice the warps, other than in increments."""
        key_block, value_block, options = LAUNCHES[name]
        shape = dict(
            K=self.K, V=self.V, C=self.C, HALF=self.HALF, GLOW=self.GLOW, FLAGS=self.flags, BC=self.BC,
            BK=self.width(self.K, key_block), BV=self.width(self.V, value_block), **options,
        )  # fmt: skip
        if name != "increment" and self.BC > 64:
            shape["num_warps"] *= 2
        elif name == "increment" and shape["BK"] * shape["BV"] <= 8192:
            shape["num_warps"] = 4
        return shape

    @property
    def levels(self) -> int:
        return self.BC.bit_length() - 1


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
    """One forward's tensors, in the order of the operator, and what follows from them."""

    kinds: list[Kind]
    weight: Tensor
    v: Tensor
    initial: Tensor | None
    scale: float
    blocks: Blocks

    @property
    def heads(self) -> int:
        return self.v.shape[1]

    def own_rows(self, kind: Kind) -> bool:
        """Whether rows of a token meet in the output, so that each needs a place of its own."""
        return kind.o_div > 1

    def passes(self) -> list[tuple[Kind, bool, bool]]:
        """(kind, adds to what the one before left, leaves the result): launches that add up in one place."""
        last = len(self.kinds) - 1
        meet = self.own_rows(self.kinds[-1])
        return [(kind, n > 0 and not meet, n == last and not meet) for n, kind in enumerate(self.kinds)]


def _call(q1, k1, g1, q2, k2, g2, v, v2, weight, index, initial, num_partitions, scale, gate, chunk_size, sequences) -> Call:
    tokens, routes = index.shape
    shared_chunks, routed_chunks = plan_sizes(tokens, routes, sequences, num_partitions, chunk_size, q1 is not None)
    v = v.contiguous()
    values, value_div = (v, routes) if v2 is None else (v2.contiguous().flatten(0, 1), routes // v2.shape[1])
    kinds = []
    if q1 is not None:
        kinds.append(
            Kind(
                q=q1.contiguous(),
                k=k1.contiguous(),
                g=g1.contiguous(),
                v=v,
                x_div=1,
                y_div=1,
                o_div=1,
                read=False,
                write=False,
                first_chunk=0,
                num_chunks=shared_chunks,
                num_rows=tokens,
            )  # fmt: skip
        )
    kinds.append(
        Kind(
            q=q2.contiguous().flatten(0, 1),
            k=k2.contiguous().flatten(0, 1),
            g=g2.contiguous().flatten(0, 1),
            v=values,
            x_div=routes // q2.shape[1],
            y_div=value_div,
            o_div=routes,
            read=gate in ("both", "read"),
            write=gate in ("both", "write"),
            first_chunk=shared_chunks,
            num_chunks=routed_chunks,
            num_rows=tokens * routes,
        )  # fmt: skip
    )
    return Call(
        kinds=kinds, weight=weight.float().contiguous(), v=v, initial=None if initial is None else initial.contiguous(),
        scale=scale, blocks=Blocks.of(q2, g2, v, chunk_size),
    )  # fmt: skip


def _increments(c: Call, rows: Tensor, decay: Tensor, strong: Tensor, do: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What every chunk adds to the state, or with `do` to its gradient -> [NC,H,K,V] fp32. Without `do`, fills decay and strong;
    with it, also returns the gradients of the scores [NC,H,C,C] below the diagonal, and on it [NC,H,C] fp32."""
    b, backward = c.blocks, do is not None
    sizes = (decay.shape[0], c.heads)
    increment = torch.empty(*sizes, b.K, b.V, dtype=torch.float32, device=c.v.device)
    dscores = torch.empty((*sizes, b.C, b.C) if backward else (0,), dtype=b.state_dtype, device=c.v.device)
    own = increment.new_empty((*sizes, b.C) if backward else (0,))
    shape = b.shape("increment")
    for kind in c.kinds:
        grid = (c.heads, kind.num_chunks, triton.cdiv(b.K, shape["BK"]) * triton.cdiv(b.V, shape["BV"]))
        gla_increment_kernel[grid](
            rows, kind.q if backward else kind.k, kind.g, do if backward else kind.v, kind.v, c.weight, increment, decay, strong,
            dscores, own, c.heads, kind.first_chunk, c.scale if backward else 1.0,
            XDIV=kind.x_div, YDIV=kind.o_div if backward else kind.y_div, VDIV=kind.y_div,
            WEIGHTED=kind.read if backward else kind.write, BACKWARD=backward, **shape,
        )  # fmt: skip
    return increment, dscores, own


def _scan(
    c: Call, begin: Tensor, chunks: Tensor, increment: Tensor, decay: Tensor, start: Tensor | None, backward: bool, end: bool
) -> tuple[Tensor, Tensor]:
    """-> boundary [NC,H,K,V] in v's dtype (fp32 unless the products are bf16), the states at the other end or an empty tensor."""
    b = c.blocks
    boundary = torch.empty(increment.shape, dtype=b.state_dtype, device=increment.device)
    final = increment.new_empty((*begin.shape, c.heads, b.K, b.V) if end else (0,))
    rows, columns = 8, min(128, max(16, triton.next_power_of_2(b.V)))
    grid = (begin.numel(), c.heads, triton.cdiv(b.K, rows) * triton.cdiv(b.V, columns))
    gla_scan_kernel[grid](
        begin, chunks, increment, decay, start if start is not None else increment, boundary, final, c.heads,
        K=b.K, V=b.V, BACKWARD=backward, HAS_INITIAL=start is not None, HAS_FINAL=end, BK=rows, BV=columns, STAGES=4, num_warps=4,
    )  # fmt: skip
    return boundary, final


def _boundary_states(c: Call, plan: DevicePlan, end: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> start states of the chunks, final states (or empty), log decays [NC,H,K], flags of strong decay [NC,H,FLAGS]."""
    chunks, device = plan.rows.shape[0], c.v.device
    decay = torch.empty(chunks, c.heads, c.blocks.K, dtype=torch.float32, device=device)
    strong = torch.zeros(chunks, c.heads, c.blocks.flags, dtype=torch.int32, device=device)
    increment, _, _ = _increments(c, plan.rows, decay, strong)
    boundary, final = _scan(c, plan.begin, plan.chunks, increment, decay, c.initial, False, end)
    return boundary, final, decay, strong


class _Sum:
    """Where launches leave results that add up: one fp32 part for `passes`, or a place for every row where rows meet."""

    def __init__(self, c: Call, dtype: torch.dtype) -> None:
        self.total = torch.empty(c.v.shape, dtype=dtype, device=c.v.device)
        routed, routes = c.kinds[-1], c.kinds[-1].o_div
        self.part = torch.empty_like(self.total, dtype=torch.float32) if len(c.kinds) > 1 else None
        self.rows = None
        if c.own_rows(routed):
            self.rows = self.total.new_empty((c.v.shape[0], routes, *c.v.shape[1:]), dtype=torch.float32)

    def target(self, kind: Kind) -> Tensor:
        if self.rows is not None and kind.o_div > 1:
            return self.rows
        return self.total if self.part is None else self.part

    def finish(self) -> Tensor:
        if self.rows is None:
            return self.total
        total = self.rows.sum(1)
        return (total if self.part is None else total.add_(self.part)).to(self.total.dtype)


def _mix(c: Call, rows: Tensor, state: Tensor, strong: Tensor, do: Tensor | None = None) -> Tensor:
    """o, or with `do` the gradient of v where the routes share it -> [T,H,V]."""
    out = _Sum(c, c.v.dtype)
    for kind, add, last in c.passes():
        _mix_kind(c, kind, rows, state, strong, out.target(kind), out.total, add, last, do)
    return out.finish()


def _mix_kind(
    c: Call, kind: Kind, rows: Tensor, state: Tensor, strong: Tensor, part: Tensor, out: Tensor, add: bool, last: bool,
    do: Tensor | None = None,
) -> None:  # fmt: skip
    b = c.blocks
    shape = b.shape("mix") | dict(
        BACKWARD=do is not None, XDIV=kind.x_div, YDIV=kind.y_div if do is None else kind.o_div, READ=kind.read,
        WRITE=kind.write, ADD=add, LAST=last, LEVELS=b.levels,
    )  # fmt: skip
    tensors = (rows, kind.q, kind.k, kind.g, kind.v if do is None else do, c.weight, state, strong, part, out)
    grid = (c.heads, kind.num_chunks, triton.cdiv(b.V, shape["BV"]))
    gla_mix_kernel[grid](*tensors, c.heads, kind.first_chunk, c.scale, **shape)
    gla_mix_strong_kernel[_shares(c, kind)](
        *tensors, c.heads, kind.first_chunk, kind.num_chunks, c.scale, **shape | dict(num_stages=1)
    )


def _shares(c: Call, kind: Kind) -> tuple[int]:
    """Programs of a launch that usually finds nothing to do."""
    return (min(264, max(1, c.heads * kind.num_chunks)),)


def _forward(
    q1: Optional[Tensor], k1: Optional[Tensor], g1: Optional[Tensor], q2: Tensor, k2: Tensor, g2: Tensor, v: Tensor,
    v2: Optional[Tensor], weight: Tensor, index: Tensor, cu_seqlens: Tensor, initial: Optional[Tensor],
    num_partitions: int, scale: float, gate: str, chunk_size: int, output_final_state: bool, keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> o, final state (empty unless asked for), start states of the chunks (empty unless kept), their log decays and flags of
    strong decay, and the plan: rows, begin, chunks."""
    sequences = cu_seqlens.shape[0] - 1
    c = _call(q1, k1, g1, q2, k2, g2, v, v2, weight, index, initial, num_partitions, scale, gate, chunk_size, sequences)
    plan = build_device_plan(
        index.contiguous(), cu_seqlens, num_partitions=num_partitions, chunk_size=chunk_size, shared=q1 is not None
    )
    boundary, final, decay, strong = _boundary_states(c, plan, output_final_state)
    o = _mix(c, plan.rows, boundary, strong)
    kept = boundary if keep_states else boundary.new_empty(0)
    return o, final, kept, decay, strong, plan.rows, plan.begin, plan.chunks


sse_gla_forward = torch.library.custom_op("posttrain::sse_gla_forward", _forward, mutates_args=())


@sse_gla_forward.register_fake
def _(
    q1, k1, g1, q2, k2, g2, v, v2, weight, index, cu_seqlens, initial,
    num_partitions, scale, gate, chunk_size, output_final_state, keep_states,
):  # fmt: skip
    (tokens, routes), sequences = index.shape, cu_seqlens.shape[0] - 1
    heads, key_dim, value_dim = v.shape[1], q2.shape[-1], v.shape[-1]
    chunks = sum(plan_sizes(tokens, routes, sequences, num_partitions, chunk_size, q1 is not None))
    blocks = Blocks.of(q2, g2, v, chunk_size)
    streams = (sequences, 1 + num_partitions)
    return (
        v.new_empty(v.shape),
        v.new_empty((*streams, heads, key_dim, value_dim) if output_final_state else (0,), dtype=torch.float32),
        v.new_empty((chunks, heads, key_dim, value_dim) if keep_states else (0,), dtype=blocks.state_dtype),
        v.new_empty((chunks, heads, key_dim), dtype=torch.float32),
        v.new_empty((chunks, heads, blocks.flags), dtype=torch.int32),
        v.new_empty((chunks, chunk_size), dtype=torch.int32),
        v.new_empty(streams, dtype=torch.int32),
        v.new_empty(streams, dtype=torch.int32),
    )


def _gradients(
    do: Tensor, dfinal: Optional[Tensor],
    q1: Optional[Tensor], k1: Optional[Tensor], g1: Optional[Tensor], q2: Tensor, k2: Tensor, g2: Tensor, v: Tensor,
    v2: Optional[Tensor], weight: Tensor, index: Tensor, initial: Optional[Tensor],
    boundary: Tensor, decay: Tensor, strong: Tensor, plan_rows: Tensor, begin: Tensor, chunks: Tensor,
    num_partitions: int, scale: float, gate: str, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> gradients of q1, k1, g1, q2, k2, g2, v, v2, weight, initial; empty where the input is None."""
    c = _call(q1, k1, g1, q2, k2, g2, v, v2, weight, index, initial, num_partitions, scale, gate, chunk_size, begin.shape[0])
    do = do.contiguous()
    if boundary.numel() == 0:
        plan = DevicePlan(rows=plan_rows, begin=begin, chunks=chunks, shared_chunks=0, routed_chunks=0)
        boundary, *_ = _boundary_states(c, plan, False)
    increment, dscores, own = _increments(c, plan_rows, decay, strong, do)
    dend, dinitial = _scan(
        c, begin, chunks, increment, decay, None if dfinal is None else dfinal.contiguous(), True, initial is not None
    )
    del increment
    dv, dv2 = _value_gradients(c, plan_rows, dend, strong, do, v2)
    found = [_row_gradients(c, kind, plan_rows, boundary, dend, decay, dscores, own, strong, do) for kind in c.kinds]
    dq1, dk1, dg1 = found[0][:3] if len(found) > 1 else (v.new_empty(0) for _ in range(3))
    kind, routes = c.kinds[-1], index.shape[1]
    dq2, dk2, dg2 = (_sum_routes(a, routes, kind.x_div) for a in found[-1][:3])
    dweight = found[-1][3].view(weight.shape).to(weight.dtype)
    return dq1, dk1, dg1, dq2, dk2, dg2, dv, dv2, dweight, dinitial


def _value_gradients(c: Call, rows: Tensor, dend: Tensor, strong: Tensor, do: Tensor, v2: Tensor | None) -> tuple[Tensor, Tensor]:
    if v2 is None:
        return _mix(c, rows, dend, strong, do), c.v.new_empty(0)
    found = []
    for kind in c.kinds:
        dv = c.v.new_empty((kind.num_rows, *c.v.shape[1:]))
        _mix_kind(c, kind, rows, dend, strong, dv, dv, False, True, do)
        found.append(dv)
    routed = _sum_routes(found[-1], c.kinds[-1].o_div, c.kinds[-1].y_div)
    return found[0] if len(found) > 1 else torch.zeros_like(c.v), routed


def _row_gradients(
    c: Call,
    kind: Kind,
    rows: Tensor,
    boundary: Tensor,
    dend: Tensor,
    decay: Tensor,
    dscores: Tensor,
    own: Tensor,
    strong: Tensor,
    do: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dq, dk, dg [rows, H, K], dweight [rows] fp32 (zero without a gate)."""
    b = c.blocks
    shape = b.shape("gradient") | dict(
        XDIV=kind.x_div, YDIV=kind.y_div, ODIV=kind.o_div, READ=kind.read, WRITE=kind.write, LEVELS=b.levels
    )
    blocks = triton.cdiv(b.K, shape["BK"])
    gated = kind.read or kind.write
    dq, dk, dg = (torch.empty((kind.num_rows, *a.shape[1:]), dtype=a.dtype, device=a.device) for a in (kind.q, kind.k, kind.g))
    dweight = torch.empty((blocks, kind.num_rows, c.heads) if gated else (0,), dtype=torch.float32, device=dq.device)
    tensors = (
        rows, kind.q, kind.k, kind.g, kind.v, do, c.weight, boundary, dend, decay, dscores, own, strong,
        dq, dk, dg, dweight,
        kind.num_rows, c.heads, kind.first_chunk,
    )  # fmt: skip
    gla_gradient_kernel[(c.heads, kind.num_chunks, blocks)](*tensors, c.scale, **shape)
    gla_gradient_strong_kernel[_shares(c, kind)](*tensors, kind.num_chunks, c.scale, **shape, num_stages=1)
    return dq, dk, dg, dweight.sum((0, 2)) if gated else dweight.new_zeros(kind.num_rows)


def _sum_routes(rows: Tensor, routes: int, div: int) -> Tensor:
    """[T*R, H, D] -> [T, 1|R, H, D]: summed over the routes where they share a source row."""
    rows = rows.view(-1, routes, *rows.shape[1:])
    return rows if div == 1 else rows.sum(1, keepdim=True)


sse_gla_backward = torch.library.custom_op("posttrain::sse_gla_backward", _gradients, mutates_args=())


@sse_gla_backward.register_fake
def _(
    do, dfinal, q1, k1, g1, q2, k2, g2, v, v2, weight, index, initial, boundary, decay, strong, plan_rows,
    begin, chunks, num_partitions, scale, gate, chunk_size,
):  # fmt: skip
    def like(a: Tensor | None) -> Tensor:
        return v.new_empty(0) if a is None else torch.empty_like(a, memory_format=torch.contiguous_format)

    dinitial = v.new_empty(0 if initial is None else initial.shape, dtype=torch.float32)
    return *(like(a) for a in (q1, k1, g1, q2, k2, g2, v, v2, weight)), dinitial


def _setup_context(ctx, inputs, output) -> None:
    q1, k1, g1, q2, k2, g2, v, v2, weight, index, _, initial, *options = inputs
    _, _, boundary, decay, strong, rows, begin, chunks = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(boundary, decay, strong, rows, begin, chunks)
    ctx.save_for_backward(q1, k1, g1, q2, k2, g2, v, v2, weight, index, initial, boundary, decay, strong, rows, begin, chunks)
    ctx.options = options[:4]
    ctx.output_final_state = options[4]


def _backward(run: Callable, ctx, do, dfinal) -> tuple[Tensor | None, ...]:
    """Gradients of the forward's 18 inputs, by `run`: `_gradients` or its operator."""
    if do is None and dfinal is None:
        return (None,) * 18
    q1, v2, initial = ctx.saved_tensors[0], ctx.saved_tensors[7], ctx.saved_tensors[10]
    do = torch.zeros_like(ctx.saved_tensors[6]) if do is None else do
    dfinal = dfinal if ctx.output_final_state else None
    *found, dv2, dweight, dinitial = run(do, dfinal, *ctx.saved_tensors, *ctx.options)
    if q1 is None:
        found[:3] = (None,) * 3
    dv2 = None if v2 is None else dv2
    dinitial = None if initial is None else dinitial.to(initial.dtype)
    return *found, dv2, dweight, None, None, dinitial, *(None,) * 6


class _EagerGLA(torch.autograd.Function):
    """The operator without its dispatch."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx, do, dfinal, *_):
        return _backward(_gradients, ctx, do, dfinal)


def _operator_backward(ctx, do, dfinal, *_):
    return _backward(torch.ops.posttrain.sse_gla_backward, ctx, do, dfinal)


sse_gla_forward.register_autograd(_operator_backward, setup_context=_setup_context)
