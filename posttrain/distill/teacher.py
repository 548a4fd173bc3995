"""The teacher of a recipe: its section as a checkpoint, and the backend that it writes through."""

from __future__ import annotations

from typing import Any

from posttrain.config import ModelConfig, Recipe
from posttrain.config.distill import TeacherConfig
from posttrain.inference import Backend, open_backend


def teacher_of(recipe: Recipe) -> TeacherConfig:
    """The teacher's section, which a recipe with the stage distill has."""
    assert recipe.distill.teacher is not None, "checked by the recipe"
    return recipe.distill.teacher


def teacher_model(recipe: Recipe) -> ModelConfig:
    """The teacher as a model section: what its weights, tokenizer and chat template are."""
    teacher = teacher_of(recipe)
    return ModelConfig(
        path=teacher.model,
        revision=teacher.revision,
        tokenizer=teacher.tokenizer,
        chat_template=teacher.chat_template,
        dtype=teacher.dtype,
        trust_remote_code=teacher.trust_remote_code,
    )


def teacher_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer that the teacher's prompts are made with.

    Raises:
        CheckpointError, ConfigError: there is none, or it has no chat template.
    """
    import posttrain.models.sse_h  # noqa: F401 - a tokenizer is found by its model's configuration
    from posttrain.data.tokenizer import load_tokenizer

    return load_tokenizer(teacher_model(recipe))


def open_teacher(recipe: Recipe) -> Backend:
    """A connection to the server, or the engines, with the model loaded (a cluster's engines load theirs when first asked).

    Raises:
        PosttrainError: the key is not set, vLLM is missing, the cluster too small, or the model cannot be loaded.
    """
    teacher = teacher_of(recipe)
    gpus = 0.0
    if teacher.kind != "openai" and teacher.engines > 1:
        from posttrain.runtime.session import gpus_per_worker

        gpus = gpus_per_worker(recipe.ray)
    return open_backend(
        teacher,
        teacher_model(recipe),
        max_prompt_length=recipe.data.max_prompt_length,
        max_tokens=recipe.distill.max_tokens,
        max_sequences=teacher.max_sequences,
        engine_options=recipe.rollout.engine_options(),
        num_cpus=recipe.ray.cpus_per_worker,
        num_gpus=gpus,
        keep_refusals=True,
    )
