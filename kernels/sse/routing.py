"""The router of a sparse-state layer: which partitions a token touches, with what weight, and the loss that balances them."""

from __future__ import annotations

import torch
from torch import Tensor


def route(logits: Tensor, num_selected: int) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the partitions in fp32 (float64 stays float64), the R largest kept and not renormalised.

    Ties go to the lowest index, on every device, which `torch.topk` does not promise.

    Args:
        logits: [T, N].
        num_selected: R, 1 <= R <= N.

    Returns:
        probs [T, N], weight [T, R] (largest first, differentiable), index [T, R] int64.

    Raises:
        ValueError: logits are not [T, N], or R is outside [1, N].
    """
    if logits.ndim != 2:
        raise ValueError(f"router logits must be [T, N], got shape {tuple(logits.shape)}")
    partitions = logits.shape[1]
    if not 1 <= num_selected <= partitions:
        raise ValueError(f"num_selected={num_selected}, but it must be in [1, {partitions}] (the number of partitions)")
    probs = torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    if num_selected == 1:
        weight, index = probs.max(dim=-1, keepdim=True)  # documented to return the first maximum
        return probs, weight, index
    index = torch.sort(probs.detach(), dim=-1, descending=True, stable=True).indices[:, :num_selected].contiguous()
    return probs, probs.gather(1, index), index


def balance_loss(probs: Tensor, index: Tensor) -> Tensor:
    """(N/R) sum_i mean_t(probs_ti) mean_t(selected_ti); 1 when the load is even, N/R when one set of partitions takes all.

    Args:
        probs: [T, N] of the real tokens of the batch (no padding).
        index: [T, R] int64, the partitions that were used.

    Returns:
        a scalar that is differentiable through `probs`; 0 for T = 0.
    """
    tokens, partitions = probs.shape
    if index.ndim != 2 or index.shape[0] != tokens:
        raise ValueError(f"index must be [T, R] with T={tokens}, got shape {tuple(index.shape)}")
    if tokens == 0:
        return probs.sum()
    selected = torch.zeros_like(probs).scatter_(1, index, 1.0)
    return (partitions / index.shape[1]) * (probs.mean(0) * selected.mean(0)).sum()
