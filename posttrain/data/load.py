"""A data source of a recipe -> rows {id, problem, answer, source, solution?, ...}.

    source = DataSource(kind="jsonl", path="train.jsonl.gz", columns={"problem": "question"}, limit=1000)
    rows = load_source(source)
"""

from __future__ import annotations

import difflib
import gzip
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from posttrain.data import arithmetic
from posttrain.errors import DataError

Row = dict[str, Any]

KINDS = ("jsonl", "hub", "arithmetic")
REQUIRED = ("problem", "answer")
OPTIONAL = ("id", "solution", "source", "level")
DEFAULT_ARITHMETIC_ROWS = 10_000


def load_source(source: Any, *, needs_solution: bool = False) -> list[Row]:
    """Rows of one source, columns mapped, shuffled and limited as it says; filters are applied by `prepare`.

    Args:
        source: attributes (all but `kind` optional) `kind` jsonl | hub | arithmetic; `path` (a file or a folder of files for
            jsonl: .jsonl, .jsonl.gz or .parquet; a dataset id for hub); `name` (hub configuration); `split`; `columns`
            {problem | answer | solution | id | source | level: its column}; `limit`; `shuffle` (bool); `seed`;
            `solution_suffix` (added to solutions without \\boxed{, with {answer} replaced); `arithmetic` (difficulty).
        needs_solution: a row without a solution is an error (SFT).

    Raises:
        DataError: missing file or column, unreadable line (named file:line), no rows, or an empty problem, answer or solution.
    """
    kind = getattr(source, "kind", "jsonl")
    if kind not in KINDS:
        raise DataError(f"data source: kind={kind!r}, but it must be one of {', '.join(KINDS)}")
    if kind == "arithmetic":
        count = getattr(source, "limit", None) or DEFAULT_ARITHMETIC_ROWS
        split = getattr(source, "split", None) or "train"
        return arithmetic.generate(count, _seed(source), split, getattr(source, "arithmetic", None))
    path = getattr(source, "path", None)
    if not path:
        raise DataError(f"data source of kind {kind}: path is missing")
    limit, shuffle = getattr(source, "limit", None), bool(getattr(source, "shuffle", False))
    numbered = read_files(path) if kind == "jsonl" else _read_hub(source)
    # Read no further than the limit, unless the rows to keep are drawn from all of them.
    if limit is not None and not shuffle:
        numbered = itertools.islice(numbered, limit)
    mapping = _mapping(getattr(source, "columns", None))
    rows = [_map_row(row, mapping, where, needs_solution, str(path), number) for number, (where, row) in enumerate(numbered)]
    if not rows:
        raise DataError(f"{path}: no rows; a dataset needs at least one")
    if shuffle:
        random.Random(_seed(source)).shuffle(rows)
    rows = rows if limit is None else rows[:limit]
    _check_ids(rows, str(path))
    suffix = getattr(source, "solution_suffix", None)
    return [_with_suffix(row, suffix) for row in rows] if suffix else rows


def read_files(path: str | Path) -> Iterator[tuple[str, Row]]:
    """("file:line", row) of a .jsonl, .jsonl.gz, .json (lines) or .parquet file, or of all those in a folder, by name."""
    path = Path(path)
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.name.endswith((".jsonl", ".jsonl.gz", ".parquet"))]
        if not files:
            raise DataError(f"{path}: the folder holds no .jsonl, .jsonl.gz or .parquet file")
    elif path.is_file():
        files = [path]
    else:
        raise DataError(_no_such_file(path))
    for file in files:
        yield from _read_parquet(file) if file.suffix == ".parquet" else _read_lines(file)


def _read_lines(file: Path) -> Iterator[tuple[str, Row]]:
    opened = gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else open(file, encoding="utf-8")
    number = 0
    with opened as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file}:{number}", _parse(line, file, number)
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise DataError(f"{file}:{number + 1}: cannot be read ({error}); it must be UTF-8 text, gzipped if it ends in .gz") from error


def _parse(line: str, file: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{number}: not valid JSON: {error.msg} at column {error.colno}; one object a line is expected") from error
    if not isinstance(row, dict):
        raise DataError(f"{file}:{number}: a JSON object was expected, got {type(row).__name__}")
    return row


def _read_parquet(file: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a parquet file: {error}") from error
    number = 0
    for batch in table.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{file}:{number}", row


def _read_hub(source: Any) -> Iterator[tuple[str, Row]]:
    """Streams a hub dataset: a limit of 100 rows downloads little more than 100 rows."""
    import datasets

    name, split = source.path, getattr(source, "split", None) or "train"
    try:
        stream = datasets.load_dataset(name, getattr(source, "name", None), split=split, streaming=True)
    # What the hub raises has many types; every one of them means that this id, split or configuration cannot be had.
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"hub dataset {name} (split {split}): cannot be loaded: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(stream):
        yield f"{name}[{split}]:{number}", row


def _mapping(columns: Any) -> dict[str, str]:
    given = columns if isinstance(columns, dict) else columns.model_dump() if hasattr(columns, "model_dump") else {}
    known = (*REQUIRED, *OPTIONAL)
    for name in given:
        if name not in known:
            raise DataError(f"columns: {name!r} is not something to map; known: {', '.join(known)}{_nearest(name, known)}")
    return {name: given.get(name) or name for name in known}


def _map_row(row: Row, mapping: dict[str, str], where: str, needs_solution: bool, path: str, number: int) -> Row:
    needed = (*REQUIRED, "solution") if needs_solution else REQUIRED
    mapped = dict(row)
    for name, column in mapping.items():
        if column in row:
            mapped[name] = row[column]
        elif name in needed or column != name:
            raise DataError(
                f"{where}: no column {column!r} for {name!r}; it has: {', '.join(row)}{_nearest(column, row)}. "
                f"Map it in the recipe: columns: {{{name}: ...}}"
            )
    for name in needed:
        value = mapped[name]
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
        if not text.strip():
            raise DataError(f"{where}: its {name} is empty (column {mapping[name]!r}); remove the row or map another column")
        mapped[name] = text
    mapped["id"] = str(mapped["id"]) if mapped.get("id") is not None else f"{Path(path).name}-{number:06d}"
    mapped.setdefault("source", path)
    return mapped


def _check_ids(rows: Iterable[Row], path: str) -> None:
    """Ids name rows in reports, rollouts and resumed evaluations, so they must be unique."""
    seen: set[str] = set()
    for row in rows:
        if row["id"] in seen:
            raise DataError(f"{path}: two rows have the id {row['id']!r}; ids must be unique (leave the column out to have them made)")
        seen.add(row["id"])


def _with_suffix(row: Row, suffix: str) -> Row:
    solution = row.get("solution")
    if not solution or "\\boxed{" in solution:
        return row
    return {**row, "solution": solution + suffix.replace("{answer}", row["answer"])}


def _seed(source: Any) -> int:
    return int(getattr(source, "seed", 0) or 0)


def _no_such_file(path: Path) -> str:
    beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return f"{path}: no such file or folder{_nearest(path.name, beside)}"


def _nearest(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
