"""The folder of a run: who may use it, what is finished, and how things get onto the disk whole.

config.yaml               the resolved recipe
metrics.jsonl             one JSON object a line: stage, step, time, metrics
stages.json               finished stages
base/                     the initial weights and tokenizer
distill/traces.jsonl      every trace of the teacher; distill/final the rows that SFT reads
sft/checkpoint-N, sft/final, grpo/checkpoint-N, grpo/final
rollouts/step-000001.parquet
eval/<model>/<suite>/samples.jsonl, eval/results.json
report.html

with RunFolder.open(recipe, resume=False) as run:
    if not run.stage_done("sft"):
        ...
        run.mark_done("sft", steps=100)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self

import yaml

from posttrain.config import Recipe, dump_recipe, recipe_from_dict
from posttrain.errors import CheckpointError, ConfigError, RunFolderError

CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")

# What may differ between two launches of the same run: it says where things run and what is shown, not what is computed.
# A changed `eval` section runs the evaluation again, where samples of an unchanged protocol are found and kept.
FREE_TO_CHANGE = {
    *("description", "run_dir", "stages", "eval", "reward.workers"),
    # `ray.num_workers` is not among them: it sets SFT's global batch.
    *(
        f"ray.{name}"
        for name in ("address", "cpus_per_worker", "gpus_per_worker", "num_cpus", "max_failures", "dashboard", "env", "listen")
    ),
    "ray.object_store_memory_mb",
    *("rollout.max_sequences", "rollout.max_prefill_tokens"),
    *(
        f"distill.teacher.{name}"
        for name in ("engines", "max_failures", "base_url", "api_key_env", "concurrency", "timeout_s", "retries", "max_sequences")
    ),
    "distill.give_up_after",
    *(f"grpo.{name}" for name in ("generators", "cpus_per_generator", "gpus_per_generator", "generator_failures")),
    *("grpo.batch_timeout_s", "grpo.weights"),
} | {
    f"{section}.{name}"
    for section in ("trainer", "grpo")
    for name in (
        *("logging_steps", "logging_strategy", "logging_first_step", "report_to", "log_level"),
        *("save_steps", "save_strategy", "save_total_limit"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_timeout"),
    )
}
# How long a stage trains may change until it is finished: afterwards there would be nothing to continue.
FREE_UNTIL_DONE = {"trainer": "sft", "grpo": "grpo"}
LENGTHS = ("max_steps", "num_train_epochs")
# Which of the teacher's traces are kept is computed from those that are there, and may change until SFT has begun on them.
SELECTION = {"distill.filters", "distill.balance", "distill.rows_per_file"}


class RunFolder:
    """A run's folder. `RunFolder.open` holds it for one process at a time; `RunFolder(path)` is for workers and readers."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None

    @classmethod
    def open(cls, recipe: Recipe, resume: bool, stages: Sequence[str] | None = None) -> RunFolder:
        """Create the folder or take it over, and hold its lock until `close`.

        Args:
            stages: those that are about to run; by default the recipe's.

        Raises:
            RunFolderError: another process holds it, or it belongs to another recipe, or one of `stages` is unfinished there and
                `resume` is false.
        """
        run = cls(recipe.run_dir)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._take_lock()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            reason = getattr(error, "strerror", None) or error
            raise RunFolderError(f"run folder {run.path}: {reason}; choose another with run_dir=PATH") from error
        try:
            again = run._check_recipe(recipe)
            wanted = recipe.stages if stages is None else stages
            run._check_unfinished([stage for stage in wanted if stage not in again], resume)
            write_text_atomically(run.path / "config.yaml", dump_recipe(recipe))
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take_lock(self) -> None:
        lock = open(self.path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - held until close()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise RunFolderError(
                f"run folder {self.path} is in use by {holder}; wait for it, stop it, or choose another folder with run_dir=PATH"
            ) from None
        # Python's descriptors are not inherited by exec, so a child that outlives us (Ray's daemons) can't keep the lock.
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        lock.flush()
        self._lock = lock

    def _check_recipe(self, recipe: Recipe) -> tuple[str, ...]:
        """Refuse a folder of another recipe; return the stages that run again because their section changed."""
        path = self.path / "config.yaml"
        if not path.exists():
            foreign = sorted(p.name for p in self.path.iterdir() if p.name != ".lock")
            if foreign:
                raise RunFolderError(
                    f"run folder {self.path} has no config.yaml but holds {', '.join(foreign[:5])}; "
                    "choose an empty folder with run_dir=PATH"
                )
            return ()
        try:
            old = yaml.safe_load(path.read_text(encoding="utf-8"))
            if not isinstance(old, dict):
                raise ValueError("it holds no sections")
        except (yaml.YAMLError, ValueError) as error:
            raise RunFolderError(f"{path} is damaged ({error}); choose another folder with run_dir=PATH") from None
        # An option newer than the folder takes its default there; a recipe that no longer parses is compared raw.
        with contextlib.suppress(ConfigError):
            old = recipe_from_dict(old).model_dump(mode="json")
        new = recipe.model_dump(mode="json")
        lengths = {f"{key}.{name}" for key, stage in FREE_UNTIL_DONE.items() if not self.stage_done(stage) for name in LENGTHS}
        selection = set() if self._started("sft") else SELECTION
        differing = _differences(old, new, FREE_TO_CHANGE | lengths | selection)
        if differing:
            shown = "\n".join(f"  {key}: {before!r} there, {now!r} now" for key, before, now in differing[:12])
            more = f"\n  and {len(differing) - 12} more" if len(differing) > 12 else ""
            raise RunFolderError(
                f"run folder {self.path} belongs to another recipe; these keys differ:\n{shown}{more}\n"
                "choose another folder with run_dir=PATH, delete this one, or put the keys back"
            )
        again: tuple[str, ...] = () if old.get("eval") == new["eval"] else ("eval", "report")
        if any(_differences(old.get("distill", {}).get(key), new["distill"][key], set()) for key in ("filters", "balance")):
            again = ("distill", *(again or ("report",)))
        self._forget(*again)
        return again

    def _check_unfinished(self, stages: list[str], resume: bool) -> None:
        unfinished = [stage for stage in stages if self._started(stage) and not self.stage_done(stage)]
        if unfinished and not resume:
            raise RunFolderError(
                f"run folder {self.path} holds an unfinished stage ({', '.join(unfinished)}); "
                "continue it with --resume, or choose another folder with run_dir=PATH"
            )

    def _started(self, stage: str) -> bool:
        folder = self.path / stage
        return folder.is_dir() and any(folder.iterdir())

    def _stages(self) -> dict[str, Any]:
        path = self.path / "stages.json"
        if not path.exists():
            return {}
        try:
            stages = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(stages, dict):
                raise ValueError(f"an object was expected, got {type(stages).__name__}")
            return stages
        except ValueError as error:
            raise RunFolderError(f"{path} is damaged ({error}); delete it to run the stages again") from None

    def stage_done(self, name: str) -> bool:
        """Whether the stage is finished."""
        return name in self._stages()

    def stage_info(self, name: str) -> dict[str, Any]:
        """What `mark_done` was given, with the time under `finished`."""
        return self._stages().get(name, {})

    def mark_done(self, name: str, **info: Any) -> None:
        """Record that a stage is finished, with facts about it."""
        stages = self._stages() | {name: {"finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **info}}
        write_text_atomically(self.path / "stages.json", json.dumps(stages, indent=2) + "\n")

    def _forget(self, *names: str) -> None:
        stages = self._stages()
        if stages.keys() & set(names):
            kept = {name: info for name, info in stages.items() if name not in names}
            write_text_atomically(self.path / "stages.json", json.dumps(kept, indent=2) + "\n")

    def stage_dir(self, name: str) -> Path:
        """The folder of a stage, created if need be."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def final_checkpoint(self, stage: str) -> Path:
        """Where the model that a stage made is (or will be); the stage "base" is the initial model."""
        return self.path / "base" if stage == "base" else self.path / stage / "final"

    def append_metrics(self, stage: str, step: int, metrics: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl; NaN and infinity are written as null, for JSON has neither."""
        record = {"stage": stage, "step": step, "time": time.time()} | metrics
        line = json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False)
        path = self.path / "metrics.jsonl"
        with open(path, "ab+") as file:
            # A crash may have left half a line: end it, so that ours stays readable.
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line
            file.write(line.encode() + b"\n")

    def read_metrics(self, stage: str | None = None) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, by step within each stage; a step logged again after a resume replaces its first record."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        merged: dict[tuple[str, int, tuple[str, ...]], dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                key = (record["stage"], record["step"], tuple(sorted(record)))
            except (ValueError, KeyError, TypeError):
                continue  # half a line, left by a crash
            if stage is None or record["stage"] == stage:
                merged[key] = record
        stages = list(dict.fromkeys(record["stage"] for record in merged.values()))
        return sorted(merged.values(), key=lambda record: (stages.index(record["stage"]), record["step"]))


def _plain(value: Any) -> Any:
    """A number as JSON can hold it; tensors and numpy scalars have `.item()`."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _differences(old: Any, new: Any, free: set[str], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, the free ones left out."""
    if prefix in free or old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in dict.fromkeys((*old, *new)):
            found += _differences(old.get(key), new.get(key), free, f"{prefix}.{key}" if prefix else str(key))
        return found
    return [(prefix, old, new)]


@contextlib.contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Fill a folder that appears under `path` only when it is complete.

    Yields a temporary folder beside `path`; on leaving, everything is flushed and renamed over `path` (an older folder there
    is replaced). On an error the temporary folder is removed and the older one stays.

    Raises:
        CheckpointError: the disk is full; what was there before is untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        _flush_tree(temporary)
        _replace_directory(temporary, path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_disk_full(error):
            raise CheckpointError(
                f"no space left on the disk while writing {path}; the older checkpoints are untouched. "
                "Free some space (or set save_total_limit) and continue with --resume"
            ) from error
        raise


def is_disk_full(error: BaseException) -> bool:
    """Whether the error, which safetensors and torch may have wrapped, is a full disk."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "os error 28" in str(error)


def _flush_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in [*(os.path.join(root, file) for file in files), root]:
            flush(name)


def flush(path: str | Path) -> None:
    """See that a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_directory(new: Path, path: Path) -> None:
    """Rename `new` to `path`. A folder cannot be renamed over another, so the old one steps aside first."""
    if path.exists():
        aside = path.with_name(f".{path.name}.old-{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        try:
            new.rename(path)
        except BaseException:
            aside.rename(path)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    else:
        new.rename(path)
    flush(path.parent)


def append_whole(file: IO[bytes], data: bytes) -> None:
    """Append to an unbuffered file, all or nothing: what a full disk cut off is taken back, lest the next line join it.

    Raises:
        RunFolderError: the disk is full.
    """
    start = file.seek(0, os.SEEK_END)
    try:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        file.truncate(start)
        if is_disk_full(error):
            raise RunFolderError(
                f"no space left on the disk while writing {file.name}; free some space and use --resume"
            ) from error
        raise


def write_text_atomically(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if is_disk_full(error):
            raise RunFolderError(f"no space left on the disk while writing {path}; free some space and use --resume") from error
        raise


def last_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint-N with the highest N in a stage's folder, or None.

    Checkpoints appear by a rename when complete (`atomic_directory`), so one that is there can be used.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return None
    found = [(int(match[1]), path) for path in folder.iterdir() if path.is_dir() and (match := CHECKPOINT.match(path.name))]
    return max(found)[1] if found else None


def cut_torn_line(file: IO[bytes]) -> None:
    """Cut what follows the last newline, looking for it from the end: the file may be many gigabytes."""
    end = file.seek(0, os.SEEK_END)
    position = end
    while position > 0:
        start = max(0, position - 65536)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            position = start + found + 1
            break
        position = start
    if position < end:
        file.truncate(position)
    file.seek(0, os.SEEK_END)
