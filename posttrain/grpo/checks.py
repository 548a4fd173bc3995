"""What TRL's arguments must be for this learner, beyond what TRL itself checks; and what a loss must be."""

from __future__ import annotations

import math
from typing import cast

import torch
from accelerate import Accelerator
from trl.trainer.grpo_config import GRPOConfig

from posttrain.errors import PosttrainError


def check_learner_arguments(args: GRPOConfig) -> None:
    """Raises ValueError where a group would be torn between processes, or a run could not be resumed."""
    assert args.steps_per_generation and args.num_generations, "filled in by GRPOConfig"
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % args.num_generations:
        raise ValueError(
            f"one process generates {rows} completions at a time (per_device_train_batch_size "
            f"{args.per_device_train_batch_size} x steps_per_generation {args.steps_per_generation}), which is no multiple "
            f"of num_generations {args.num_generations}: a group must be whole on one process"
        )
    if args.max_steps <= 0:
        raise ValueError(f"max_steps={args.max_steps}, but the learner needs a positive number of steps")
    if args.sync_ref_model:
        raise ValueError("sync_ref_model=True, but a reference that moves is in no checkpoint, so the run could not be resumed")


def check_loss(value: float, step: int, accelerator: Accelerator) -> None:
    """Every process must call this with its loss: where one's is NaN or infinite all raise, instead of waiting for it in the next
    collective.

    Raises:
        PosttrainError: the loss of one or more processes is not finite.
    """
    losses = [value]
    if accelerator.num_processes > 1:
        own = torch.tensor([value], dtype=torch.float32, device=accelerator.device)
        losses = cast(torch.Tensor, accelerator.gather(own)).tolist()
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        where = "" if len(losses) == 1 else f" on learner {', '.join(map(str, bad))} of {len(losses)}"
        raise PosttrainError(
            f"the loss is {losses[bad[0]]} in step {step}{where}: the optimiser would make every weight NaN. Look at grad_norm "
            "and mismatch_k3 of the steps before; --resume goes on from the last checkpoint"
        )
