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
- every token's loss carries an importance weight between the policy that sampled it (other kernels, an older version) and pi_old,
  the learner when the batch is first trained: TRL's `vllm_importance_sampling_*`, whose weights plain TRL knows with vLLM alone.

    _prepare_inputs (TRL) -> _generate_and_score_completions (ours): rows -> completions -> rewards -> groups -> padded tensors
    compute_loss -> _compute_loss (TRL) -> _get_per_token_logps_and_entropies (ours): unpad -> pack -> forward -> put back
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

from posttrain.grpo.adapters import lora_config, merged_state, train_adapters_alone
from posttrain.grpo.checks import check_learner_arguments, check_loss
from posttrain.grpo.experience import collate
from posttrain.grpo.forward import packed_logprobs
from posttrain.grpo.measures import Measures, StepClock
from posttrain.grpo.schedule import Schedule
from posttrain.grpo.scoring import Scored, Scorer
from posttrain.grpo.source import Collected, Generate, OwnSource
from posttrain.runtime.checkpoints import AtomicCheckpoints, shared_atomic_directory

TRL_MINOR = (1, 16)
if Version(trl.__version__).release[:2] != TRL_MINOR:
    # The overrides below reach into private methods, which change between minor versions.
    raise ImportError(
        f"posttrain's GRPO learner works with trl {'.'.join(map(str, TRL_MINOR))}.*, but {trl.__version__} is installed"
    )

Collect = Callable[[list[dict[str, Any]], int], Collected]
# What the clock measures inside a training step that is no update.
NOT_UPDATE = ("generate", "reward", "logprobs", "sync", "wait")


class Learner(AtomicCheckpoints, Schedule, GRPOTrainer):
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
        extra_groups, extra_groups_ahead: of a batch, in place of groups that teach nothing (see `posttrain.grpo.dynamic`).
        lora: r, alpha, dropout and target_modules of adapters that are trained in place of the weights.
        curriculum: every_batches, floor and memory of a `Curriculum`; without, every prompt comes once a pass.
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
        extra_groups: int = 0,
        extra_groups_ahead: int = 0,
        lora: dict[str, Any] | None = None,
        curriculum: dict[str, Any] | None = None,
        replay_router: bool = False,
        max_forward_tokens: int = 16384,
        record: Callable[[int, list[dict[str, Any]]], Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        check_learner_arguments(args)
        if (generate is None) == (collect is None):
            raise ValueError("a learner needs one source of completions: give either `generate` or `collect`")
        self._generate_completions = generate
        self._collect: Collect = collect or self._collect_own
        self.extra_groups, self._extra_groups_ahead = extra_groups, extra_groups_ahead
        self._stale, self._version, self._referring = False, 0, False
        self._scorer = scorer
        self._stop_strings = tuple(stop)
        self._replay_router = replay_router
        self._max_forward_tokens = max_forward_tokens
        self._record = record
        self._rows: dict[str, Any] = {}
        self._measures = Measures()
        self._step_clock = StepClock(self._measures)
        # TRL would load the reference from `config._name_or_path` with classes it knows; ours is a copy, made before the head is
        # patched. A resumed run starts from the same checkpoint and loads the trained weights later, so the copy is the same.
        # Under PEFT the reference is the model without its adapter, which TRL knows how to find.
        beta, reference = args.beta, None
        if beta and lora is None:
            reference, args.beta = copy.deepcopy(model), 0.0
        super().__init__(
            model=model,
            reward_funcs=[_scored_elsewhere],
            args=args,
            train_dataset=prompts,
            processing_class=tokenizer,
            callbacks=callbacks,
            peft_config=None if lora is None else lora_config(lora),
        )
        if lora is not None:
            train_adapters_alone(self.model)
        if reference is not None:
            args.beta = self.beta = beta
            self.ref_model = self._prepare_reference(reference)
        self.add_callback(self._step_clock)
        self.curriculum = None if curriculum is None else self._make_curriculum(curriculum)
        # TRL then asks for the auxiliary loss, scales it for gradient accumulation and logs it as `aux_loss`.
        if getattr(model.config, "balance_loss_coef", 0.0) and getattr(model.config, "sse_layers", None):
            self.aux_loss_enabled = True
            self.router_aux_loss_coef = 1.0

    def _prepare_reference(self, model: PreTrainedModel) -> Any:
        model.eval().requires_grad_(False)
        if self.args.cast_lm_head_to_fp32:
            model.get_output_embeddings().float()
        add_fused_lm_head(model, temperature=self.temperature, cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32)
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(model, self.accelerator)
        return self.accelerator.prepare_model(model, evaluation_mode=True)

    # What the run looks like is in `Schedule`

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        return self.prompt_sampler(dataset)

    def generator_weights(self) -> Mapping[str, torch.Tensor]:
        """Every weight of the policy as a generator of its own loads it, this model's own tensors where nothing is merged."""
        model = self.accelerator.unwrap_model(self.model)
        return merged_state(model) if is_peft_model(model) else model.state_dict(keep_vars=True)

    def save_final(self, path: Path) -> None:
        """A whole checkpoint, adapters merged."""
        model = self.accelerator.unwrap_model(self.model)
        if not is_peft_model(model):
            super().save_final(path)
            return
        with shared_atomic_directory(path, leader=self.args.should_save) as folder:
            if self.args.should_save:
                model.get_base_model().save_pretrained(folder, state_dict=merged_state(model))
                self.processing_class.save_pretrained(folder)

    def extra_state(self) -> dict[str, Any]:
        return {} if self.curriculum is None else {"curriculum": self.curriculum.state()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.load(state["curriculum"])

    # Experience

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rows = self._own_rows(inputs[:: self.num_generations])
        step = self.state.global_step
        scored = self._scored(rows, step)
        batch = collate(
            scored.groups,
            pad_token_id=self._tokenizer.pad_token_id,
            masked=scored.masked,
            version=self._version,
            plain_logprobs=self._truncated_sampling,
            replay_router=self._replay_router,
        )
        device = self.accelerator.device
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        batch["num_items_in_batch"] = self.accelerator.gather(batch["completion_mask"].sum()).sum()
        self._log_batch(scored)
        with self._measures.clock.measure("logprobs"):
            self._add_logprobs(batch)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        if self._record is not None:
            # Steps are counted from 1 in everything that a user reads.
            records = gather_object(scored.records(step + 1))
            if self.accelerator.is_main_process:
                self._record(step + 1, records)
        return batch

    def _own_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """This rank's prompts: those of the loader, or those of the curriculum, which the loader comes too early to know."""
        if self.curriculum is None:
            return rows
        first = self.accelerator.process_index * len(rows)
        chosen = self.curriculum.batch(self.batch_number)[first : first + len(rows)]
        return [self.train_dataset[index] for index in chosen]

    def _scored(self, rows: list[dict[str, Any]], step: int) -> Scored:
        """The groups of `rows` (or of extra ones in their place), sampled here or by generators elsewhere."""
        collected = self._collect(rows, step)
        self._stale, self._version = collected.stale, collected.version
        self._note(self._measures.source(collected, self.accelerator))
        if self.curriculum is not None:
            # In one order on every rank and in every placement: a prompt may have been sampled twice.
            self.curriculum.record(self.batch_number, sorted(gather_object(self._measures.answers(collected))))
        return self._scorer.assemble(collected.rows, collected.completions, collected.ratings, gather=self._gather_rewards)

    def _collect_own(self, rows: list[dict[str, Any]], step: int) -> Collected:
        assert self._generate_completions is not None, "checked by the constructor"
        source = OwnSource(
            generate=self._generate_completions,
            scorer=self._scorer,
            prompts=self.train_dataset,
            order=self.curriculum or self.prompt_sampler(),
            sampling=self.sampling,
            num_generations=self.num_generations,
            extra_groups=self.extra_groups,
            ahead=self._extra_groups_ahead,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )
        # Autocast as in the training forward: the two must compute the same policy.
        with torch.no_grad(), self.accelerator.autocast():
            return source.collect(rows, step, self.batch_number)

    def _gather_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Rewards [P', ...] of all processes from those of this one [P, ...]."""
        return self.accelerator.gather(rewards.to(self.accelerator.device)).cpu()

    def _add_logprobs(self, batch: dict[str, Any]) -> None:
        """Add `old_per_token_logps` and `ref_per_token_logps` where the loss needs them."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        keep = batch["completion_ids"].size(1)
        self._rows = batch
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self._weights_move:
                # The policy that the batch is first trained at must be remembered.
                batch["old_per_token_logps"] = self._get_per_token_logps_and_entropies(self.model, ids, mask, keep)[0]
                self._compare(batch["old_per_token_logps"], batch)
            if self._stale and self._comparable and not self._corrected:
                # The clipped ratio alone then does the weighing, against the policies that sampled, as in TRL's async trainer.
                batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
            if self.beta:
                batch["ref_per_token_logps"] = self._reference_logps(ids, mask, keep)

    def _reference_logps(self, ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        self._referring = True
        try:
            if self.ref_model is not None:
                return self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, keep)[0]
            # The base model under a PEFT adapter is the reference.
            with use_adapter(self.accelerator.unwrap_model(self.model), adapter_name=None):
                return self._get_per_token_logps_and_entropies(self.model, ids, mask, keep)[0]
        finally:
            self._referring = False

    # Loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        before = time.perf_counter()
        elsewhere = sum(self._measures.clock[name] for name in NOT_UPDATE)
        loss = super().training_step(model, inputs, num_items_in_batch)
        # Reading it waits for the GPU, which the seconds need; the loop does so right afterwards, to hide a NaN from the log.
        value = loss.item()
        elsewhere = sum(self._measures.clock[name] for name in NOT_UPDATE) - elsewhere
        self._step_clock.since = time.perf_counter()
        self._measures.clock.add("update", self._step_clock.since - before - elsewhere)
        check_loss(value, self.state.global_step + 1, self.accelerator)
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self._rows = inputs
        # TRL's loss looks at the weights where it believes that vLLM sampled; nothing else in it depends on that.
        self.use_vllm = self._corrected
        try:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        finally:
            self.use_vllm = False

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
        learning = torch.is_grad_enabled()
        made = packed_logprobs(
            model,
            self._rows,
            input_ids,
            logits_to_keep,
            temperature=self.temperature,
            max_tokens=None if learning else self._max_forward_tokens,
            # The reference keeps its own routing: it is another policy.
            replay=self._replay_router and not self._referring,
            entropies=compute_entropy,
            balance=compute_aux_loss,
            autocast=self.accelerator.autocast,
            own_head=not self.args.cast_lm_head_to_fp32,
        )
        if learning and not self._weights_move:
            # TRL's loss reads the weights of the batch after this forward.
            self._compare(made.logps, self._rows)
        balance = made.balance
        if compute_aux_loss and balance is None:
            balance = made.logps.new_zeros(())
        return made.logps, made.entropies if compute_entropy else None, balance

    # Measurements

    @property
    def _truncated_sampling(self) -> bool:
        """Whether the generator's log-probabilities are those of a distribution with its tail cut off."""
        return bool(self.top_p < 1 or self.top_k or self.min_p)

    @property
    def _comparable(self) -> bool:
        """Whether the generator's log-probabilities are to be compared with the learner's: of a distribution with its tail cut
        off, the model's own (at temperature 1) stand in for them; at another temperature there are none."""
        return not self._truncated_sampling or self.temperature == 1.0

    @property
    def _corrected(self) -> bool:
        return self.args.vllm_importance_sampling_correction and self._comparable

    @property
    def _weights_move(self) -> bool:
        """Whether the weights change while a generation batch is in use."""
        return bool(self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations))

    def _compare(self, logps: torch.Tensor, batch: dict[str, Any]) -> None:
        """Measure the mismatch between the learner at `self._version`, whose log-probabilities `logps` [B, C] are, and the
        policies that sampled `batch`; add its importance weights."""
        if self._comparable:
            weights = self._measures.compare(logps.detach(), batch, self.args if self._corrected else None)
            if weights is not None:
                batch["importance_sampling_ratio"] = weights

    def _log_batch(self, scored: Scored) -> None:
        metrics = self._measures.batch(
            scored,
            self.accelerator,
            passes=self.num_iterations,
            tokens_seen=self.state.num_input_tokens_seen,
            gather=self._gather_rewards,
        )
        self.state.num_input_tokens_seen = int(metrics["num_tokens"])
        self._note(metrics)
        if self._replay_router:
            completions = [completion for group in scored.groups for completion in group.completions]
            partitions = getattr(self.model.config, "num_partitions", 0)
            self._note(self._measures.routing(completions, partitions, self.accelerator))

    def _note(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name == "num_tokens" or name.startswith("buffer/"):
                self._metrics["train"][name] = [value]  # a count over the run: TRL logs the mean of what is in the list
            else:
                self._metrics["train"][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            steps = self.state.global_step - self._step_clock.logged
            self._step_clock.logged = self.state.global_step
            self._note(self._measures.at_log(self.accelerator, steps))
        super().log(logs, start_time)

    # TRL's token and flop counters walk the model at every step; the batch here is a list of rows, which they can't count anyway.
    def floating_point_ops(self, inputs: Any) -> float:
        return 0.0


def _scored_elsewhere(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    """TRL insists on a reward function; ours are called by `Scorer`."""
    raise AssertionError("rewards are computed by the scorer")
