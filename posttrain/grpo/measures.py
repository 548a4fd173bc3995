"""What a learner reports of every step: gathered here between two logs, over all its processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from posttrain.grpo.correction import importance_weights
from posttrain.grpo.metrics import (
    Clock,
    Sums,
    WeightStatistics,
    mismatch_metrics,
    mismatch_sums,
    router_counts,
    router_metrics,
)
from posttrain.grpo.scoring import answers

if TYPE_CHECKING:
    from accelerate import Accelerator

    from posttrain.grpo.scoring import Scored
    from posttrain.grpo.source import Collected
    from posttrain.types import Completion

Metrics = dict[str, float]


class Measures:
    """Attributes:
    clock: seconds by what they were spent on; mismatch: `mismatch_sums`; weights: importance weights.
    """

    def __init__(self) -> None:
        self.clock, self.mismatch, self.weights = Clock(), Sums(), WeightStatistics()
        self._sampled_tokens = self._passed_over_tokens = self._trained_tokens = 0
        self._since = time.perf_counter()

    def compare(self, logps: torch.Tensor, batch: dict[str, Any], correction: Any) -> torch.Tensor | None:
        """Measure the mismatch of a batch between its generator's log-probabilities and the trainer's `logps` [B, C].

        Args:
            correction: TRL's arguments, whose `vllm_importance_sampling_*` say how; None asks for no weights.

        Returns:
            the importance weights, where they are asked for.
        """
        generator, mask = batch["sampling_per_token_logps"], batch["completion_mask"]
        self.mismatch.add(mismatch_sums(logps, generator, mask, batch["fresh"]))
        if correction is None:
            return None
        weights = importance_weights(
            logps,
            generator,
            mask,
            mode=correction.vllm_importance_sampling_mode,
            clip_min=correction.vllm_importance_sampling_clip_min,
            clip_max=correction.vllm_importance_sampling_clip_max,
        )
        self.weights.add(weights)
        return weights.values

    @staticmethod
    def answers(collected: Collected) -> list[tuple[int, int, int]]:
        """`scoring.answers` of all groups that were sampled for a batch, those that were passed over among them."""
        sampled = [(collected.rows, collected.ratings), *([collected.passed_over] if collected.passed_over else [])]
        return [found for rows, ratings in sampled for found in answers(rows, ratings)]

    def source(self, collected: Collected, accelerator: Accelerator) -> Metrics:
        """What the source says of a batch, counts summed over all processes; the pass rate is that of all that was sampled."""
        for name, seconds in collected.seconds.items():
            self.clock.add(name, seconds)
        found = self.answers(collected)
        counts = {
            **collected.counts(),
            "passed_over_tokens": float(collected.tokens_passed_over),
            "right": float(sum(right for _, right, _ in found)),
            "judged": float(sum(judged for _, _, judged in found)),
        }
        sums: Any = accelerator.reduce(torch.tensor([*counts.values()], device=accelerator.device), reduction="sum")
        counts = dict(zip(counts, sums.tolist(), strict=True))
        right, judged = counts.pop("right"), counts.pop("judged")
        self._passed_over_tokens += int(counts.pop("passed_over_tokens"))
        return {**collected.metrics, **counts, **({"pass_rate": right / judged} if judged else {})}

    def batch(self, scored: Scored, accelerator: Accelerator, *, passes: int, tokens_seen: int, gather: Any) -> Metrics:
        """Statistics of a generation batch, under TRL's names where TRL has one; means over all processes.

        Args:
            passes: how often the batch is trained on; tokens_seen: before it; gather: as `Scored.metrics` takes it.
        """
        completions = [completion for group in scored.groups for completion in group.completions]
        lengths = torch.tensor([float(len(completion.token_ids)) for completion in completions], device=accelerator.device)
        prompts = sum(len(completion.prompt_ids) for completion in completions)
        totals: Any = accelerator.reduce(torch.stack([lengths.sum(), lengths.new_tensor(float(prompts))]), reduction="sum")
        sampled, read = totals.tolist()
        self._sampled_tokens += int(sampled)
        self._trained_tokens += int(sampled + read) * passes
        every: Any = accelerator.gather(lengths)
        return {
            "num_tokens": float(tokens_seen + int(sampled + read)),
            "completions/mean_length": every.mean().item(),
            "completions/min_length": every.min().item(),
            "completions/max_length": every.max().item(),
            **scored.metrics(gather),
        }

    def routing(self, completions: list[Completion], num_partitions: int, accelerator: Accelerator) -> Metrics:
        """Balance of each routed layer over a batch; nothing where completions carry no choices."""
        counts = router_counts(completions, num_partitions)
        if counts is None:
            return {}
        summed: Any = accelerator.reduce(torch.from_numpy(counts).to(accelerator.device), reduction="sum")
        return router_metrics(summed.cpu().numpy())

    def at_log(self, accelerator: Accelerator, steps: int) -> Metrics:
        """What has gathered since the last log, `steps` optimiser steps ago; every process must ask."""
        metrics: Metrics = {}
        sums = self.mismatch.take()
        if sums is not None:
            metrics |= mismatch_metrics(accelerator.reduce(sums, reduction="sum"))  # pyright: ignore[reportArgumentType]
        metrics |= self.weights.take(accelerator)
        seconds = self.clock.take()
        if seconds:
            metrics |= {f"time/{name}": value / max(steps, 1) for name, value in seconds.items()}
            metrics |= self._speeds(seconds)
        self._sampled_tokens = self._passed_over_tokens = self._trained_tokens = 0
        return metrics

    def start(self) -> None:
        """The first step begins now."""
        self._since = time.perf_counter()

    def _speeds(self, seconds: dict[str, float]) -> Metrics:
        """Tokens a second: trained ones by the clock on the wall, whatever the time went into (checkpoints too), and those of
        each side while it was at work, as far as this process knows it."""
        since, self._since = self._since, time.perf_counter()
        speeds = {"tokens_per_second": self._sampled_tokens / max(self._since - since, 1e-9)}
        learning = seconds.get("update", 0.0) + seconds.get("logprobs", 0.0)
        if learning:
            speeds["learner/tokens_per_second"] = self._trained_tokens / learning
        if seconds.get("generate"):
            speeds["generator/tokens_per_second"] = (self._sampled_tokens + self._passed_over_tokens) / seconds["generate"]
        return speeds


class StepClock(TrainerCallback):
    """Counts what stands between a step's last backward and its end as update: clipping and the optimiser.

    Args:
        measures: whose clock it is.

    Attributes:
        since: end of the last backward; logged: step of the last log. The learner sets both.
    """

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self.since, self.logged = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._measures.start()
        self.logged = state.global_step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._measures.clock.add("update", time.perf_counter() - self.since)
