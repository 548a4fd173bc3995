"""Completions -> rewards -> groups with advantages.

Text is made here, for the rewards alone; a reward of None (the gold answer could not be read) takes its completion out of the
group's statistics and out of the loss, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from posttrain.grpo.advantages import (
    FLAT,
    Baseline,
    Scale,
    batch_advantages,
    group_advantages,
    group_std,
    normalise_then_sum,
    penalise_truncated,
    reward_matrix,
    zero_variance,
)
from posttrain.rewards.registry import RewardSet
from posttrain.types import CORRECTNESS, Completion, Group, Ratings

Gather = Callable[[torch.Tensor], torch.Tensor]
# Columns of a row that are the learner's own, or named like what every reward is given; rewards get the others.
OWN_COLUMNS = ("prompt", "prompt_ids", "prompt_index", "prompts", "completions", "completion_ids")


@dataclass(frozen=True, kw_only=True)
class Scored:
    """P groups of G completions with what their rewards said.

    Attributes:
        rows: the P prompts.
        groups: completions, rewards and advantages.
        masked: [P][G], completions left out of the loss.
        texts: [P][G] decoded completions.
        rewards: [P, G], NaN where not judged, penalties applied.
        parts: name of each reward function -> [P, G], without weights or penalties.
        truncated: bool [P, G].
        timeouts: verifications of this batch that were killed.
    """

    rows: Sequence[dict[str, Any]]
    groups: tuple[Group, ...]
    masked: list[list[bool]]
    texts: list[list[str]]
    rewards: torch.Tensor
    parts: dict[str, torch.Tensor]
    truncated: torch.Tensor
    timeouts: int

    @property
    def correct(self) -> torch.Tensor | None:
        """Whether the answer is right [P, G] (1, 0, NaN), where the recipe has a reward that says so."""
        return next((self.parts[name] for name in CORRECTNESS if name in self.parts), None)

    def metrics(self, gather: Gather) -> dict[str, float]:
        """Statistics over all processes, under TRL's names where TRL has one."""
        rewards = gather(self.rewards)
        truncated = gather(self.truncated)
        judged = rewards[~rewards.isnan()]
        metrics = {
            "reward": judged.mean().item() if len(judged) else float("nan"),
            "reward_std": judged.std().item() if len(judged) > 1 else 0.0,
            "completions/clipped_ratio": truncated.float().mean().item(),
            "frac_reward_zero_std": zero_variance(rewards).float().mean().item(),
            "zero_variance_groups": float(zero_variance(rewards).sum()),
            "unreadable_gold": float(rewards.isnan().sum()),
            "verifier_timeouts": float(gather(torch.tensor([float(self.timeouts)])).sum()),
        }
        for name, part in sorted(self.parts.items()):
            part = gather(part)
            known = part[~part.isnan()]
            metrics[f"rewards/{name}/mean"] = known.mean().item() if len(known) else float("nan")
            metrics[f"rewards/{name}/std"] = known.std().item() if len(known) > 1 else 0.0
        if self.correct is not None:
            judged = gather(self.correct)
            metrics["accuracy"] = (judged[~judged.isnan()] > 0.5).float().mean().item()
        return metrics

    def records(self, step: int) -> list[dict[str, Any]]:
        """Rows of the rollout table, see `posttrain.grpo.rollouts.SCHEMA`."""
        return [
            {
                "step": step,
                "prompt_index": row["prompt_index"],
                "sample": sample,
                "id": str(row.get("id", row["prompt_index"])),
                "prompt": row["prompt"],
                "completion": self.texts[p][sample],
                "answer": _text(row.get("answer")),
                "prompt_ids": completion.prompt_ids,
                "completion_ids": completion.token_ids,
                "reward": group.rewards[sample],
                "rewards": [(name, _or_none(part[p, sample].item())) for name, part in self.parts.items()],
                "correct": None if self.correct is None else _correct(self.correct[p, sample].item()),
                "advantage": group.advantages[sample],
                "length": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "logprob_mean": sum(completion.logprobs) / len(completion.logprobs),
                "version": completion.versions[-1],
                "oldest_version": min(completion.versions),
            }
            for p, (row, group) in enumerate(zip(self.rows, self.groups, strict=True))
            for sample, completion in enumerate(group.completions)
        ]


def picked(ratings: Ratings, which: Sequence[int]) -> Ratings:
    """The ratings of some groups, in that order; killed verifications stay with all of them."""
    return Ratings(
        totals=[ratings.totals[p] for p in which],
        parts={name: [values[p] for p in which] for name, values in ratings.parts.items()},
        flat=[ratings.flat[p] for p in which],
        timeouts=ratings.timeouts,
    )


def concatenated(several: Sequence[Ratings]) -> Ratings:
    """The ratings of all their groups."""
    return Ratings(
        totals=[group for ratings in several for group in ratings.totals],
        parts={name: [group for ratings in several for group in ratings.parts[name]] for name in several[0].parts},
        flat=[flat for ratings in several for flat in ratings.flat],
        timeouts=sum(ratings.timeouts for ratings in several),
    )


def answers(rows: Sequence[dict[str, Any]], ratings: Ratings) -> list[tuple[int, int, int]]:
    """(prompt_index, right answers, judged answers) of each group; nothing where no reward says what is right."""
    parts = next((ratings.parts[name] for name in CORRECTNESS if name in ratings.parts), None)
    if parts is None:
        return []
    judged = [[value > 0.5 for value in group if value is not None] for group in parts]
    return [(row["prompt_index"], sum(group), len(group)) for row, group in zip(rows, judged, strict=True)]


class Scorer:
    """Calls the rewards and makes groups.

    Args:
        rewards: the recipe's.
        decode: list of token ids -> texts, special tokens left out.
        truncated_completions: "mask" leaves them out of the loss (their rewards stay in the statistics, as in TRL), "penalise"
            sets their reward to `truncation_penalty`, "keep" treats them like any other.
        scale_rewards, aggregation: TRL's `scale_rewards` and `multi_objective_aggregation`.
        baseline: what a reward is compared with.
    """

    def __init__(
        self,
        rewards: RewardSet,
        decode: Callable[[list[list[int]]], list[str]],
        *,
        truncated_completions: Literal["mask", "penalise", "keep"] = "mask",
        truncation_penalty: float = -1.0,
        scale_rewards: Scale = "group",
        aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
        baseline: Baseline = "mean",
    ) -> None:
        self._rewards = rewards
        self._decode = decode
        self._truncated = truncated_completions
        self._penalty = truncation_penalty
        self._scale: Scale = scale_rewards
        self._aggregation = aggregation
        self._baseline: Baseline = baseline

    def score(self, rows: Sequence[dict[str, Any]], completions: Sequence[Sequence[Completion]], gather: Gather) -> Scored:
        """Groups of `completions` [P][G] of the prompts `rows` [P].

        Args:
            gather: rewards of this process [P, ...] -> of all processes; only statistics across the batch need it.
        """
        texts = self._texts(completions)
        return self._assemble(rows, completions, texts, self._call(rows, completions, texts), gather)

    def rate(self, rows: Sequence[dict[str, Any]], completions: Sequence[Sequence[Completion]]) -> Ratings:
        """The part of `score` that calls the rewards; `assemble` does the rest, perhaps in another process."""
        return self._call(rows, completions, self._texts(completions))

    def assemble(
        self, rows: Sequence[dict[str, Any]], completions: Sequence[Sequence[Completion]], ratings: Ratings, gather: Gather
    ) -> Scored:
        """What `score` returns, from ratings that were made before."""
        return self._assemble(rows, completions, self._texts(completions), ratings, gather)

    def _texts(self, completions: Sequence[Sequence[Completion]]) -> list[str]:
        return self._decode([completion.token_ids for group in completions for completion in group])

    def _left_out(self, rewards: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """Bool [P, G], completions that take no part in the loss."""
        return rewards.isnan() | truncated if self._truncated == "mask" else rewards.isnan()

    def _assemble(
        self,
        rows: Sequence[dict[str, Any]],
        completions: Sequence[Sequence[Completion]],
        texts: list[str],
        ratings: Ratings,
        gather: Gather,
    ) -> Scored:
        total = reward_matrix(ratings.totals)
        parts = {name: reward_matrix(values) for name, values in ratings.parts.items()}
        truncated = _truncated(completions)
        rewards = self._final(total, parts, truncated)
        advantages = self._advantages(rewards, gather)
        left_out = self._left_out(rewards, truncated)
        groups = tuple(
            Group(
                prompt_ids=list(group[0].prompt_ids),
                completions=tuple(group),
                rewards=tuple(_or_none(reward) for reward in rewards[p].tolist()),
                advantages=tuple(advantages[p].tolist()),
            )
            for p, group in enumerate(completions)
        )
        size = len(completions[0])
        return Scored(
            rows=rows,
            groups=groups,
            masked=left_out.tolist(),
            texts=[texts[p * size : (p + 1) * size] for p in range(len(completions))],
            rewards=rewards,
            parts=parts,
            truncated=truncated,
            timeouts=ratings.timeouts,
        )

    def _call(self, rows: Sequence[dict[str, Any]], completions: Sequence[Sequence[Completion]], texts: list[str]) -> Ratings:
        size = len(completions[0])
        repeated = [row for row in rows for _ in range(size)]
        columns = {name: [row[name] for row in repeated] for name in rows[0] if name not in OWN_COLUMNS}
        before = self._timeouts()
        scores = self._rewards.score(
            prompts=[row["prompt"] for row in repeated],
            completions=texts,
            completion_ids=[completion.token_ids for group in completions for completion in group],
            **columns,
        )
        fold = lambda values: [values[at : at + size] for at in range(0, len(values), size)]  # noqa: E731
        totals, parts = fold(scores.total), {name: fold(values) for name, values in scores.parts.items()}
        truncated = _truncated(completions)
        rewards = self._final(reward_matrix(totals), {name: reward_matrix(values) for name, values in parts.items()}, truncated)
        flat = (group_std(rewards).squeeze(1) <= FLAT) | self._left_out(rewards, truncated).all(dim=1)
        return Ratings(totals=totals, parts=parts, flat=flat.tolist(), timeouts=self._timeouts() - before)

    def _timeouts(self) -> int:
        return int(self._rewards.counters().get("timeouts", 0))

    def _final(self, total: torch.Tensor, parts: dict[str, torch.Tensor], truncated: torch.Tensor) -> torch.Tensor:
        if self._aggregation == "normalize_then_sum":
            weights = torch.tensor([reward.weight for reward in self._rewards.rewards])
            stacked = torch.stack([parts[reward.name] for reward in self._rewards.rewards], dim=-1)
            # Where a required reward is missing there is no total, and what the others said is no part of the statistics.
            total = normalise_then_sum(stacked.masked_fill(total.isnan().unsqueeze(-1), torch.nan), weights)
        return penalise_truncated(total, truncated, self._penalty) if self._truncated == "penalise" else total

    def _advantages(self, rewards: torch.Tensor, gather: Gather) -> torch.Tensor:
        if self._aggregation == "normalize_then_sum":
            return batch_advantages(rewards, gather(rewards))
        batch = gather(rewards) if self._scale == "batch" else None
        return group_advantages(rewards, scale=self._scale, baseline=self._baseline, batch=batch)


def _truncated(completions: Sequence[Sequence[Completion]]) -> torch.Tensor:
    return torch.tensor([[completion.truncated for completion in group] for group in completions])


def _or_none(value: float) -> float | None:
    return None if value != value else value


def _correct(value: float) -> bool | None:
    return None if value != value else value > 0.5


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
