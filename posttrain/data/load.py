"""A data source of a recipe -> rows {id, problem, answer, source, solution?, ...}.

source = DataSource(kind="jsonl", path="train.jsonl.gz", columns={"problem": "question"}, limit=1000)
rows = load_source(source)
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from posttrain.data import arithmetic
from posttrain.data.filters import apply_filters, nearest, verdict_column
from posttrain.errors import DataError

Row = dict[str, Any]

KINDS = ("jsonl", "hub", "arithmetic")
REQUIRED = ("problem", "answer")
OPTIONAL = ("id", "solution", "source", "level", "subject")
DEFAULT_ARITHMETIC_ROWS = 10_000


def load_source(
    source: Any,
    *,
    tokenizer: Any = None,
    pool: Any = None,
    seed: int = 0,
    needs_solution: bool = False,
    report: dict[str, Any] | None = None,
) -> list[Row]:
    """Rows of one source: read, mapped, filtered, in the order of the file unless `shuffle` says otherwise.

    Args:
        source: a DataSource or an evaluation suite; attributes, all optional: `kind` jsonl | hub | arithmetic; `path` (a file, or
            a folder of .jsonl, .jsonl.gz or .parquet files; the dataset id where kind is hub); `hub` (a dataset id); `name`,
            `split`, `revision` of a hub dataset; `columns` {problem | answer | solution | id | source | level | subject: column};
            `limit` (rows read, or made); `shuffle` (the limit is then drawn from all rows); `seed`; `answer_after` (the gold
            answer follows this mark); `solution_suffix` (added to solutions without \\boxed{, {answer} in it replaced, after
            the filters); `filters` (see `filters.py`); `arithmetic` (the difficulty, see `arithmetic.py`).
        tokenizer: needed where `filters` count tokens.
        pool: VerifierPool for `filters.verified`; one is made where it is not given.
        seed: used where the source has none of its own.
        needs_solution: a row without a solution is an error (SFT).
        report: filled in with source, read, kept and dropped {reason: rows}.

    Raises:
        DataError: missing file or column, unreadable line (named file:line), no rows, or an empty problem, answer or solution.
    """
    kind = _kind(source)
    own = getattr(source, "seed", None)
    seed = seed if own is None else own
    if kind == "arithmetic":
        rows, name = _generate(source, seed), "arithmetic"
    else:
        rows, name = _read(source, kind, seed, needs_solution)
    kept, dropped = apply_filters(rows, getattr(source, "filters", None), tokenizer=tokenizer, pool=pool)
    if report is not None:
        report.update(source=name, read=len(rows), kept=len(kept), dropped=dropped)
    if not kept:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
        raise DataError(f"{name}: the filters left none of {len(rows)} rows ({reasons}); loosen them")
    suffix = getattr(source, "solution_suffix", None)
    if suffix:
        # In place: a second copy of every solution would double what they take.
        for row in kept:
            _add_suffix(row, suffix)
    return kept


def _kind(source: Any) -> str:
    kind = getattr(source, "kind", None)
    if kind is None:
        kind = "hub" if getattr(source, "hub", None) else "arithmetic" if getattr(source, "arithmetic", None) else "jsonl"
    if kind not in KINDS:
        raise DataError(f"data source: kind={kind!r}, but it must be one of {', '.join(KINDS)}")
    return kind


def _generate(source: Any, seed: int) -> list[Row]:
    limit, split = getattr(source, "limit", None), getattr(source, "split", None) or "train"
    count = DEFAULT_ARITHMETIC_ROWS if limit is None else limit
    return arithmetic.generate(count, seed, "eval" if split == "test" else split, getattr(source, "arithmetic", None))


def _read(source: Any, kind: str, seed: int, needs_solution: bool) -> tuple[list[Row], str]:
    path = (getattr(source, "hub", None) if kind == "hub" else None) or getattr(source, "path", None)
    if not path:
        raise DataError(f"data source of kind {kind}: path is missing")
    limit, shuffle = getattr(source, "limit", None), bool(getattr(source, "shuffle", False))
    numbered = read_files(path) if kind == "jsonl" else _read_hub(source, path)
    # Read no further than the limit, unless the rows to keep are drawn from all of them.
    if limit is not None and not shuffle:
        numbered = itertools.islice(numbered, limit)
    mapping, mark = _mapping(getattr(source, "columns", None)), getattr(source, "answer_after", None)
    if needs_solution:
        numbered = _without_extras(numbered, mapping, verdict_column(getattr(source, "filters", None)))
    rows = [_map_row(row, mapping, where, needs_solution, mark) for where, row in numbered]
    if not rows:
        raise DataError(f"{path}: no rows; a dataset needs at least one")
    for number, row in enumerate(rows):
        row.setdefault("source", str(path))
        row["id"] = f"{Path(path).name}-{number:06d}" if row.get("id") is None else str(row["id"])
    _check_ids(rows, str(path))
    if shuffle:
        random.Random(seed).shuffle(rows)
    return (rows if limit is None else rows[:limit]), str(path)


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
    number = 0
    # utf-8-sig: some editors begin a file with a byte order mark.
    encoding = "utf-8-sig"
    with gzip.open(file, "rt", encoding=encoding) if file.suffix == ".gz" else open(file, encoding=encoding) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file}:{number}", _parse(line, file, number)
        except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(
                f"{file}:{number + 1}: cannot be read ({error}); it must be UTF-8 text, gzipped if it ends in .gz"
            ) from error


def _parse(line: str, file: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}:{number}: not valid JSON: {error.msg} at column {error.colno}; one object a line is expected"
        ) from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, brackets nested by the thousand.
        raise DataError(f"{file}:{number}: cannot be read as JSON: {error}") from error
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


def _read_hub(source: Any, name: str) -> Iterator[tuple[str, Row]]:
    """Streams a hub dataset: a limit of 100 rows downloads little more than 100 rows."""
    import datasets
    from datasets.exceptions import DatasetsError

    split = getattr(source, "split", None) or "train"
    configuration, revision = getattr(source, "name", None), getattr(source, "revision", None)
    try:
        stream = datasets.load_dataset(name, name=configuration, split=split, revision=revision, streaming=True)
    # What the hub raises has many types; every one of them means that this id, split or configuration cannot be had.
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(f"hub dataset {name} (split {split}): cannot be loaded: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(stream):
        yield f"{name}[{split}]:{number}", row


def _mapping(columns: Any) -> dict[str, str | None]:
    """What a row is asked for -> its column; None where the recipe says that there is none."""
    given = columns if isinstance(columns, dict) else columns.model_dump() if hasattr(columns, "model_dump") else {}
    known = (*REQUIRED, *OPTIONAL)
    for name in given:
        if name not in known:
            raise DataError(f"columns: {name!r} is not something to map; known: {', '.join(known)}{nearest(name, known)}")
    return {name: given.get(name, name) for name in known}


def _without_extras(
    numbered: Iterable[tuple[str, Row]], mapping: dict[str, str | None], verdict: str | None
) -> Iterator[tuple[str, Row]]:
    """Rows with the columns that SFT reads: distillation sets bring others as long as the solution (messages, generations)."""
    wanted = {*mapping.values(), verdict}
    named = {column for name, column in mapping.items() if column not in (name, None)}
    needed = named | {mapping[name] for name in (*REQUIRED, "solution")} | ({verdict} if verdict else set())
    for where, row in numbered:
        # A row that lacks something stays whole, for the message to name what it has.
        yield where, {name: row[name] for name in row if name in wanted} if needed <= row.keys() else row


def _map_row(row: Row, mapping: dict[str, str | None], where: str, needs_solution: bool, mark: str | None) -> Row:
    needed = (*REQUIRED, "solution") if needs_solution else REQUIRED
    mapped = dict(row)
    for name, column in mapping.items():
        if column in row:
            mapped[name] = row[column]
        elif column is None and name not in needed:
            mapped.pop(name, None)
        elif name in needed or column != name:
            raise DataError(
                f"{where}: no column {column!r} for {name!r}; it has: {', '.join(row)}{nearest(str(column), row)}. "
                f"Name it in the recipe: columns: {{{name}: ...}}"
            )
    if mark:
        mapped["answer"] = _after(mapped["answer"], mark, where)
    if isinstance(mapped["answer"], bool) or (isinstance(mapped["answer"], float) and not math.isfinite(mapped["answer"])):
        raise DataError(
            f"{where}: its answer is {json.dumps(mapped['answer'])}, which is no answer to compare with; write it as text "
            f'(such as "True" or "Yes"), or name another column: columns: {{answer: ...}}'
        )
    for name in needed:
        mapped[name] = _text(mapped[name])
        if not mapped[name].strip():
            raise DataError(f"{where}: its {name} is empty (column {mapping[name]!r}); remove the row or name another column")
    if mapped.get("solution") is not None:
        mapped["solution"] = _text(mapped["solution"])
    for name in (*REQUIRED, "solution"):
        if not encodable(mapped.get(name) or ""):
            raise DataError(f"{where}: its {name} holds half a surrogate pair (such as \\ud800), which is no text; mend the row")
    return mapped


def encodable(text: str) -> bool:
    """Whether the text can be written as UTF-8, which tokenizers demand: JSON can hold halves of surrogate pairs."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(value: Any) -> str:
    """A cell as text; several answers (OlympiadBench lists them) are joined by commas."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(_text(part) for part in value)
    return json.dumps(value)


def _after(answer: Any, mark: str, where: str) -> str:
    before, found, after = _text(answer).rpartition(mark)
    if not found:
        raise DataError(f"{where}: the mark {mark!r} (answer_after) is not in its answer {before[-60:] or after[-60:]!r}")
    return after.strip()


def _check_ids(rows: Iterable[Row], path: str) -> None:
    """Ids name rows in reports, rollouts and resumed evaluations, so they must be unique."""
    seen: set[str] = set()
    for row in rows:
        if row["id"] in seen:
            raise DataError(
                f"{path}: two rows have the id {row['id']!r}; ids must be unique (columns: {{id: null}} numbers the rows)"
            )
        seen.add(row["id"])


def _add_suffix(row: Row, suffix: str) -> None:
    solution = row.get("solution")
    if solution and "\\boxed{" not in solution:
        row["solution"] = solution + suffix.replace("{answer}", row["answer"])


def _no_such_file(path: Path) -> str:
    beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return f"{path}: no such file or folder{nearest(path.name, beside)}"
