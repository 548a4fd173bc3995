"""Parts of a recipe's `grpo` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.base import Section

Adapted = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class CurriculumConfig(Section):
    """Prompts that are sometimes solved more often than those that always or never are, by pass rates that the run measures."""

    every_batches: Annotated[int, Field(ge=1)] = 16
    """Batches whose prompts are drawn at a time, by the pass rates measured until the draw before; above `grpo.max_staleness`."""

    floor: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Weight of a prompt that is always or never solved; one that is solved half of the time, or was never tried, has 1."""

    memory: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the old pass rate in the new one when a prompt is measured again."""


class LoraConfig(Section):
    """Train adapters of low rank (PEFT's LoRA) in place of the weights; the result is merged into a plain checkpoint."""

    r: Annotated[int, Field(ge=1)] = 16
    """Rank."""

    alpha: Annotated[float, Field(gt=0)] = 32
    """The adapters' product is multiplied by alpha / r."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout in front of the adapters in training; above 0 the trained policy is not the one that sampled."""

    target_modules: list[Adapted] = Field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], min_length=1
    )
    """Projections that get one, in every layer that has them."""
