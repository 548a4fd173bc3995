"""Slot -> prompt and request: the run's data order, known to every process alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.grpo.experience import build_requests
from posttrain.grpo.sampler import PromptSampler
from posttrain.types import Request


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every slot of a run is (pickled into the generators).

    Attributes:
        prompts: rows by index (a `datasets.Dataset` or a list).
        sampler: the learner's own order.
        groups_per_batch, num_batches: of the run; `num_generations` completions a group.
        extra_groups: candidates of a batch beyond its own groups (see `posttrain.grpo.dynamic`), numbered after them.
        sampling: temperature, top_p, top_k, min_p, max_tokens, stop and run_seed of `build_requests`.
        steps_per_batch: optimiser steps that a batch serves: batch b comes before step b * steps_per_batch, which the seeds of
            its samples depend on.
    """

    prompts: Any
    sampler: PromptSampler
    groups_per_batch: int
    num_batches: int
    num_generations: int
    sampling: dict[str, Any]
    steps_per_batch: int = 1
    extra_groups: int = 0

    def place(self, slot: int) -> tuple[int, int]:
        """(batch, number of the candidate in it)."""
        return divmod(slot, self.groups_per_batch + self.extra_groups)

    def row(self, slot: int) -> dict[str, Any]:
        """The prompt of a slot."""
        batch, candidate = self.place(slot)
        extra = candidate - self.groups_per_batch
        return self.prompts[self.sampler.batch(batch)[candidate] if extra < 0 else self.sampler.extra(batch, extra)]

    def request(self, slot: int, row: dict[str, Any]) -> Request:
        """The request that the colocated learner would have made for it."""
        batch, candidate = self.place(slot)
        extra = candidate - self.groups_per_batch
        [request] = build_requests(
            [row],
            num_generations=self.num_generations,
            step=batch * self.steps_per_batch,
            extras=[None if extra < 0 else extra],
            **self.sampling,
        )
        return request
