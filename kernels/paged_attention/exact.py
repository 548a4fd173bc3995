"""Attention with one order of sums for decoding, prefill and training (strict mode)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from posttrain.kernels.backend import on_device_of, takes_triton
from posttrain.kernels.recompute import value_of

# At 256, rows behind the first range come out wrong on Hopper (Triton 3.6).
MAX_WIDTH = 128
# Keys of a block, which lie in one page.
BLOCK = 64


def exact_paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`paged_attention`, a row of which has bitwise the numbers that `exact_attention` gives it in its whole sequence.

    Raises:
        ValueError: pages are no multiple of 64 rows, or Triton cannot run here.
    """
    if keys.shape[2] % BLOCK:
        raise ValueError(f"pages of {keys.shape[2]} rows, but strict attention needs a multiple of {BLOCK}")
    takes_triton(q, "triton", max_width=MAX_WIDTH)
    from posttrain.kernels.paged_attention.triton_exact import launch_paged

    with on_device_of(q):
        return launch_paged(q, keys, values, table, slots, positions, window=window, scale=_scale(q, scale))


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    key_lengths: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    window: int | None = None,
    scale: float | None = None,
    ordinary: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Causal attention of packed sequences, each row of which depends on its own sequence up to it alone, bit for bit.

    Args:
        q: [T, H, D]; k, v: [M, H_kv, D], H a multiple of H_kv.
        lengths: tokens of each sequence in q, none of them 0.
        key_lengths: keys of each sequence, the last ones those of its tokens; by default `lengths`.
        ends: position behind the last token of each sequence, which the blocks of keys are aligned to; by default `key_lengths`.
            Keys from ends - key_lengths on must be all that a token sees.
        window: a token sees itself and the window - 1 tokens before it.
        ordinary: another implementation of the same, whose gradients are used; without it there are none.

    Returns:
        [T, H, D] in q's dtype.

    Raises:
        ValueError: Triton cannot run here.
    """
    takes_triton(q, "triton", max_width=MAX_WIDTH)
    from posttrain.kernels.paged_attention.triton_exact import launch_packed

    keys = list(lengths if key_lengths is None else key_lengths)
    behind = list(keys if ends is None else ends)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with on_device_of(q):
            return launch_packed(q, k, v, lengths, keys, behind, window=window, scale=_scale(q, scale))

    if ordinary is None or not torch.is_grad_enabled():
        return exact(q, k, v)
    return value_of(exact, ordinary, q, k, v)


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5 if scale is None else scale)
