"""What is read and made before Ray starts, so that bad input of any stage fails early and in the user's own terminal."""

from __future__ import annotations

import sys
from typing import Any

from posttrain.config import DataSource, Recipe
from posttrain.errors import CheckpointError, DataError
from posttrain.run_folder import RunFolder, atomic_directory
from posttrain.runtime.worker import quiet


def prepare(recipe: Recipe, run: RunFolder, stages: list[str]) -> None:
    """Make what `stages` start from: the teacher's problems, SFT's rows and GRPO's prompts, then base/. Data errors come before
    any model is loaded.

    Raises:
        PosttrainError: data, tokenizer or checkpoint that cannot be used.
    """
    quiet()
    if "distill" in stages:
        from posttrain.distill.problems import prepare as prepare_problems

        print(f"distill {prepare_problems(recipe, run)}", file=sys.stderr)
        if stages == ["distill"]:
            return
    if {"sft", "grpo"} & set(stages) and recipe.model.path is not None and not run.final_checkpoint("base").is_dir():
        from posttrain.models.hub import check_available

        check_available(recipe.model.path, revision=recipe.model.revision)
    if "sft" in stages:
        from posttrain.sft.dataset import prepare as prepare_rows

        print("sft    reading and packing the data", file=sys.stderr)
        print(f"sft    {prepare_rows(with_traces(recipe, run), run)}", file=sys.stderr)
    if "grpo" in stages:
        from posttrain.grpo.prompts import prepare as prepare_prompts

        print(f"grpo   {prepare_prompts(recipe, run)}", file=sys.stderr)
    if "eval" in stages:
        from posttrain.evaluation.suites import prepare as prepare_suites

        made = [run.final_checkpoint(stage).is_dir() for stage in ("base", "sft", "grpo")]
        for line in prepare_suites(recipe, from_stages=stages != ["eval"] or any(made)):
            print(f"eval   {line}", file=sys.stderr)
    if stages == ["eval"] and recipe.model.path is not None and "base" not in recipe.eval.models:
        return  # a checkpoint is evaluated where it lies
    ensure_base(recipe, run)


def with_traces(recipe: Recipe, run: RunFolder) -> Recipe:
    """The recipe with the traces of this run's distill stage as its training data, where it has that stage.

    Raises:
        DataError: the stage has not run.
    """
    if "distill" not in recipe.stages:
        return recipe
    folder = run.final_checkpoint("distill")
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist: the teacher's traces are not there yet; run the stage distill first")
    train = DataSource(kind="jsonl", path=str(folder))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": train})})


def ensure_base(recipe: Recipe, run: RunFolder) -> None:
    """Save the initial weights and the tokenizer as base/, unless it is there.

    Raises:
        CheckpointError: `model.path` is no checkpoint, or its vocabulary is too small for the tokenizer.
        ConfigError: `model.init` does not make a model.
    """
    base = run.final_checkpoint("base")
    if base.is_dir():
        return
    from posttrain.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(recipe.model)
    with atomic_directory(base) as folder:
        model = _initial_model(recipe, tokenizer)
        size = model.get_input_embeddings().weight.shape[0]
        if len(tokenizer) > size:
            raise CheckpointError(f"the tokenizer has {len(tokenizer)} tokens, but the model's vocabulary holds {size}")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _initial_model(recipe: Recipe, tokenizer: Any) -> Any:
    from posttrain.models.loading import load_model, new_model

    config = recipe.model
    if config.path is not None:
        return load_model(config.path, dtype=config.dtype, trust_remote_code=config.trust_remote_code, revision=config.revision)
    fields = dict(config.init or {})
    fields.setdefault("vocab_size", len(tokenizer))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(name, getattr(tokenizer, name))
    return new_model(fields, seed=recipe.seed, dtype=config.dtype)
