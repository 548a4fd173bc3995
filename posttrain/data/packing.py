"""Best-fit-decreasing packing of samples into rows without padding.

Longest sample first, each goes into the row with the least room that still takes it. On length distributions of reasoning
traces this fills rows to above 99%; ties and the order of the rows are drawn from (seed, epoch), so that a resumed run sees
the rows it would have seen.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from posttrain.errors import DataError

Overlong = Literal["drop", "truncate", "split"]
Piece = tuple[int, int, int]  # (sample, start, stop)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Attributes:
    rows: each the pieces of one packed row; the pieces of a row sum to at most `max_length` tokens.
    dropped: samples left out, because they are longer than `max_length` (overlong "drop") or empty.
    shortened: samples that were truncated or split.
    fill: tokens over rows * max_length.
    """

    rows: list[list[Piece]]
    dropped: list[int]
    shortened: list[int]
    fill: float


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Packed rows {"input_ids" [T] int32, "labels" [T] int32, "seq_lengths" [S]}, each joined from its samples when asked for.

    Only lengths decide what goes where, so that the tokens need no second copy in memory.
    """

    samples: Sequence[dict[str, Any]]
    pieces: list[list[Piece]]

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> dict[str, Any]:
        pieces = self.pieces[row]
        joined: dict[str, Any] = {
            column: np.concatenate([self.samples[n][column][start:stop] for n, start, stop in pieces], dtype=np.int32)
            for column in ("input_ids", "labels")
        }
        return {**joined, "seq_lengths": [stop - start for _, start, stop in pieces]}


def pack(lengths: Sequence[int], max_length: int, *, seed: int = 0, epoch: int = 0, overlong: Overlong = "drop") -> Packing:
    """Rows of at most `max_length` tokens from samples of these lengths.

    Args:
        overlong: what happens to a sample longer than `max_length`: "drop", "truncate" (its beginning stays), or "split" (into
            pieces that know nothing of each other). Nothing else is ever cut.
    """
    if max_length < 2:
        raise ValueError(f"max_length={max_length}, but a row needs at least 2 tokens")
    if overlong not in ("drop", "truncate", "split"):
        raise ValueError(f"overlong={overlong!r}, but it must be drop, truncate or split")
    pieces: list[Piece] = []
    dropped: list[int] = []
    shortened: list[int] = []
    for sample, length in enumerate(lengths):
        if length == 0 or (length > max_length and overlong == "drop"):
            dropped.append(sample)
            continue
        if length > max_length:
            shortened.append(sample)
        last = max_length if overlong == "truncate" else length
        pieces.extend((sample, start, min(start + max_length, length)) for start in range(0, min(last, length), max_length))
    rng = random.Random(f"posttrain-packing:{seed}:{epoch}")
    rng.shuffle(pieces)
    pieces.sort(key=lambda piece: piece[1] - piece[2])
    rows = _best_fit(pieces, max_length)
    rng.shuffle(rows)
    tokens = sum(stop - start for _, start, stop in pieces)
    return Packing(rows=rows, dropped=dropped, shortened=shortened, fill=tokens / (len(rows) * max_length) if rows else 0.0)


def _best_fit(pieces: list[Piece], max_length: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    open_rows: dict[int, list[int]] = {}  # room -> rows with just that room
    rooms: list[int] = []  # the keys of open_rows, ascending
    for piece in pieces:
        length = piece[2] - piece[1]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), max_length
            rows.append([])
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        rows[row].append(piece)
        left = room - length
        if left:
            if left not in open_rows:
                insort(rooms, left)
            open_rows.setdefault(left, []).append(row)
    return rows


def pack_samples(
    samples: Sequence[dict[str, Any]], max_length: int, *, seed: int = 0, epoch: int = 0, overlong: Overlong = "drop"
) -> PackedRows:
    """Encoded samples {"input_ids" [T], "labels" [T]}, lists or arrays -> packed rows; the collator takes either.

    Raises:
        DataError: nothing is left to train on.
    """
    packing = pack([len(sample["input_ids"]) for sample in samples], max_length, seed=seed, epoch=epoch, overlong=overlong)
    if not packing.rows:
        raise DataError(f"packing: none of {len(samples)} samples fits into max_length {max_length}; raise data.max_length")
    return PackedRows(samples=samples, pieces=packing.rows)
