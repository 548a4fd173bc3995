"""The learner's side of the split: it starts the actors, publishes weights and waits for batches."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from posttrain.grpo.scoring import Scorer
from posttrain.grpo.source import Collected
from posttrain.grpo.split.buffer import ExperienceBuffer, Lease, Work
from posttrain.grpo.split.generator import GeneratorActor, RewardActor, Workbench
from posttrain.grpo.split.groups import RatedGroup, ratings_of
from posttrain.grpo.split.plan import Plan
from posttrain.grpo.split.pool import GeneratorPool, SplitError, SplitSettings, answer
from posttrain.grpo.split.weights import WeightBoard, WeightSender, open_sender
from posttrain.types import Ratings

logger = logging.getLogger(__name__)

POLL_S = 0.05
OnProgress = Callable[[int, int, int], None]


class SplitExperience:
    """Where a learner in split placement gets its batches. Ray must be connected; actors start at the first `collect`.

    Args:
        plan: of the run.
        folder: of the buffer's journal.
        open_workbench, open_scorer: run in the actors' processes; pickled.
        open_sender: board -> the learner's side of the weights' transfer.
        progress: called while the learner waits with (completions ready, completions in all, 0); may raise to end the wait.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        folder: Path,
        open_workbench: Callable[[str], Workbench],
        open_scorer: Callable[[int], Scorer],
        settings: SplitSettings,
        open_sender: Callable[[Any], WeightSender] = open_sender,
        progress: OnProgress = lambda done, total, tokens: None,
    ) -> None:
        self._plan, self._folder, self._settings, self.progress = plan, folder, settings, progress
        self._open_workbench, self._open_scorer, self._open_sender = open_workbench, open_scorer, open_sender
        self._learner = f"learner-{uuid.uuid4().hex[:8]}"
        self._actors: list[Any] = []
        self._pool: GeneratorPool | None = None
        self._work, self._worked_at = Work(), time.monotonic()
        self._prompts: dict[int, list[int]] | None = None
        self.buffer: Any = None

    def collect(
        self,
        rows: Sequence[dict[str, Any]],
        batch: int,
        named_tensors: Mapping[str, Tensor],
        prompts: dict[int, list[int]] | None = None,
    ) -> Collected:
        """The groups of generation batch `batch`, whose prompts the learner expects to be `rows` [P].

        Args:
            prompts: where the learner chooses them, those of all slots of this batch and of those that may be made ahead.
            named_tensors: the learner's weights as they are now, trained on batches 0..batch-1: published as version `batch`.

        Raises:
            SplitError: generators keep dying, cannot be placed, or groups are late.
            PosttrainError: what an actor raised, as it raised it.
        """
        self._prompts = prompts
        self._start(batch)
        begun = time.monotonic()
        self._sender.publish(batch, named_tensors)
        self._advance(batch)
        published = time.monotonic()
        lease = self._wait(batch)
        arrived = time.monotonic()
        groups = lease.groups
        self._check_prompts(batch, rows, [*groups, *lease.passed_over])
        ages = self._ages(batch, groups)
        return Collected(
            rows=[self._row(group.slot) for group in groups],
            completions=[list(group.completions) for group in groups],
            ratings=ratings_of(groups),
            passed_over=self._passed_over(lease),
            short=lease.short,
            version=batch,
            stale=len(ages) > 1,
            metrics={**self._staleness(ages), **self._counters(), **self._generation(), **self._sender.metrics()},
            seconds={"sync": published - begun, "wait": arrived - published},
        )

    def ack(self, batch: int) -> None:
        """The optimiser has taken the steps of `batch`."""
        self._ask(self.buffer.ack.remote(self._learner, batch), f"taken note that batch {batch} was trained")

    def commit(self, position: int) -> None:
        """A checkpoint holds batches 0..position-1: their groups may be deleted."""
        if self.buffer is not None:
            self._ask(self.buffer.commit.remote(self._learner, position), f"deleted the batches before {position}")

    def close(self) -> None:
        """End the actors at once."""
        import ray

        if self._pool is not None:
            self._pool.close()
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._pool, self.buffer = [], None, None

    # -- the actors ---------------------------------------------------------------------------------------------------

    def _start(self, position: int) -> None:
        if self.buffer is not None:
            return
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The journal is in the run folder, which this machine sees; Ray repeats what was under way when one of these dies.
        here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        lasting: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
        self.buffer = ray.remote(scheduling_strategy=here, **lasting)(ExperienceBuffer).remote(  # pyright: ignore
            str(self._folder.absolute()),
            groups_per_batch=self._plan.groups_per_batch,
            num_batches=self._plan.num_batches,
            max_staleness=self._settings.max_staleness,
            extra_groups=self._plan.extra_groups,
            ahead=self._settings.ahead,
            chosen=self._prompts is not None,
        )
        board: Any = ray.remote(**lasting)(WeightBoard).remote()  # pyright: ignore
        # Their processes take whole cores and no GPU; one that dies starts again where there is room, its groups with it.
        scoring: Any = ray.remote(scheduling_strategy="SPREAD", **lasting)(RewardActor)
        rewards = [scoring.remote(self._open_scorer, os.getcwd(), n) for n in range(self._settings.rewards)]
        self._actors = [self.buffer, board, *rewards]
        self._sender: WeightSender = self._open_sender(board)
        self._ask(self.buffer.attach.remote(self._learner, position), "come up")
        plan = ray.put(self._plan)

        def make(name: str) -> Any:
            options = {"num_cpus": self._settings.num_cpus, "num_gpus": self._settings.num_gpus}
            return ray.remote(**options)(GeneratorActor).remote(  # pyright: ignore
                name,
                self._open_workbench,
                plan,
                buffer=self.buffer,
                rewards=rewards,
                board=board,
                limit_s=self._settings.limit_s,
                folder=os.getcwd(),
            )

        self._pool = GeneratorPool(make, self._retire, self._settings)

    def _retire(self, name: str) -> None:
        self._sender.forget(name)
        lost = self._ask(self.buffer.retire.remote(name), f"taken the slots of {name} back")
        logger.warning("%d slots of %s go to the others", len(lost), name)

    # -- a batch ------------------------------------------------------------------------------------------------------

    def _advance(self, batch: int) -> None:
        self._ask(self.buffer.advance.remote(self._learner, batch, self._prompts), f"taken note of version {batch}")

    def _row(self, slot: int) -> dict[str, Any]:
        """The prompt of a slot of the batch at hand."""
        if self._prompts is None:
            return self._plan.row(slot)
        batch, candidate = self._plan.place(slot)
        return self._plan.prompts[self._prompts[batch][candidate]]

    def _wait(self, batch: int) -> Lease:
        assert self._pool is not None
        size = self._plan.groups_per_batch
        since, made = time.monotonic(), -1
        while True:
            lease: Lease = self._ask(self.buffer.lease.remote(self._learner, batch), f"answered about batch {batch}")
            if lease.groups:
                return lease
            self._pool.check()
            self.progress(lease.ready * self._plan.num_generations, size * self._plan.num_generations, 0)
            if lease.made != made:
                since, made = time.monotonic(), lease.made
            self._sender.ensure()
            if self._prompts is not None:
                self._advance(batch)  # a buffer that was restarted knows of no choice
            if time.monotonic() - since > self._settings.limit_s:
                raise SplitError(
                    f"batch {batch}: no group has come for {self._settings.limit_s:.0f} s, and {len(lease.late)} of {size} are "
                    f"missing. {'; '.join(lease.late[:4])}{'; ...' if len(lease.late) > 4 else ''}. Look at logs/grpo*.log for "
                    "what they do, raise grpo.batch_timeout_s if they are only slow, then continue with --resume"
                )
            time.sleep(POLL_S)

    def _check_prompts(self, batch: int, rows: Sequence[dict[str, Any]], groups: Sequence[RatedGroup]) -> None:
        first = batch * (self._plan.groups_per_batch + self._plan.extra_groups)
        wanted = {first + place: row["prompt_index"] for place, row in enumerate(rows)}
        for group in groups:
            expected = wanted.get(group.slot, self._row(group.slot)["prompt_index"])
            if group.prompt_index != expected:
                raise SplitError(
                    f"the buffer's group of slot {group.slot} is of prompt {group.prompt_index}, but the data order has "
                    f"{expected}: {self._folder} was written by a run of another recipe or another data set; delete that folder "
                    "to generate them anew"
                )

    def _passed_over(self, lease: Lease) -> tuple[list[dict[str, Any]], Ratings] | None:
        groups = lease.passed_over
        return ([self._row(group.slot) for group in groups], ratings_of(groups)) if groups else None

    def _counters(self) -> dict[str, float]:
        counters = self._ask(self.buffer.counters.remote(), "given its counters")
        names = {"stale": "stale_groups", "duplicate": "duplicate_groups", "given_back": "groups_given_back"}
        return {f"buffer/{name}": float(counters.get(key, 0)) for key, name in names.items()}

    @staticmethod
    def _ages(batch: int, groups: Sequence[RatedGroup]) -> np.ndarray:
        """Tokens by their age in versions: entry a counts those of age a, up to the oldest."""
        versions = [completion.versions for group in groups for completion in group.completions]
        return np.bincount(batch - np.concatenate([np.asarray(of, dtype=np.int64) for of in versions]))

    def _staleness(self, counts: np.ndarray) -> dict[str, float]:
        """Mean, maximum and histogram of the tokens' ages in versions, from `_ages`."""
        shares = counts / counts.sum()
        histogram = {
            f"staleness/age_{age}": float(shares[age]) if age < len(shares) else 0.0
            for age in range(self._settings.max_staleness + 1)
        }
        mean = float(shares @ np.arange(len(shares)))
        return {"staleness/mean": mean, "staleness/max": float(len(shares) - 1), **histogram}

    def _generation(self) -> dict[str, float]:
        """What the generators did since the last batch: tokens a second of all together, the share of their time that their
        engines were busy, seconds that a group waited for its score."""
        work, now = self._ask(self.buffer.work.remote(), "said what the generators did"), time.monotonic()
        done, seconds = work - self._work, now - self._worked_at
        self._work, self._worked_at = work, now
        if done.elapsed <= 0 or seconds <= 0:  # the buffer was restarted, and has forgotten what it knew
            return {}
        metrics = {"generator/tokens_per_second": done.tokens / seconds, "generator/busy": done.busy / done.elapsed}
        return metrics | ({"generator/time_reward": done.scoring / done.groups} if done.groups else {})

    def _ask(self, reference: Any, what: str) -> Any:
        """An answer of the buffer; see `answer`."""
        return answer(reference, self._settings.limit_s, f"the experience buffer has not {what}")
