"""Projection and cross-entropy with whole logits, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
