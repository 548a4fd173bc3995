"""Two runs on the same suites: the paired difference of each, with an interval, and the problems that changed.

Both models answered the same problems, so that the difference is taken problem by problem (B minus A) and the problems are
resampled: what makes a problem hard for both cancels, and the interval is narrower than those of the two scores. It holds for
problems of this kind, not for other prompts or samplings: runs under different protocols are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.errors import PosttrainError
from posttrain.evaluation.metrics import Interval, bootstrap_interval
from posttrain.evaluation.table import grid

MAX_SHOWN = 10
MAX_TEXTS = 100  # in each direction: the report is opened in a browser


class CompareError(PosttrainError):
    """Runs that cannot be compared: other suites, another protocol, or not finished."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One model's finished suites in a run folder. `suites`: name -> folder with settings.json and problems.jsonl."""

    run: str
    model: str
    suites: dict[str, Path]

    @property
    def name(self) -> str:
        return f"{self.run}: {self.model}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A problem whose share of right samples differs.

    Attributes:
        a, b: the shares, in [0, 1].
        a_answer, b_answer: the most frequent answers.
        a_text, b_text: a right sample of the better side and a wrong one of the other, for the first `MAX_TEXTS` problems.
    """

    id: str
    problem: str
    gold: str
    a: float
    b: float
    a_answer: str | None
    b_answer: str | None
    a_text: str | None = None
    b_text: str | None = None

    @property
    def gained(self) -> bool:
        return self.b > self.a


@dataclass(frozen=True, kw_only=True)
class SuiteComparison:
    """`difference`: B minus A over `problems` problems, with its 95% interval. `changes`: largest gains first, then losses."""

    suite: str
    problems: int
    samples: int
    a: float
    b: float
    difference: Interval
    better: int
    worse: int
    changes: list[Change]


def find_models(path: str) -> list[Evaluated]:
    """What is evaluated in a run folder, or in one model's folder of it (RUN/eval/MODEL).

    Raises:
        CompareError: no such folder, or nothing evaluated in it.
    """
    given = Path(path)
    if not given.is_dir():
        raise CompareError(f"{path}: no such folder; give a run folder, or RUN/eval/MODEL for one of its models")
    run, folders = given, [given / "eval"]
    if not folders[0].is_dir() and given.parent.name == "eval":
        run, models = given.parent.parent, [given]
    else:
        models = sorted(folder for folder in folders[0].iterdir() if folder.is_dir()) if folders[0].is_dir() else []
    found = [Evaluated(run=str(run), model=model.name, suites=_suites(model)) for model in models if _suites(model)]
    if not found:
        raise CompareError(f"{path}: nothing is evaluated here (no eval/MODEL/SUITE/settings.json); run `posttrain eval` first")
    return found


def _suites(folder: Path) -> dict[str, Path]:
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/settings.json"))}


def pair_models(a: list[Evaluated], b: list[Evaluated]) -> list[tuple[Evaluated, Evaluated]]:
    """Which model of A is compared with which of B: the only ones, else those of equal names.

    Raises:
        CompareError: the names do not say.
    """
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    ours, theirs = ({one.model: one for one in models} for models in (a, b))
    if ours.keys() != theirs.keys():
        raise CompareError(
            f"{a[0].run} has the models {', '.join(ours)}, and {b[0].run} has {', '.join(theirs)}; "
            "say which with RUN/eval/MODEL on each side"
        )
    return [(ours[name], theirs[name]) for name in ours]


def compare(a: Evaluated, b: Evaluated, *, seed: int = 0) -> list[SuiteComparison]:
    """Every suite of two models.

    Raises:
        CompareError: their suites differ, or the protocol of one; the message names what differs.
    """
    if a.suites.keys() != b.suites.keys():
        only = {one.name: sorted(one.suites.keys() - other.suites.keys()) for one, other in ((a, b), (b, a))}
        said = "; ".join(f"only {name} has {', '.join(suites)}" for name, suites in only.items() if suites)
        raise CompareError(f"the suites differ: {said}. Evaluate both on the same suites")
    return [_compare_suite(name, a, b, seed) for name in a.suites]


def _compare_suite(suite: str, a: Evaluated, b: Evaluated, seed: int) -> SuiteComparison:
    settings = [_read_json(one.suites[suite] / "settings.json") for one in (a, b)]
    differing = list(_protocol_differences(*(one.get("protocol", {}) for one in settings)))
    differing += _policy_differences(*settings)
    if differing:
        lines = "\n".join(f"  {key}: {first!r} in {a.run}, {second!r} in {b.run}" for key, first, second in differing)
        raise CompareError(
            f"suite {suite}: the protocols differ, so that a difference would say nothing about the models:\n{lines}"
        )
    first, second = (_read_problems(one, suite) for one in (a, b))
    both = [name for name in first if name in second and first[name]["scored"] and second[name]["scored"]]
    if not both:
        raise CompareError(f"suite {suite}: no problem was scored in both runs")
    shares = {name: tuple(_share(side[name]) for side in (first, second)) for name in both}
    differences = [after - before for before, after in shares.values()]
    changed = [_change(first[name], second[name]) for name, (before, after) in shares.items() if before != after]
    return SuiteComparison(
        suite=suite,
        problems=len(both),
        samples=len(first[both[0]]["correct"]),
        a=sum(before for before, _ in shares.values()) / len(both),
        b=sum(after for _, after in shares.values()) / len(both),
        difference=_paired_interval(differences, seed),
        better=sum(value > 0 for value in differences),
        worse=sum(value < 0 for value in differences),
        changes=_with_texts(
            sorted(changed, key=lambda c: (not c.gained, -abs(c.b - c.a), c.id)), a.suites[suite], b.suites[suite]
        ),
    )


def _paired_interval(differences: list[float], seed: int) -> Interval:
    """95% bootstrap over problems. Equal differences (all 0, say) have no spread to resample: the interval is a point then."""
    if len(set(differences)) == 1:
        return Interval(mean=differences[0], low=differences[0], high=differences[0])
    return bootstrap_interval(differences, seed=seed)


def _protocol_differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys((*a, *b)):
        if a.get(key) == b.get(key):
            continue
        if key == "problems" and isinstance(a.get(key), dict) and isinstance(b.get(key), dict):
            counts = a[key]["count"], b[key]["count"]
            yield (
                ("number of problems", *counts)
                if counts[0] != counts[1]
                else (
                    "problems",
                    f"texts or answers {a[key]['digest']}",
                    f"texts or answers {b[key]['digest']}",
                )
            )
        else:
            yield key, a.get(key), b.get(key)


def _policy_differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Rules about answers that only one of the runs was graded by; runs that do not say them are not held to them."""
    first, second = ((one.get("verifier") or {}).get("policy") or {} for one in (a, b))
    return [(f"reward.answer.{key}", first[key], second[key]) for key in first if key in second and first[key] != second[key]]


def _share(problem: dict[str, Any]) -> float:
    return sum(problem["correct"]) / len(problem["correct"])


def _change(a: dict[str, Any], b: dict[str, Any]) -> Change:
    answers = [next((vote["answer"] for vote in side["answers"]), None) for side in (a, b)]
    return Change(
        id=a["id"], problem=a["problem"], gold=a["gold"], a=_share(a), b=_share(b), a_answer=answers[0], b_answer=answers[1]
    )  # fmt: skip


def _with_texts(changes: list[Change], a: Path, b: Path) -> list[Change]:
    """The changes with a sample of each side: where B gained, a wrong one of A and a right one of B."""
    gains, losses = [c for c in changes if c.gained], [c for c in changes if not c.gained]
    shown = {change.id: change.gained for change in (*gains[:MAX_TEXTS], *losses[:MAX_TEXTS])}
    of_a = _first_texts(a / "samples.jsonl", {name: not gained for name, gained in shown.items()})
    of_b = _first_texts(b / "samples.jsonl", shown)
    return [replace(change, a_text=of_a.get(change.id), b_text=of_b.get(change.id)) for change in changes]


def _first_texts(path: Path, wanted: dict[str, bool]) -> dict[str, str]:
    """Problem -> its first completion whose verdict is the wanted one. Line by line: such a file may exceed the memory."""
    found: dict[str, tuple[int, str]] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                sample = json.loads(line)
                name, index = sample["problem_id"], sample["sample"]
                if name in wanted and sample["correct"] is wanted[name] and (name not in found or index < found[name][0]):
                    found[name] = index, sample["text"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompareError(f"{path} cannot be read as samples ({error})") from None
    return {name: text for name, (_, text) in found.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no object")
        return content
    except (OSError, ValueError) as error:
        raise CompareError(f"{path} cannot be read ({error})") from None


def _read_problems(one: Evaluated, suite: str) -> dict[str, dict[str, Any]]:
    path = one.suites[suite] / "problems.jsonl"
    if not path.is_file():
        raise CompareError(
            f"{one.name} has not finished {suite} (no {path.name}); continue it with `posttrain eval ... --resume`"
        )
    try:
        # not splitlines(): a problem's text may hold other line separators than the file's
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        if any(not row["correct"] or not isinstance(row["scored"], bool) for row in rows):
            raise ValueError("a problem without verdicts")
        return {row["id"]: {**row, "answers": list(row["answers"])} for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise CompareError(f"{path} is damaged ({error}); delete it and run `posttrain eval` again") from None


def format_comparison(a: Evaluated, b: Evaluated, suites: list[SuiteComparison]) -> str:
    """The differences, then up to `MAX_SHOWN` problems in each direction a suite."""
    lines = [
        [
            s.suite,
            f"{s.problems} x {s.samples}",
            f"{100 * s.a:.1f}%",
            f"{100 * s.b:.1f}%",
            f"{100 * s.difference.mean:+.1f} ({100 * s.difference.low:+.1f} to {100 * s.difference.high:+.1f})",
            f"{s.better} better, {s.worse} worse",
        ]
        for s in suites
    ]
    parts = [
        f"A = {a.name}\nB = {b.name}",
        grid(["suite", "problems x samples", "A", "B", "B - A in points (95% interval, paired)", "problems"], lines),
    ]
    for s in suites:
        gains, losses = [c for c in s.changes if c.gained], [c for c in s.changes if not c.gained]
        for title, changes in ((f"{s.suite}: B is better", gains), (f"{s.suite}: B is worse", losses)):
            if changes:
                parts.append(grid([title, "A", "B", "gold", "A's answer", "B's answer"], [_row(c) for c in changes[:MAX_SHOWN]]))
                if len(changes) > MAX_SHOWN:
                    parts[-1] += f"\nand {len(changes) - MAX_SHOWN} more, all of them in the report"
    return "\n\n".join(parts)


def _row(change: Change) -> list[str]:
    shown = [change.id, f"{100 * change.a:.0f}%", f"{100 * change.b:.0f}%", change.gold, change.a_answer, change.b_answer]
    return [_cell(text) for text in shown]


def _cell(text: str | None) -> str:
    flat = "-" if text is None else " ".join(text.split())
    return flat if len(flat) <= 40 else flat[:37] + "..."


def as_dict(a: Evaluated, b: Evaluated, suites: list[SuiteComparison]) -> dict[str, Any]:
    """What the report shows of a comparison."""
    return {"a": a.name, "b": b.name, "suites": [asdict(suite) for suite in suites]}


def compare_command(run_a: str, run_b: str) -> int:
    """`posttrain compare`: print the comparison, keep it in B's run folder, and write B's report again.

    Raises:
        CompareError: see `compare`.
    """
    from posttrain.report import write_report
    from posttrain.run_folder import write_text_atomically

    pairs = pair_models(find_models(run_a), find_models(run_b))
    compared = [(a, b, compare(a, b)) for a, b in pairs]
    run = Path(pairs[0][1].run)
    for a, b, suites in compared:
        folder = run / "compare"
        folder.mkdir(exist_ok=True)
        name = f"{b.model}-against-{Path(a.run).resolve().name}-{a.model}.json"
        write_text_atomically(folder / name, json.dumps(as_dict(a, b, suites), indent=1, ensure_ascii=False))
    report = write_report(run)
    print("\n\n".join(format_comparison(a, b, suites) for a, b, suites in compared))
    print(f"\nreport: {report}")
    return 0
