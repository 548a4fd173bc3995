"""Logits in fp32 from half-precision operands: what a product sums up in fp32 anyway is not rounded to half precision."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] @ weight [V, D]^T -> [T, V], fp32 where x is half precision, else in its dtype. No gradients.

    A logit of 20 in bf16 is off by up to 0.06, and its log-probability with it.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x @ weight.t()
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()
