"""What is measured beside the loss: pure functions and two accumulators."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def mismatch_sums(trainer: torch.Tensor, generator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens of `mask` [B, C] that say how far the trainer's policy is from the one that sampled.

    Args:
        trainer, generator: log-probabilities [B, C] of the sampled tokens under each.

    Returns:
        [3], float64: sum of |difference|; sum of k3 = r - 1 - log r with r = p_trainer / p_generator, the low-variance estimate
        of KL(generator || trainer) on the generator's samples (Schulman 2020); number of tokens.
    """
    difference = (trainer - generator).double()[mask.bool()]
    k3 = torch.expm1(difference) - difference
    return torch.stack([difference.abs().sum(), k3.sum(), torch.tensor(float(difference.numel()), device=k3.device).double()])


class Mismatch:
    """Token-weighted mean of `mismatch_sums` over the micro-batches between two logs."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, sums: torch.Tensor) -> None:
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> torch.Tensor | None:
        """The sums [3] since the last call, or None."""
        sums, self._sums = self._sums, None
        return sums


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
