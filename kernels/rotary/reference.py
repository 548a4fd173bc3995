"""Rotary position embedding in plain PyTorch."""

import torch
from torch import Tensor


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
