"""Checkpoints of a Hugging Face trainer that are whole or absent, under any number of ranks.

    class Learner(AtomicCheckpoints, GRPOTrainer): ...

A checkpoint is filled under a temporary name and renamed when every rank has finished, so that a process killed at any
moment, or a full disk, leaves the older one usable.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from posttrain.errors import CheckpointError
from posttrain.run_folder import atomic_directory

EXTRA_STATE = "posttrain_state.json"
# torch.save says this when a write fails, and loses the errno on the way.
TORCH_FULL_DISK = ("PytorchStreamWriter failed", "unexpected pos")


class AtomicCheckpoints(Trainer):
    """Mixin, to stand before a trainer of TRL: atomic checkpoints with a JSON state of the subclass's own in them."""

    _filling: Path | None = None

    def extra_state(self) -> dict[str, Any]:
        """What else a resume needs (JSON). Override together with `load_extra_state`."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what `extra_state` gave."""

    def restore_extra_state(self, checkpoint: str | os.PathLike[str]) -> None:
        """Read the extra state of `checkpoint`; call it before `train(resume_from_checkpoint=checkpoint)`."""
        path = Path(checkpoint, EXTRA_STATE)
        if path.is_file():
            self.load_extra_state(json.loads(path.read_text()))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._filling or self.args.output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        output = Path(str(self.args.output_dir))
        name = f"checkpoint-{self.state.global_step}"
        with shared_atomic_directory(output / name, leader=self.args.should_save) as folder:
            self._filling = folder
            try:
                # Not TRL's override of it, which adds a model card at each save.
                Trainer._save_checkpoint(self, model, trial)
            finally:
                self._filling = None
            barrier()
            if self.args.should_save:
                # The trainer insists on a folder of its own inside the one it is given.
                for path in (folder / name).iterdir():
                    path.rename(folder / path.name)
                (folder / name).rmdir()
                (folder / EXTRA_STATE).write_text(json.dumps(self.extra_state()))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(output),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights. The original reads config.json as a PreTrainedConfig first (to compare versions), and that class
        refuses layer types that transformers does not know; adapters, which have no config.json, still go through it.

        Raises:
            CheckpointError: weights are missing, unknown or of another shape.
        """
        folder = Path(resume_from_checkpoint)
        if (folder / "config.json").is_file():
            load_weights(self.model if model is None else model, folder)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def save_final(self, path: Path) -> None:
        """Save weights, configuration and tokenizer as the folder `path`. Every rank calls it, for ZeRO-3 gathers."""
        with shared_atomic_directory(path, leader=self.args.should_save) as folder:
            self.save_model(str(folder), _internal_call=True)
            if self.args.should_save:
                (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle: nobody should have to load one


def load_weights(model: Any, folder: Path) -> None:
    """Load the safetensors of a checkpoint folder into `model`, all of them and nothing else.

    Raises:
        CheckpointError: weights are missing, unknown or of another shape.
    """
    files = sorted(folder.glob("*.safetensors"))
    missing, unknown = set(model.state_dict()), set()
    try:
        for file in files:
            result = model.load_state_dict(load_file(file), strict=False)
            missing &= set(result.missing_keys)
            unknown |= set(result.unexpected_keys)
    except (RuntimeError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder}: its weights cannot be loaded: {error}") from error
    if files:
        missing -= set(getattr(model, "all_tied_weights_keys", None) or {})
    if missing or unknown:
        missing_names, unknown_names = (", ".join(sorted(names)[:3]) or "none" for names in (missing, unknown))
        raise CheckpointError(f"{folder}: weights missing: {missing_names}; unknown: {unknown_names}")


@contextlib.contextmanager
def shared_atomic_directory(path: Path, *, leader: bool) -> Iterator[Path]:
    """`atomic_directory` that every rank fills together; the leader creates, flushes and renames it.

    Raises:
        CheckpointError: the disk is full; what was there before is untouched.
    """
    with atomic_directory(path) if leader else contextlib.nullcontext() as folder, _recognised_full_disk(path):
        yield _from_leader(folder)
        barrier()
    barrier()


@contextlib.contextmanager
def _recognised_full_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if any(message in str(error) for message in TORCH_FULL_DISK):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreed(stop: bool) -> bool:
    """Rank 0's answer on every rank: all must leave the loop at the same step."""
    if not several_ranks():
        return stop
    flag = torch.tensor([int(stop)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def barrier() -> None:
    """Wait for the other ranks, where there are any."""
    if several_ranks():
        dist.barrier()


def _from_leader(folder: Path | None) -> Path:
    """The temporary folder that the leader (rank 0 of its node or of all) made, on every rank."""
    if not several_ranks():
        assert folder is not None, "a single process leads itself"
        return folder
    shared: list[Path | None] = [folder]
    dist.broadcast_object_list(shared, src=0)
    assert shared[0] is not None, "rank 0 leads"
    return shared[0]
