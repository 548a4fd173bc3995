"""A suite of a recipe -> its problems."""

from __future__ import annotations

from typing import Any

from posttrain.config import DataConfig, DataSource, SuiteConfig
from posttrain.data.load import load_source
from posttrain.errors import DataError


def load_problems(name: str, suite: SuiteConfig, data: DataConfig, seed: int) -> list[dict[str, Any]]:
    """Rows {id, problem, answer, source, ...} of one suite, in the suite's order, `limit` applied.

    Args:
        name: the suite's, for messages.
        data: the recipe's data section (for the seed of procedural problems alone).

    Raises:
        DataError: no such file or set, a missing column, no rows, or a row without an answer.
    """
    rows = load_source(_source(suite, seed))
    if suite.answer_after is not None:
        rows = [{**row, "answer": _after(row, suite.answer_after, name)} for row in rows]
    return rows


def _source(suite: SuiteConfig, seed: int) -> DataSource:
    """The suite as a data source; only evaluation problems of the procedural generator, which training never sees."""
    if suite.arithmetic is not None:
        arithmetic = suite.arithmetic
        if arithmetic.seed is None:
            arithmetic = arithmetic.model_copy(update={"seed": seed})
        return DataSource(kind="arithmetic", arithmetic=arithmetic, split="test", limit=suite.limit)
    columns = suite.columns.model_copy(update={"solution": None})
    if suite.path is not None:
        return DataSource(kind="jsonl", path=suite.path, columns=columns, limit=suite.limit)
    return DataSource(kind="hub", path=suite.hub, name=suite.name, split=suite.split, columns=columns, limit=suite.limit)


def _after(row: dict[str, Any], mark: str, name: str) -> str:
    answer = str(row["answer"])
    if mark not in answer:
        raise DataError(f"suite {name}, row {row['id']}: the answer column holds no {mark!r}; set answer_after to the mark before the answer")
    return answer.rsplit(mark, 1)[1].strip()
