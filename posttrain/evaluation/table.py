"""The evaluation's results: one row a (model, suite), as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from posttrain.evaluation.metrics import Interval, avg_at_k, bootstrap_interval, maj_at_k, pass_at_k
from posttrain.evaluation.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Row:
    """Scores of one model on one suite.

    Attributes:
        problems: problems that were scored; `unscored` more had a gold answer that could not be read.
        accuracy: avg@k with its 95% interval, bootstrapped over problems.
        pass_k, maj_k: pass@k and maj@k at k = `samples`. All three are None where nothing could be scored.
        mean_length: completion tokens; truncated: share of completions that met the length limit.
    """

    model: str
    suite: str
    problems: int
    unscored: int
    samples: int
    accuracy: Interval | None
    pass_k: Interval | None
    maj_k: Interval | None
    mean_length: float
    truncated: float

    def as_dict(self) -> dict:
        return asdict(self)


def score(model: str, suite: str, samples: Sequence[Sample], *, seed: int = 0) -> Row:
    """Scores from the samples of one suite, all problems with the same number of samples.

    Raises:
        ValueError: when there is no sample, or when problems have different numbers of samples.
    """
    problems: dict[str, list[Sample]] = {}
    for sample in samples:
        problems.setdefault(sample.problem_id, []).append(sample)
    sizes = {len(group) for group in problems.values()}
    if len(sizes) != 1:
        raise ValueError(f"{model} on {suite}: every problem needs the same number of samples, got {sorted(sizes) or 'none'}")
    k = sizes.pop()
    scored = [sorted(group, key=lambda s: s.sample) for group in problems.values() if all(s.correct is not None for s in group)]

    def interval(values: list[float]) -> Interval | None:
        return bootstrap_interval(values, seed=seed) if values else None

    verdicts = [[bool(s.correct) for s in group] for group in scored]
    return Row(
        model=model,
        suite=suite,
        problems=len(scored),
        unscored=len(problems) - len(scored),
        samples=k,
        accuracy=interval([avg_at_k(v) for v in verdicts]),
        pass_k=interval([pass_at_k(v, k) for v in verdicts]),
        maj_k=interval([maj_at_k([s.answer for s in group], v) for group, v in zip(scored, verdicts, strict=True)]),
        mean_length=sum(s.length for s in samples) / len(samples),
        truncated=sum(s.finish_reason == "length" for s in samples) / len(samples),
    )


def format_table(rows: Sequence[Row | dict]) -> str:
    """Rows as a text table; accuracies in percent with their 95% interval."""
    header = ["model", "suite", "problems", "accuracy (95% interval)", "pass@k", "maj@k", "mean length", "truncated"]
    cells = [_cells(row if isinstance(row, dict) else row.as_dict()) for row in rows]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in [header, *cells]]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cells(row: dict) -> list[str]:
    k = row["samples"]
    unscored = f" (+{row['unscored']} unscored)" if row["unscored"] else ""
    several = k > 1
    return [
        row["model"],
        row["suite"],
        f"{row['problems']}{unscored}",
        _with_interval(row["accuracy"]) + (f" avg@{k}" if several else ""),
        _percent(row["pass_k"]) if several else "-",
        _percent(row["maj_k"]) if several else "-",
        f"{row['mean_length']:.1f}",
        f"{100 * row['truncated']:.1f}%",
    ]


def _percent(interval: dict | None) -> str:
    return "-" if interval is None else f"{100 * interval['mean']:.1f}%"


def _with_interval(interval: dict | None) -> str:
    return "-" if interval is None else f"{_percent(interval)} ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})"
