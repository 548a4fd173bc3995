"""Sampled completions as Parquet, for the report and for whoever wonders what the model wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("prompt_index", pa.int64()),
        ("sample", pa.int32()),
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("answer", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("reward", pa.float32()),
        ("rewards", pa.map_(pa.string(), pa.float32())),
        ("correct", pa.bool_()),
        ("advantage", pa.float32()),
        ("length", pa.int32()),
        ("finish_reason", pa.string()),
        ("logprob_mean", pa.float32()),
        ("version", pa.int32()),
        ("oldest_version", pa.int32()),
    ]
)


def write_rollouts(folder: Path, step: int, records: list[dict[str, Any]]) -> Path:
    """Write `folder/step-XXXXXX.parquet`, whole or not at all; a step done again after a resume replaces its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.parquet"
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(records, schema=SCHEMA), partial, compression="zstd")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
