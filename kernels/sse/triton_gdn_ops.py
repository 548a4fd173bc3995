"""`sse_gdn` on a GPU: the launches of `triton_gdn_launch.py` as `torch.library` operators, which torch.compile and checkpointing
see through."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.kernels.recompute import kept
from posttrain.kernels.sse.checks import Inputs
from posttrain.kernels.sse.triton_gdn_launch import Sizes, gradients, make_call, outputs, reverse, states
from posttrain.kernels.sse.triton_plan import DevicePlan, build_device_plan, plan_sizes
from posttrain.kernels.triton_launch import aligned, compiled_together


def run_triton_gdn(x: Inputs, *, output_final_state: bool = True, keep_states: bool = True) -> tuple[Tensor, Tensor | None]:
    """Runs checked gated-delta inputs -> o [T,H,V] in v's dtype, final_state [S,1+N,H,K,V] fp32 or None.

    keep_states: the chunks' start states, u and inverses stay in memory for the backward pass, else they are computed again.
    """
    seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    # An operator costs the host as much as several launches: only who looks at operators pays for it.
    run = torch.ops.posttrain.sse_gdn_forward if seen else _EagerGDN.apply
    o, final, *_ = run(
        x.q1, x.k1, x.g1, x.b1, x.q2, x.k2, x.g2, x.b2, x.v, None if x.same_values else x.v2, x.weight, x.index, x.cu_seqlens,
        x.initial_state if x.has_initial_state else None,
        x.num_partitions, x.scale, x.gate, x.chunk_size, output_final_state, keep_states,
    )  # fmt: skip
    return o, final if output_final_state else None


def _plan(c, rows: Tensor, begin: Tensor, chunks: Tensor) -> DevicePlan:
    shared_chunks = c.kinds[-1].first_chunk
    return DevicePlan(
        rows=rows, begin=begin, chunks=chunks, shared_chunks=shared_chunks, routed_chunks=c.num_chunks - shared_chunks
    )


def _forward_launches(
    q1: Tensor | None, k1: Tensor | None, g1: Tensor | None, b1: Tensor | None,
    q2: Tensor, k2: Tensor, g2: Tensor, b2: Tensor, v: Tensor, v2: Tensor | None,
    weight: Tensor, index: Tensor, cu_seqlens: Tensor, initial: Tensor | None,
    num_partitions: int, scale: float, gate: str, chunk_size: int, output_final_state: bool, keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> o, final state (empty unless asked for), start states, u and inverses of the chunks (empty unless kept), accumulated
    log decays, and the plan: rows, begin, chunks."""
    c = make_call(
        q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight, index, initial,
        num_partitions, scale, gate, chunk_size, cu_seqlens.shape[0] - 1,
    )  # fmt: skip
    plan = build_device_plan(
        index.contiguous(), cu_seqlens, num_partitions=num_partitions, chunk_size=chunk_size, shared=q1 is not None
    )
    total, inverse, boundary, u, final = states(c, plan, end=output_final_state, keep=keep_states)
    o = outputs(c, plan, total, u, boundary)
    kept_states, kept_u = (a if keep_states else a.new_empty(0) for a in (boundary, u))
    return o, final, kept_states, kept_u, inverse, total, plan.rows, plan.begin, plan.chunks


def _forward(
    q1: Tensor | None, k1: Tensor | None, g1: Tensor | None, b1: Tensor | None,
    q2: Tensor, k2: Tensor, g2: Tensor, b2: Tensor, v: Tensor, v2: Tensor | None,
    weight: Tensor, index: Tensor, cu_seqlens: Tensor, initial: Tensor | None,
    num_partitions: int, scale: float, gate: str, chunk_size: int, output_final_state: bool, keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`_forward_launches`, compiled together."""
    return compiled_together(
        _forward_launches, q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight, index, cu_seqlens, initial,
        num_partitions, scale, gate, chunk_size, output_final_state, keep_states,
        key=(
            "gdn forward", output_final_state, keep_states,
            *_constants(q1, q2, g2, b2, v, v2, index, initial, num_partitions, gate, chunk_size),
        ),
    )  # fmt: skip


def _constants(
    q1: Tensor | None, q2: Tensor, g2: Tensor, b2: Tensor, v: Tensor, v2: Tensor | None, index: Tensor, initial: Tensor | None,
    num_partitions: int, gate: str, chunk_size: int,
) -> tuple:  # fmt: skip
    """What the constants of the launches depend on."""
    return (
        v.device.index, q1 is None, q2.dtype, g2.dtype, b2.dtype, v.dtype, q2.shape[1:], v.shape[-1], v2 is None or v2.shape[1],
        index.shape[1], initial is None, num_partitions, gate, chunk_size,
    )  # fmt: skip


sse_gdn_forward = torch.library.custom_op("posttrain::sse_gdn_forward", _forward, mutates_args=())


@sse_gdn_forward.register_fake
def _(
    q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight, index, cu_seqlens, initial,
    num_partitions, scale, gate, chunk_size, output_final_state, keep_states,
):  # fmt: skip
    (tokens, routes), sequences = index.shape, cu_seqlens.shape[0] - 1
    heads, key_dim, value_dim = v.shape[1], q2.shape[-1], v.shape[-1]
    chunks = sum(plan_sizes(tokens, routes, sequences, num_partitions, chunk_size, q1 is not None))
    stored = Sizes.choose(q2, k2, v, chunk_size).stored
    streams = (sequences, 1 + num_partitions)
    return (
        v.new_empty(v.shape),
        v.new_empty((*streams, heads, key_dim, value_dim) if output_final_state else (0,), dtype=torch.float32),
        v.new_empty((chunks, heads, key_dim, value_dim) if keep_states else (0,), dtype=stored),
        v.new_empty((chunks, heads, chunk_size, value_dim) if keep_states else (0,), dtype=stored),
        v.new_empty((chunks, heads, chunk_size, chunk_size) if keep_states else (0,), dtype=stored),
        v.new_empty((chunks, heads, 2, chunk_size), dtype=torch.float32),
        v.new_empty((chunks, chunk_size), dtype=torch.int32),
        v.new_empty(streams, dtype=torch.int32),
        v.new_empty(streams, dtype=torch.int32),
    )


def _gradient_launches(
    do: Tensor, dfinal: Tensor | None,
    q1: Tensor | None, k1: Tensor | None, g1: Tensor | None, b1: Tensor | None,
    q2: Tensor, k2: Tensor, g2: Tensor, b2: Tensor, v: Tensor, v2: Tensor | None,
    weight: Tensor, index: Tensor, initial: Tensor | None,
    boundary: Tensor, u: Tensor, inverse: Tensor, total: Tensor, rows: Tensor, begin: Tensor, chunks: Tensor,
    num_partitions: int, scale: float, gate: str, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> gradients of q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight, initial; empty where the input is None."""
    c = make_call(
        q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight, index, initial, num_partitions, scale, gate, chunk_size, begin.shape[0]
    )
    plan = _plan(c, rows, begin, chunks)
    if boundary.numel() == 0:
        _, inverse, boundary, u, _ = states(c, plan, end=False, keep=True)
    do, dfinal = aligned(do), None if dfinal is None else aligned(dfinal)
    z, dboundary, dinitial = reverse(c, plan, total, inverse, do, dfinal, initial is not None)
    found, dv, dweight = gradients(c, plan, total, u, z, boundary, dboundary, do, v2 is not None)
    first, second = found[0] if len(found) > 1 else None, found[-1]
    out = [v.new_empty(0) if first is None else first[n] for n in "qkgb"]
    out += [second[n].view(a.shape) for n, a in zip("qkgb", (q2, k2, g2, b2))]
    if v2 is not None:
        dv = torch.zeros_like(c.v) if first is None else first["v"]
    dweight = torch.zeros_like(weight) if dweight is None else dweight.view(weight.shape).to(weight.dtype)
    return *out, dv, v.new_empty(0) if v2 is None else second["v"].view(v2.shape), dweight, dinitial


def _gradients(
    do: Tensor, dfinal: Tensor | None,
    q1: Tensor | None, k1: Tensor | None, g1: Tensor | None, b1: Tensor | None,
    q2: Tensor, k2: Tensor, g2: Tensor, b2: Tensor, v: Tensor, v2: Tensor | None,
    weight: Tensor, index: Tensor, initial: Tensor | None,
    boundary: Tensor, u: Tensor, inverse: Tensor, total: Tensor, rows: Tensor, begin: Tensor, chunks: Tensor,
    num_partitions: int, scale: float, gate: str, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`_gradient_launches`, compiled together."""
    return compiled_together(
        _gradient_launches, do, dfinal, q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight, index, initial,
        boundary, u, inverse, total, rows, begin, chunks, num_partitions, scale, gate, chunk_size,
        key=(
            "gdn gradients", dfinal is None, boundary.numel() == 0,
            *_constants(q1, q2, g2, b2, v, v2, index, initial, num_partitions, gate, chunk_size),
        ),
    )  # fmt: skip


sse_gdn_backward = torch.library.custom_op("posttrain::sse_gdn_backward", _gradients, mutates_args=())


@sse_gdn_backward.register_fake
def _(
    do, dfinal, q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight, index, initial, boundary, u, inverse, total, rows, begin, chunks,
    num_partitions, scale, gate, chunk_size,
):  # fmt: skip
    def like(a: Tensor | None) -> Tensor:
        return v.new_empty(0) if a is None else torch.empty_like(a, memory_format=torch.contiguous_format)

    dinitial = v.new_empty(0 if initial is None else initial.shape, dtype=torch.float32)
    return *(like(a) for a in (q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight)), dinitial


def _setup_context(ctx, inputs, output) -> None:
    *tensors, num_partitions, scale, gate, chunk_size, output_final_state, _ = inputs
    q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight, index, _, initial = tensors
    _, _, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(q1, k1, g1, b1, q2, k2, g2, b2, v, v2, weight, index, initial, *kept)
    ctx.options = num_partitions, scale, gate, chunk_size
    ctx.output_final_state = output_final_state


def _backward(run: Callable, ctx, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of the forward's 20 inputs, by `run`: `_gradients` or its operator."""
    if do is None and dfinal is None:
        return (None,) * 20
    saved = ctx.saved_tensors
    q1, v, v2, initial = saved[0], saved[8], saved[9], saved[12]
    *grads, dv2, dweight, dinitial = run(
        torch.zeros_like(v) if do is None else do, dfinal if ctx.output_final_state else None, *saved, *ctx.options
    )
    if q1 is None:
        grads[:4] = [None] * 4
    dinitial = None if initial is None else dinitial.to(initial.dtype)
    return *grads, None if v2 is None else dv2, dweight, None, None, dinitial, *(None,) * 6


class _EagerGDN(torch.autograd.Function):
    """The operator without its dispatch. Under `keep_results`, its forward runs once for a checkpointed layer."""

    forward = staticmethod(partial(kept, _forward))
    setup_context = staticmethod(_setup_context)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal, *_):
        return _backward(_gradients, ctx, do, dfinal)


def _operator_backward(ctx, do, dfinal, *_):
    return _backward(torch.ops.posttrain.sse_gdn_backward, ctx, do, dfinal)


sse_gdn_forward.register_autograd(_operator_backward, setup_context=_setup_context)
