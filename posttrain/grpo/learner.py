"""GRPO: TRL's trainer with our experience and our forward.

Objective (TRL's `_compute_loss`, untouched; `loss_type` chooses the normalisation, here DAPO's), over the completions i of a
batch and their tokens t, with r = pi_theta(token) / pi_old(token) and A_i the advantage of completion i within its group of G:

    loss = - sum_it min(r_it A_i, clip(r_it, 1 - epsilon, 1 + epsilon_high) A_i) / tokens + beta KL(pi_theta || pi_ref) + balance

Where this departs from plain TRL:
- completions come from the generator that runs on this very model, prompts prefilled once and forked to G samples; ids stay ids;
- a reward of None (gold answer unreadable) leaves the completion out of its group's statistics and of the loss;
- log-probabilities come from one packed forward without padding, with the generator's routing replayed;
- the balance loss of the routed layers enters as TRL's MoE auxiliary loss does, already multiplied by its coefficient;
- the order of prompts and every sample's randomness are functions of (seed, step, prompt): a resume repeats and skips nothing;
- in split placement a batch may hold tokens of older versions; r is then taken against the policy that sampled each token.

    _prepare_inputs (TRL) -> _generate_and_score_completions (ours): rows -> completions -> rewards -> groups -> padded tensors
    compute_loss -> _compute_loss (TRL) -> _get_per_token_logps_and_entropies (ours): unpad -> pack -> forward -> put back
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import trl
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from packaging.version import Version
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing, prepare_deepspeed
from trl.trainer.utils import add_fused_lm_head, use_adapter

from posttrain.balance import last_balance_loss
from posttrain.grpo.experience import build_requests, collate
from posttrain.grpo.metrics import Clock, Mismatch, mismatch_sums
from posttrain.grpo.packing import pack_inputs, pack_router_indices, plan_packs, put_back
from posttrain.grpo.sampler import PromptSampler
from posttrain.grpo.scoring import Scored, Scorer
from posttrain.runtime.checkpoints import AtomicCheckpoints
from posttrain.types import Completion, Request

if TYPE_CHECKING:
    from posttrain.grpo.split.experience import Collected

TRL_MINOR = (1, 16)
if Version(trl.__version__).release[:2] != TRL_MINOR:
    # The overrides below reach into private methods, which change between minor versions.
    raise ImportError(
        f"posttrain's GRPO learner works with trl {'.'.join(map(str, TRL_MINOR))}.*, but {trl.__version__} is installed"
    )

Generate = Callable[[list[Request], int], list[list[Completion]]]
Collect = Callable[[list[dict[str, Any]], int], "Collected"]
# What the clock measures inside a training step that is no update.
NOT_UPDATE = ("generate", "reward", "logprobs", "sync", "wait")


class Learner(AtomicCheckpoints, GRPOTrainer):
    """GRPOTrainer whose completions come from `generate` and whose log-probabilities come from packed forwards.

    Args:
        model: policy; as it is given here it is the reference too, where `args.beta` is above 0.
        args: TRL's arguments; `max_steps` must be set.
        prompts: rows with `prompt_ids`, `prompt_index`, `prompt` and the columns that rewards read.
        tokenizer: with a pad token.
        generate: `(requests, policy version) -> completions of each request`, on the learner's own weights.
        collect: in place of `generate`, `(rows, steps taken) -> Collected`: completions and ratings of generators elsewhere.
        scorer: rewards and advantages.
        stop: strings that end a completion.
        replay_router: whether the forward uses the generator's partitions.
        max_forward_tokens: packed tokens of one forward that needs no gradient.
        record: called with (step, rows of the rollout table) on the main process after every generation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        args: GRPOConfig,
        prompts: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        generate: Generate | None = None,
        collect: Collect | None = None,
        scorer: Scorer,
        stop: Sequence[str] = (),
        replay_router: bool = False,
        max_forward_tokens: int = 16384,
        record: Callable[[int, list[dict[str, Any]]], Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        self._check(args)
        if (generate is None) == (collect is None):
            raise ValueError("a learner needs one source of completions: give either `generate` or `collect`")
        self._generate_completions = generate
        self._collect = collect
        self._stale = False
        self._scorer = scorer
        self._stop_strings = tuple(stop)
        self._replay_router = replay_router
        self._max_forward_tokens = max_forward_tokens
        self._record = record
        self._rows: dict[str, Any] = {}
        self._mismatch = Mismatch()
        self._clock = Clock()
        self._sampled_tokens = 0
        # TRL would load the reference from `config._name_or_path` with classes it knows; ours is a copy, made before the head is
        # patched. A resumed run starts from the same checkpoint and loads the trained weights later, so the copy is the same.
        # Under PEFT the reference is the model without its adapter, which TRL knows how to find.
        beta, reference = args.beta, None
        if beta and not is_peft_model(model):
            reference, args.beta = copy.deepcopy(model), 0.0
        super().__init__(
            model=model,
            reward_funcs=[_scored_elsewhere],
            args=args,
            train_dataset=prompts,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        if reference is not None:
            args.beta = self.beta = beta
            self.ref_model = self._prepare_reference(reference)
        # TRL then asks for the auxiliary loss, scales it for gradient accumulation and logs it as `aux_loss`.
        if getattr(model.config, "balance_loss_coef", 0.0) and getattr(model.config, "sse_layers", None):
            self.aux_loss_enabled = True
            self.router_aux_loss_coef = 1.0

    @staticmethod
    def _check(args: GRPOConfig) -> None:
        rows = args.per_device_train_batch_size * args.steps_per_generation
        if rows % args.num_generations:
            raise ValueError(
                f"one process generates {rows} completions at a time (per_device_train_batch_size "
                f"{args.per_device_train_batch_size} x steps_per_generation {args.steps_per_generation}), which is no multiple "
                f"of num_generations {args.num_generations}: a group must be whole on one process"
            )
        if args.max_steps <= 0:
            raise ValueError(f"max_steps={args.max_steps}, but the learner needs a positive number of steps")
        if args.sync_ref_model:
            raise ValueError(
                "sync_ref_model=True, but a reference that moves is in no checkpoint, so the run could not be resumed"
            )

    def _prepare_reference(self, model: PreTrainedModel) -> Any:
        model.eval().requires_grad_(False)
        if self.args.cast_lm_head_to_fp32:
            model.get_output_embeddings().float()
        add_fused_lm_head(model, temperature=self.temperature, cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32)
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(model, self.accelerator)
        return self.accelerator.prepare_model(model, evaluation_mode=True)

    # What the run looks like

    @property
    def steps_per_batch(self) -> float:
        """Optimiser steps that one generation batch serves; below 1 where a step takes several batches."""
        return self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps

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

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        return self.prompt_sampler(dataset)

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

    # Experience

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rows = inputs[:: self.num_generations]
        step = self.state.global_step
        scored = self._scored(rows, step)
        completions = [list(group.completions) for group in scored.groups]
        batch = collate(
            scored.groups,
            pad_token_id=self._tokenizer.pad_token_id,
            masked=scored.masked,
            replay_router=self._replay_router,
        )
        device = self.accelerator.device
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        batch["num_items_in_batch"] = self.accelerator.gather(batch["completion_mask"].sum()).sum()
        self._log_batch(scored, completions)
        with self._clock.measure("logprobs"):
            self._add_logprobs(batch)
        if self._record is not None:
            # Steps are counted from 1 in everything that a user reads.
            records = gather_object(scored.records(step + 1))
            if self.accelerator.is_main_process:
                self._record(step + 1, records)
        return batch

    def _scored(self, rows: list[dict[str, Any]], step: int) -> Scored:
        """The groups of `rows`, sampled here or by generators elsewhere."""
        if self._collect is None:
            completions = self._sample(rows, step)
            with self._clock.measure("reward"):
                return self._scorer.score(rows, completions, gather=self._gather_rewards)
        collected = self._collect(rows, step)
        self._stale = collected.stale
        for name, seconds in collected.seconds.items():
            self._clock.add(name, seconds)
        for name, value in collected.metrics.items():
            self._metrics["train"][name].append(value)
        return self._scorer.assemble(rows, collected.completions, collected.ratings, gather=self._gather_rewards)

    def _sample(self, rows: list[dict[str, Any]], step: int) -> list[list[Completion]]:
        requests = build_requests(rows, num_generations=self.num_generations, step=step, **self.sampling)
        assert self._generate_completions is not None, "checked by the constructor"
        # Autocast as in the training forward: the two must compute the same policy.
        with self._clock.measure("generate"), torch.no_grad(), self.accelerator.autocast():
            return self._generate_completions(requests, step)

    def _gather_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Rewards [P', ...] of all processes from those of this one [P, ...]."""
        return self.accelerator.gather(rewards.to(self.accelerator.device)).cpu()

    def _add_logprobs(self, batch: dict[str, Any]) -> None:
        """Add `old_per_token_logps` and `ref_per_token_logps` where the loss needs them, as TRL decides it."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        keep = batch["completion_ids"].size(1)
        self._rows = batch
        generate_every = self.args.steps_per_generation * self.num_iterations
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self._stale and not self._truncated_sampling:
                # Clipped importance sampling against the policies that sampled, whatever version each token is of.
                batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
            elif self.args.gradient_accumulation_steps % generate_every:
                # The weights move while this batch is used, so the policy that sampled it must be remembered.
                logps = self._get_per_token_logps_and_entropies(self.model, ids, mask, keep)[0]
                batch["old_per_token_logps"] = logps
                self._measure_mismatch(logps, batch)
            if self.beta:
                batch["ref_per_token_logps"] = self._reference_logps(ids, mask, keep)

    def _reference_logps(self, ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        if self.ref_model is not None:
            return self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, keep)[0]
        # The base model under a PEFT adapter is the reference.
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._get_per_token_logps_and_entropies(self.model, ids, mask, keep)[0]

    # Loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        before = time.perf_counter()
        elsewhere = sum(self._clock[name] for name in NOT_UPDATE)
        loss = super().training_step(model, inputs, num_items_in_batch)
        elsewhere = sum(self._clock[name] for name in NOT_UPDATE) - elsewhere
        self._clock.add("update", time.perf_counter() - before - elsewhere)
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self._rows = inputs
        return super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Log-probabilities [B, C], entropies [B, C] and balance loss of padded rows [B, P + C], by packed forwards.

        With gradients there is one forward; without, as many as `max_forward_tokens` asks for. Padding and masked completions
        read 0. The lengths of the rows and the router's choices are those of `self._rows`, the batch at hand.
        """
        assert not any(value is not None for value in multimodal.values()), "images never reach this trainer"
        shape = (input_ids.size(0), logits_to_keep)
        logps = torch.zeros(shape, dtype=torch.float32, device=input_ids.device)
        entropies = torch.zeros_like(logps)
        balance = None
        learning = torch.is_grad_enabled()
        packs = plan_packs(
            self._rows["prompt_lengths"],
            self._rows["completion_lengths"],
            input_ids.size(1) - logits_to_keep,
            logits_to_keep,
            max_tokens=None if learning else self._max_forward_tokens,
        )
        for pack in packs:
            arguments = pack_inputs(pack, input_ids)
            if self._replay_router and model is not self.ref_model:
                # The reference keeps its own routing: it is another policy.
                arguments["router_indices"] = pack_router_indices(pack, self._rows["router_indices"]).to(input_ids.device)
            with self.accelerator.autocast():
                outputs = model(**arguments, fused_lm_head=True)
            logps = put_back(pack, outputs.log_probs, logps)
            if compute_entropy:
                entropies = put_back(pack, outputs.entropy, entropies)
            if compute_aux_loss:
                balance = last_balance_loss(model)
        if learning and "old_per_token_logps" not in self._rows:
            self._measure_mismatch(logps, self._rows)
        if compute_aux_loss and balance is None:
            balance = logps.new_zeros(())
        return logps, entropies if compute_entropy else None, balance

    # Measurements

    @property
    def _truncated_sampling(self) -> bool:
        """Whether the generator's log-probabilities are those of a distribution with its tail cut off."""
        return bool(self.top_p < 1 or self.top_k or self.min_p)

    def _measure_mismatch(self, logps: torch.Tensor, batch: dict[str, Any]) -> None:
        """Compare the trainer's log-probabilities with the generator's, unless truncated sampling hides the latter."""
        if self._truncated_sampling:
            return
        self._mismatch.add(mismatch_sums(logps.detach(), batch["sampling_per_token_logps"], batch["completion_mask"]))

    def _log_batch(self, scored: Any, completions: list[list[Completion]]) -> None:
        """Statistics of a generation batch, under TRL's names where TRL has one; means over all processes."""
        lengths = torch.tensor([float(len(c.token_ids)) for group in completions for c in group], device=self.accelerator.device)
        prompts = sum(len(c.prompt_ids) for group in completions for c in group)
        totals = torch.stack([lengths.sum(), lengths.new_tensor(float(prompts))])
        sampled, read = self.accelerator.reduce(totals, reduction="sum").tolist()
        self._sampled_tokens += int(sampled)
        self.state.num_input_tokens_seen += int(sampled + read)
        lengths = self.accelerator.gather(lengths)
        metrics = {
            "num_tokens": float(self.state.num_input_tokens_seen),
            "completions/mean_length": lengths.mean().item(),
            "completions/min_length": lengths.min().item(),
            "completions/max_length": lengths.max().item(),
            **scored.metrics(self._gather_rewards),
        }
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics["train" if self.model.training else "eval"]
        sums = self._mismatch.take()
        if sums is not None:
            absolute, k3, count = self.accelerator.reduce(sums, reduction="sum").tolist()
            metrics["mismatch/abs"].append(absolute / max(count, 1))
            metrics["mismatch/k3"].append(k3 / max(count, 1))
        seconds = self._clock.take()
        if seconds:
            for name, value in seconds.items():
                metrics[f"time/{name}"].append(value)
            metrics["tokens_per_second"].append(self._sampled_tokens / max(sum(seconds.values()), 1e-9))
            self._sampled_tokens = 0
        super().log(logs, start_time)

    # TRL's token and flop counters walk the model at every step; the batch here is a list of rows, which they can't count anyway.
    def floating_point_ops(self, inputs: Any) -> float:
        return 0.0


def _scored_elsewhere(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    """TRL insists on a reward function; ours are called by `Scorer`."""
    raise AssertionError("rewards are computed by the scorer")
