"""One product for all kernels of strict mode, in three forms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.kernels.triton_launch import interpreted

# The operands as they are, on tensor cores; in fp32; and summed entry by entry, for the interpreter, which computes wrongly in
# bf16 and whose NumPy gives an entry other last bits in another place of a tile.
HALF, FULL, SUMMED = (tl.constexpr(n) for n in range(3))


@triton.jit
def product(a, b, total, FORM: tl.constexpr):
    """total [M, N] + a [M, K] b [N, K]^T."""
    if FORM == HALF:
        return tl.dot(a, tl.trans(b), total)
    elif FORM == FULL:
        return tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), total, input_precision="ieee")
    else:
        return total + tl.sum(a.to(tl.float32)[:, None, :] * b.to(tl.float32)[None, :, :], 2)


@triton.jit
def product_rows(a, b, total, FORM: tl.constexpr):
    """total [M, N] + a [M, K] b [K, N], a in fp32 and rounded to what b holds."""
    if FORM == HALF:
        return tl.dot(a.to(b.dtype), b, total)
    elif FORM == FULL:
        return tl.dot(a, b.to(tl.float32), total, input_precision="ieee")
    else:
        return total + tl.sum(a[:, :, None] * b.to(tl.float32)[None, :, :], 1)


def form_of(*dtypes: torch.dtype) -> int:
    """FORM for operands of these dtypes."""
    if interpreted():
        return SUMMED.value
    return FULL.value if torch.float32 in dtypes or len(set(dtypes)) > 1 else HALF.value
