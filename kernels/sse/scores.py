"""The masked products q_i . (exp(G_i - G_j) k_j) of a chunk, j <= i, for decays of any strength.

Two forms. *Split*: (q exp(G)) (k exp(-G))^T, one product, exact to rounding while the decay since the chunk's start stays
above -SPLIT_LIMIT. *Nested*: the lower triangle is cut into blocks of 1, 2, 4, ... rows; the block of rows above and rows
below a cut is split at that cut, so both exponents are sums of decays, never positive: nothing can overflow.

Which form a row uses depends on its own chunk, head and past alone, so that neither a neighbour in the batch nor a later
token changes a bit of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# exp(40) squared is far from fp32's largest number, and rounding 40 costs 2e-6 of a product at most.
SPLIT_LIMIT = 40.0
SPLIT_GROWTH = math.exp(SPLIT_LIMIT)


def decay_after(g: Tensor) -> Tensor:
    """g [..., C, K] -> the decay of the rows after each one, up to the chunk's end (never positive, summed in float64)."""
    wide = g.double()
    return (wide.flip(-2).cumsum(-2).flip(-2) - wide).to(g.dtype)


def nested_scores(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """q, k, g [B, C, K] -> scores [B, C, C], zero above the diagonal."""
    size = q.shape[1]
    scores = _pad_square(torch.diag_embed((q * k).sum(-1)))
    for q_upper, k_lower, cut in _levels(q, k, g):
        block = (q_upper[0] * torch.exp(q_upper[1])) @ (k_lower[0] * torch.exp(k_lower[1])).transpose(-1, -2)
        cut(scores).copy_(block)
    return scores[:, :size, :size]


def nested_scores_backward(q: Tensor, k: Tensor, g: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of q and k [B, C, K] for grad [B, C, C] of the scores (only what lies below its diagonal is read).

    The gradient of the accumulated decay follows from them: dG = q dq - k dk, since scores depend on G_i - G_j alone.
    """
    size, dtype = q.shape[1], q.dtype
    padded = _pad_square(grad)
    dq = _pad_rows(torch.zeros_like(q))
    dk = torch.zeros_like(dq)
    for q_upper, k_lower, cut in _levels(q, k, g):
        block = cut(padded).to(dtype)
        decay_q, decay_k = torch.exp(q_upper[1]), torch.exp(k_lower[1])
        half = q_upper[0].shape[2]
        shape = (dq.shape[0], -1, 2, half, dq.shape[2])
        dq.view(shape)[:, :, 1] += (block @ (k_lower[0] * decay_k)) * decay_q
        dk.view(shape)[:, :, 0] += (block.transpose(-1, -2) @ (q_upper[0] * decay_q)) * decay_k
    return dq[:, :size], dk[:, :size]


def _pad_rows(a: Tensor) -> Tensor:
    size = a.shape[1]
    extra = (1 << (size - 1).bit_length()) - size
    return torch.nn.functional.pad(a, (0, 0, 0, extra)).contiguous()


def _pad_square(a: Tensor) -> Tensor:
    size = a.shape[1]
    extra = (1 << (size - 1).bit_length()) - size
    return torch.nn.functional.pad(a, (0, extra, 0, extra)).contiguous()


def _levels(q: Tensor, k: Tensor, g: Tensor):
    """Yields, for half = 1, 2, 4, ...: (q rows, decay from the cut to the row) and (k rows, decay from the row to the cut) of
    every block, each [B, blocks, half, K], and a function that views the blocks [B, blocks, half, half] of a [B, C, C] matrix.

    Sums of decays are accumulated inside a block, so that a strong decay elsewhere costs no precision here.
    """
    q, k, g = _pad_rows(q), _pad_rows(k), _pad_rows(g)
    batch, size, width = q.shape
    until, after, half = g.clone(), torch.zeros_like(g), 1
    while half < size:
        shape = (batch, size // (2 * half), 2, half, width)
        u, a = until.view(shape), after.view(shape)

        def cut(matrix: Tensor, half: int = half) -> Tensor:
            n = size // (2 * half)
            blocks = matrix.view(batch, n, 2, half, n, 2, half)[:, :, 1, :, :, 0]
            return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

        upper, lower = (q.view(shape)[:, :, 1], u[:, :, 1]), (k.view(shape)[:, :, 0], a[:, :, 0])
        below, above = u[:, :, 1, -1:].clone(), u[:, :, 0, -1:].clone()
        yield upper, lower, cut
        u[:, :, 1] += above
        a[:, :, 0] += below
        half *= 2
