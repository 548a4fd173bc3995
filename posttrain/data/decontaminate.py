"""Drops training rows that repeat an evaluation problem.

A problem is compared as its words: lower case, runs of letters and digits, everything else a gap. A row is dropped when at
least `threshold` of its distinct 13-grams stand in one and the same evaluation problem. 13 words are the length used since
GPT-3's overlap study; asking for half of the row's own grams keeps rows that share a stock phrase ("where m and n are
relatively prime positive integers"). A text of fewer than 13 words must be equal but for case, spaces and punctuation; signs
count there, because in "x+1" and "x-1" they are all that differs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

NGRAM = 13
THRESHOLD = 0.5
WORD = re.compile(r"[^\W_]+")
NOT_A_SIGN = re.compile(r"[^\w+*/^=<>%|()-]+|_")


@dataclass(frozen=True, kw_only=True)
class Match:
    """A row that repeats an evaluation problem; `overlap` is the share of its 13-grams, 1.0 for an exact match."""

    id: str
    suite: str
    problem: int
    overlap: float


class Decontaminator:
    """Looks rows up among the problems of evaluation suites.

    Args:
        suites: name -> its problems, as texts or as rows with `problem`.
        n: words a gram.
        threshold: share of a row's grams, in (0, 1].
    """

    def __init__(self, suites: Mapping[str, Iterable[str | Row]], *, n: int = NGRAM, threshold: float = THRESHOLD):
        if n < 1 or not 0 < threshold <= 1:
            raise ValueError(f"decontaminate: n={n} must be at least 1 and threshold={threshold} in (0, 1]")
        self.n, self.threshold = n, threshold
        self._problems: list[tuple[str, int]] = []
        self._short: dict[str, int] = {}
        self._grams: dict[tuple[str, ...], tuple[int, ...]] = {}
        for suite, problems in suites.items():
            for number, problem in enumerate(problems):
                self._add(suite, number, problem if isinstance(problem, str) else problem["problem"])

    def _add(self, suite: str, number: int, text: str) -> None:
        index = len(self._problems)
        self._problems.append((suite, number))
        words = normalise(text)
        if len(words) < self.n:
            self._short.setdefault(_signs(text), index)
        for gram in _grams(words, self.n):
            self._grams[gram] = (*self._grams.get(gram, ()), index)

    def check(self, row: Row) -> Match | None:
        """The evaluation problem that the row repeats most, or None."""
        words = normalise(row["problem"])
        if len(words) < self.n:
            same = self._short.get(_signs(row["problem"])) if words else None
            return None if same is None else self._match(row, same, 1.0)
        grams = _grams(words, self.n)
        shared: Counter[int] = Counter()
        for gram in grams & self._grams.keys():
            shared.update(self._grams[gram])
        if not shared:
            return None
        index, count = min(shared.items(), key=lambda item: (-item[1], item[0]))
        return self._match(row, index, count / len(grams)) if count / len(grams) >= self.threshold else None

    def filter(self, rows: Iterable[Row]) -> tuple[list[Row], dict[str, Any]]:
        """Rows that repeat nothing, and {checked, dropped, by_suite {name: rows}, matches [Match]}."""
        kept: list[Row] = []
        matches: list[Match] = []
        for row in rows:
            match = self.check(row)
            if match is None:
                kept.append(row)
            else:
                matches.append(match)
        by_suite = dict(Counter(match.suite for match in matches))
        return kept, {"checked": len(kept) + len(matches), "dropped": len(matches), "by_suite": by_suite, "matches": matches}

    def _match(self, row: Row, index: int, overlap: float) -> Match:
        suite, number = self._problems[index]
        return Match(id=str(row.get("id")), suite=suite, problem=number, overlap=overlap)


def normalise(text: str) -> list[str]:
    """Lower-case runs of letters and digits."""
    return WORD.findall(text.lower())


def _signs(text: str) -> str:
    """Letters, digits and signs of arithmetic, closed up."""
    return NOT_A_SIGN.sub("", text.lower())


def _grams(words: list[str], n: int) -> set[tuple[str, ...]]:
    return set(zip(*(words[start:] for start in range(n)), strict=False))
