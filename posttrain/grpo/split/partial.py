"""Unfinished groups: the tokens that a generator has sampled so far, kept by the buffer in case it dies.

    generator: TokenLog.note(slot) --what is new--> buffer: Partial.add --all of it--> the slot's next generator: snapshot_of

Tokens alone travel, a few bytes each: the state that belongs to them is computed again where they go on, in one prefill. A sample
is numbered by its tokens, so what it draws next is what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.types import Completion, Request

COLUMNS = {"token_ids": "<i4", "logprobs": "<f8", "plain_logprobs": "<f8", "versions": "<i4"}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens of a sample from `start` on: `columns` has an array each of `COLUMNS`."""

    start: int
    columns: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a generator has done of a slot since the buffer last heard of it: samples `done`, and `pieces` of unfinished ones."""

    done: tuple[Completion, ...] = ()
    pieces: dict[int, Piece] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the buffer has of a slot: samples that are `done`, and the tokens of the others."""

    done: frozenset[int] = frozenset()
    lengths: dict[int, int] = field(default_factory=dict)


class Partial:
    """An unfinished group."""

    def __init__(self) -> None:
        self.done: dict[int, Completion] = {}
        self.begun: dict[int, dict[str, np.ndarray]] = {}

    @property
    def kept(self) -> Kept:
        return Kept(
            done=frozenset(self.done), lengths={sample: len(columns["token_ids"]) for sample, columns in self.begun.items()}
        )

    @property
    def oldest(self) -> int | None:
        """The oldest policy version among its tokens, None where it has none."""
        versions = [int(columns["versions"].min()) for columns in self.begun.values() if len(columns["versions"])]
        versions += [min(completion.versions) for completion in self.done.values()]
        return min(versions, default=None)

    def add(self, note: Note) -> None:
        """Take a note in; one that came before changes nothing, and of one that begins too late nothing is taken."""
        for sample, piece in note.pieces.items():
            before = self.begun.get(sample, {name: np.empty(0, dtype) for name, dtype in COLUMNS.items()})
            if sample not in self.done and piece.start <= len(before["token_ids"]):
                self.begun[sample] = {
                    name: np.concatenate([before[name][: piece.start], piece.columns[name]]) for name in COLUMNS
                }
        for completion in note.done:
            self.done[completion.sample] = completion
            self.begun.pop(completion.sample, None)


def snapshot_of(partial: Partial, request: Request) -> dict[str, Any] | None:
    """What `Generator.restore` continues: the samples of `request` that are not done, their state to be computed from their
    tokens. None where all are done."""
    from posttrain.rollout.snapshot import pending_snapshot

    pending = [sample for sample in range(request.n) if sample not in partial.done and sample not in partial.begun]
    if not pending and not partial.begun:
        return None
    sequences = [
        {"sample": sample, **{name: columns[name].tolist() for name in COLUMNS}, "cache": None, "router_indices": None}
        for sample, columns in sorted(partial.begun.items())
    ]
    return {**pending_snapshot(request, pending), "sequences": sequences}


class TokenLog:
    """A generator's memory of its unfinished samples: a listener for its engine's tokens, of which there were `tokens`."""

    def __init__(self) -> None:
        self.tokens = 0
        self._requests: dict[str, dict[int, dict[str, list[Any]]]] = {}
        # Where a sample began again since the last note of it: what the buffer has from there on is another sample's.
        self._again: dict[tuple[str, int], int] = {}

    def open(self, request_id: str, partial: Partial | None = None) -> None:
        """A request begins, with the tokens of `partial` in it."""
        begun = partial.begun if partial is not None else {}
        self._requests[request_id] = {
            sample: {name: columns[name].tolist() for name in COLUMNS} for sample, columns in begun.items()
        }

    def close(self, request_id: str) -> None:
        for sample in self._requests.pop(request_id, {}):
            self._again.pop((request_id, sample), None)

    def token(self, event: Any) -> None:
        """A `StreamedToken`. One with an index that was there before begins the sample again from it."""
        self.tokens += 1
        request = self._requests.get(event.request_id)
        if request is None:
            return
        columns = request.setdefault(event.sample, {name: [] for name in COLUMNS})
        if event.index < len(columns["token_ids"]):
            key = event.request_id, event.sample
            self._again[key] = min(event.index, self._again.get(key, event.index))
        for values in columns.values():
            del values[event.index :]
        for name, value in zip(COLUMNS, (event.token_id, event.logprob, event.plain_logprob, event.version), strict=True):
            columns[name].append(value)

    def note(self, request_id: str, done: Iterable[Completion], kept: Kept) -> Note:
        """What is new of a request, of which `done` are all the finished samples and the buffer has `kept`. Every note must reach
        the buffer, in the order in which they were made."""
        done = list(done)
        finished = {completion.sample for completion in done}
        pieces = {}
        for sample, columns in self._requests.get(request_id, {}).items():
            start = kept.lengths.get(sample, 0)
            start = min(start, self._again.pop((request_id, sample), start))
            if sample not in finished and len(columns["token_ids"]) > start:
                pieces[sample] = Piece(
                    start=start, columns={name: np.asarray(columns[name][start:], dtype) for name, dtype in COLUMNS.items()}
                )
        return Note(done=tuple(completion for completion in done if completion.sample not in kept.done), pieces=pieces)
