"""Advantages of groups of completions: pure functions on a reward matrix.

    rewards [P, G]: P prompts, G completions each; NaN marks a reward that could not be judged (`None` from a reward).
    advantage = (reward - baseline of its group) / scale

A NaN reward takes no part in any mean or deviation, and its advantage is 0: it never counts as a wrong answer. The numbers are
TRL's (`scale_rewards`, Bessel-corrected deviation, 1e-4 under the fraction), which a test checks; `baseline="leave_one_out"` is
the estimator of RLOO (Ahmadian et al. 2024, arXiv 2402.14740).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave_one_out"]

# TRL adds it to the deviation.
EPSILON = 1e-4
# Rewards of a group closer than this have no variance: fp32 rounding of equal sums of weighted rewards.
FLAT = 1e-8


def reward_matrix(rewards: Sequence[Sequence[float | None]]) -> torch.Tensor:
    """Rewards [P][G] as a float32 tensor [P, G], None as NaN."""
    sizes = {len(group) for group in rewards}
    if len(sizes) > 1:
        raise ValueError(f"every group needs the same number of rewards, got groups of {sorted(sizes)}")
    return torch.tensor([[float("nan") if r is None else r for r in group] for group in rewards], dtype=torch.float32)


def penalise_truncated(rewards: torch.Tensor, truncated: torch.Tensor, penalty: float) -> torch.Tensor:
    """Rewards [P, G], `penalty` in place of those where `truncated` [P, G] holds. NaN (not judged) stays NaN."""
    return torch.where(truncated & ~rewards.isnan(), penalty, rewards)


def normalise_then_sum(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rewards [P, G] of F functions [P, G, F]: each normalised within its group, then summed with `weights` [F].

    TRL's `multi_objective_aggregation="normalize_then_sum"`; what follows it there is the batch's own mean and deviation, see
    `batch_advantages`. NaN where no function judged the completion.
    """
    normal = torch.stack([_centred(parts[..., f]) / (group_std(parts[..., f]) + EPSILON) for f in range(parts.shape[-1])], dim=-1)
    summed = torch.nansum(normal * weights, dim=-1)
    return torch.where(parts.isnan().all(dim=-1), torch.nan, summed)


def batch_advantages(rewards: torch.Tensor, batch: torch.Tensor | None = None) -> torch.Tensor:
    """Advantages [P, G]: rewards against the mean and deviation of the whole batch, 0 where NaN."""
    everything = (rewards if batch is None else batch).reshape(1, -1)
    advantages = (rewards - torch.nanmean(everything)) / (group_std(everything) + EPSILON)
    return torch.nan_to_num(advantages, nan=0.0)


def _centred(rewards: torch.Tensor) -> torch.Tensor:
    return rewards - torch.nanmean(rewards, dim=1, keepdim=True)


def group_std(rewards: torch.Tensor) -> torch.Tensor:
    """Bessel-corrected deviation [P, 1] of the judged rewards [P, G] of each group; 0 where fewer than two were judged."""
    known = ~rewards.isnan()
    count = known.sum(dim=1, keepdim=True)
    mean = torch.nanmean(rewards, dim=1, keepdim=True)
    squares = torch.where(known, (rewards - mean) ** 2, 0.0).sum(dim=1, keepdim=True)
    return torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), 0.0)


def zero_variance(rewards: torch.Tensor) -> torch.Tensor:
    """Bool [P]: at least one judged reward, and all judged rewards equal, so the group teaches nothing."""
    return (group_std(rewards).squeeze(1) <= FLAT) & ~rewards.isnan().all(dim=1)


def group_advantages(
    rewards: torch.Tensor, *, scale: Scale = "group", baseline: Baseline = "mean", batch: torch.Tensor | None = None
) -> torch.Tensor:
    """Advantages [P, G] of rewards [P, G].

    Args:
        scale: "group" divides by the deviation of the group, "batch" by that of all judged rewards, "none" by nothing.
        baseline: "mean" of the group, or "leave_one_out": the mean of the *other* judged completions of the group.
        batch: rewards [P', G] of the whole batch where `rewards` is one process's part of it; only `scale="batch"` reads it.

    Raises:
        ValueError: unknown `scale` or `baseline`.
    """
    if baseline == "mean":
        advantages = _centred(rewards)
    elif baseline == "leave_one_out":
        count = (~rewards.isnan()).sum(dim=1, keepdim=True)
        total = torch.nansum(rewards, dim=1, keepdim=True)
        # Alone in its group a completion has nothing to compare with: its own reward is the reference, the advantage 0.
        advantages = rewards - torch.where(count > 1, (total - rewards) / (count - 1).clamp(min=1), rewards)
    else:
        raise ValueError(f"baseline={baseline!r}, but it must be 'mean' or 'leave_one_out'")
    if scale == "group":
        advantages = advantages / (group_std(rewards) + EPSILON)
    elif scale == "batch":
        everything = rewards if batch is None else batch
        advantages = advantages / (group_std(everything.reshape(1, -1)) + EPSILON)
    elif scale != "none":
        raise ValueError(f"scale_rewards={scale!r}, but it must be 'group', 'batch' or 'none'")
    return torch.nan_to_num(advantages, nan=0.0)
