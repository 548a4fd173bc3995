"""The two kinds of actors that make groups: generators, each with an engine, and the one that scores what they sample.

A generator's loop, one turn of which is a step of the engine:

    talk to the buffer (new slots, newest version) -> fetch newer weights -> step -> hand finished groups to the rewards -> put

No turn waits for another process but to fetch weights: questions are asked, and their answers are looked for in later turns.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from posttrain.errors import PosttrainError
from posttrain.grpo.scoring import Scorer
from posttrain.grpo.split.buffer import Orders
from posttrain.grpo.split.groups import RatedGroup
from posttrain.grpo.split.plan import Plan
from posttrain.grpo.split.weights import ObjectStoreReceiver, Shapes, WeightReceiver, WeightsGone
from posttrain.types import Completion, Ratings, Request

logger = logging.getLogger(__name__)

# How often a generator that is busy talks to the buffer, and how long one with nothing to do sleeps.
TALK_S = 0.2
IDLE_S = 0.02


class Engine(Protocol):
    """What is needed of `posttrain.rollout.Generator`."""

    def submit(self, request: Request) -> str: ...

    def abort(self, request_id: str) -> bool: ...

    def step(self) -> list[Completion]: ...

    @property
    def has_unfinished(self) -> bool: ...

    def update_weights(self, version: int, state_dict: Any = None) -> None: ...


@dataclass(kw_only=True)
class Workbench:
    """What a generator works with, opened in its own process: `engine` runs `max_sequences` samples at once; `shapes` are
    those of its weights."""

    engine: Engine
    shapes: Shapes
    max_sequences: int


class RewardActor:
    """Scores groups in a process that has nothing to do with any engine."""

    def __init__(self, open_scorer: Callable[[], Scorer], folder: str) -> None:
        """`folder`: the learner's working folder, from which a recipe's relative paths are meant."""
        enter(folder)
        self._open = open_scorer
        self._scorer: Scorer | None = None

    def rate(self, row: dict[str, Any], completions: list[Completion]) -> Ratings:
        """Ratings of one group. The first call opens the rewards, so that their errors are its own."""
        self._scorer = self._scorer or self._open()
        return self._scorer.rate([row], [completions])


@dataclass(kw_only=True)
class _Making:
    """A slot that is being made; `waits_for` is the reference of the rating or of the buffer's answer."""

    row: dict[str, Any]
    request: Request
    done: list[Completion] = field(default_factory=list)
    waits_for: Any = None
    group: RatedGroup | None = None
    since: float = 0.0


class GeneratorActor:
    """Makes the slots that the buffer gives it, until it is told to stop.

    Args:
        name: unique in the run; a generator that replaces a dead one has a new name.
        open_workbench: loads the model and makes the engine; called with the name.
        buffer, rewards, board: handles of the actors.
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
        rewards: Any,
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
        self._newest = -1
        self._reply: Any = None
        self._asked = 0.0
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
        self._engine, self._max_sequences = bench.engine, bench.max_sequences
        self._receiver: WeightReceiver = ObjectStoreReceiver(self._board, bench.shapes, limit_s=self._limit_s)
        while not self._stopped:
            self._talk()
            self._update()
            worked = self._step()
            self._deliver()
            if not worked:
                time.sleep(IDLE_S)

    def _talk(self) -> None:
        if self._reply is None:
            if time.monotonic() - self._asked < TALK_S and self._slots:
                return
            self._asked = time.monotonic()
            self._reply = self._buffer.sync.remote(
                self._name, version=self._version, holding=list(self._making), want=self._room()
            )
            return
        orders: Orders | None = self._arrived(self._reply, self._asked, "the experience buffer has not answered")
        if orders is None:
            return
        self._reply = None
        self._stopped, self._newest = orders.stop, orders.version
        for slot in orders.drop:
            making = self._making.pop(slot, None)
            if making is not None and self._slots.pop(making.request.id, None) is not None:
                self._engine.abort(making.request.id)
        for slot in orders.take:
            row = self._plan.row(slot)
            making = self._making[slot] = _Making(row=row, request=self._plan.request(slot, row))
            self._slots[self._engine.submit(making.request)] = slot

    def _room(self) -> int:
        """Slots that the engine has room for; groups that wait for their scores take none."""
        if self._version < 0:
            return 0
        open_samples = sum(
            self._making[slot].request.n - len(self._making[slot].done) for slot in self._slots.values() if slot in self._making
        )
        return max(0, -(-(self._max_sequences - open_samples) // self._plan.num_generations))

    def _update(self) -> None:
        """Newer weights, between two steps: samples that have begun go on under them."""
        if self._newest == self._version or self._newest < 0:
            return
        version = self._receiver.newest()
        if version == self._version:
            return  # published already, and the buffer not yet told
        try:
            weights = self._receiver.fetch(version)
        except WeightsGone:
            return  # newer ones came meanwhile
        self._engine.update_weights(version, weights)
        self._version = self._newest = version
        self._asked = 0.0  # say so at once: there may be slots for this version

    def _step(self) -> bool:
        if not self._engine.has_unfinished:
            return False
        for completion in self._engine.step():
            slot = self._slots.get(completion.request_id)
            if slot is None or completion.finish_reason == "abort":
                continue
            making = self._making[slot]
            making.done.append(_on_the_host(completion))
            if len(making.done) == making.request.n:
                del self._slots[completion.request_id]
                making.done.sort(key=lambda completion: completion.sample)
                # Rewards read ids; the router's choices are most of the bytes.
                bare = [replace(completion, router_indices=None) for completion in making.done]
                making.waits_for, making.since = self._rewards.rate.remote(making.row, bare), time.monotonic()
        return True

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
                    timeouts=ratings.timeouts,
                    generator=self._name,
                )
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
