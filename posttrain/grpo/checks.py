"""What TRL's arguments must be for this learner, beyond what TRL itself checks."""

from __future__ import annotations

from trl.trainer.grpo_config import GRPOConfig


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
