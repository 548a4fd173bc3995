"""The buffer between the generators and the learner: a plain class, wrapped as a Ray actor by `experience.py`.

A slot is waiting -> taken by a generator -> ready (admitted, in the journal) -> leased with its batch -> acknowledged.
Every message may arrive twice (Ray repeats those that were on their way when the buffer died) and none is lost by that.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from posttrain.errors import PosttrainError
from posttrain.grpo.dynamic import Choice, choose, extras_due
from posttrain.grpo.split.groups import RatedGroup, bare
from posttrain.grpo.split.journal import LOCK_SECONDS, Journal
from posttrain.grpo.split.partial import Kept, Note, Partial

logger = logging.getLogger(__name__)
Verdict = Literal["admitted", "duplicate", "stale", "spare", "trained"]


class BufferError(PosttrainError):
    """A message that the buffer cannot accept: of a learner that was replaced, or about a batch out of turn."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a generator is told: `take` these slots, `drop` those of its own (others made them), the newest `version` there is
    (-1: none yet), and whether to `stop`. `prompts`: of slots to be taken, where the learner chooses them; `partials`: what
    others have done of such slots, before they died."""

    take: tuple[int, ...] = ()
    prompts: dict[int, int] = field(default_factory=dict)
    partials: dict[int, Partial] = field(default_factory=dict)
    drop: tuple[int, ...] = ()
    version: int = -1
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A batch for the learner: `groups` in slot order, or empty while some are missing; `ready` of them are there, and `late`
    says who holds the others. made: groups that are there at all, flat ones that are to be replaced among them.

    passed_over: groups that were made for the batch and are not in it, without router choices; flat ones, and extra ones that
    were made ahead and not needed. short: flat groups that are in it, for want of better ones.
    """

    groups: tuple[RatedGroup, ...] = ()
    passed_over: tuple[RatedGroup, ...] = ()
    short: int = 0
    ready: int = 0
    made: int = 0
    late: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a generator has done since it began: `tokens` sampled; seconds `busy` in its engine, of those that it had (`elapsed`);
    `groups` scored, which took `scoring` seconds from their last token on, all added up."""

    tokens: int = 0
    busy: float = 0.0
    elapsed: float = 0.0
    groups: int = 0
    scoring: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in vars(self)})

    def __sub__(self, other: Work) -> Work:
        return Work(**{name: getattr(self, name) - getattr(other, name) for name in vars(self)})


@dataclass(kw_only=True)
class _Generator:
    version: int = -1
    heard: float = 0.0


class ExperienceBuffer:
    """Slots of a run: who makes them, which are ready, what the learner has had.

    Args:
        folder: of the journal; groups that are in it are taken up.
        groups_per_batch, num_batches: of the run.
        extra_groups: that may be made for a batch in place of flat ones (see `posttrain.grpo.dynamic`), `ahead` of them before
            it is known whether they are needed. A batch has as many slots as it may have groups.
        max_staleness: versions that a token may be older than the one that its batch is trained at; 0 is strictly on-policy.
        chosen: whether the learner chooses the prompts as it goes (see `advance`): no slot is given out before.
        now: a clock in seconds.
        patience_s: how long to wait for a predecessor to let go of the journal.

    Raises:
        RunFolderError: the journal is damaged, or held by another process.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        groups_per_batch: int,
        num_batches: int,
        max_staleness: int,
        extra_groups: int = 0,
        ahead: int = 0,
        chosen: bool = False,
        now: Callable[[], float] = time.monotonic,
        patience_s: float = LOCK_SECONDS,
    ) -> None:
        for name, given, least in (
            ("groups_per_batch", groups_per_batch, 1),
            ("num_batches", num_batches, 1),
            ("max_staleness", max_staleness, 0),
            ("extra_groups", extra_groups, 0),
        ):
            if given < least:
                raise ValueError(f"{name}={given}, but it must be at least {least}")
        self._groups_per_batch, self._num_batches, self._max_staleness = groups_per_batch, num_batches, max_staleness
        self._slots_per_batch, self._extras, self._ahead = groups_per_batch + extra_groups, extra_groups, ahead
        self._chosen, self._prompts = chosen, dict[int, list[int]]()
        self._now = now
        self._journal = Journal(Path(folder), patience_s=patience_s)
        self._ready: dict[int, RatedGroup] = {}
        self._taken: dict[int, tuple[str, float]] = {}
        self._partials: dict[int, Partial] = {}
        self._generators: dict[str, _Generator] = {}
        self._retired: set[str] = set()
        self._work: dict[str, Work] = {}
        self._counters: Counter[str] = Counter()
        self._version = -1
        note = self._journal.last_note()
        self._learner: str = note.get("learner", "")
        self._position: int = note.get("position", 0)
        self._load()
        self._counters["recovered"] = len(self._ready)

    # -- the generators' side -----------------------------------------------------------------------------------------

    def sync(self, generator: str, *, version: int, holding: list[int], want: int, work: Work | None = None) -> Orders:
        """A generator says what it has, and is told what to do; it does so every few moments.

        Args:
            version: of its weights. A slot is given only where its batch may be trained with tokens of that version.
            holding: slots that it is making. What the buffer gave it and is not among them goes back (the answer was lost).
            want: slots that it has room for.
            work: what it has done so far.
        """
        if work is not None:
            self._work[generator] = work
        if generator in self._retired:
            return Orders(stop=True)
        self._generators[generator] = _Generator(version=version, heard=self._now())
        held = set(holding)
        for slot in [slot for slot, (name, _) in self._taken.items() if name == generator and slot not in held]:
            del self._taken[slot]
        drop = []
        for slot in holding:
            other = self._taken.setdefault(slot, (generator, self._now()))[0]
            if self._is_past(slot) or slot in self._ready or other != generator or self._is_complete(self._batch(slot)):
                drop.append(slot)
                if other == generator:
                    del self._taken[slot]
        take = tuple(slot for slot, _ in zip(self._waiting(version), range(want), strict=False)) if want > 0 else ()
        for slot in take:
            self._taken[slot] = (generator, self._now())
        partials = {slot: partial for slot in take if (partial := self._usable_partial(slot)) is not None}
        self._counters["continued"] += len(partials)
        prompts = {slot: self._prompts[self._batch(slot)][slot % self._slots_per_batch] for slot in take if self._chosen}
        return Orders(take=take, prompts=prompts, partials=partials, drop=tuple(drop), version=self._version)

    def keep(self, generator: str, notes: dict[int, Note]) -> dict[int, Kept]:
        """Remember what a generator has done of the slots that it is making: whoever gets one after its death goes on there.

        In memory alone: a group that is not finished begins anew where generator and buffer die together.

        Returns:
            what is remembered of each, of which nothing needs to be said again.
        """
        mine = {slot: note for slot, note in notes.items() if self._taken.get(slot, ("", 0.0))[0] == generator}
        for slot, note in mine.items():
            self._partials.setdefault(slot, Partial()).add(note)
        return {slot: self._partials[slot].kept for slot in mine}

    def put(self, group: RatedGroup) -> Verdict:
        """Admit a group whole, or say why not. It is in the journal when this returns "admitted".

        "duplicate": another generator, or this message before, made it. "stale": a token is older than allowed; the slot will be
        made again. "spare": its batch is complete without it. "trained": its batch has been acknowledged.

        Raises:
            RunFolderError: the disk is full.
            BufferError: no such slot.
        """
        slot, batch = group.slot, self._batch(group.slot)
        if not 0 <= batch < self._num_batches:
            raise BufferError(f"slot {slot} does not exist: the run has {self._num_batches * self._slots_per_batch}")
        verdict: Verdict = "admitted"
        if self._is_past(slot):
            verdict = "trained"
        elif slot in self._ready:
            verdict = "duplicate"
        elif batch - group.oldest > self._max_staleness:
            verdict = "stale"
        elif self._is_complete(batch):
            verdict = "spare"
        else:
            self._journal.add(batch, group)
            self._ready[slot] = group
        if verdict in ("admitted", "spare", "trained") or self._taken.get(slot, ("", 0.0))[0] == group.generator:
            self._taken.pop(slot, None)
        self._partials.pop(slot, None)
        self._counters[verdict] += 1
        return verdict

    def retire(self, generator: str) -> list[int]:
        """Declare a generator dead: its slots go to the others, and messages of it that are still on their way get nothing."""
        self._retired.add(generator)
        self._generators.pop(generator, None)
        lost = sorted(slot for slot, (name, _) in self._taken.items() if name == generator)
        for slot in lost:
            del self._taken[slot]
        self._counters["given_back"] += len(lost)
        return lost

    # -- the learner's side -------------------------------------------------------------------------------------------

    def attach(self, learner: str, position: int) -> None:
        """A learner starts: `position` is the first batch that its weights have not been trained on (its checkpoint's).

        Batches from there on that were acknowledged by a learner before it are handed out again. Other learners are refused
        from now on.

        Raises:
            BufferError: the journal no longer holds what lies between, for a later checkpoint was reported.
        """
        if (learner, position) == (self._learner, self._position):
            return
        if position < self._position:
            kept = set(self._journal.batches())
            gone = [batch for batch in range(position, self._position) if batch not in kept]
            if gone:
                raise BufferError(
                    f"the learner continues at batch {position}, but the buffer's journal in {self._journal.folder} begins at "
                    f"{min(kept, default=self._position)}: a later checkpoint than this one was reported. Restore it, or delete "
                    "the journal's folder to generate these batches anew"
                )
            self._counters["replayed"] += self._position - position
        self._learner, self._position = learner, position
        self._journal.note(learner=learner, position=position)
        self._taken = {slot: taken for slot, taken in self._taken.items() if not self._is_past(slot)}
        self._load()

    def advance(self, learner: str, version: int, prompts: dict[int, list[int]] | None = None) -> None:
        """The weights of `version` can be fetched from now on. `prompts`: of all slots of some batches, where they are chosen."""
        self._check_learner(learner)
        self._version = version
        self._prompts = {batch: chosen for batch, chosen in {**self._prompts, **(prompts or {})}.items() if batch >= version}

    def lease(self, learner: str, batch: int) -> Lease:
        """The groups of a batch, once all are there; the same again until it is acknowledged.

        Raises:
            BufferError: another learner has taken over, or it is not this batch's turn.
        """
        self._check_learner(learner)
        if batch != self._position or batch >= self._num_batches:
            raise BufferError(
                f"batch {batch} was asked for, but {self._position} is next (of {self._num_batches}); each is trained once"
            )
        slots, choice = self._slots(batch), self._choice(batch)
        if choice.missing:
            late = tuple(self._late(slots[candidate]) for candidate in choice.missing)
            made = sum(slot in self._ready for slot in slots)
            return Lease(ready=self._groups_per_batch - len(late), made=made, late=late)
        taken = {slots[candidate] for candidate in choice.take}
        return Lease(
            groups=tuple(self._ready[slot] for slot in sorted(taken)),
            passed_over=tuple(bare(self._ready[slot]) for slot in slots if slot in self._ready and slot not in taken),
            short=choice.short,
            ready=len(taken),
        )

    def ack(self, learner: str, batch: int) -> None:
        """The optimiser has stepped on a batch: no living learner gets it again."""
        self._check_learner(learner)
        if batch == self._position - 1:  # this message, repeated
            return
        if batch != self._position or not self._is_complete(batch):
            raise BufferError(f"batch {batch} was acknowledged, but {self._position} is next, and it must have been leased")
        self._journal.note(learner=learner, position=batch + 1)
        self._position = batch + 1
        for slot in self._slots(batch):
            self._ready.pop(slot, None)
            self._partials.pop(slot, None)
        self._counters["trained_batches"] += 1

    def commit(self, learner: str, position: int) -> None:
        """A checkpoint holds everything before batch `position`: those groups are deleted."""
        self._check_learner(learner)
        self._journal.forget(min(position, self._position))

    # -- both ---------------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Since this process began: groups admitted, duplicate, stale, spare, trained (came too late), given_back, recovered,
        continued (by another generator than the one that began them); batches trained_batches, replayed."""
        return dict(self._counters)

    def work(self) -> Work:
        """Of all generators, dead ones among them, that this process has heard of."""
        return sum(self._work.values(), Work())

    def state(self) -> dict[str, int]:
        """position: the next batch; ready, taken: slots; version: the newest."""
        return {"position": self._position, "ready": len(self._ready), "taken": len(self._taken), "version": self._version}

    def close(self) -> None:
        self._journal.close()

    def _load(self) -> None:
        """Take up what the journal has from the position on."""
        for batch in self._journal.batches():
            if batch < self._position:
                continue
            for slot, group in self._journal.read(batch).items():
                if batch >= self._num_batches or self._batch(slot) != batch or slot in self._ready:
                    continue
                if batch - group.oldest > self._max_staleness:
                    # The recipe allows less than it did when this was made.
                    self._journal.drop(batch, slot)
                    self._counters["stale"] += 1
                else:
                    self._ready[slot] = group

    def _batch(self, slot: int) -> int:
        return slot // self._slots_per_batch

    def _slots(self, batch: int) -> range:
        return range(batch * self._slots_per_batch, (batch + 1) * self._slots_per_batch)

    def _choice(self, batch: int) -> Choice:
        groups = [self._ready.get(slot) for slot in self._slots(batch)]
        return choose(
            [None if group is None else self._extras == 0 or not group.flat for group in groups], self._groups_per_batch
        )

    def _is_complete(self, batch: int) -> bool:
        return not self._choice(batch).missing

    def _is_past(self, slot: int) -> bool:
        return self._batch(slot) < self._position

    def _waiting(self, version: int) -> Iterator[int]:
        """Slots that nobody makes and that a generator at `version` may make, in order."""
        if version < 0:
            return
        last = min(version + self._max_staleness, self._num_batches - 1)
        for batch in range(self._position, last + 1):
            if self._is_complete(batch) or (self._chosen and batch not in self._prompts):
                continue
            slots = self._slots(batch)
            flat = sum(self._ready[slot].flat for slot in slots if slot in self._ready)
            for slot in slots[: self._groups_per_batch + extras_due(flat, self._extras, self._ahead)]:
                if slot not in self._ready and slot not in self._taken:
                    yield slot

    def _usable_partial(self, slot: int) -> Partial | None:
        """What was done of a slot, where its tokens are young enough for its batch."""
        partial = self._partials.get(slot)
        if partial is None or partial.oldest is None:
            return None
        if self._batch(slot) - partial.oldest > self._max_staleness:
            del self._partials[slot]
            return None
        return partial

    def _check_learner(self, learner: str) -> None:
        if learner != self._learner:
            raise BufferError(f"learner {learner} is not the one that the buffer serves ({self._learner or 'none yet'})")

    def _late(self, slot: int) -> str:
        now = self._now()
        if slot in self._taken:
            name, since = self._taken[slot]
            heard = self._generators.get(name)
            silence = "never heard of" if heard is None else f"heard of {now - heard.heard:.0f} s ago at version {heard.version}"
            return f"slot {slot}: with {name} for {now - since:.0f} s, {silence}"
        known = ", ".join(
            f"{name} (version {generator.version}, heard of {now - generator.heard:.0f} s ago)"
            for name, generator in sorted(self._generators.items())
        )
        return f"slot {slot}: nobody has taken it; generators: {known or 'none has said a word yet'}"
