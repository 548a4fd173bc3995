"""The GRPO stage: sft/final (or base/) -> Learner -> grpo/checkpoint-N, grpo/final."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl.trainer.grpo_config import GRPOConfig

from posttrain.config import Recipe
from posttrain.errors import CheckpointError, DataError, PosttrainError
from posttrain.grpo.callbacks import GenerationStopped, RunCallback
from posttrain.grpo.curriculum import Curriculum
from posttrain.grpo.learner import Learner
from posttrain.grpo.prompts import load_prompts
from posttrain.grpo.rollouts import write_rollouts
from posttrain.grpo.scoring import Scorer
from posttrain.grpo.split.stage import SplitSource
from posttrain.models.exact import make_exact
from posttrain.models.loading import load_model
from posttrain.rewards.errors import RewardError
from posttrain.rewards.registry import RewardSet, build_rewards
from posttrain.rollout import Generator
from posttrain.run_folder import RunFolder, last_checkpoint
from posttrain.runtime.worker import StageStopped, WorkerContext
from posttrain.runtime.zero import trainer_arguments
from posttrain.types import Completion, Request


@dataclass(kw_only=True)
class Stage:
    """The stage, built: its trainer and what must be asked or closed at the end."""

    learner: Learner
    callback: RunCallback
    rewards: RewardSet
    split: SplitSource | None = None


def train(recipe: Recipe, run_path: str | Path, context: WorkerContext) -> None:
    """Train from sft/final (base/ where there was no SFT), or from the last checkpoint of this run, to grpo/final.

    Raises:
        StageStopped: asked to; everything that was trained is in a checkpoint.
        PosttrainError: prompts, weights or disk space are missing.
    """
    run = RunFolder(run_path)
    with build(recipe, run, context) as stage, explained_rewards():
        learner = stage.learner
        checkpoint = last_checkpoint(run.path / "grpo")
        if checkpoint is not None:
            learner.restore_extra_state(checkpoint)
        try:
            learner.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except GenerationStopped:
            # Nothing of this step has been trained or drawn from torch's generator: the state is that after the last step.
            if learner.state.global_step > 0 and last_step(run) != learner.state.global_step:
                learner._save_checkpoint(learner.model_wrapped, None)
            raise StageStopped(f"GRPO stopped after step {learner.state.global_step}") from None
        state = learner.state
        if stage.callback.stopped:
            raise StageStopped(f"GRPO stopped after step {state.global_step}")
        context.report(state.global_step, state.max_steps, note="saving", force=True)
        learner.save_final(run.final_checkpoint("grpo"))
        if stage.split is not None:
            stage.split.finish()
        context.report(state.global_step, state.max_steps, force=True)


@contextlib.contextmanager
def explained_rewards() -> Iterator[None]:
    """A reward that fails is the user's to mend: its message goes out without a traceback."""
    try:
        yield
    except RewardError as error:
        raise PosttrainError(str(error)) from error


def last_step(run: RunFolder) -> int | None:
    """Step of the last checkpoint."""
    checkpoint = last_checkpoint(run.path / "grpo")
    return None if checkpoint is None else int(checkpoint.name.rpartition("-")[2])


@contextlib.contextmanager
def build(recipe: Recipe, run: RunFolder, context: WorkerContext) -> Iterator[Stage]:
    """Build the trainer of the stage; the verifier's processes, and generators of its own, end with the `with` block."""
    start = starting_checkpoint(run)
    tokenizer = AutoTokenizer.from_pretrained(start, trust_remote_code=recipe.model.trust_remote_code)
    prompts = load_prompts(recipe, run, tokenizer)
    args = arguments(recipe, run.path, len(prompts))
    model = load_model(str(start), dtype=recipe.model.dtype, trust_remote_code=recipe.model.trust_remote_code)
    model.config.use_cache = False
    if recipe.rollout.exact:
        # Before the learner copies it as its reference; the trainer moves it to the device.
        make_exact(model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    max_length = context_length(recipe, args, model, prompts)
    with explained_rewards():
        rewards = build_rewards(recipe.reward, limit_s=recipe.grpo.batch_timeout_s)
    split: SplitSource | None = None
    try:
        scorer = Scorer(
            rewards,
            lambda ids: tokenizer.batch_decode(ids, skip_special_tokens=True),
            truncated_completions=recipe.grpo.truncated_completions,
            truncation_penalty=recipe.grpo.truncation_penalty,
            scale_rewards=args.scale_rewards,  # pyright: ignore[reportArgumentType]
            aggregation=args.multi_objective_aggregation,  # pyright: ignore[reportArgumentType]
            baseline=recipe.grpo.get("baseline", "mean"),
        )
        policy = Policy(recipe, model, tokenizer, max_length)
        if recipe.grpo.placement == "split":
            split = SplitSource(recipe, run.path, checkpoint=start, max_length=max_length, router_indices=policy.replay_router)
        learner = Learner(
            model,
            args=args,
            prompts=prompts,
            tokenizer=tokenizer,
            generate=policy.generate if split is None else None,
            collect=None if split is None else split.collect,
            scorer=scorer,
            stop=recipe.rollout.stop,
            extra_groups=recipe.grpo.max_extra_groups,
            extra_groups_ahead=recipe.grpo.extra_groups_ahead,
            lora=None if recipe.grpo.lora is None else recipe.grpo.lora.model_dump(),
            curriculum=None if recipe.grpo.curriculum is None else recipe.grpo.curriculum.model_dump(),
            replay_router=policy.replay_router,
            max_forward_tokens=recipe.rollout.max_prefill_tokens,
            record=lambda step, records: write_rollouts(run.path / "rollouts", step, records),
        )
        callback = RunCallback(context, lambda step, metrics: run.append_metrics("grpo", step, metrics), learner.at_boundary)
        learner.add_callback(callback)
        learner.remove_callback(PrinterCallback)
        policy.progress = lambda: callback.progress(learner.state.global_step, args.max_steps)
        policy.eos_token_ids = learner.eos_token_ids
        if split is not None:
            check_round(learner.curriculum, recipe.grpo.max_staleness, len(prompts))
            split.attach(learner)
            split.progress = policy.progress
            learner.add_callback(split)
        yield Stage(learner=learner, callback=callback, rewards=rewards, split=split)
    finally:
        if split is not None:
            split.close()
        rewards.close()


def check_round(curriculum: Curriculum | None, max_staleness: int, num_prompts: int) -> None:
    """Raises DataError where few prompts make a curriculum's rounds so short that generators would be ahead of the draw."""
    if curriculum is not None and curriculum.every_batches < max_staleness:
        raise DataError(
            f"grpo.curriculum: {num_prompts} prompts make rounds of {curriculum.every_batches} batches, but grpo.max_staleness "
            f"{max_staleness} lets generators run further ahead, for which no prompts are drawn; give more prompts, or lower it"
        )


class Policy:
    """The generator on the learner's own weights, made at the first generation (when the model is on its device)."""

    def __init__(self, recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self._rollout = recipe.rollout
        self._model = model
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._generator: Generator | None = None
        self.replay_router = recipe.rollout.router_replay and routed(model)
        self.eos_token_ids: list[int] = []
        self.progress: Any = lambda: None

    def generate(self, requests: list[Request], version: int) -> list[list[Completion]]:
        """Completions of the requests under the weights as they are now, called policy `version`."""
        if self._generator is None:
            self._generator = Generator(
                self._model,
                eos_token_ids=self.eos_token_ids,
                tokenizer=self._tokenizer,
                max_sequences=self._rollout.max_sequences,
                max_length=self._max_length,
                **self._rollout.engine_options(),
                return_router_indices=self.replay_router,
            )
        self._generator.update_weights(version)
        return self._generator.generate(requests, self.progress())


def routed(model: PreTrainedModel) -> bool:
    """Whether any layer chooses partitions, so that there is something to replay."""
    return any(str(kind).startswith("sse") for kind in getattr(model.config, "layer_types", None) or [])


def starting_checkpoint(run: RunFolder) -> Path:
    """sft/final where SFT was done, else base/.

    Raises:
        CheckpointError: neither is there.
    """
    for stage in ("sft", "base"):
        path = run.final_checkpoint(stage)
        if path.is_dir():
            return path
    raise CheckpointError(f"{run.path} holds neither sft/final nor base/: there is no model to start GRPO from")


def context_length(recipe: Recipe, args: GRPOConfig, model: PreTrainedModel, prompts: Dataset) -> int:
    """Tokens of the longest prompt and its completion together: what a slot of the generator holds.

    Raises:
        DataError: a prompt leaves no room for `max_completion_length` tokens.
    """
    lengths = [len(ids) for ids in prompts["prompt_ids"]]
    length = max(lengths)
    longest = lengths.index(length)
    needed = length + (args.max_completion_length or 0)
    limits = {
        "rollout.max_length": recipe.rollout.max_length,
        "the model's max_position_embeddings": getattr(model.config, "max_position_embeddings", None),
    }
    for name, limit in limits.items():
        if limit is not None and needed > limit:
            raise DataError(
                f"row {prompts[longest].get('id', longest)}: its prompt of {length} tokens and grpo.max_completion_length "
                f"{args.max_completion_length} make {needed}, above {name} {limit}; lower one, raise the limit, or drop long "
                "prompts with data.max_prompt_length and data.overlong_prompt=drop"
            )
    return needed


def arguments(recipe: Recipe, run_path: Path, num_prompts: int) -> GRPOConfig:
    """Return TRL's arguments: the recipe's `grpo` section over our defaults, under what a run folder fixes."""
    cuda = torch.cuda.is_available()
    defaults: dict[str, Any] = {
        # TRL's default is autocast; the generator would have to decode under it too.
        "bf16": cuda and recipe.deepspeed is not None and recipe.model.dtype != "float16",
        "report_to": ["tensorboard"],
        "dataloader_pin_memory": cuda,
        "ddp_find_unused_parameters": False,
        "logging_steps": 1,
    }
    given = defaults | recipe.grpo.arguments
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run_path / "tb" / "grpo"))
    fixed: dict[str, Any] = {
        "output_dir": str(run_path / "grpo"),
        "run_name": recipe.name,
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "mask_truncated_completions": recipe.grpo.truncated_completions == "mask",
        **trainer_arguments(recipe.deepspeed, bf16=bool(given["bf16"]), cuda=cuda),
    }
    args = GRPOConfig(**(given | fixed))
    steps = steps_of_passes(args, num_prompts)
    if args.max_steps <= 0:
        args.max_steps = steps
    return args


def steps_of_passes(args: GRPOConfig, num_prompts: int) -> int:
    """Optimiser steps of `num_train_epochs` passes over the prompts.

    Raises:
        DataError: fewer prompts than one batch needs.
    """
    assert args.num_generations and args.generation_batch_size and args.steps_per_generation
    per_batch = args.generation_batch_size // args.num_generations
    batches = num_prompts // per_batch
    if not batches:
        raise DataError(
            f"{num_prompts} prompts, but one generation batch needs {per_batch} different ones: give more prompts, "
            "or lower grpo.per_device_train_batch_size or grpo.gradient_accumulation_steps"
        )
    micro_steps = batches * args.num_train_epochs * args.steps_per_generation * args.num_iterations
    return max(1, math.floor(micro_steps / args.gradient_accumulation_steps))
