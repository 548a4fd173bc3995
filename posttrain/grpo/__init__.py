"""GRPO: sample groups, reward them, move the policy.

train_stage.py  recipe -> model, prompts, rewards, generator, learner; resume, stop, final checkpoint
learner.py      the one subclass of TRL's GRPOTrainer
checks.py       what TRL's arguments must be for it
adapters.py     LoRA: what is trained, and what it amounts to when merged
schedule.py     batches, prompts and sampling of a run (a part of the learner)
sampler.py      which prompt comes when
curriculum.py   which prompt comes when, by measured pass rates
source.py       what a learner gets of a batch, and the source on its own model
dynamic.py      groups that teach nothing are replaced
experience.py   prompts -> requests; groups -> padded tensors
scoring.py      completions -> rewards -> groups
advantages.py   rewards -> advantages
packing.py      padded tensors -> one packed forward -> padded tensors
forward.py      log-probabilities of a padded batch by packed forwards
correction.py   importance weights between the policy that sampled and the one that trains
measures.py     what a learner reports of every step
metrics.py      its parts: mismatch, weights, routing, times
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
