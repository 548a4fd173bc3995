"""TRL's SFTTrainer on packed rows: balance loss, whole-or-absent checkpoints, metrics for the run folder.

Objective, over the tokens of one optimiser step (all accumulation steps, all ranks):

    loss = sum over completion tokens of -log p(token | its own sample's prefix) / number of those tokens
         + mean over micro-batches of the balance loss (already multiplied by its coefficient)

TRL computes the first line through its fused LM head, so [T, vocabulary] logits never exist; `num_items_in_batch` makes the
mean right under accumulation and data parallelism. The balance loss is a mean of each micro-batch's own tokens, as in MoE
training, so it is the one term that changes slightly when the same rows are split otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import TrainerCallback
from trl import SFTTrainer

from posttrain.balance import last_balance_loss
from posttrain.data.collate import collate
from posttrain.runtime.checkpoints import AtomicCheckpoints, agreed
from posttrain.runtime.worker import WorkerContext

METRIC_NAMES = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "num_tokens": "tokens",
    "entropy": "entropy",
    "mean_token_accuracy": "accuracy",
    "balance_loss": "balance_loss",
    "epoch": "epoch",
}


def collate_boundaries_on_host(features: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`collate`, with cu_seq_lens_q as a list: the trainer would move a tensor to the GPU, and the model read it back."""
    batch: dict[str, Any] = dict(collate(features))
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_q"].tolist()
    return batch


class PackedSFTTrainer(AtomicCheckpoints, SFTTrainer):
    """SFTTrainer for rows packed beforehand (`dataset_kwargs={"skip_prepare_dataset": True}`) and our collator."""

    _flops_per_token: float | None = None

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if isinstance(inputs["cu_seq_lens_q"], list):
            inputs["cu_seq_lens_q"] = torch.tensor(inputs["cu_seq_lens_q"], dtype=torch.int32)
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        balance = last_balance_loss(self.model) if self.model.training else None
        if balance is None:
            return result
        self._metrics["train"]["balance_loss"].append(balance.detach().item())
        # With num_items_in_batch the trainer leaves the division by the accumulation steps to the loss.
        balance = balance / (self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1)
        if return_outputs:
            loss, outputs = result
            return loss + balance, outputs
        return result + balance

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """6 x parameters x tokens, the parameters counted once: the original walks all modules at every step."""
        if self._flops_per_token is None:
            self._flops_per_token = 6.0 * self.model.num_parameters(exclude_embeddings=True)
        return self._flops_per_token * inputs["input_ids"].numel()

    def extra_state(self) -> dict[str, Any]:
        return {"tokens": self._total_train_tokens}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._total_train_tokens = state["tokens"]


class RunFolderCallback(TrainerCallback):
    """Metrics into the run folder, progress to the driver, and an orderly stop on Ctrl-C.

    Args:
        context: of this worker.
        append: called as `append(step, metrics)` on rank 0 at every logging step.
    """

    def __init__(self, context: WorkerContext, append: Callable[[int, dict[str, float]], None]) -> None:
        self.stopped = False
        self.start_tokens = 0
        self._context = context
        self._append = append
        self._shown: dict[str, float] = {}
        self._last = (0.0, 0)  # when tokens were last counted, and how many there were
        self._logged_at = -1

    def report(self, state: Any, note: str = "") -> None:
        """Tell the driver at once where training is."""
        self._context.report(state.global_step, state.max_steps, note=note, force=True, **self._shown)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last = (time.monotonic(), self.start_tokens)
        self.report(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._context.report(state.global_step, state.max_steps, **self._shown)
        if state.global_step < state.max_steps and agreed(self._context.stop_requested()):
            self.stopped = True
            control.should_training_stop = True
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._logged_at == state.global_step:
            self._last = (time.monotonic(), self._last[1])  # the next speed need not count the time of the save

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or logs is None or "loss" not in logs:
            return
        metrics = {ours: float(logs[theirs]) for theirs, ours in METRIC_NAMES.items() if theirs in logs}
        now, tokens = time.monotonic(), int(metrics.get("tokens", 0))
        # In every record: after a resume, records with the same keys replace those of the same steps.
        metrics["tokens_per_second"] = (tokens - self._last[1]) / max(now - self._last[0], 1e-9)
        self._last, self._logged_at = (now, tokens), state.global_step
        self._append(state.global_step, metrics)
        shown = {"loss": "loss", "accuracy": "accuracy", "tokens_per_second": "tokens/s"}
        self._shown |= {label: metrics[name] for name, label in shown.items() if name in metrics}
