"""Which rows stay, with a counted reason for each that does not."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from posttrain.errors import DataError

Row = dict[str, Any]

TRUE, FALSE = (True, 1, "true", "True", "1", "yes"), (False, 0, "false", "False", "0", "no", None)


def apply_filters(rows: list[Row], filters: Any, *, tokenizer: Any = None, pool: Any = None) -> tuple[list[Row], dict[str, int]]:
    """Rows that pass every filter, in their order, and {reason: rows dropped}; the cheapest filters go first.

    Args:
        filters: attributes or dict keys, all optional: `correct_column` (rows where this column is true), `min_tokens`,
            `max_tokens` (of the solution), `verified` (the solution reaches the gold answer, by the verifier).
        tokenizer: needed for the token limits.
        pool: a `VerifierPool`; one is made and closed here where `verified` is set and none is given.

    Raises:
        DataError: the correct column is missing or holds something else than true and false; no solution to look at.
    """
    dropped: Counter[str] = Counter()
    column = verdict_column(filters)
    if column:
        rows = _keep(rows, [f"{column} is not true" if not _is_true(row, column) else None for row in rows], dropped)
    least, most = _get(filters, "min_tokens") or 0, _get(filters, "max_tokens")
    if least or most is not None:
        if tokenizer is None:
            raise ValueError("filters min_tokens and max_tokens need a tokenizer")
        rows = _keep(rows, [_length_reason(row, tokenizer, least, most) for row in rows], dropped)
    if _get(filters, "verified"):
        rows = _keep(rows, _verify(rows, pool), dropped)
    return rows, dict(dropped)


def verdict_column(filters: Any) -> str | None:
    """The column that says whether a row's solution is right, where the filters go by one."""
    return _get(filters, "correct_column") or None


def nearest(given: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?", or nothing where no name is near."""
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _get(filters: Any, name: str) -> Any:
    return filters.get(name) if isinstance(filters, dict) else getattr(filters, name, None)


def _keep(rows: list[Row], reasons: list[str | None], dropped: Counter[str]) -> list[Row]:
    dropped.update(reason for reason in reasons if reason)
    return [row for row, reason in zip(rows, reasons, strict=True) if reason is None]


def _is_true(row: Row, column: str) -> bool:
    if column not in row:
        raise DataError(
            f"row {row['id']}: no column {column!r} (filters.correct_column); it has: {', '.join(row)}{nearest(column, row)}"
        )
    value = row[column]
    if value not in TRUE and value not in FALSE:
        raise DataError(f"row {row['id']}: column {column!r} holds {value!r}; filters.correct_column needs true or false")
    return value in TRUE


def _length_reason(row: Row, tokenizer: Any, least: int, most: int | None) -> str | None:
    length = len(tokenizer(_solution(row), add_special_tokens=False)["input_ids"])
    if length < least:
        return f"solution below {least} tokens"
    return f"solution above {most} tokens" if most is not None and length > most else None


def _solution(row: Row) -> str:
    if not row.get("solution"):
        raise DataError(f"row {row['id']}: it has no solution to filter by; name its column with columns: {{solution: ...}}")
    return row["solution"]


def _verify(rows: list[Row], pool: Any) -> list[str | None]:
    pairs = [(row["answer"], _solution(row)) for row in rows]
    if pool is not None:
        verdicts = pool.verify(pairs)
    else:
        from posttrain.rewards.pool import VerifierPool

        with VerifierPool() as own:
            verdicts = own.verify(pairs)
    return [None if verdict.correct else f"not verified: {verdict.reason}" for verdict in verdicts]
