"""Importance weights between the policy that sampled a token and the one that is trained: a pure function.

    w = p_trainer / p_generator      of a token, or of a whole completion (the product over its tokens)

where p_trainer is the learner at the version that a batch is first trained at, and p_generator whatever sampled the token: other
kernels, rounding, or an older version. The loss of each token is multiplied by w, beside its own clipped ratio, which is taken
against p_trainer. Weights are bounded in one of two ways: `truncate` clips w into [clip_min, clip_max] (less variance, some
bias), `mask` sets w outside of it to 0, so that what was sampled by too different a policy teaches nothing.

The variants, their names and their numbers are those of TRL's `vllm_importance_sampling_mode`, `..._clip_min`, `..._clip_max`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Attributes:
    values: bounded weights, [B, C] by token (1 outside the mask) or [B, 1] by completion.
    bounded: bool, of the same shape: where a bound was reached.
    counted: bool, of the same shape: tokens of the mask, or completions with any.
    """

    values: torch.Tensor
    bounded: torch.Tensor
    counted: torch.Tensor


def importance_weights(
    trainer: torch.Tensor,
    generator: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: Mode = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Weights:
    """Weights from log-probabilities [B, C] under the trainer and under the generator, of the tokens of `mask` [B, C].

    Args:
        clip_min, clip_max: None is no bound on that side.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"vllm_importance_sampling_mode={mode!r}, but it must be one of {', '.join(get_args(Mode))}")
    difference = torch.where(mask.bool(), trainer - generator, 0.0)
    counted = mask.bool()
    if mode.startswith("sequence"):
        difference, counted = difference.sum(dim=1, keepdim=True), counted.any(dim=1, keepdim=True)
    ratios = difference.exp()
    low, high = (0.0 if clip_min is None else clip_min), (float("inf") if clip_max is None else clip_max)
    bounded = ((ratios < low) | (ratios > high)) & counted
    values = ratios.masked_fill(bounded, 0.0) if mode.endswith("mask") else ratios.clamp(low, high)
    # A lower bound above 1 would else reach padding, and completions of which nothing is trained.
    return Weights(values=torch.where(counted, values, 1.0), bounded=bounded, counted=counted)
