r"""Majority voting over answers that are the same in mathematics, not in text: `\frac12`, `0.5` and `50\%` are one candidate.

Right answers form one class, since each equals the gold. Wrong ones are compared with each other through the verifier pool, the
most frequent first: an answer joins the first class whose head it equals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from posttrain.evaluation.samples import Sample

RIGHT = 0
Equal = Callable[[list[tuple[str, str]]], list[bool]]


def vote_classes(samples: Sequence[Sample], equal: Equal) -> list[int | None]:
    """A class for each sample of one problem, None where it gave no answer; class `RIGHT` is the gold's.

    Args:
        equal: [(answer, answer)] -> whether they are the same in mathematics, for many pairs at once.
    """
    wrong = Counter(sample.answer for sample in samples if not sample.correct and sample.answer is not None)
    heads: list[str] = []
    classes: dict[str, int] = {}
    # Counter.most_common keeps the order of first appearance among equals, and samples come in the order of their index.
    for answer, _ in wrong.most_common():
        same = equal([(head, answer) for head in heads]) if heads else []
        if True in same:
            classes[answer] = 1 + same.index(True)
        else:
            heads.append(answer)
            classes[answer] = len(heads)
    return [None if s.answer is None else RIGHT if s.correct else classes[s.answer] for s in samples]
