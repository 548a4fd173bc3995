"""Scores of repeated samples, as pure functions.

A problem's result is `correct`: one bool a sample. All scores average over problems, so that a problem with more samples weighs
the same.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Z_95 = 1.959964


def avg_at_k(correct: Sequence[bool]) -> float:
    """Mean correctness of the k samples of one problem."""
    if not correct:
        raise ValueError("avg@k needs at least one sample")
    return sum(correct) / len(correct)


def pass_at_k(correct: Sequence[bool], k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is right, from n >= k samples.

    1 - C(n-c, k) / C(n, k) with c right ones (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1).
    """
    n, right = len(correct), sum(correct)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs between 1 and n={n} samples to choose from")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """Whether the most frequent answer is right; answers that tie for the top share the verdict evenly.

    `answers[i]` is what stands for the answer of sample i, the same for equal answers (see `votes.vote_classes`), and None where
    it gave none; such samples do not vote. Nobody voted: 0.
    """
    if len(answers) != len(correct):
        raise ValueError(f"one verdict an answer, got {len(answers)} answers and {len(correct)} verdicts")
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    top = max(votes.values())
    verdicts = {answer: ok for answer, ok in zip(answers, correct, strict=True) if answer is not None}
    winners = [answer for answer, count in votes.items() if count == top]
    return sum(verdicts[answer] for answer in winners) / len(winners)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with the ends of its interval."""

    mean: float
    low: float
    high: float


def bootstrap_interval(values: Sequence[float], *, seed: int = 0, draws: int = 2000) -> Interval:
    """95% percentile bootstrap of the mean over problems (Efron and Tibshirani 1993, chapter 13).

    The resampling is seeded, so the same values give the same interval. Where every value is 0, or every value 1, it is Wilson's.
    """
    if not values:
        raise ValueError("an interval needs at least one problem")
    mean = statistics.fmean(values)
    if mean in (0.0, 1.0):
        # Resampling equal values says that nothing is uncertain; Wilson's interval (1927) does not.
        edge = Z_95**2 / (len(values) + Z_95**2)
        return Interval(mean=mean, low=0.0 if mean == 0 else 1 - edge, high=edge if mean == 0 else 1.0)
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(draws))
    tail = 0.025
    low = means[math.floor(tail * (draws - 1))]
    high = means[math.ceil((1 - tail) * (draws - 1))]
    return Interval(mean=mean, low=low, high=high)
