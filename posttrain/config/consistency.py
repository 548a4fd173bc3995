"""Checks that concern more than one section of a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.config.suites import SUITES
from posttrain.config.trl import nearest
from posttrain.models.sizes import DEFAULTS, resolve
from posttrain.types import CORRECTNESS

if TYPE_CHECKING:
    from posttrain.config.recipe import Recipe

TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
ORDER = ("distill", "sft", "grpo", "eval", "report")


def problems(recipe: Recipe) -> list[str]:
    """Return what is wrong, one sentence each, `section.key: ...` first."""
    found = _model(recipe) or _stages(recipe)
    if found:
        return found
    found = _decontaminate(recipe)
    if "distill" in recipe.stages:
        found += _distill(recipe) + _rewards(recipe)
    if "sft" in recipe.stages:
        found += _sft(recipe) + _intervals(recipe, "trainer")
    if "grpo" in recipe.stages:
        found += _grpo(recipe) + _intervals(recipe, "grpo")
        found += [] if "distill" in recipe.stages else _rewards(recipe)
    if "eval" in recipe.stages:
        found += _eval(recipe)
    return found + _exact(recipe)


def context_length(recipe: Recipe) -> int | None:
    """Positions that the model takes, where the recipe says so."""
    if recipe.model.init is None:
        return None
    return recipe.model.init.get("max_position_embeddings", DEFAULTS["max_position_embeddings"])


def grpo_processes(recipe: Recipe) -> int:
    """Learners of the GRPO stage, whatever `ray.num_workers` says for SFT."""
    return recipe.grpo.learners


def _model(recipe: Recipe) -> list[str]:
    """Fields of a new model. The vocabulary's size may be left out: the tokenizer's is used then."""
    if recipe.model.init is None:
        return []
    allowed = [*DEFAULTS, *TOKEN_IDS]
    unknown = [
        f"model.init.{name}: unknown field of SSEHConfig{nearest(name, allowed)}"
        for name in recipe.model.init
        if name not in allowed
    ]
    if unknown:
        return unknown
    try:
        resolve(recipe.model.init)
    except (ValueError, TypeError) as error:
        return [f"model.init: {error}"]
    return []


def _stages(recipe: Recipe) -> list[str]:
    ordered = [stage for stage in ORDER if stage in recipe.stages]
    if recipe.stages != ordered:
        return [f"stages: got {', '.join(recipe.stages)}; each stage once, in the order {', '.join(ordered)}"]
    data = recipe.data
    if "stages" not in recipe.model_fields_set and data.train is None and data.prompts is None:
        return [
            f"stages: without it a recipe runs {', '.join(recipe.stages)}, and this one has no data to train on; list what it "
            "is to run, for instance `stages: [eval, report]`"
        ]
    return []


def _decontaminate(recipe: Recipe) -> list[str]:
    return [
        f"data.decontaminate: {name!r} is neither a suite nor a JSONL file{nearest(name, [*SUITES, *recipe.eval.suites])}"
        for name in recipe.data.decontaminate
        if name not in SUITES and name not in recipe.eval.suites and not _looks_like_file(name)
    ]


def _looks_like_file(name: str) -> bool:
    return name.endswith((".jsonl", ".jsonl.gz", ".json")) or Path(name).is_file()


def _distill(recipe: Recipe) -> list[str]:
    found = []
    if recipe.distill.teacher is None:
        found.append("distill.teacher: the stage distill needs a teacher: `model` and where it is (`kind`, `base_url`)")
    if recipe.distill.problems is None:
        found.append("distill.problems: the stage distill needs problems with gold answers, as data.prompts does")
    most = recipe.distill.filters.max_tokens
    if most is not None and most < recipe.distill.filters.min_tokens:
        found.append(f"distill.filters.max_tokens: {most} is below min_tokens {recipe.distill.filters.min_tokens}")
    return found


def _sft(recipe: Recipe) -> list[str]:
    found = []
    data, context = recipe.data, context_length(recipe)
    if data.train is None and "distill" not in recipe.stages:
        found.append("data.train: the stage sft needs training data with solutions")
    if data.train is not None and "distill" in recipe.stages:
        found.append("data.train: leave it out: with the stage distill, sft reads the traces that the teacher writes")
    if context is not None and data.max_length > context:
        found.append(f"data.max_length: {data.max_length} tokens a row, but the model takes {context} (max_position_embeddings)")
    return found


def _exact(recipe: Recipe) -> list[str]:
    """What strict mode cannot hold for, as far as a recipe says."""
    if not recipe.rollout.exact:
        return []
    found = []
    if recipe.model.dtype != "bfloat16":
        found.append(f"rollout.exact: strict mode needs model.dtype: bfloat16, got {recipe.model.dtype}")
    if recipe.deepspeed is not None and recipe.deepspeed.stage == 3:
        found.append("rollout.exact: strict mode needs whole weights, which deepspeed.stage 3 shards; use stage 0, 1 or 2")
    kinds = resolve(recipe.model.init)["layer_types"] if recipe.model.init is not None else []
    if "sse_gdn" in kinds:
        found.append(f"rollout.exact: strict mode is not there for sse_gdn layers, and layer {kinds.index('sse_gdn')} is one")
    return found


def _grpo(recipe: Recipe) -> list[str]:
    found = []

    def value(name: str) -> Any:
        return recipe.argument("grpo", name)

    if recipe.data.prompts is None and recipe.data.train is None:
        found.append("data.prompts: the stage grpo needs prompts (or data.train)")
    generations = value("num_generations")
    micro = value("per_device_train_batch_size") * grpo_processes(recipe)
    if value("generation_batch_size") is not None and value("steps_per_generation") is not None:
        found.append("grpo.generation_batch_size: cannot be given together with grpo.steps_per_generation")
        return found
    if generations is None:
        found.append("grpo.num_generations: must be a number, at least 2")
        return found
    batch = value("generation_batch_size")
    if batch is None:
        batch = micro * (value("steps_per_generation") or value("gradient_accumulation_steps"))
        source = "per_device_train_batch_size x steps_per_generation"
    else:
        source = "generation_batch_size"
        if batch % micro:
            found.append(f"grpo.generation_batch_size: {batch} is not a multiple of {micro} (per_device_train_batch_size)")
    if batch % generations:
        found.append(f"grpo.num_generations: {generations} does not divide the {batch} completions of a batch ({source})")
    completion = value("max_completion_length")
    if completion is None:
        found.append("grpo.max_completion_length: must be a number of tokens")
    else:
        found += _fits(recipe, "grpo.max_completion_length", completion)
    # Greedy completions of a prompt are all the same, and the learner divides by the temperature.
    if value("temperature") == 0:
        found.append("grpo.temperature: 0 is greedy, so that a group's completions would be the same; it must be above 0")
    if not 0 < value("top_p") <= 1:
        found.append(f"grpo.top_p: got {value('top_p')!r}, but it must be above 0 and at most 1")
    if value("top_k") < 0:
        found.append(f"grpo.top_k: got {value('top_k')!r}, but it must be 0 (off) or more")
    if not 0 <= (value("min_p") or 0) < 1:
        found.append(f"grpo.min_p: got {value('min_p')!r}, but it must be at least 0 and below 1")
    if value("loss_type") == "luspo" and value("importance_sampling_level") != "sequence":
        found.append("grpo.importance_sampling_level: the loss luspo needs sequence")
    if value("loss_type") == "vespo" and value("importance_sampling_level") != "token":
        found.append("grpo.importance_sampling_level: the loss vespo needs token")
    own = batch // grpo_processes(recipe)
    if not found and own % generations:
        found.append(
            f"grpo.learners: each of {grpo_processes(recipe)} has {own} of the {batch} completions of a batch ({source}), which "
            f"is no multiple of grpo.num_generations {generations}: a group must be whole on one process"
        )
    if value("multi_objective_aggregation") == "normalize_then_sum" and recipe.grpo.baseline != "mean":
        found.append("grpo.baseline: multi_objective_aggregation normalize_then_sum compares with the mean; leave baseline out")
    found += _correction(value) + _curriculum(recipe)
    if recipe.grpo.lora is not None and recipe.deepspeed is not None and recipe.deepspeed.stage == 3:
        found.append("grpo.lora: adapters are merged whole, which deepspeed.stage 3 shards; use stage 0, 1 or 2")
    if recipe.grpo.extra_groups_ahead > recipe.grpo.max_extra_groups:
        ahead, most = recipe.grpo.extra_groups_ahead, recipe.grpo.max_extra_groups
        found.append(f"grpo.extra_groups_ahead: {ahead}, but grpo.max_extra_groups allows {most} extra groups a batch")
    if recipe.grpo.placement == "split":
        return found + _split(recipe, batch)
    if recipe.deepspeed is not None and recipe.deepspeed.stage == 3:
        found.append(
            "grpo.placement: colocated generates with whole weights, which deepspeed.stage 3 shards; use placement split, or "
            "stage 0, 1 or 2"
        )
    return found


def _correction(value: Callable[[str], Any]) -> list[str]:
    """What TRL would say of the importance weights when it is loaded."""
    low, high = value("vllm_importance_sampling_clip_min"), value("vllm_importance_sampling_clip_max")
    cap = value("vllm_importance_sampling_cap")
    high = high if cap is None else cap
    if low is not None and high is not None and low >= high:
        return [f"grpo.vllm_importance_sampling_clip_min: {low} must be below vllm_importance_sampling_clip_max {high}"]
    if high is not None and high <= 0:
        return [f"grpo.vllm_importance_sampling_clip_max: {high} leaves no weight above 0; it must be above 0, or null"]
    mode = value("vllm_importance_sampling_mode")
    if value("vllm_importance_sampling_correction") and mode.endswith("truncate") and low is None and high is None:
        return [f"grpo.vllm_importance_sampling_clip_max: {mode} needs a bound, clip_max or clip_min"]
    if value("loss_type") == "vespo" and value("vllm_importance_sampling_correction") and not mode.startswith("token"):
        return [f"grpo.vllm_importance_sampling_mode: the loss vespo needs token_truncate or token_mask, not {mode}"]
    return []


def _curriculum(recipe: Recipe) -> list[str]:
    """What decides that a prompt is solved, and that generators are never ahead of the draw."""
    curriculum = recipe.grpo.curriculum
    if curriculum is None:
        return []
    found = []
    if not any(function.name in CORRECTNESS for function in recipe.reward.functions):
        known = " or ".join(CORRECTNESS)
        found.append(f"grpo.curriculum: it goes by right answers, so that reward.functions must have {known}")
    if recipe.grpo.placement == "split" and curriculum.every_batches <= recipe.grpo.max_staleness:
        found.append(
            f"grpo.curriculum.every_batches: {curriculum.every_batches} must be above grpo.max_staleness "
            f"{recipe.grpo.max_staleness}: generators that run ahead would need prompts that are not drawn yet"
        )
    return found


def _split(recipe: Recipe, batch: int) -> list[str]:
    """What generators elsewhere ask for: one version of the weights a generation batch."""
    found = []
    micro = recipe.argument("grpo", "per_device_train_batch_size") * grpo_processes(recipe)
    micro_steps = batch // micro * recipe.argument("grpo", "num_iterations")
    accumulation = recipe.argument("grpo", "gradient_accumulation_steps")
    if micro_steps % accumulation:
        found.append(
            f"grpo.placement: split needs optimiser steps that end with a generation batch, but a batch is {micro_steps} "
            f"micro-steps and grpo.gradient_accumulation_steps is {accumulation}, which must divide it"
        )
    learners, generators = recipe.grpo.learners, recipe.grpo.generators
    needed = learners * recipe.ray.cpus_per_worker + generators * recipe.grpo.cpus_per_generator
    if recipe.ray.address is None and recipe.ray.num_cpus is not None and needed > recipe.ray.num_cpus:
        found.append(f"ray.num_cpus: {recipe.ray.num_cpus}, but {learners} learners and {generators} generators hold {needed:g}")
    return found


def _intervals(recipe: Recipe, section: Literal["trainer", "grpo"]) -> list[str]:
    """Logging or saving every 0 steps, which Trainer refuses only once the model is loaded."""
    return [
        f"{section}.{kind}_steps: 0 steps is no interval; give at least 1, or {section}.{kind}_strategy: no"
        for kind in ("logging", "save")
        if recipe.argument(section, f"{kind}_steps") == 0 and recipe.argument(section, f"{kind}_strategy") == "steps"
    ]


def _rewards(recipe: Recipe) -> list[str]:
    """Names and arguments of built-in rewards, and the files of others (which are not run here)."""
    from posttrain.rewards.registry import NAMED

    found = []
    for i, function in enumerate(recipe.reward.functions):
        key = f"reward.functions.{i}"
        if function.name is None:
            file = (function.path or "").rpartition(":")[0]
            if file.endswith(".py") and not Path(file).is_file():
                found.append(f"{key}.path: no such file {file!r} (paths start at the folder of the command)")
        elif function.name not in NAMED:
            known = list(NAMED)
            found.append(
                f"{key}.name: unknown reward {function.name!r}; known: {', '.join(known)}{nearest(function.name, known)}"
            )
        else:
            taken = [name for name in inspect.signature(NAMED[function.name]).parameters if name != "pool"]
            found += [
                f"{key}.args.{name}: {function.name} takes no such argument"
                + (nearest(name, taken) or f"; it takes: {', '.join(taken)}")
                for name in function.args
                if name not in taken
            ]
    return found


def _eval(recipe: Recipe) -> list[str]:
    if not recipe.eval.suites:
        return ["eval.suites: the stage eval needs at least one suite"]
    found = _served(recipe) if recipe.eval.backend.kind == "openai" else []
    for name, suite in recipe.eval.suites.items():
        assert suite.max_tokens is not None, "resolved by EvalConfig"
        found += _fits(recipe, f"eval.suites.{name}.max_tokens", suite.max_tokens)
    return found


def _served(recipe: Recipe) -> list[str]:
    """A server knows its models by names of its own, and none of what this run's stages make."""
    made = [name for name in recipe.eval.models if name in ("base", "sft", "grpo")]
    if made:
        return [
            f"eval.models: {', '.join(made)}: a server (eval.backend.kind: openai) is asked by the name it serves a model under"
        ]
    if not (recipe.eval.models or recipe.eval.backend.model or recipe.model.path):
        return ["eval.models: name the model that the server (eval.backend.kind: openai) is to be asked for"]
    return []


def _fits(recipe: Recipe, key: str, completion: int) -> list[str]:
    """A prompt and a completion must fit into the context, the model's and the generator's."""
    needed = recipe.data.max_prompt_length + completion
    limits = {"rollout.max_length": recipe.rollout.max_length, "the model's max_position_embeddings": context_length(recipe)}
    return [
        f"{key}: {completion} tokens and data.max_prompt_length {recipe.data.max_prompt_length} make {needed}, "
        f"above {name} {limit}"
        for name, limit in limits.items()
        if limit is not None and needed > limit
    ]
