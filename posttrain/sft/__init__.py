"""Supervised fine-tuning: packed rows, TRL's SFTTrainer, exact resume.

prepare (driver)         rows of the recipe -> tokenised, packed -> data/sft/  (Arrow, memory-mapped)
train   (each rank)      data/sft/ + base/  -> sft/checkpoint-N -> sft/final
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.config import Recipe
    from posttrain.runtime.worker import WorkerContext

__all__ = ["train"]


def train(recipe: Recipe, run_path: str | Path, context: WorkerContext) -> None:
    """Run the stage on this rank; see `posttrain.sft.train_stage.train` (imported here, for it brings torch along)."""
    from posttrain.sft.train_stage import train as run

    run(recipe, run_path, context)
