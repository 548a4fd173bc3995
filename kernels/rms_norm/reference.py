"""RMS normalisation in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.kernels.elementwise import elementwise


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None) -> Tensor:
    """See `rms_norm`. float64 is rounded to fp32 inside, as everything else is."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if gate is None else y * elementwise(F.silu, gate.float())).to(x.dtype)
