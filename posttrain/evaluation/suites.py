"""Suites of a recipe -> their problems, and what an evaluation needs, checked before anything starts."""

from __future__ import annotations

from typing import Any

from posttrain.config import Recipe, SuiteConfig
from posttrain.data.load import load_source
from posttrain.errors import DataError


def load_problems(name: str, suite: SuiteConfig) -> list[dict[str, Any]]:
    """Rows {id, problem, answer, source, ...} of one suite, in the suite's order, `limit` applied.

    Args:
        name: the suite's, for messages.

    Raises:
        DataError: no such file or set, a missing column, no rows, two rows of one id, or a row without an answer.
    """
    try:
        return load_source(suite.source())
    except DataError as error:
        raise DataError(f"suite {name}: {error}") from error


def prepare(recipe: Recipe, *, from_stages: bool) -> list[str]:
    """Read every suite, and look whether the models can be had; a line a suite, for the user.

    Args:
        from_stages: whether models may come out of stages of this run, so that `model.path` alone says nothing.

    Raises:
        DataError: see `load_problems`.
        CheckpointError: a checkpoint is missing.
        ConfigError: the variable with the server's key is not set.
    """
    from posttrain.inference.opening import api_key
    from posttrain.models.hub import check_available

    if recipe.eval.backend.kind == "openai":
        api_key(recipe.eval.backend)
    else:
        named = [name for name in recipe.eval.models if name not in ("base", "sft", "grpo")]
        if not from_stages and not recipe.eval.models and recipe.model.path is not None:
            named.append(recipe.model.path)
        for name in named:
            check_available(name, revision=recipe.model.revision if name == recipe.model.path else None)
    return [f"{name}: {len(load_problems(name, suite))} problems" for name, suite in recipe.eval.suites.items()]
