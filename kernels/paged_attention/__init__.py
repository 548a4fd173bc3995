"""Attention of one new token a sequence over keys and values that lie in pages, and the writing of its own."""

from __future__ import annotations

from torch import Tensor

from posttrain.kernels.backend import FusedBackend, on_device_of, takes_triton
from posttrain.kernels.paged_attention.reference import paged_attention_reference, paged_write_reference, visible_rows

__all__ = ["paged_attention", "paged_write", "visible_rows"]

# The widest head that the Triton kernels take: a program holds a page of keys and one of values.
MAX_WIDTH = 256


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    backend: FusedBackend | None = None,
) -> Tensor:
    """softmax(scale q K^T) V for the token at `positions[b]` of slot `slots[b]`, whose own key and value are written already.

    Row p of a slot lies in page table[slot, p // page], row p % page. With a `window` the slot's pages are a ring: row p lies
    where row p mod (pages of a slot * page) would, and a token sees itself and the window - 1 tokens before it.

    Args:
        q: [B, H, D]. keys, values: [pages, H_kv, page, D], H a multiple of H_kv, in q's dtype or another floating-point one.
        table: int32 [slots, W], pages of each slot in order. slots, positions: int64 [B]; a negative slot is padding.
        scale: D^-1/2 by default.
        backend: "torch", "triton", or None for the best one here. Triton reads nothing back, so it fits a CUDA graph, splits a
            sequence into ranges that depend on its length alone, and takes pages of 16 to 128 rows and D up to 256, where a
            page of keys and one of values have 160 KiB at most.

    Returns:
        [B, H, D] in q's dtype, zeros for padding. A sequence's numbers do not depend on the others.

    Raises:
        ValueError: shapes do not fit; the backend cannot take q.
    """
    _check(q, keys, values, table, slots, positions, window)
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if takes_triton(q, backend, max_width=MAX_WIDTH) and q.numel():
        from posttrain.kernels.paged_attention.triton_paged_attention import triton_paged_attention

        with on_device_of(q):
            return triton_paged_attention(q, keys, values, table, slots, positions, window=window, scale=factor)
    return paged_attention_reference(q, keys, values, table, slots, positions, window=window, scale=factor)


def paged_write(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    ring: bool = False,
    backend: FusedBackend | None = None,
) -> None:
    """Puts k and v [B, H_kv, D] into the rows of the tokens at `positions` of `slots`, converted to the pools' dtype.

    `ring`: a slot's pages are a ring, as under a window. Rows of padding (a negative slot) go to page 0, which is nobody's, in
    any order. Other arguments as in `paged_attention`; slots that are not negative differ.

    Raises:
        ValueError: shapes do not fit; the backend cannot take k.
    """
    _check(k, keys, values, table, slots, positions, None)
    if k.shape != v.shape or k.shape[1] != keys.shape[1]:
        raise ValueError(f"k and v must both be [B, {keys.shape[1]}, D], got {list(k.shape)} and {list(v.shape)}")
    if takes_triton(k, backend, max_width=MAX_WIDTH) and k.numel():
        from posttrain.kernels.paged_attention.triton_paged_attention import triton_paged_write

        with on_device_of(k):
            return triton_paged_write(k, v, keys, values, table, slots, positions, ring=ring)
    return paged_write_reference(k, v, keys, values, table, slots, positions, ring=ring)


def _check(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, slots: Tensor, positions: Tensor, window: int | None) -> None:
    if keys.ndim != 4 or values.shape != keys.shape:
        raise ValueError(f"keys and values must both be [pages, H_kv, page, D], got {list(keys.shape)} and {list(values.shape)}")
    if q.ndim != 3 or q.shape[-1] != keys.shape[-1] or q.shape[1] % keys.shape[1]:
        raise ValueError(
            f"q must be [B, H, D] with H a multiple of {keys.shape[1]} and D = {keys.shape[-1]}, got {list(q.shape)}"
        )
    if table.ndim != 2 or slots.shape != q.shape[:1] or positions.shape != q.shape[:1]:
        raise ValueError(
            f"table must be [slots, W] and slots, positions [B] with B = {q.shape[0]}, got {list(table.shape)}, "
            f"{list(slots.shape)}, {list(positions.shape)}"
        )
    if window is not None and not 1 <= window <= table.shape[1] * keys.shape[2]:
        raise ValueError(f"window={window}, but it must be 1 to {table.shape[1] * keys.shape[2]}, the rows of a slot's ring")
