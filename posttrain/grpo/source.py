"""Where a learner's batches come from: what it gets, and the source that samples with the learner's own weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.grpo.curriculum import Curriculum
from posttrain.grpo.dynamic import choose, extras_due
from posttrain.grpo.experience import build_requests
from posttrain.grpo.sampler import PromptSampler
from posttrain.grpo.scoring import Scorer, concatenated, picked
from posttrain.types import Completion, Ratings, Request

Generate = Callable[[list[Request], int], list[list[Completion]]]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A batch of the learner's: prompts [P], completions [P][G] and their ratings.

    Attributes:
        rows: the prompts: the batch's own, and extra ones in place of some.
        passed_over: prompts that were sampled and are not in it, and their ratings (None where there are none).
        short: groups of it that teach nothing, for want of extra ones.
        tokens_passed_over: of the prompts that are not in it, where this process sampled them.
        version: of the learner; stale: whether any token is of an older one.
        metrics: of the source, the same on every rank that knows them; seconds: by what they were spent on.
    """

    rows: list[dict[str, Any]]
    completions: list[list[Completion]]
    ratings: Ratings
    passed_over: tuple[list[dict[str, Any]], Ratings] | None = None
    short: int = 0
    tokens_passed_over: int = 0
    version: int
    stale: bool
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def counts(self) -> dict[str, float]:
        """Groups: `flat` ones that were sampled, those `passed_over`, and those in the batch for want of others (`short`)."""
        passed_over = self.passed_over[1].flat if self.passed_over else []
        return {
            "groups/flat": float(sum(self.ratings.flat) + sum(passed_over)),
            "groups/passed_over": float(len(passed_over)),
            "groups/short": float(self.short),
        }


@dataclass(kw_only=True)
class OwnSource:
    """Samples one rank's batches with its own model, flat groups replaced by extra ones (see `posttrain.grpo.dynamic`).

    Attributes:
        generate: on the learner's weights.
        prompts, order: the run's, from which extra prompts are taken.
        sampling: as `build_requests` takes it; num_generations completions a group.
        extra_groups, ahead: of a batch of all ranks; rank r has the extra candidates r, r + world_size, ...
    """

    generate: Generate
    scorer: Scorer
    prompts: Any
    order: PromptSampler | Curriculum
    sampling: dict[str, Any]
    num_generations: int
    extra_groups: int = 0
    ahead: int = 0
    rank: int = 0
    world_size: int = 1

    def collect(self, rows: Sequence[dict[str, Any]], step: int, batch: int) -> Collected:
        """The groups of this rank's `rows` of generation batch `batch`, at which `step` optimiser steps have been taken."""
        places = len(rows)
        extra = len(range(self.rank, self.extra_groups, self.world_size))
        ahead = len(range(self.rank, self.ahead, self.world_size))
        made, completions, rated = list(rows), [], []
        numbers: list[int | None] = [None] * places
        seconds = {"generate": 0.0, "reward": 0.0}
        due = places + extras_due(0, extra, ahead)
        while True:
            for place in range(len(made) - places, due - places):
                numbers.append(self.rank + place * self.world_size)
                made.append(self.prompts[self.order.extra(batch, numbers[-1] or 0)])
            begin = len(completions)
            begun = time.perf_counter()
            completions += self._sample(made[begin:], numbers[begin:], step)
            sampled = time.perf_counter()
            rated.append(self.scorer.rate(made[begin:], completions[begin:]))
            seconds["generate"] += sampled - begun
            seconds["reward"] += time.perf_counter() - sampled
            ratings = concatenated(rated)
            known = [not (extra and flat) for flat in ratings.flat]
            choice = choose([*known, *[None] * (places + extra - len(known))], places)
            if not choice.missing:
                break
            due = places + extras_due(sum(ratings.flat), extra, ahead)
        others = [candidate for candidate in range(len(made)) if candidate not in choice.take]
        return Collected(
            rows=[made[candidate] for candidate in choice.take],
            completions=[completions[candidate] for candidate in choice.take],
            ratings=picked(ratings, choice.take),
            passed_over=([made[candidate] for candidate in others], picked(ratings, others)) if others else None,
            short=choice.short,
            tokens_passed_over=sum(len(completion.token_ids) for candidate in others for completion in completions[candidate]),
            version=step,
            stale=False,
            seconds=seconds,
        )

    def _sample(self, rows: list[dict[str, Any]], numbers: list[int | None], step: int) -> list[list[Completion]]:
        requests = build_requests(rows, num_generations=self.num_generations, step=step, extras=numbers, **self.sampling)
        return self.generate(requests, step)
