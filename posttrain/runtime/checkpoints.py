"""Checkpoints of a Hugging Face trainer that are whole or absent.

`class Learner(AtomicCheckpoints, GRPOTrainer)`: a checkpoint is written into `.partial-checkpoint-N` beside its place and
renamed when every rank has finished, so that a process killed at any moment, or a full disk, leaves the older one usable.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from posttrain.errors import RunFolderError

PARTIAL_PREFIX = ".partial-"
EXTRA_STATE = "posttrain_state.json"
# What torch.save and safetensors say when a write fails; neither keeps the errno.
FULL_DISK_MESSAGES = ("No space left", "Disk quota exceeded", "PytorchStreamWriter failed", "unexpected pos")


class AtomicCheckpoints:
    """Mixin before a `transformers.Trainer`: atomic `_save_checkpoint`, and a JSON state of the subclass's own beside it."""

    _partial_parent: Path | None = None

    def extra_state(self: Any) -> dict[str, Any]:
        """What else a resume needs (JSON). Override together with `load_extra_state`."""
        return {}

    def load_extra_state(self: Any, state: dict[str, Any]) -> None:
        """Take back what `extra_state` gave, before training continues."""

    def restore_extra_state(self: Any, checkpoint: str | os.PathLike[str]) -> None:
        """Read the extra state of `checkpoint`; call it before `train(resume_from_checkpoint=...)`."""
        path = Path(checkpoint, EXTRA_STATE)
        if path.is_file():
            self.load_extra_state(json.loads(path.read_text()))

    def _get_output_dir(self: Any, trial: Any) -> str:
        return str(self._partial_parent or super()._get_output_dir(trial))

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        output = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        parent = output / f"{PARTIAL_PREFIX}{name}"
        with explained_full_disk(f"saving {output / name}", output):
            try:
                if self.args.should_save:
                    shutil.rmtree(parent, ignore_errors=True)
                    parent.mkdir(parents=True)
                barrier()
                self._partial_parent = parent
                # Not TRL's override: it would add a model card to each save.
                Trainer._save_checkpoint(self, model, trial)
                barrier()
                if self.args.should_save:
                    (parent / name / EXTRA_STATE).write_text(json.dumps(self.extra_state()))
                    publish(parent / name, output / name)
                    rotate_checkpoints(
                        output_dir=str(output),
                        save_total_limit=self.args.save_total_limit,
                        best_model_checkpoint=self.state.best_model_checkpoint,
                    )
            finally:
                self._partial_parent = None
                if self.args.should_save:
                    shutil.rmtree(parent, ignore_errors=True)
        barrier()

    def save_final(self: Any, path: Path) -> None:
        """Save the weights, configuration and tokenizer as `path` (replaced as a whole). Every rank calls it (ZeRO-3 gathers)."""
        partial = path.parent / f"{PARTIAL_PREFIX}{path.name}"
        with explained_full_disk(f"saving {path}", path.parent):
            try:
                if self.args.should_save:
                    shutil.rmtree(partial, ignore_errors=True)
                self.save_model(str(partial), _internal_call=True)
                barrier()
                if self.args.should_save:
                    (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle: not for publishing
                    publish(partial, path)
            finally:
                if self.args.should_save:
                    shutil.rmtree(partial, ignore_errors=True)
        barrier()


def barrier() -> None:
    """Wait for the other ranks, where there are any."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def publish(partial: Path, path: Path) -> None:
    """Flush every file of `partial` to the disk, then make it appear as `path` (an older `path` goes)."""
    for file in sorted(partial.rglob("*")):
        if file.is_file():
            _fsync(file)
    _fsync(partial)
    if path.exists():
        shutil.rmtree(path)
    os.replace(partial, path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explained_full_disk(doing: str, where: Path) -> Iterator[None]:
    """Turn the many faces of a full disk into one RunFolderError that says what is still there."""
    try:
        yield
    except Exception as error:  # sorted by message: safetensors and torch raise classes of their own
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and not any(message in str(error) for message in FULL_DISK_MESSAGES):
            raise
        older = sorted(path.name for path in where.glob("checkpoint-*") if path.is_dir())
        kept = f"{', '.join(older)} in {where} is kept" if older else "no checkpoint had been saved before"
        raise RunFolderError(f"no space left on the disk while {doing}; {kept}. Free some space, then --resume.") from error
