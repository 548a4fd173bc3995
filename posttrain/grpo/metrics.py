"""What is measured beside the loss: pure functions and accumulators."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from posttrain.grpo.correction import Weights
from posttrain.types import Completion

if TYPE_CHECKING:
    from accelerate import Accelerator


def mismatch_sums(
    trainer: torch.Tensor, generator: torch.Tensor, mask: torch.Tensor, fresh: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums over the tokens of `mask` [B, C] that say how far the trainer's policy is from the one that sampled.

    Args:
        trainer: log-probabilities [B, C] of the sampled tokens under the learner, at the version that the batch is trained at.
        generator: those under the policy that sampled each token, of that version or of an older one.
        fresh: bool [B, C], tokens that were sampled by the trainer's own version: the numerics of two programs are all that is
            between their two log-probabilities. By default all.

    Returns:
        [2, 3], float64, first of all tokens, then of the fresh ones: sum of |difference|; sum of k3 = r - 1 - log r with
        r = p_trainer / p_generator, the low-variance estimate of KL(generator || trainer) on the generator's samples
        (Schulman 2020); number of tokens.
    """
    difference = (trainer - generator).double()
    k3 = torch.expm1(difference) - difference
    chosen = [mask.bool(), mask.bool() if fresh is None else mask.bool() & fresh]
    sums = [torch.stack([difference[of].abs().sum(), k3[of].sum(), of.sum().double()]) for of in chosen]
    return torch.stack(sums)


class Sums:
    """A tensor summed between two logs."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, sums: torch.Tensor) -> None:
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> torch.Tensor | None:
        """The sum since the last call, or None."""
        sums, self._sums = self._sums, None
        return sums


def mismatch_metrics(sums: torch.Tensor) -> dict[str, float]:
    """Token-weighted means of `mismatch_sums`; nothing of fresh tokens where there were none."""
    metrics: dict[str, float] = {}
    for name, (absolute, k3, count) in zip(("mismatch", "mismatch_fresh"), sums.tolist(), strict=True):
        if count:
            metrics |= {f"{name}/abs": absolute / count, f"{name}/k3": k3 / count}
    return metrics


class WeightStatistics:
    """Mean, extremes and bounded share of the importance weights between two logs."""

    def __init__(self) -> None:
        self._sums, self._extremes = Sums(), []

    def add(self, weights: Weights) -> None:
        values = weights.values.double()[weights.counted]
        self._sums.add(torch.stack([values.sum(), weights.bounded.sum().double(), weights.counted.sum().double()]))
        if values.numel():
            self._extremes.append(torch.stack(list(values.aminmax())))

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Over all processes, under TRL's names where TRL has one; every process must ask. Empty where there were none."""
        sums, extremes = self._sums.take(), self._extremes
        self._extremes = []
        if sums is None:
            return {}
        nothing = sums.new_tensor([torch.inf, -torch.inf])
        lows, highs = torch.stack([*extremes, nothing]).unbind(1)
        lows, highs = cast(torch.Tensor, accelerator.gather(torch.stack([lows.min(), highs.max()])[None])).unbind(1)
        total, bounded, count = cast(torch.Tensor, accelerator.reduce(sums, reduction="sum")).tolist()
        if not count:
            return {}
        name = "sampling/importance_sampling_ratio"
        return {
            f"{name}/mean": total / count,
            f"{name}/min": lows.min().item(),
            f"{name}/max": highs.max().item(),
            f"{name}/bounded": bounded / count,
        }


def router_counts(completions: Iterable[Completion], num_partitions: int) -> np.ndarray | None:
    """How often each routed layer chose each partition, int64 [layers, partitions], over the tokens of completions that carry
    the router's choices; None where none does."""
    total: np.ndarray | None = None
    for completion in completions:
        if completion.router_indices is None:
            continue
        indices = np.asarray(completion.router_indices).astype(np.int64)  # [layers, T, R]
        layers = indices.shape[0]
        shifted = indices + num_partitions * np.arange(layers)[:, None, None]
        counts = np.bincount(shifted.ravel(), minlength=layers * num_partitions).reshape(layers, num_partitions)
        total = counts if total is None else total + counts
    return total


def router_metrics(counts: np.ndarray) -> dict[str, float]:
    """Load of the busiest partition of each routed layer from `router_counts`, as a multiple of an even share: 1 is balanced, the
    number of partitions is collapse."""
    loads = counts.max(axis=1) * counts.shape[1] / np.maximum(counts.sum(axis=1), 1)
    return {f"router/max_load_{layer}": float(load) for layer, load in enumerate(loads)}


class Clock:
    """Seconds by name, since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds

    def __getitem__(self, name: str) -> float:
        return self._seconds[name]

    def take(self) -> dict[str, float]:
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
