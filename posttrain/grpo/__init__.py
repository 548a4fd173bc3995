"""GRPO: sample groups, reward them, move the policy.

train_stage.py  recipe -> model, prompts, rewards, generator, learner; resume, stop, final checkpoint
learner.py      the one subclass of TRL's GRPOTrainer
sampler.py      which prompt comes when
experience.py   prompts -> requests; groups -> padded tensors
scoring.py      completions -> rewards -> groups
advantages.py   rewards -> advantages
packing.py      padded tensors -> one packed forward -> padded tensors
metrics.py      train-inference mismatch, times
callbacks.py    metrics, progress, stops, checkpoints
rollouts.py     completions as Parquet
split/          generators in processes of their own, and the buffer between them and the learner
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.config import Recipe
    from posttrain.runtime.worker import WorkerContext

__all__ = ["train"]


def train(recipe: Recipe, run_path: str | Path, context: WorkerContext) -> None:
    """Run the stage; see `posttrain.grpo.train_stage.train` (imported here, for it brings torch along)."""
    from posttrain.grpo.train_stage import train as run

    run(recipe, run_path, context)
