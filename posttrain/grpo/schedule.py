"""What a learner's run looks like, whatever it learns: its batches, the order of its prompts, how completions are drawn."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from posttrain.grpo.curriculum import Curriculum
from posttrain.grpo.sampler import PromptSampler


class Schedule:
    """A part of `Learner`, which has the rest of the attributes from TRL's trainer."""

    args: Any
    state: Any
    train_dataset: Any
    num_generations: int
    num_iterations: int
    shuffle_dataset: bool | None
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float | None
    max_completion_length: int
    _step: int
    _stop_strings: tuple[str, ...]

    @property
    def steps_per_batch(self) -> float:
        """Optimiser steps that one generation batch serves; below 1 where a step takes several batches."""
        return self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps

    @property
    def batch_number(self) -> int:
        """The generation batch that the next micro-step belongs to, counted over the whole run."""
        accumulation = self.args.gradient_accumulation_steps
        micro_steps = self.state.global_step * accumulation + self._step % accumulation
        return micro_steps // (self.args.steps_per_generation * self.num_iterations)

    def at_boundary(self, step: int) -> bool:
        """Whether the next step after `step` starts with a generation: a checkpoint there loses and repeats nothing."""
        return (step * self.args.gradient_accumulation_steps) % (self.args.steps_per_generation * self.num_iterations) == 0

    @property
    def sampling(self) -> dict[str, Any]:
        """How completions are drawn, as `build_requests` takes it."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or 0,
            "min_p": self.min_p or 0.0,
            "max_tokens": self.max_completion_length,
            "stop": self._stop_strings,
            "run_seed": self.args.seed,
        }

    def prompt_sampler(self, dataset: Dataset | None = None) -> PromptSampler:
        """The order of the prompts (by default the learner's) in this run."""
        repeat_count = self.num_iterations * self.args.steps_per_generation
        micro_steps = self.args.max_steps * self.args.gradient_accumulation_steps
        return PromptSampler(
            len(self.train_dataset if dataset is None else dataset),
            prompts_per_batch=self.args.generation_batch_size // self.num_generations,
            num_generations=self.num_generations,
            repeat_count=repeat_count,
            num_batches=-(-micro_steps // repeat_count),
            shuffle=bool(self.shuffle_dataset),
            seed=self.args.seed,
        )

    def _make_curriculum(self, given: dict[str, Any]) -> Curriculum:
        return Curriculum(
            self.prompt_sampler(),
            num_prompts=len(self.train_dataset),
            prompts_per_batch=self.args.generation_batch_size // self.num_generations,
            seed=self.args.seed,
            **given,
        )
