"""Sparse-state linear attention: a shared state that every token writes and reads, and N states of which a token touches R.

    o, final_state = sse(q1, k1, g1, q2, k2, g2, v, weight, index, cu_seqlens=cu_seqlens, num_partitions=4)

Inputs are packed: T tokens of S sequences one after another, no batch dimension. All backends work on the same chunk grid
(`plan.py`), so training, prefill and decoding (`sse_extend` on a `ChunkState`) do the same arithmetic. Nothing here asks the
device for a value in `sse` and `sse_gdn`.

Shapes: T packed tokens, H heads, K key width, V value width, N partitions, R routed, S sequences, C chunk.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from posttrain.kernels.sse.checks import Gate, Inputs, check_inputs, without_autocast
from posttrain.kernels.sse.chunked import run_chunked
from posttrain.kernels.sse.chunked_gdn import run_chunked_gdn
from posttrain.kernels.sse.decode import ChunkState, extend
from posttrain.kernels.sse.folds import folds_together
from posttrain.kernels.sse.reference import run_reference
from posttrain.kernels.sse.routing import balance_loss, route

Backend = Literal["reference", "torch", "triton"]

__all__ = [
    "Backend",
    "ChunkState",
    "balance_loss",
    "folds_together",
    "route",
    "sse",
    "sse_extend",
    "sse_gdn",
    "sse_gdn_extend",
    "use_backend",
]

_HAS_TRITON = find_spec("triton") is not None  # absent from some platforms
_default_backend: Backend | None = None


@contextmanager
def use_backend(backend: Backend | None) -> Iterator[None]:
    """What `backend=None` means inside the block, for calls that a model makes; None is the best one here.

    It holds for the whole process: gradient checkpointing computes forwards again in threads of autograd.
    """
    global _default_backend
    before, _default_backend = _default_backend, backend
    try:
        yield
    finally:
        _default_backend = before


def sse(
    q1: Tensor | None,
    k1: Tensor | None,
    g1: Tensor | None,
    q2: Tensor,
    k2: Tensor,
    g2: Tensor,
    v: Tensor,
    weight: Tensor,
    index: Tensor,
    *,
    cu_seqlens: Tensor,
    num_partitions: int,
    v2: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    gate: Gate = "both",
    chunk_size: int = 64,
    output_final_state: bool = True,
    keep_states: bool = True,
    exact: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """SSE with a decay per key channel (GLA), differentiable in every floating-point input.

    Per head, with e the token's weight for partition i, all other partitions untouched (neither written nor decayed):

        S0 <- diag(exp g1) S0 + k1^T v        Si <- diag(exp g2) Si + (e k2)^T v        o = scale (q1 S0 + sum_i e q2 Si)

    Args:
        q1, k1, g1: [T, H, K] of the shared partition, g1 the log decay (<= 0, and finite: -1e4 forgets as well as -inf would);
            all None: there is no shared partition.
        q2, k2, g2: [T, H, K] of the routed partitions, or [T, R, H, K] with a row a route.
        v: [T, H, V]; v2: values of the routed partitions where they differ, [T, H, V] or [T, R, H, V].
        weight: [T, R] the router's weights; index: [T, R] int64 in [0, N), distinct for a token.
        cu_seqlens: [S+1] integers from 0 to T, not decreasing; a sequence may be empty. On the CPU it spares the torch backend
            its longest scan. On a GPU nobody looks at the values, which the host would have to wait for: boundaries that are none
            end in wrong numbers or an illegal access.
        num_partitions: N.
        initial_state: [S, 1+N, H, K, V], row 0 the shared partition; zeros by default.
        scale: K**-0.5 by default.
        gate: where e goes: "both" (as above), "write" (k only), "read" (q only), "none".
        chunk_size: C, the chunk of the grid; results differ by rounding only.
        output_final_state: False spares a GPU the writing of the final states.
        keep_states: whether the triton backend keeps the start state of every chunk for the backward pass, NC*H*K*V numbers in
            the products' precision (0.6 GB for 32,768 tokens, n4k1, 18 heads of 128, C = 64, bf16), or computes them again, which
            spares memory between the passes, not within one.
        exact: o is bitwise what `sse_extend` gives token by token, at several times the cost, with the ordinary gradients but
            none of initial_state; in Triton only, in bf16 on a GPU, and without final states.
        backend: "reference" (token loop), "torch" (chunked), "triton", or None: triton where it can run the inputs on a GPU,
            else torch.

    Returns:
        o [T, H, V] in v's dtype, final_state [S, 1+N, H, K, V] in fp32 (float64 for float64 inputs) or None. The reference and
        torch backends compute in fp32 (float64) whatever the inputs, under autocast too; triton's products take bf16 operands
        where q, k and v are bf16, and all sums and states are fp32. A sequence's numbers do not depend on what it is packed
        with: bitwise for triton and for torch on the CPU; torch on a GPU picks its products by the size of the batch.

    Raises:
        ValueError: a shape, an option, or (inputs on the CPU only) a value is wrong; the triton backend was asked for and cannot
            run the inputs (the message says why).
    """
    x = check_inputs(
        q1, k1, g1, None, q2, k2, g2, None, v, weight, index, v2=v2, cu_seqlens=cu_seqlens, initial_state=initial_state,
        num_partitions=num_partitions, scale=scale, gate=gate, chunk_size=chunk_size, is_gdn=False,
    )  # fmt: skip
    if exact:
        if backend not in (None, "triton"):
            raise ValueError(f"exact=True runs in Triton only, got backend={backend!r}")
        return _run_exact(x), None
    return _run(x, backend, output_final_state=output_final_state, keep_states=keep_states)


def sse_gdn(
    q1: Tensor | None,
    k1: Tensor | None,
    g1: Tensor | None,
    b1: Tensor | None,
    q2: Tensor,
    k2: Tensor,
    g2: Tensor,
    b2: Tensor,
    v: Tensor,
    weight: Tensor,
    index: Tensor,
    *,
    cu_seqlens: Tensor,
    num_partitions: int,
    v2: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    gate: Gate = "both",
    chunk_size: int = 64,
    output_final_state: bool = True,
    keep_states: bool = True,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """SSE with the gated delta rule; arguments as in `sse` save for the scalars a head g (log decay) and b (write strength).

    Per head and touched partition: S <- exp(g) S; S <- S + b k^T (e v - k S); o += scale e q S (e = 1 in the shared partition).

    Args:
        g1, b1: [T, H]; g2, b2: [T, H] or [T, R, H].
        q1, k1, q2, k2: as in `sse`, L2-normalised by the caller.
        gate: "write" keeps e before v only, "read" before q only.
        keep_states: as in `sse`, and the rows' corrections and the chunks' inverses with them, NC*H*C*(V+C) numbers more.

    Raises:
        ValueError: as `sse`.
    """
    x = check_inputs(
        q1, k1, g1, b1, q2, k2, g2, b2, v, weight, index, v2=v2, cu_seqlens=cu_seqlens, initial_state=initial_state,
        num_partitions=num_partitions, scale=scale, gate=gate, chunk_size=chunk_size, is_gdn=True,
    )  # fmt: skip
    return _run(x, backend, output_final_state=output_final_state, keep_states=keep_states)


def sse_extend(
    q1: Tensor | None,
    k1: Tensor | None,
    g1: Tensor | None,
    q2: Tensor,
    k2: Tensor,
    g2: Tensor,
    v: Tensor,
    weight: Tensor,
    index: Tensor,
    *,
    cu_seqlens: Tensor | None,
    state: ChunkState,
    slots: Tensor,
    num_partitions: int,
    v2: Tensor | None = None,
    scale: float | None = None,
    gate: Gate = "both",
    strict: bool = False,
    exact: bool = False,
    fresh: bool = False,
) -> Tensor:
    """Continues sequences on the chunk grid: `sse` over all tokens so far, of which only the new ones come back. No autograd.

    Prefill is this on a reset slot; decoding is this with one token a sequence, which takes a faster path.

    Args:
        cu_seqlens: as in `sse`; None says one token a sequence, without a copy to the device: fit for a CUDA graph.
        state: the layer's decode state, updated in place; its chunk size is the grid's.
        slots: [S] int64, sequence s continues slot slots[s]; distinct.
        strict: one-token calls too compute whole chunks, so that outputs are bitwise those of `sse` on the CPU.
        exact: longer calls compute every row as one-token calls do, so that outputs are bitwise those of `sse(exact=True)`,
            however a sequence is cut; for the Triton state only.
        fresh: every one of the slots is empty, which spares a prompt's call a third of its launches. Not checked.

    Returns:
        o [T, H, V] in v's dtype.

    Raises:
        ValueError: as `sse`; the state was allocated for other sizes; slots are out of range or repeated (on the CPU).
    """
    x = check_inputs(
        q1, k1, g1, None, q2, k2, g2, None, v, weight, index, v2=v2, cu_seqlens=_bounds(cu_seqlens, v, strict),
        initial_state=None, num_partitions=num_partitions, scale=scale, gate=gate, chunk_size=state.chunk_size, is_gdn=False,
        has_state=True,
    )  # fmt: skip
    return extend(_one_each(x, cu_seqlens), state, slots, strict=strict, exact=exact, fresh=fresh)


def sse_gdn_extend(
    q1: Tensor | None,
    k1: Tensor | None,
    g1: Tensor | None,
    b1: Tensor | None,
    q2: Tensor,
    k2: Tensor,
    g2: Tensor,
    b2: Tensor,
    v: Tensor,
    weight: Tensor,
    index: Tensor,
    *,
    cu_seqlens: Tensor | None,
    state: ChunkState,
    slots: Tensor,
    num_partitions: int,
    v2: Tensor | None = None,
    scale: float | None = None,
    gate: Gate = "both",
    strict: bool = False,
    fresh: bool = False,
) -> Tensor:
    """`sse_extend` for the gated delta rule; the state must be allocated with transition="gdn"."""
    x = check_inputs(
        q1, k1, g1, b1, q2, k2, g2, b2, v, weight, index, v2=v2, cu_seqlens=_bounds(cu_seqlens, v, strict),
        initial_state=None, num_partitions=num_partitions, scale=scale, gate=gate, chunk_size=state.chunk_size, is_gdn=True,
        has_state=True,
    )  # fmt: skip
    return extend(_one_each(x, cu_seqlens), state, slots, strict=strict, fresh=fresh)


def _bounds(cu_seqlens: Tensor | None, v: Tensor, strict: bool) -> Tensor:
    """cu_seqlens, or those of sequences of one token; on a GPU only `strict` calls look at them: others are spared the launch."""
    if cu_seqlens is not None:
        return cu_seqlens
    if strict or not v.is_cuda:
        return torch.arange(v.shape[0] + 1, device=v.device)
    return torch.empty(v.shape[0] + 1, dtype=torch.int64, device=v.device)


def _one_each(x: Inputs, cu_seqlens: Tensor | None) -> Inputs:
    """x, told that no sequence is longer than one token where no cu_seqlens were given."""
    return x if cu_seqlens is not None else replace(x, longest=min(1, x.v.shape[0]))


def _run(x: Inputs, backend: Backend | None, *, output_final_state: bool, keep_states: bool) -> tuple[Tensor, Tensor | None]:
    backend = backend or _default_backend or ("triton" if _triton_serves(x) else "torch")
    with without_autocast(x.v):
        if backend == "torch":
            o, final = run_chunked_gdn(x) if x.is_gdn else run_chunked(x)
        elif backend == "reference":
            o, final = run_reference(x)
        elif backend == "triton":
            return _run_triton(x, output_final_state, keep_states)
        else:
            raise ValueError(f"backend={backend!r}, but it must be 'reference', 'torch', 'triton' or None")
    return o, final if output_final_state else None


def _run_exact(x: Inputs) -> Tensor:
    if not _HAS_TRITON:
        raise ValueError("exact=True was asked for, but the package triton is not installed")
    from posttrain.kernels.sse.triton_limits import unsupported
    from posttrain.kernels.triton_launch import interpreted

    half = all(a.dtype == torch.bfloat16 for a in (x.q2, x.k2, x.v))
    reason = unsupported(x) or (None if half or interpreted() else f"q, k and v must be bfloat16, got {x.v.dtype}")
    if reason:
        raise ValueError(f"exact=True cannot run this call: {reason}")
    from posttrain.kernels.sse.triton_exact import run_exact_gla
    from posttrain.kernels.sse.triton_gla_ops import run_triton_gla

    def ordinary(a: Inputs) -> Tensor:
        return run_triton_gla(a, output_final_state=False)[0]

    with without_autocast(x.v), torch.cuda.device_of(x.v) if x.v.is_cuda else nullcontext():
        return run_exact_gla(x, ordinary)


def _triton_serves(x: Inputs) -> bool:
    """Whether an unasked call goes to Triton."""
    if not x.v.is_cuda or x.v.shape[0] == 0 or not _HAS_TRITON:
        return False
    from posttrain.kernels.sse.triton_limits import unsupported

    reason = unsupported(x)
    if reason:
        _say_once(f"sse runs in plain PyTorch on this GPU, slower and with other roundings than in Triton: {reason}")
    return reason is None


@cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _run_triton(x: Inputs, output_final_state: bool, keep_states: bool) -> tuple[Tensor, Tensor | None]:
    if not _HAS_TRITON:
        raise ValueError("backend='triton' was asked for, but the package triton is not installed")
    from posttrain.kernels.sse.triton_limits import unsupported

    if reason := unsupported(x):
        raise ValueError(f"backend='triton' cannot run this call: {reason}; use backend='torch' or None")
    # Triton launches on the current device; compiled code sees to that itself.
    with torch.cuda.device_of(x.v) if x.v.is_cuda and not torch.compiler.is_compiling() else nullcontext():
        if x.is_gdn:
            from posttrain.kernels.sse.triton_gdn_ops import run_triton_gdn

            return run_triton_gdn(x, output_final_state=output_final_state, keep_states=keep_states)
        from posttrain.kernels.sse.triton_gla_ops import run_triton_gla

        return run_triton_gla(x, output_final_state=output_final_state, keep_states=keep_states)
