"""The two kinds of actors that make groups: generators, each with an engine, and the one that scores what they sample.

A generator's loop, one turn of which is a step of the engine:

    talk to the buffer (new slots) -> swap to newer weights that have arrived -> step -> finished groups to the rewards -> put

No turn waits for another process: questions are asked, and their answers are looked for in later turns. Weights arrive in a
thread beside it, and the engine stands still only while it copies them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from posttrain.errors import PosttrainError
from posttrain.grpo.scoring import Scorer
from posttrain.grpo.split.buffer import Orders, Work
from posttrain.grpo.split.groups import RatedGroup
from posttrain.grpo.split.partial import Kept, Partial, TokenLog, snapshot_of
from posttrain.grpo.split.plan import Plan
from posttrain.grpo.split.transfer.buckets import Shapes
from posttrain.grpo.split.weights import Inbox, open_receiver
from posttrain.types import Completion, Ratings, Request

logger = logging.getLogger(__name__)

# How often a generator that is busy talks to the buffer, and how long one with nothing to do sleeps.
TALK_S = 0.2
IDLE_S = 0.02
# How often it says what it has sampled of unfinished groups: what a death costs at most, besides a prefill.
KEEP_S = 2.0


class Engine(Protocol):
    """What is needed of `posttrain.rollout.Generator`."""

    on_token: Any

    def submit(self, request: Request) -> str: ...

    def restore(self, snapshot: dict[str, Any]) -> str: ...

    def abort(self, request_id: str) -> bool: ...

    def step(self) -> list[Completion]: ...

    @property
    def has_unfinished(self) -> bool: ...

    def update_weights(self, version: int, state_dict: Any = None) -> None: ...


@dataclass(kw_only=True)
class Workbench:
    """What a generator works with, opened in its own process: `engine` runs `max_sequences` samples at once; `shapes` are
    those of its weights, which are on `device`. `finish_first`: samples that have begun are finished before newer weights."""

    engine: Engine
    shapes: Shapes
    max_sequences: int
    device: str = "cpu"
    finish_first: bool = False


class RewardActor:
    """Scores groups in a process that has nothing to do with any engine."""

    def __init__(self, open_scorer: Callable[[int], Scorer], folder: str, number: int) -> None:
        """
        Args:
            open_scorer: called with the number of the actor.
            folder: the learner's working folder, from which a recipe's relative paths are meant.
        """
        enter(folder)
        self._open, self._number = open_scorer, number
        self._scorer: Scorer | None = None

    def rate(self, row: dict[str, Any], completions: list[Completion]) -> Ratings:
        """Ratings of one group. The first call opens the rewards, so that their errors are its own."""
        self._scorer = self._scorer or self._open(self._number)
        return self._scorer.rate([row], [completions])


@dataclass(kw_only=True)
class _Making:
    """A slot that is being made; `waits_for` is the reference of the rating or of the buffer's answer, `kept` what the buffer
    has of it while it is unfinished."""

    row: dict[str, Any]
    request: Request
    done: list[Completion] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)
    waits_for: Any = None
    group: RatedGroup | None = None
    since: float = 0.0


class GeneratorActor:
    """Makes the slots that the buffer gives it, until it is told to stop.

    Args:
        name: unique in the run; a generator that replaces a dead one has a new name.
        open_workbench: loads the model and makes the engine; called with the name.
        buffer, rewards, board: handles of the actors; a slot's group goes to one of `rewards` by its number.
        limit_s: longest wait for an answer of any of them.
        folder: the learner's working folder.
    """

    def __init__(
        self,
        name: str,
        open_workbench: Callable[[str], Workbench],
        plan: Plan,
        *,
        buffer: Any,
        rewards: Sequence[Any],
        board: Any,
        limit_s: float,
        folder: str,
    ) -> None:
        enter(folder)
        self._name, self._open, self._plan = name, open_workbench, plan
        self._buffer, self._rewards, self._board, self._limit_s = buffer, rewards, board, limit_s
        self._making: dict[int, _Making] = {}
        self._slots: dict[str, int] = {}
        self._version = -1
        self._held: int | None = None
        self._reply: Any = None
        self._asked, self._due = 0.0, False
        self._log = TokenLog()
        self._work, self._began = Work(), time.monotonic()
        self._keeping: Any = None
        self._kept_at = time.monotonic()
        self._stopped = False

    def placed(self) -> int:
        """The process id, once this process runs."""
        return os.getpid()

    def run(self) -> None:
        """Work until the buffer says stop.

        Raises:
            PosttrainError: the engine, the rewards or the weights failed, or somebody did not answer in time.
        """
        bench = self._open(self._name)
        self._engine, self._max_sequences, self._device = bench.engine, bench.max_sequences, bench.device
        self._finish_first = bench.finish_first
        self._inbox = Inbox(open_receiver(self._board, bench.shapes, name=self._name, device=bench.device, limit_s=self._limit_s))
        self._engine.on_token = self._log.token
        self._began = time.monotonic()
        while not self._stopped:
            self._talk()
            self._update()
            worked = self._step()
            self._deliver()
            self._keep()
            if not worked:
                time.sleep(IDLE_S)
        self._inbox.close()

    def _talk(self) -> None:
        if self._reply is None:
            if time.monotonic() - self._asked < TALK_S and self._slots and not self._due:
                return
            self._asked, self._due = time.monotonic(), False
            self._reply = self._buffer.sync.remote(
                self._name,
                version=self._version,
                holding=list(self._making),
                want=self._room(),
                work=replace(self._work, tokens=self._log.tokens, elapsed=time.monotonic() - self._began),
            )
            return
        orders: Orders | None = self._arrived(self._reply, self._asked, "the experience buffer has not answered")
        if orders is None:
            return
        self._reply = None
        self._stopped = orders.stop
        for slot in orders.drop:
            making = self._making.pop(slot, None)
            if making is not None and self._slots.pop(making.request.id, None) is not None:
                self._log.close(making.request.id)
                self._engine.abort(making.request.id)
        for slot in orders.take:
            chosen = orders.prompts.get(slot)
            row = self._plan.row(slot) if chosen is None else self._plan.prompts[chosen]
            self._begin(slot, row, orders.partials.get(slot))

    def _begin(self, slot: int, row: dict[str, Any], partial: Partial | None) -> None:
        """Make a slot, from where another generator was with it."""
        making = self._making[slot] = _Making(row=row, request=self._plan.request(slot, row))
        self._log.open(making.request.id, partial)
        if partial is None:
            self._slots[self._engine.submit(making.request)] = slot
            return
        making.done, making.kept = list(partial.done.values()), partial.kept
        snapshot = snapshot_of(partial, making.request)
        if snapshot is None:
            self._rate(slot, making)
        else:
            self._slots[self._engine.restore(snapshot)] = slot

    def _keep(self) -> None:
        """Tell the buffer, now and then, what has been sampled of unfinished groups."""
        if self._keeping is None:
            if time.monotonic() - self._kept_at < KEEP_S or not self._making:
                return
            self._kept_at = time.monotonic()
            notes = {
                slot: self._log.note(making.request.id, making.done, making.kept)
                for slot, making in self._making.items()
                if making.group is None
            }
            notes = {slot: note for slot, note in notes.items() if note.done or note.pieces}
            self._keeping = self._buffer.keep.remote(self._name, notes) if notes else None
            return
        kept: dict[int, Kept] | None = self._arrived(
            self._keeping, self._kept_at, "the experience buffer has not taken note of unfinished groups"
        )
        if kept is not None:
            self._keeping = None
            for slot, what in kept.items():
                if slot in self._making:
                    self._making[slot].kept = what

    def _room(self) -> int:
        """Slots that the engine has room for; groups that wait for their scores take none."""
        if self._version < 0 or self._held is not None:
            return 0
        open_samples = sum(
            self._making[slot].request.n - len(self._making[slot].done) for slot in self._slots.values() if slot in self._making
        )
        return max(0, -(-(self._max_sequences - open_samples) // self._plan.num_generations))

    def _update(self) -> None:
        """Newer weights, between two steps: what becomes of samples that have begun is the engine's policy. Where they are to be
        finished first, the version is held and no slot is taken until none is left."""
        if self._held is None:
            self._held = self._inbox.poll()
        if self._held is None or (self._finish_first and self._engine.has_unfinished):
            return
        version, self._held = self._held, None
        begun = time.perf_counter()
        self._engine.update_weights(version, self._inbox.staged)
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize(self._device)
        pause = time.perf_counter() - begun
        self._board.swapped.remote(self._name, version, self._inbox.seconds, pause)
        self._inbox.release()
        self._version = version
        self._due = True  # say so at once: there may be slots for this version

    def _step(self) -> bool:
        if not self._engine.has_unfinished:
            return False
        begun = time.monotonic()
        completions = self._engine.step()
        self._work = replace(self._work, busy=self._work.busy + time.monotonic() - begun)
        for completion in completions:
            slot = self._slots.get(completion.request_id)
            if slot is None or completion.finish_reason == "abort":
                continue
            making = self._making[slot]
            making.done.append(_on_the_host(completion))
            if len(making.done) == making.request.n:
                del self._slots[completion.request_id]
                self._log.close(completion.request_id)
                self._rate(slot, making)
        return True

    def _rate(self, slot: int, making: _Making) -> None:
        making.done.sort(key=lambda completion: completion.sample)
        # Rewards read ids; the router's choices are most of the bytes.
        bare = [replace(completion, router_indices=None) for completion in making.done]
        actor = self._rewards[slot % len(self._rewards)]
        making.waits_for, making.since = actor.rate.remote(making.row, bare), time.monotonic()

    def _deliver(self) -> None:
        """Rated groups to the buffer; those that it has answered about are done with."""
        for slot, making in list(self._making.items()):
            if making.waits_for is None:
                continue
            if making.group is not None:
                what = f"the experience buffer has not taken slot {slot}"
                if self._arrived(making.waits_for, making.since, what) is not None:
                    del self._making[slot]
                continue
            ratings: Ratings | None = self._arrived(making.waits_for, making.since, f"the rewards have not scored slot {slot}")
            if ratings is not None:
                making.group = RatedGroup(
                    slot=slot,
                    prompt_index=making.row["prompt_index"],
                    completions=tuple(making.done),
                    totals=tuple(ratings.totals[0]),
                    parts={name: tuple(values[0]) for name, values in ratings.parts.items()},
                    flat=ratings.flat[0],
                    timeouts=ratings.timeouts,
                    generator=self._name,
                )
                scoring = self._work.scoring + time.monotonic() - making.since
                self._work = replace(self._work, groups=self._work.groups + 1, scoring=scoring)
                making.waits_for, making.since = self._buffer.put.remote(making.group), time.monotonic()

    def _arrived(self, reference: Any, since: float, late: str) -> Any:
        """The value of a reference, or None while it is on its way.

        Raises:
            PosttrainError: it is later than allowed.
        """
        import ray

        ready, _ = ray.wait([reference], timeout=0)
        if ready:
            return ray.get(reference)
        if time.monotonic() - since > self._limit_s:
            raise PosttrainError(f"{self._name}: {late} for {self._limit_s:.0f} s")
        return None


def _on_the_host(completion: Completion) -> Completion:
    """The completion with its router's choices as an array, which any process can read."""
    router = completion.router_indices
    return completion if router is None else replace(completion, router_indices=router.detach().cpu().numpy())


def enter(folder: str) -> None:
    """Work in `folder`, where this machine has it."""
    if os.path.isdir(folder):
        os.chdir(folder)
