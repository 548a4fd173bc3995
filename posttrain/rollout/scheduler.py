"""Who runs next: slots, the waiting queue, and the packing of prompts under a token budget. Knows no tensors.

The pool has one slot more than `max_sequences`. Requests are admitted first come, first served, and a request is admitted as soon
as one of its samples may run; if others must wait, the spare slot keeps the state of its prompt and they are forked from it when
running ones finish. Only the last admitted request can be in that position, so one spare slot is enough and no prompt is ever
computed twice.

A prompt is cut at multiples of `max_prefill_tokens` and nowhere else: where it is cut never depends on what else is in the batch.

Memory for keys and values is asked for through `Room`. A prompt gets all of its own when it is admitted; what grows later may run
short, and then the youngest sequences are taken out (`retract`) and come back before anything new is admitted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, Protocol

from posttrain.rollout.sequence import Group, Sequence


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Prompt tokens [start, stop) of a group, to be prefilled in this step."""

    group: Group
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Samples to start from the prompt state in slot `source`: copied to `copies`; the last sample may take `source` itself."""

    source: int
    copies: list[int]
    sequences: list[Sequence]


Begun = Literal["continue", "restart", "recompute"]


class Room(Protocol):
    """Memory that slots grow into."""

    def fits(self, tokens: int, *, spare: int) -> bool:
        """Whether there is room for a sequence of so many tokens, and for `spare` sequences to grow."""
        ...

    def reserve(self, slot: int, tokens: int) -> None: ...

    def release(self, slot: int) -> None: ...


class Scheduler:
    def __init__(self, max_sequences: int, max_prefill_tokens: int, memory: Room) -> None:
        self.memory = memory
        self.max_sequences = max_sequences
        self.max_prefill_tokens = max_prefill_tokens
        self.num_slots = max_sequences + 1
        self.free = list(range(self.num_slots))[::-1]
        self.groups: dict[str, Group] = {}  # unfinished ones, in the order of submission
        self.waiting: deque[Group] = deque()
        self.prefilling: deque[Group] = deque()
        self.parent: Group | None = None  # prefilled, with samples that had no room yet
        self.restoring: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, group: Group) -> None:
        self.groups[group.request.id] = group
        if group.pending:
            self.waiting.append(group)
        self.restoring.extend(group.started.values())

    def _room(self) -> int:
        """Sequences that may still be admitted once everything admitted runs; negative while samples wait for a fork."""
        admitted = sum(len(group.pending) for group in self.prefilling)
        admitted += len(self.parent.pending) if self.parent else 0
        return self.max_sequences - len(self.running) - admitted

    def _fits(self, tokens: int, samples: int) -> bool:
        """With nothing else on its way it must: the pool holds the longest sequence twice."""
        if not self.running and not self.prefilling:
            return True
        return self.memory.fits(tokens, spare=len(self.running) + samples)

    def next_restored(self) -> Sequence | None:
        """Gives a slot to a sequence that was set aside and now runs; the caller fills its cache before it asks for another."""
        if not self.restoring or self._room() <= 0 or not self._fits(self.restoring[0].inputs, 1):
            return None
        sequence = self.restoring.popleft()
        sequence.slot = self.free.pop()
        self.running.append(sequence)
        return sequence

    def retract(self, sequence: Sequence) -> None:
        """Takes a running sequence out, to be restored first of all; the caller has kept its cache."""
        assert sequence.slot is not None and sequence.cached is not None
        self._free_slot(sequence.slot)
        sequence.slot = None
        self.restoring.appendleft(sequence)
        self.keep_running()

    def _free_slot(self, slot: int) -> None:
        self.memory.release(slot)
        self.free.append(slot)

    def plan_prefill(self) -> tuple[list[Piece], list[int]]:
        """The prompt pieces of this step and the slots that must be reset first."""
        budget = self.max_prefill_tokens
        pieces: list[Piece] = []
        for group in self.prefilling:
            piece = self._next_piece(group)
            if piece.stop - piece.start > budget:
                return pieces, []
            budget -= piece.stop - piece.start
            pieces.append(piece)
        fresh = []
        while self.waiting and not self.restoring and self._room() > 0:
            group = self.waiting[0]
            group.prefilled = 0
            piece = self._next_piece(group)
            prompt = len(group.request.prompt_ids)
            if piece.stop - piece.start > budget or not self._fits(prompt, min(len(group.pending), self._room())):
                break
            budget -= piece.stop - piece.start
            pieces.append(piece)
            group.slot = self.free.pop()
            self.memory.reserve(group.slot, prompt)
            fresh.append(group.slot)
            self.prefilling.append(self.waiting.popleft())
        return pieces, fresh

    def _next_piece(self, group: Group) -> Piece:
        start = group.prefilled
        return Piece(group=group, start=start, stop=min(len(group.request.prompt_ids), start + self.max_prefill_tokens))

    def fork(self) -> list[Fork]:
        """Starts the samples for which there is room, of the waiting parent first and then of the prompts just completed."""
        ready = [self.parent] if self.parent else []
        while self.prefilling and self.prefilling[0].prefilled == len(self.prefilling[0].request.prompt_ids):
            ready.append(self.prefilling.popleft())
        self.parent = None
        forks = []
        room = self.max_sequences - len(self.running) - sum(len(group.pending) for group in self.prefilling)
        for group in ready:
            assert self.parent is None, "only the last admitted request may have to wait for room"
            forks.append(self._fork(group, max(0, room)))
            room -= len(forks[-1].sequences)
            if group.pending:
                self.parent = group
        return [fork for fork in forks if fork.sequences]

    def _fork(self, group: Group, room: int) -> Fork:
        assert group.slot is not None
        source = group.slot
        count = min(room, len(group.pending))
        sequences = [Sequence.start(group, group.pending.popleft()) for _ in range(count)]
        last = not group.pending
        copies = [self.free.pop() for _ in range(count - last)]
        for sequence, slot in zip(sequences, [*copies, source] if last else copies, strict=True):
            sequence.slot = slot
            group.started[sequence.sample] = sequence
        if last:
            group.slot = None
        self.running.extend(sequences)
        return Fork(source=source, copies=copies, sequences=sequences)

    def finish(self, sequence: Sequence) -> None:
        """Takes an unfinished sequence out and frees its slot; `keep_running` then drops it from `running`, many in one pass."""
        del sequence.group.started[sequence.sample]
        if sequence.slot is not None:
            self._free_slot(sequence.slot)
            sequence.slot = None
        if sequence.group.finished:
            self.groups.pop(sequence.group.request.id, None)

    def keep_running(self) -> None:
        """Drops the sequences that lost their slot from `running`."""
        self.running = [sequence for sequence in self.running if sequence.slot is not None]

    def remove(self, group: Group) -> None:
        """Forgets a group and everything it holds."""
        self._drop_prompt(group)
        group.pending.clear()
        self.restoring = deque(sequence for sequence in self.restoring if sequence.group is not group)
        for sequence in list(group.started.values()):
            self.finish(sequence)
        self.keep_running()
        self.groups.pop(group.request.id, None)
        self._rebuild_waiting()

    def _drop_prompt(self, group: Group) -> None:
        if group.slot is not None:
            self._free_slot(group.slot)
        group.slot, group.logits, group.prefilled = None, None, 0
        if self.parent is group:
            self.parent = None
        if group in self.prefilling:
            self.prefilling.remove(group)

    def requeue(self, begun: Begun) -> None:
        """Sends prompts back to be prefilled, for their state is of older weights. What becomes of samples that have begun:
        "continue": nothing; "restart": they begin again; "recompute": they are set aside without a state, in their order."""
        for group in self.groups.values():
            self._drop_prompt(group)
            if begun == "restart":
                group.pending = deque(sorted([*group.pending, *group.started]))
                for sequence in list(group.started.values()):
                    self.finish(sequence)
        if begun == "restart":
            self.restoring.clear()
        elif begun == "recompute":
            for sequence in self.restoring:
                sequence.cached = None
            for sequence in self.running[::-1]:
                assert sequence.slot is not None and sequence.token_ids
                self._free_slot(sequence.slot)
                sequence.slot = None
                self.restoring.appendleft(sequence)
        self.keep_running()
        self._rebuild_waiting()

    def _rebuild_waiting(self) -> None:
        admitted = {id(group) for group in self.prefilling} | {id(self.parent)}
        self.waiting = deque(group for group in self.groups.values() if group.pending and id(group) not in admitted)
