"""The pointwise maps in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.kernels.elementwise import elementwise, silu


def map_reference(x: Tensor, fn: str) -> Tensor:
    """x [..., K] -> the same shape and dtype."""
    return silu(x) if fn == "silu" else torch.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)


def pair_map_reference(x: Tensor, delta: Tensor, fn: str) -> tuple[Tensor, Tensor]:
    return map_reference(x, fn), map_reference(x + delta, fn)


def log_decay_reference(logits: Tensor, normalizer: float) -> Tensor:
    return elementwise(F.logsigmoid, logits.float()) / normalizer
