"""The SFT stage on one rank: packed rows -> PackedSFTTrainer -> sft/checkpoint-N, sft/final."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from trl.trainer.sft_config import SFTConfig

from posttrain.config import Recipe
from posttrain.errors import CheckpointError
from posttrain.models.loading import load_model
from posttrain.run_folder import RunFolder, last_checkpoint
from posttrain.runtime.worker import StageStopped, WorkerContext
from posttrain.runtime.zero import trainer_arguments
from posttrain.sft.dataset import load_rows
from posttrain.sft.trainer import PackedSFTTrainer, RunFolderCallback, collate_boundaries_on_host


def train(recipe: Recipe, run_path: str | Path, context: WorkerContext) -> None:
    """Train from base/ (or the last checkpoint of this run) to sft/final.

    Raises:
        StageStopped: asked to; a checkpoint of the last step is saved.
        PosttrainError: rows, weights or disk space are missing.
    """
    run = RunFolder(run_path)
    trainer, callback = build(recipe, run, context)
    checkpoint = last_checkpoint(run.path / "sft")
    if checkpoint is not None:
        trainer.restore_extra_state(checkpoint)
    callback.start_tokens = trainer.extra_state()["tokens"]
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if callback.stopped:
        raise StageStopped(f"SFT stopped after step {trainer.state.global_step}")
    callback.report(trainer.state, note="saving")
    trainer.save_final(run.final_checkpoint("sft"))
    callback.report(trainer.state)


def build(recipe: Recipe, run: RunFolder, context: WorkerContext) -> tuple[PackedSFTTrainer, RunFolderCallback]:
    """Build the trainer of the stage, its model loaded from base/; the callback knows whether the user asked to stop."""
    rows = load_rows(run)
    base = run.final_checkpoint("base")
    if not base.is_dir():
        raise CheckpointError(f"{base} is missing: the initial weights are saved there before the stage starts")
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=recipe.model.trust_remote_code)
    args = arguments(recipe, run.path)
    model = load_model(str(base), dtype=recipe.model.dtype, trust_remote_code=recipe.model.trust_remote_code)
    model.config.use_cache = False
    callback = RunFolderCallback(context, lambda step, metrics: run.append_metrics("sft", step, metrics))
    trainer = PackedSFTTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        data_collator=collate_boundaries_on_host,
        processing_class=tokenizer,
        callbacks=[callback],
    )
    return trainer, callback


def arguments(recipe: Recipe, run_path: Path) -> SFTConfig:
    """Return TRL's arguments: the recipe's `trainer` section over our defaults, under what a run folder fixes."""
    cuda = torch.cuda.is_available()
    # TRL's default is bf16 autocast; weights in float32 on a machine that cannot hurry bf16 should compute in float32.
    defaults: dict[str, Any] = {
        "bf16": cuda and recipe.model.dtype != "float16",
        "report_to": ["tensorboard"],
        "dataloader_pin_memory": cuda,
        "ddp_find_unused_parameters": False,
    }
    given = defaults | recipe.trainer
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run_path / "tb" / "sft"))
    fixed: dict[str, Any] = {
        "output_dir": str(run_path / "sft"),
        "run_name": recipe.name,
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "disable_tqdm": True,
        # The rows are tokenised, cut and packed already (posttrain.sft.dataset).
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "max_length": None,
        "packing": False,
        "remove_unused_columns": False,
        **trainer_arguments(recipe.deepspeed, bf16=bool(given["bf16"]), cuda=cuda),
    }
    return SFTConfig(**(given | fixed))
