"""`sse` on a GPU: the launches of `triton_gla_launch.py` as `torch.library` operators, which torch.compile and checkpointing see
through."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.kernels.recompute import kept
from posttrain.kernels.sse.checks import Inputs
from posttrain.kernels.sse.triton_gla_launch import (
    Chunks,
    Sizes,
    end_gradients,
    make_call,
    mix,
    mix_apart,
    row_gradients,
    start_states,
    sum_routes,
    upstream,
)
from posttrain.kernels.sse.triton_plan import DevicePlan, build_device_plan, plan_sizes
from posttrain.kernels.triton_launch import aligned, compiled_together


def run_triton_gla(x: Inputs, *, output_final_state: bool = True, keep_states: bool = True) -> tuple[Tensor, Tensor | None]:
    """Runs checked GLA inputs -> o [T,H,V] in v's dtype, final_state [S,1+N,H,K,V] fp32 or None.

    keep_states: the chunks' start states stay in memory for the backward pass, else they are computed again.
    """
    seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    # An operator costs the host as much as several launches: only who looks at operators pays for it.
    run = torch.ops.posttrain.sse_gla_forward if seen else _EagerGLA.apply
    routes = {a.shape[1] for a in (x.q2, x.k2, x.g2)}
    q2, k2, g2 = (x.q2, x.k2, x.g2) if len(routes) == 1 else (a.expand(-1, max(routes), -1, -1) for a in (x.q2, x.k2, x.g2))
    o, final, *_ = run(
        x.q1, x.k1, x.g1, q2, k2, g2, x.v, None if x.same_values else x.v2, x.weight, x.index, x.cu_seqlens,
        x.initial_state if x.has_initial_state else None,
        x.num_partitions, x.scale, x.gate, x.chunk_size, output_final_state, keep_states,
    )  # fmt: skip
    return o, final if output_final_state else None


def _forward_launches(
    q1: Tensor | None, k1: Tensor | None, g1: Tensor | None, q2: Tensor, k2: Tensor, g2: Tensor, v: Tensor,
    v2: Tensor | None, weight: Tensor, index: Tensor, cu_seqlens: Tensor, initial: Tensor | None,
    num_partitions: int, scale: float, gate: str, chunk_size: int, output_final_state: bool, keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> o, final state (empty unless asked for), start states of the chunks (empty unless kept), their log decays and flags of
    strong decay, and the plan: rows, begin, chunks."""
    c = make_call(
        q1, k1, g1, q2, k2, g2, v, v2, weight, index, initial, num_partitions, scale, gate, chunk_size, cu_seqlens.shape[0] - 1
    )
    plan = build_device_plan(index, cu_seqlens, num_partitions=num_partitions, chunk_size=chunk_size, shared=q1 is not None)
    boundary, final, chunks = start_states(c, plan, end=output_final_state)
    o = mix(c, chunks, boundary)
    kept = boundary if keep_states else boundary.new_empty(0)
    return o, final, kept, chunks.decay, chunks.strong, plan.rows, plan.begin, plan.chunks


def _forward(
    q1: Tensor | None, k1: Tensor | None, g1: Tensor | None, q2: Tensor, k2: Tensor, g2: Tensor, v: Tensor,
    v2: Tensor | None, weight: Tensor, index: Tensor, cu_seqlens: Tensor, initial: Tensor | None,
    num_partitions: int, scale: float, gate: str, chunk_size: int, output_final_state: bool, keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`_forward_launches`, compiled together."""
    return compiled_together(
        _forward_launches, q1, k1, g1, q2, k2, g2, v, v2, weight, index, cu_seqlens, initial,
        num_partitions, scale, gate, chunk_size, output_final_state, keep_states,
        key=("forward", output_final_state, *_constants(q1, q2, g2, v, v2, index, initial, num_partitions, chunk_size)),
    )  # fmt: skip


def _constants(
    q1: Tensor | None, q2: Tensor, g2: Tensor, v: Tensor, v2: Tensor | None, index: Tensor, initial: Tensor | None,
    num_partitions: int, chunk_size: int,
) -> tuple:  # fmt: skip
    """What the constants of the launches depend on."""
    return (
        v.device.index, q1 is None, q2.dtype, g2.dtype, v.dtype, q2.shape[1:], v.shape[-1], v2 is None or v2.shape[1],
        index.shape[1], initial is None, num_partitions, chunk_size,
    )  # fmt: skip


sse_gla_forward = torch.library.custom_op("posttrain::sse_gla_forward", _forward, mutates_args=())


@sse_gla_forward.register_fake
def _(
    q1, k1, g1, q2, k2, g2, v, v2, weight, index, cu_seqlens, initial,
    num_partitions, scale, gate, chunk_size, output_final_state, keep_states,
):  # fmt: skip
    (tokens, routes), sequences = index.shape, cu_seqlens.shape[0] - 1
    heads, key_dim, value_dim = v.shape[1], q2.shape[-1], v.shape[-1]
    chunks = sum(plan_sizes(tokens, routes, sequences, num_partitions, chunk_size, q1 is not None))
    sizes = Sizes.choose(q2, k2, g2, v, chunk_size)
    streams = (sequences, 1 + num_partitions)
    return (
        v.new_empty(v.shape),
        v.new_empty((*streams, heads, key_dim, value_dim) if output_final_state else (0,), dtype=torch.float32),
        v.new_empty((chunks, heads, key_dim, value_dim) if keep_states else (0,), dtype=sizes.stored),
        v.new_empty((chunks, heads, 2, key_dim), dtype=torch.float32),
        v.new_empty((chunks, heads, sizes.flags), dtype=torch.int32),
        v.new_empty((chunks, chunk_size), dtype=torch.int32),
        v.new_empty(streams, dtype=torch.int32),
        v.new_empty(streams, dtype=torch.int32),
    )


def _gradient_launches(
    do: Tensor, dfinal: Tensor | None,
    q1: Tensor | None, k1: Tensor | None, g1: Tensor | None, q2: Tensor, k2: Tensor, g2: Tensor, v: Tensor,
    v2: Tensor | None, weight: Tensor, index: Tensor, initial: Tensor | None,
    boundary: Tensor, decay: Tensor, strong: Tensor, plan_rows: Tensor, begin: Tensor, chunks: Tensor,
    num_partitions: int, scale: float, gate: str, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> gradients of q1, k1, g1, q2, k2, g2, v, v2, weight, initial; empty where the input is None."""
    c = make_call(q1, k1, g1, q2, k2, g2, v, v2, weight, index, initial, num_partitions, scale, gate, chunk_size, begin.shape[0])
    shared = c.kinds[-1].first_chunk
    plan = DevicePlan(rows=plan_rows, begin=begin, chunks=chunks, shared_chunks=shared, routed_chunks=plan_rows.shape[0] - shared)
    grid = Chunks(plan=plan, decay=decay, strong=strong)
    do, dfinal = aligned(do), None if dfinal is None else aligned(dfinal)
    if boundary.numel() == 0:
        boundary, _, _ = start_states(c, plan, end=False)
    dend, dinitial = end_gradients(c, grid, do, dfinal)
    dv, dv2 = (mix(c, grid, dend, do), v.new_empty(0)) if v2 is None else mix_apart(c, grid, dend, do)
    up = upstream(c, grid, do)
    found = [row_gradients(c, kind, grid, boundary, dend, up) for kind in c.kinds]
    dq1, dk1, dg1 = found[0][:3] if len(found) > 1 else (v.new_empty(0) for _ in range(3))
    dq2, dk2, dg2 = (sum_routes(a, c.routes, c.kinds[-1].x_div) for a in found[-1][:3])
    return dq1, dk1, dg1, dq2, dk2, dg2, dv, dv2, found[-1][3].view(weight.shape).to(weight.dtype), dinitial


def _gradients(
    do: Tensor, dfinal: Tensor | None,
    q1: Tensor | None, k1: Tensor | None, g1: Tensor | None, q2: Tensor, k2: Tensor, g2: Tensor, v: Tensor,
    v2: Tensor | None, weight: Tensor, index: Tensor, initial: Tensor | None,
    boundary: Tensor, decay: Tensor, strong: Tensor, plan_rows: Tensor, begin: Tensor, chunks: Tensor,
    num_partitions: int, scale: float, gate: str, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`_gradient_launches`, compiled together."""
    constants = _constants(q1, q2, g2, v, v2, index, initial, num_partitions, chunk_size)
    return compiled_together(
        _gradient_launches, do, dfinal, q1, k1, g1, q2, k2, g2, v, v2, weight, index, initial, boundary, decay, strong,
        plan_rows, begin, chunks, num_partitions, scale, gate, chunk_size,
        key=("gradients", dfinal is None, gate == "none", boundary.numel() == 0, *constants),
    )  # fmt: skip


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
    saved = ctx.saved_tensors  # once: checkpointing computes them again and gives them out a single time
    q1, v, v2, initial = saved[0], saved[6], saved[7], saved[10]
    do = torch.zeros_like(v) if do is None else do
    dfinal = dfinal if ctx.output_final_state else None
    *found, dv2, dweight, dinitial = run(do, dfinal, *saved, *ctx.options)
    if q1 is None:
        found[:3] = (None,) * 3
    dv2 = None if v2 is None else dv2
    dinitial = None if initial is None else dinitial.to(initial.dtype)
    return *found, dv2, dweight, None, None, dinitial, *(None,) * 6


class _EagerGLA(torch.autograd.Function):
    """The operator without its dispatch. Under `keep_results`, its forward runs once for a checkpointed layer."""

    forward = staticmethod(partial(kept, _forward))
    setup_context = staticmethod(_setup_context)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal, *_):
        return _backward(_gradients, ctx, do, dfinal)


def _operator_backward(ctx, do, dfinal, *_):
    return _backward(torch.ops.posttrain.sse_gla_backward, ctx, do, dfinal)


sse_gla_forward.register_autograd(_operator_backward, setup_context=_setup_context)
