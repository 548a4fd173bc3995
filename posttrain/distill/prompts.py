"""What the teacher is asked, and what its traces depend on."""

from __future__ import annotations

from typing import Any

from posttrain.config import Recipe
from posttrain.distill.teacher import teacher_of
from posttrain.inference import Backend, Prompt, SamplingOptions, prompt_seed


def identity_of(recipe: Recipe, teacher: Backend) -> dict[str, Any]:
    """Who the teacher is, as its backend and the recipe know it."""
    return {**teacher.identity(), "revision": teacher_of(recipe).revision}


def trace_settings(recipe: Recipe, teacher: dict[str, Any]) -> dict[str, Any]:
    """What a trace and its grade depend on; traces of other settings are never mixed with these."""
    config = recipe.distill
    return {
        "teacher": teacher,
        "sampling": {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop")},
        "run_seed": recipe.seed if config.seed is None else config.seed,
        "prompt": {"system": _system(recipe), "suffix": _suffix(recipe)},
        "verifier": recipe.reward.model_dump(mode="json", exclude={"workers"}),
    }


def prompt_of(row: dict[str, Any], samples: tuple[int, ...], recipe: Recipe) -> Prompt:
    """What the teacher is asked."""
    config, system = recipe.distill, _system(recipe)
    turns = [{"role": "system", "content": system}] if system else []
    return Prompt(
        id=row["id"],
        messages=(*turns, {"role": "user", "content": row["problem"] + _suffix(recipe)}),
        samples=samples,
        seed=prompt_seed(recipe.seed if config.seed is None else config.seed, row["id"]),
        sampling=SamplingOptions(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            max_tokens=config.max_tokens,
            stop=tuple(config.stop),
        ),
    )


def _system(recipe: Recipe) -> str | None:
    own = recipe.distill.system_prompt
    return recipe.data.system_prompt if own is None else own


def _suffix(recipe: Recipe) -> str:
    own = recipe.distill.prompt_suffix
    return recipe.data.prompt_suffix if own is None else own
