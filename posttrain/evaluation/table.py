"""The evaluation's results as text: the paper's layout with published rows, the details, and the tables by subject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.evaluation.published import PUBLISHED, TITLES
from posttrain.evaluation.scoring import Row, score

__all__ = ["Row", "format_results", "format_table", "grid", "score"]

MAX_UNREADABLE = 10


def format_results(rows: Sequence[Row | dict[str, Any]]) -> str:
    """Everything that `posttrain eval` prints, parted by empty lines; see the functions below."""
    given = [row if isinstance(row, dict) else row.as_dict() for row in rows]
    parts = [format_paper_table(given), format_table(given), format_splits(given), format_unreadable(given)]
    return "\n\n".join(part for part in parts if part)


def format_table(rows: Sequence[Row | dict[str, Any]]) -> str:
    """Rows as a text table; accuracies in percent with their 95% interval."""
    header = ["model", "suite", "problems", "accuracy (95% interval)", "pass@k", "maj@k", "mean length", "truncated"]
    return grid(header, [_cells(row if isinstance(row, dict) else row.as_dict()) for row in rows])


def format_paper_table(rows: Sequence[dict[str, Any]]) -> str:
    """Models down and suites across, as in Table 5 of the SSE paper: published rows first, then ours with half their interval.

    Empty where none of the suites has a published score.
    """
    suites = [name for name in TITLES if any(row["suite"] == name for row in rows)]
    suites += [name for name in dict.fromkeys(row["suite"] for row in rows) if name not in TITLES]
    published = [entry for entry in PUBLISHED if entry.scores.keys() & set(suites)]
    if not published:
        return ""
    lines, sources = [], []
    for number, entry in enumerate(published, 1):
        lines.append([f"{entry.model} [{number}]", "published", *(_published(entry.scores.get(name)) for name in suites)])
        sources.append(f"[{number}] {entry.source}")
    for model in dict.fromkeys(str(row["model"]) for row in rows):
        mine = {row["suite"]: row for row in rows if row["model"] == model}
        lines.append([model, "measured", *(_measured(mine.get(name)) for name in suites)])
    protocols: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.get("protocol"):
            protocols.setdefault(_protocol(row), {})[TITLES.get(str(row["suite"]), str(row["suite"]))] = None
    notes = ["published: as its source says, not run here; an empty cell: no source at hand", *sources]
    notes += [f"measured: {', '.join(titles)}: {protocol}" for protocol, titles in protocols.items()]
    return "\n".join([grid(["model", "", *(TITLES.get(name, name) for name in suites)], lines), *notes])


def format_splits(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy by subject, a table for each suite that has subjects, models across; by level too in the report."""
    tables = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        of_suite = [row for row in rows if row["suite"] == suite and row.get("splits", {}).get("subject")]
        parts = {row["model"]: {part["name"]: part for part in row["splits"]["subject"]} for row in of_suite}
        sizes = {name: part["problems"] for by_name in parts.values() for name, part in by_name.items()}
        lines = [[name, str(size), *(_part(by_name.get(name)) for by_name in parts.values())] for name, size in sizes.items()]
        if lines:
            tables.append(grid([f"{suite} by subject", "problems", *parts], lines))
    return "\n\n".join(tables)


def format_unreadable(rows: Sequence[dict[str, Any]]) -> str:
    """Problems that were left out because their gold answer cannot be read, each once."""
    listed = {(row["suite"], entry["id"]): entry["gold"] for row in rows for entry in row.get("unreadable", [])}
    if not listed:
        return ""
    lines = [f"  {suite} {name}: {gold[:60]!r}" for (suite, name), gold in list(listed.items())[:MAX_UNREADABLE]]
    more = [f"  and {len(listed) - MAX_UNREADABLE} more"] if len(listed) > MAX_UNREADABLE else []
    return "\n".join(["not scored, for their gold answers cannot be read:", *lines, *more])


def grid(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A text table with aligned columns."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in [header, *lines]
    ]
    return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])


def _cells(row: dict[str, Any]) -> list[str]:
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
        "-" if row["mean_length"] is None else f"{row['mean_length']:.1f}",
        f"{100 * row['truncated']:.1f}%",
    ]


def _part(part: dict[str, Any] | None) -> str:
    return "-" if part is None else _with_interval(part["accuracy"])


def _published(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _measured(row: dict[str, Any] | None) -> str:
    if row is None or row["accuracy"] is None:
        return "-"
    accuracy = row["accuracy"]
    return f"{100 * accuracy['mean']:.1f} ±{50 * (accuracy['high'] - accuracy['low']):.1f}"


def _protocol(row: dict[str, Any]) -> str:
    protocol = row["protocol"]
    drawn = "greedy" if protocol["temperature"] == 0 else f"temperature {protocol['temperature']:g}, top-p {protocol['top_p']:g}"
    return f"avg@{row['samples']}, {drawn}, at most {protocol['max_tokens']:,} tokens"


def _percent(interval: dict[str, float] | None) -> str:
    return "-" if interval is None else f"{100 * interval['mean']:.1f}%"


def _with_interval(interval: dict[str, float] | None) -> str:
    return "-" if interval is None else f"{_percent(interval)} ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})"
