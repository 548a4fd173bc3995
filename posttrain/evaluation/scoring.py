"""From the samples of one suite to a line a problem, and from those to a Row of the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.evaluation.metrics import Interval, avg_at_k, bootstrap_interval, maj_at_k, pass_at_k
from posttrain.evaluation.samples import Sample
from posttrain.evaluation.votes import RIGHT

# What a per-subject table splits a suite by, where its rows say it.
SPLITS = ("subject", "level")
Votes = Callable[[Sequence[Sample]], Sequence[int | None]]


@dataclass(frozen=True, kw_only=True)
class ProblemScore:
    """One problem's samples in numbers.

    Attributes:
        correct: a verdict a sample, in the order of their indices; `scored` is false where the gold answer could not be read.
        answers: votes by answer, most first: [{"answer", "votes", "right"}].
        truncated: samples that met the length limit.
    """

    id: str
    problem: str
    gold: str
    scored: bool
    correct: list[bool]
    majority: float
    answers: list[dict[str, Any]]
    tokens: int
    lengths_known: int
    truncated: int
    subject: str | None = None
    level: str | None = None

    @property
    def average(self) -> float:
        return avg_at_k(self.correct)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Scores of one model on one suite.

    Attributes:
        problems: problems that were scored; `unscored` more had a gold answer that cannot be read, listed in `unreadable`.
        accuracy: avg@k with its 95% interval, bootstrapped over problems.
        pass_k, maj_k: pass@k and maj@k at k = `samples`. All three are None where nothing could be scored.
        pass_at: pass@j for j = 1, 2, 4, ... up to `samples`, each the unbiased estimate from all samples.
        mean_length: completion tokens, None where no sample's is known; truncated: share of completions at the length limit.
        splits: {"subject" | "level": [{"name", "problems", "accuracy"}]}, where the suite's rows say it.
        protocol: how the samples were drawn, as `settings.json` says it.
    """

    model: str
    suite: str
    problems: int
    unscored: int
    samples: int
    accuracy: Interval | None
    pass_k: Interval | None
    maj_k: Interval | None
    mean_length: float | None
    truncated: float
    pass_at: dict[str, float] = field(default_factory=dict)
    splits: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    unreadable: list[dict[str, str]] = field(default_factory=list)
    protocol: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def score_problems(
    samples: Sequence[Sample], rows: Mapping[str, dict[str, Any]] | None = None, votes: Votes | None = None
) -> list[ProblemScore]:
    """A score a problem, in the order of their first samples.

    Args:
        rows: the suite's rows by id, for subject and level.
        votes: classes of equal answers among one problem's samples; by default answers are equal when their texts are.

    Raises:
        ValueError: there is no sample, or problems have different numbers of samples.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.problem_id, []).append(sample)
    sizes = {len(group) for group in groups.values()}
    if len(sizes) != 1:
        raise ValueError(f"every problem needs the same number of samples, got {sorted(sizes) or 'none'}")
    by_index = [sorted(group, key=lambda sample: sample.sample) for group in groups.values()]
    return [_score_problem(group, (rows or {}).get(group[0].problem_id, {}), votes or _by_text) for group in by_index]


def _by_text(samples: Sequence[Sample]) -> list[int | None]:
    texts = list(dict.fromkeys(sample.answer for sample in samples if not sample.correct))
    return [None if s.answer is None else RIGHT if s.correct else 1 + texts.index(s.answer) for s in samples]


def _score_problem(samples: list[Sample], row: dict[str, Any], votes: Votes) -> ProblemScore:
    scored = all(sample.correct is not None for sample in samples)
    correct = [bool(sample.correct) for sample in samples]
    classes = votes(samples) if scored else [None] * len(samples)
    counted: dict[int, dict[str, Any]] = {}
    for sample, kind in zip(samples, classes, strict=True):
        if kind is not None:
            vote = counted.setdefault(kind, {"answer": sample.answer, "votes": 0, "right": kind == RIGHT})
            vote["votes"] += 1
    lengths = [sample.length for sample in samples if sample.length is not None]
    return ProblemScore(
        id=samples[0].problem_id,
        problem=samples[0].problem,
        gold=samples[0].gold,
        scored=scored,
        correct=correct,
        majority=maj_at_k(classes, correct),
        answers=sorted(counted.values(), key=lambda vote: -vote["votes"]),
        tokens=sum(lengths),
        lengths_known=len(lengths),
        truncated=sum(sample.finish_reason == "length" for sample in samples),
        **{name: None if row.get(name) is None else str(row[name]) for name in SPLITS},
    )


def score(model: str, suite: str, samples: Sequence[Sample], *, seed: int = 0) -> Row:
    """Scores from samples alone, answers compared as texts. See `score_row` and `score_problems`."""
    try:
        return score_row(model, suite, score_problems(samples), seed=seed)
    except ValueError as error:
        raise ValueError(f"{model} on {suite}: {error}") from None


def score_row(
    model: str,
    suite: str,
    problems: Sequence[ProblemScore],
    *,
    seed: int = 0,
    unreadable: Sequence[dict[str, Any]] = (),
    protocol: dict[str, Any] | None = None,
) -> Row:
    """The scores of a suite, averaged over problems.

    Args:
        seed: of the bootstrap.
        unreadable: rows whose gold answers cannot be read, of which no samples were drawn.
    """
    k = len(problems[0].correct)
    scored = [problem for problem in problems if problem.scored]
    listed = [{"id": p.id, "gold": p.gold} for p in problems if not p.scored]
    listed += [{"id": str(row["id"]), "gold": str(row["answer"])} for row in unreadable]
    known = sum(problem.lengths_known for problem in problems)

    def interval(value: Callable[[ProblemScore], float], among: Sequence[ProblemScore] = scored) -> Interval | None:
        return bootstrap_interval([value(problem) for problem in among], seed=seed) if among else None

    steps = sorted({*(2**i for i in range(1 + int(math.log2(k)))), k})
    return Row(
        model=model,
        suite=suite,
        problems=len(scored),
        unscored=len(listed),
        samples=k,
        accuracy=interval(lambda problem: problem.average),
        pass_k=interval(lambda problem: pass_at_k(problem.correct, k)),
        maj_k=interval(lambda problem: problem.majority),
        mean_length=sum(problem.tokens for problem in problems) / known if known else None,
        truncated=sum(problem.truncated for problem in problems) / (k * len(problems)),
        pass_at={str(j): sum(pass_at_k(p.correct, j) for p in scored) / len(scored) for j in steps} if scored else {},
        splits={name: split for name in SPLITS if (split := _split(scored, name, interval))},
        unreadable=listed,
        protocol=protocol or {},
    )


def _split(scored: Sequence[ProblemScore], name: str, interval: Callable[..., Interval | None]) -> list[dict[str, Any]]:
    """Accuracy by subject, largest first, or by level, in order; empty where the rows don't say, or all say the same."""
    groups: dict[str, list[ProblemScore]] = {}
    for problem in scored:
        if (value := getattr(problem, name)) is not None:
            groups.setdefault(value, []).append(problem)
    if len(groups) < 2:
        return []
    order = sorted(groups, key=lambda value: value if name == "level" else (-len(groups[value]), value))  # type: ignore[arg-type]
    return [
        {
            "name": value,
            "problems": len(groups[value]),
            "accuracy": asdict(interval(lambda problem: problem.average, groups[value]) or Interval(mean=0, low=0, high=0)),
        }
        for value in order
    ]
