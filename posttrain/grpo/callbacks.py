"""Between the Hugging Face loop and the run: metrics, progress, orderly stops, checkpoints at the right steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from posttrain.runtime.checkpoints import agreed
from posttrain.runtime.worker import WorkerContext

# What the loop logs that is no metric of a step.
NOT_METRICS = ("total_flos", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")
# TRL's names -> ours in metrics.jsonl, where ours are shorter; the others stay. TensorBoard shows TRL's.
METRIC_NAMES = {
    "num_tokens": "tokens",
    "aux_loss": "balance_loss",
    "completions/mean_length": "completion_length",
    "completions/min_length": "completion_length_min",
    "completions/max_length": "completion_length_max",
    "completions/clipped_ratio": "truncated",
    "clip_ratio/region_mean": "clip_ratio",
    "mismatch/abs": "mismatch_abs",
    "mismatch/k3": "mismatch_k3",
    "mismatch_fresh/abs": "mismatch_fresh_abs",
    "mismatch_fresh/k3": "mismatch_fresh_k3",
    "sampling/importance_sampling_ratio/mean": "importance_weight",
    "sampling/importance_sampling_ratio/min": "importance_weight_min",
    "sampling/importance_sampling_ratio/max": "importance_weight_max",
    "sampling/importance_sampling_ratio/bounded": "importance_weight_bounded",
    "time/generate": "time_generate",
    "time/reward": "time_reward",
    "time/logprobs": "time_logprobs",
    "time/update": "time_update",
    "time/sync": "time_sync",
    "time/wait": "time_wait",
    "groups/flat": "flat_groups",
    "groups/passed_over": "groups_passed_over",
    "groups/short": "flat_groups_kept",
    "staleness/mean": "staleness",
    "staleness/max": "staleness_max",
    "learner/tokens_per_second": "learner_tokens_per_second",
    "generator/tokens_per_second": "generator_tokens_per_second",
    "generator/busy": "generator_busy",
    "generator/time_reward": "generator_time_reward",
}
SHOWN = {"reward": "reward", "accuracy": "accuracy", "completion_length": "length"}


class GenerationStopped(Exception):
    """Raised out of a generation that the user interrupted: nothing of the step has been trained."""


class RunCallback(TrainerCallback):
    """Metrics into the run folder, progress to the driver, stops and checkpoints only between generation batches.

    A checkpoint in the middle of a generation batch would lose the rest of the batch's experience and train its first part
    twice after a resume, so a save that falls there waits for the batch's last step, and so does a stop.

    Args:
        context: of this worker.
        append: called as `append(step, metrics)` on the main process at every log.
        at_boundary: whether a generation comes right after this step.
    """

    def __init__(
        self,
        context: WorkerContext,
        append: Callable[[int, dict[str, float]], None],
        at_boundary: Callable[[int], bool],
    ) -> None:
        self.stopped = False
        self._context = context
        self._append = append
        self._at_boundary = at_boundary
        self._save_due = False
        self._shown: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._context.report(state.global_step, state.max_steps, force=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._context.report(state.global_step, state.max_steps, **self._shown)
        self._save_due = self._save_due or control.should_save
        self.stopped = self.stopped or (state.global_step < state.max_steps and agreed(self._context.stop_requested()))
        if not self._at_boundary(state.global_step):
            # The last step needs no checkpoint that one could resume from: the final weights are saved after it.
            control.should_save = False
            return
        control.should_save = self._save_due or self.stopped
        control.should_training_stop = control.should_training_stop or self.stopped
        self._save_due = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or logs is None or "loss" not in logs:
            return
        metrics = {
            METRIC_NAMES.get(name, name): float(value)
            for name, value in logs.items()
            if value is not None and name not in NOT_METRICS
        }
        self._append(state.global_step, metrics)
        self._shown = {short: metrics[name] for name, short in SHOWN.items() if name in metrics}

    def progress(self, step: int, total: int) -> Callable[[int, int, int], None]:
        """An `on_progress` for the generator: shows that something happens, and leaves it when the user asked to stop.

        Args:
            step: optimiser steps done; total: those of the run.
        """

        def on_progress(done: int, completions: int, tokens: int) -> None:
            self._context.report(step, total, note=f"generating {done}/{completions}", **self._shown)
            # With several processes the others could not know; they stop together at the end of the step.
            if self._context.world_size == 1 and self._context.stop_requested():
                raise GenerationStopped

        return on_progress
