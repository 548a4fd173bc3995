"""Cross-entropy of a row of logits and its gradient, written over the logits. A program takes a row, in two passes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def cross_entropy_kernel(X, T, LOSS, stride, ignore_index, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(T + row)
    X += row * stride
    column = tl.arange(0, BLOCK)
    if target == ignore_index:
        for first in range(0, V, BLOCK):
            tl.store(X + first + column, tl.zeros([BLOCK], X.dtype.element_ty), mask=first + column < V)
        tl.store(LOSS + row, 0.0)
    else:
        # A running maximum and sum for each lane, joined once at the end. Finite where nothing was seen: -inf - -inf is NaN.
        top = tl.full([BLOCK], -1e30, dtype=tl.float32)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for first in range(0, V, BLOCK):
            x = tl.load(X + first + column, mask=first + column < V, other=-1e30).to(tl.float32)
            above = x > top
            e = tl.exp(-tl.abs(x - top))
            total = tl.where(above, total * e + 1.0, total + e)
            top = tl.where(above, x, top)
        highest = tl.max(top, axis=0)
        log_total = highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0))
        # A target that is no column must not be read, and shows: its row becomes NaN.
        known = (target >= 0) & (target < V)
        log_total = tl.where(known, log_total, float("nan"))
        tl.store(LOSS + row, log_total - tl.load(X + target, mask=known, other=0.0).to(tl.float32))
        # Every thread must have read the target's logit before any overwrites it.
        tl.debug_barrier()
        for first in range(0, V, BLOCK):
            at = first + column
            x = tl.load(X + at, mask=at < V, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - log_total) - tl.where(at == target, 1.0, 0.0)
            tl.store(X + at, gradient.to(X.dtype.element_ty), mask=at < V)


def loss_and_gradient_(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """logits [C, V] become the gradient of their summed cross-entropy; returns the loss of each row [C], fp32.

    Both are NaN in a row whose target is neither in [0, V) nor `ignore_index`."""
    assert logits.stride(1) == 1 and logits.dtype != torch.float64
    rows, vocabulary = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    cross_entropy_kernel[(rows,)](
        logits, targets.contiguous(), loss, logits.stride(0), ignore_index, V=vocabulary, BLOCK=BLOCK, num_warps=8
    )
    return loss
