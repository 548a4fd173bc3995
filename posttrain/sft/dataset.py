"""The packed rows of the SFT stage on disk: written once by the driver, memory-mapped by every rank.

data/sft/rows.arrow holds one packed row an entry (`input_ids`, `labels`, `seq_lengths`, all int32), data/sft/info.json what was
kept and dropped. Which samples share a row is fixed for the run; their order is drawn anew for each epoch by the trainer, from
(seed, epoch). Both are therefore the same after a resume, whatever happened to the source files meanwhile.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError
from posttrain.run_folder import RunFolder, atomic_directory, last_checkpoint

if TYPE_CHECKING:
    from datasets import Dataset

    from posttrain.config import Recipe

COLUMNS = ("input_ids", "labels", "seq_lengths")
ROWS_PER_BATCH = 64


def prepare(recipe: Recipe, run: RunFolder) -> str:
    """Make the rows of the recipe, or keep those that a checkpoint of this run was trained on; returns one line about them.

    Raises:
        PosttrainError: no data, no solutions, nothing left after the filters, or no sample that fits.
    """
    folder = run.path / "data" / "sft"
    if last_checkpoint(run.path / "sft") is None or not folder.is_dir():
        from posttrain.data.packing import pack_samples
        from posttrain.data.prepare import prepare_sft
        from posttrain.data.tokenizer import load_tokenizer
        from posttrain.rewards.pool import VerifierPool

        limits = recipe.reward
        with VerifierPool(limits.workers, limits.timeout_s, limits.memory_mb, policy=limits.answer) as pool:
            tokenizer = load_tokenizer(recipe.model)
            prepared = prepare_sft(recipe.data, tokenizer, seed=recipe.seed, suites=recipe.eval.suites, pool=pool)
        write_rows(run, pack_samples(prepared.rows, recipe.data.max_length, seed=recipe.seed), prepared.report)
    return summary(json.loads((folder / "info.json").read_text(encoding="utf-8")))


def write_rows(run: RunFolder, rows: Iterable[Mapping[str, Any]], info: dict[str, Any]) -> None:
    """Write packed rows and the account of them as data/sft/; of `rows`, no more than a batch is held here."""
    import pyarrow as pa

    schema = pa.schema([(name, pa.list_(pa.int32())) for name in COLUMNS])
    count = tokens = 0
    with atomic_directory(run.path / "data" / "sft") as folder:
        with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for batch in _batches(rows):
                stream.write_batch(pa.record_batch([[row[name] for row in batch] for name in COLUMNS], schema=schema))
                count += len(batch)
                tokens += sum(len(row["input_ids"]) for row in batch)
        account = {"rows": count, "tokens": tokens, **info}
        (folder / "info.json").write_text(json.dumps(account, indent=2, default=str), encoding="utf-8")


def load_rows(run: RunFolder) -> Dataset:
    """The rows of the run, memory-mapped.

    Raises:
        DataError: they were not prepared.
    """
    from datasets import Dataset

    path = run.path / "data" / "sft" / "rows.arrow"
    if not path.is_file():
        raise DataError(f"{path} is missing: it is made before the stage starts; run the sft stage again with --resume")
    return Dataset.from_file(str(path))


def summary(info: dict[str, Any]) -> str:
    """The account in one line."""
    dropped = dict(info.get("dropped", {})) | {f"repeats {suite}": count for suite, count in info.get("contaminated", {}).items()}
    parts = [f"{info.get('kept', '?')} samples, {info['tokens']} tokens, {info['rows']} packed rows"]
    parts += [f"left out {count} ({reason})" for reason, count in dropped.items() if count]
    return "; ".join(parts)


def _batches(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    left = iter(rows)
    while batch := list(itertools.islice(left, ROWS_PER_BATCH)):
        yield batch
