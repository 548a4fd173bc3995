"""The data section of a recipe -> what SFT trains on and what GRPO samples from, with a report of what was left out.

load (map, filter) -> decontaminate -> encode -> length

Encoded samples are int32 arrays, 8 bytes a token with their labels, and a row's text is let go once it is encoded: 80K traces of
6K tokens take 4 GB here, where lists of Python's integers would take 35.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.chat import has_special_token, iter_sft, prompt_ids, special_tokens
from posttrain.data.decontaminate import Decontaminator
from posttrain.data.load import load_source, read_files
from posttrain.errors import ConfigError, DataError

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Attributes:
    rows: the rows that stay; for SFT {id, input_ids [T], labels [T]}, both int32 arrays, without the text; for prompts the
        whole rows with `prompt_ids`.
    report: source, read, dropped {reason: rows}, contaminated {suite: rows}, kept, tokens.
    """

    rows: list[Row]
    report: dict[str, Any]


def prepare_sft(
    data: Any, tokenizer: Any, *, seed: int = 0, suites: Mapping[str, Any] | None = None, pool: Any = None
) -> Prepared:
    """Encoded samples of `data.train`; those above `data.max_length` tokens are left out and counted.

    Args:
        data: the DataConfig.
        suites: `eval.suites` of the recipe, for the names in `data.decontaminate`.
        pool: VerifierPool for `filters.verified`.
    """
    rows, report = _clean(data.train, data, tokenizer, seed, suites, pool, needs_solution=True)
    total = len(rows)
    kept = [sample for sample in _samples(rows, data, tokenizer) if len(sample["input_ids"]) <= data.max_length]
    return _finish(kept, total, f"above max_length {data.max_length}", "input_ids", report)


def _samples(rows: list[Row], data: Any, tokenizer: Any) -> Iterator[Row]:
    """Encoded samples, one a row; empties the rows behind itself, so that texts and ids are never all in memory together."""
    for row, sample in zip(rows, iter_sft(tokenizer, rows, data), strict=True):
        name = row["id"]
        row.clear()
        yield {"id": name, **{column: np.array(ids, dtype=np.int32) for column, ids in sample.items()}}


def prepare_prompts(
    data: Any, tokenizer: Any, *, seed: int = 0, suites: Mapping[str, Any] | None = None, pool: Any = None
) -> Prepared:
    """Rows of `data.prompts` (or `data.train`) with `prompt_ids`; a long prompt is an error or dropped, as
    `overlong_prompt` says."""
    source = getattr(data, "prompts", None) or data.train
    rows, report = _clean(source, data, tokenizer, seed, suites, pool, needs_solution=False)
    return encode_prompts(rows, data, tokenizer, report)


def encode_prompts(rows: Iterable[Row], data: Any, tokenizer: Any, report: dict[str, Any] | None = None) -> Prepared:
    """Adds `prompt_ids` to rows that are loaded already (an evaluation suite, say)."""
    drop = getattr(data, "overlong_prompt", "error") == "drop"
    kept, total = [], 0
    for row in rows:
        total += 1
        try:
            kept.append({**row, "prompt_ids": prompt_ids(tokenizer, row, data)})
        except DataError:
            if not drop:
                raise
    limit = getattr(data, "max_prompt_length", None)
    return _finish(kept, total, f"prompt above max_prompt_length {limit}", "prompt_ids", report or {"read": total, "dropped": {}})


def evaluation_problems(names: Iterable[str], suites: Mapping[str, Any] | None = None) -> dict[str, list[str]]:
    """Problem texts of `data.decontaminate`: suites of the recipe by name, well-known suites by name, or JSONL files."""
    from posttrain.config.suites import SUITES

    problems: dict[str, list[str]] = {}
    for name in names:
        suite: Any = (suites or {}).get(name) or SUITES.get(name)
        if suite is not None:
            source = suite.source() if hasattr(suite, "source") else suite
            problems[name] = [row["problem"] for row in load_source(source)]
        elif Path(name).exists():
            problems[name] = [_problem(row, where) for where, row in read_files(name)]
        else:
            raise ConfigError(f"data.decontaminate: {name!r} is neither a suite nor a file")
    return problems


def _problem(row: Row, where: str) -> str:
    if not isinstance(row.get("problem"), str):
        raise DataError(f"{where}: no column 'problem' to compare training rows with; it has: {', '.join(row)}")
    return row["problem"]


def _clean(
    source: Any, data: Any, tokenizer: Any, seed: int, suites: Mapping[str, Any] | None, pool: Any, *, needs_solution: bool
) -> tuple[list[Row], dict[str, Any]]:
    report: dict[str, Any] = {}
    rows = load_source(source, tokenizer=tokenizer, pool=pool, seed=seed, needs_solution=needs_solution, report=report)
    special, columns = special_tokens(tokenizer), ("problem", "solution") if needs_solution else ("problem",)
    clean = [row for row in rows if not has_special_token(row, special, columns)]
    if len(clean) < len(rows):
        report["dropped"] = {**report["dropped"], "a special token in the text": len(rows) - len(clean)}
        rows = clean
    names = getattr(data, "decontaminate", None) or []
    if names:
        rows, found = Decontaminator(evaluation_problems(names, suites)).filter(rows)
        report["contaminated"] = found["by_suite"]
        report["contaminated_ids"] = [match.id for match in found["matches"]]
    return rows, report


def _finish(kept: list[Row], total: int, reason: str, column: str, report: dict[str, Any]) -> Prepared:
    if len(kept) < total:
        report = {**report, "dropped": {**report["dropped"], reason: total - len(kept)}}
    if not kept:
        raise DataError(
            f"{report.get('source', 'data')}: no rows are left to use; read {report['read']}, left out {_left_out(report)}"
        )
    return Prepared(rows=kept, report={**report, "kept": len(kept), "tokens": sum(len(row[column]) for row in kept)})


def _left_out(report: dict[str, Any]) -> str:
    reasons = {**report["dropped"], **{f"repeats {suite}": n for suite, n in report.get("contaminated", {}).items()}}
    return ", ".join(f"{reason}: {count}" for reason, count in reasons.items()) or "nothing"
