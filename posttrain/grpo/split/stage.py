"""The split between a recipe and the actors: what they open, and the learner's hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from posttrain.config import RayConfig, Recipe, recipe_from_dict
from posttrain.grpo.scoring import Scorer
from posttrain.grpo.source import Collected
from posttrain.grpo.split.deal import Dealer
from posttrain.grpo.split.experience import SplitExperience
from posttrain.grpo.split.generator import Workbench
from posttrain.grpo.split.plan import Plan
from posttrain.grpo.split.pool import SplitSettings
from posttrain.grpo.split.transfer.buckets import gather, is_sharded, shapes_of
from posttrain.grpo.split.weights import open_sender
from posttrain.runtime.session import gpus_per_worker
from posttrain.runtime.worker import setup

if TYPE_CHECKING:
    from posttrain.grpo.learner import Learner


@dataclass(frozen=True, kw_only=True)
class OpenWorkbench:
    """Makes a generator's engine in its own process; everything in here is pickled.

    Attributes:
        checkpoint: that the learner started from: the shapes count, the weights come from the learner.
        log_to: the run folder, where the process's output goes.
    """

    checkpoint: str
    dtype: str
    trust_remote_code: bool
    eos_token_ids: tuple[int, ...]
    max_sequences: int
    max_length: int
    engine_options: dict[str, Any]
    router_indices: bool
    threads: int
    seed: int
    log_to: str

    def __call__(self, name: str) -> Workbench:
        setup(stage=f"grpo-{name}", run_path=self.log_to, threads=self.threads, seed=self.seed, redirect=True)
        import torch
        from transformers import AutoTokenizer

        from posttrain.models.loading import load_model
        from posttrain.rollout import Generator

        tokenizer = AutoTokenizer.from_pretrained(self.checkpoint, trust_remote_code=self.trust_remote_code)
        model: Any = load_model(self.checkpoint, dtype=self.dtype, trust_remote_code=self.trust_remote_code).eval()
        if torch.cuda.is_available():
            model.to("cuda")
        engine = Generator(
            model,
            eos_token_ids=self.eos_token_ids,
            tokenizer=tokenizer,
            max_sequences=self.max_sequences,
            max_length=self.max_length,
            **self.engine_options,
            return_router_indices=self.router_indices,
        )
        return Workbench(
            engine=engine,
            shapes=shapes_of(model),
            max_sequences=self.max_sequences,
            device=str(model.device),
            finish_first=self.engine_options["unfinished"] == "finish",
        )


@dataclass(frozen=True, kw_only=True)
class OpenScorer:
    """Makes the rewards in a reward actor's process, which rates and leaves advantages to the learner."""

    checkpoint: str
    recipe: dict[str, Any]
    log_to: str

    def __call__(self, number: int) -> Scorer:
        recipe = recipe_from_dict(self.recipe)
        setup(stage="grpo-rewards", run_path=self.log_to, seed=recipe.seed, rank=number, redirect=True)
        from transformers import AutoTokenizer

        import posttrain.models.loading  # noqa: F401 - AutoTokenizer reads the model's configuration, of a family registered here
        from posttrain.rewards.registry import build_rewards

        tokenizer = AutoTokenizer.from_pretrained(self.checkpoint, trust_remote_code=recipe.model.trust_remote_code)
        return Scorer(
            build_rewards(recipe.reward),
            lambda ids: tokenizer.batch_decode(ids, skip_special_tokens=True),
            # They decide which groups teach nothing.
            truncated_completions=recipe.grpo.truncated_completions,
            truncation_penalty=recipe.grpo.truncation_penalty,
            aggregation=recipe.argument("grpo", "multi_objective_aggregation"),
        )


class SplitSource(TrainerCallback):
    """A learner's source of batches in split placement, and the callback that acknowledges them. Of several ranks the first
    owns the actors, and deals what they make.

    Args:
        checkpoint: that the stage starts from; max_length: tokens of the longest prompt with its completion.
        router_indices: whether completions carry the router's choices.
    """

    def __init__(self, recipe: Recipe, run_path: Path, *, checkpoint: Path, max_length: int, router_indices: bool) -> None:
        self._recipe, self._run_path, self._checkpoint = recipe, run_path, checkpoint
        self._max_length, self._router_indices = max_length, router_indices
        self._experience: SplitExperience | None = None
        self._learner: Learner | None = None
        self._dealer = Dealer(recipe.grpo.batch_timeout_s)
        self.progress: Callable[[], Callable[[int, int, int], None]] = lambda: lambda done, total, tokens: None

    def attach(self, learner: Learner) -> None:
        """The learner whose batches these are."""
        self._learner = learner

    @property
    def experience(self) -> SplitExperience:
        """The actors' owner; made when it is first asked for, with Ray connected."""
        if self._experience is None:
            assert self._learner is not None, "attach() a learner first"
            self._experience = self._build(self._learner)
        return self._experience

    def collect(self, rows: list[dict[str, Any]], step: int) -> Collected:
        """This rank's part of a batch, whose prompts are `rows`; `step` optimiser steps have been taken.

        Rank 0 owns the actors: it gathers the prompts of all ranks, waits, and sends everybody the groups.
        """
        learner = self._learner
        assert learner is not None, "attach() a learner first"
        weights = learner.generator_weights()
        if learner.accelerator.num_processes == 1:
            return self._collect(rows, step, weights)
        everybody: list[dict[str, Any]] = gather_object(rows)
        if not self._leads and is_sharded(weights):
            gather(weights, None)
        return self._dealer.deal(lambda: self._collect(everybody, step, weights))

    def _collect(self, rows: list[dict[str, Any]], step: int, weights: Mapping[str, Tensor]) -> Collected:
        self.experience.progress = self.progress()
        batch = self._batches(step)
        return self.experience.collect(rows, batch, weights, self._chosen_prompts(batch))

    def _chosen_prompts(self, batch: int) -> dict[int, list[int]] | None:
        """Prompts of all candidates of the batches that generators may work on, where a curriculum chooses them."""
        learner = self._learner
        if learner is None or learner.curriculum is None:
            return None
        order = learner.curriculum
        ahead = range(batch, batch + self._recipe.grpo.max_staleness + 1)
        return {b: [*order.batch(b), *(order.extra(b, place) for place in range(learner.extra_groups))] for b in ahead}

    def finish(self) -> None:
        """The final weights are saved: no group is needed again."""
        if self._leads:
            self.experience.commit(self._batches(self._learner.state.global_step) if self._learner else 0)

    def close(self) -> None:
        if self._experience is not None:
            self._experience.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._leads and self._learner is not None and self._learner.at_boundary(state.global_step):
            self.experience.ack(self._batches(state.global_step) - 1)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._leads:
            self.experience.commit(self._batches(state.global_step))

    @property
    def _leads(self) -> bool:
        return self._learner is not None and self._learner.accelerator.is_main_process

    def _batches(self, step: int) -> int:
        """Generation batches that `step` optimiser steps have used up (a recipe where that is no whole number is refused)."""
        assert self._learner is not None, "attach() a learner first"
        return step // int(self._learner.steps_per_batch)

    def _build(self, learner: Learner) -> SplitExperience:
        recipe, given = self._recipe, self._recipe.grpo
        gpus = given.gpus_per_generator
        return SplitExperience(
            plan_of(learner),
            folder=self._run_path / "grpo" / "buffer",
            open_workbench=OpenWorkbench(
                checkpoint=str(self._checkpoint.absolute()),
                dtype=recipe.model.dtype,
                trust_remote_code=recipe.model.trust_remote_code,
                eos_token_ids=tuple(learner.eos_token_ids),
                max_sequences=recipe.rollout.max_sequences,
                max_length=self._max_length,
                engine_options=recipe.rollout.engine_options(),
                router_indices=self._router_indices,
                threads=max(1, int(given.cpus_per_generator)),
                seed=recipe.seed,
                log_to=str(self._run_path.absolute()),
            ),
            open_scorer=OpenScorer(
                checkpoint=str(self._checkpoint.absolute()),
                recipe=recipe.model_dump(mode="json"),
                log_to=str(self._run_path.absolute()),
            ),
            open_sender=partial(open_sender, device=learner.accelerator.device, way=given.weights),
            settings=SplitSettings(
                generators=given.generators,
                rewards=recipe.reward.actors,
                max_staleness=given.max_staleness,
                ahead=given.extra_groups_ahead,
                num_cpus=given.cpus_per_generator,
                num_gpus=gpus_per_worker(RayConfig()) if gpus is None else gpus,
                max_failures=given.generator_failures,
                limit_s=given.batch_timeout_s,
            ),
        )


def plan_of(learner: Learner) -> Plan:
    """The data order and the sampling of a learner's run."""
    args: Any = learner.args
    num_generations: Any = learner.num_generations
    micro_steps = args.max_steps * args.gradient_accumulation_steps
    return Plan(
        prompts=learner.train_dataset,
        sampler=learner.prompt_sampler(),
        groups_per_batch=args.generation_batch_size // num_generations,
        num_batches=-(-micro_steps // (args.steps_per_generation * learner.num_iterations)),
        num_generations=num_generations,
        sampling=learner.sampling,
        steps_per_batch=int(learner.steps_per_batch),
        extra_groups=learner.extra_groups,
    )
