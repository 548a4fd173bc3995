"""The learner on a tiny model, without Ray: it learns, it resumes exactly, it leaves out what cannot be judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from posttrain.data.tokenizer import arithmetic_tokenizer
from posttrain.grpo.learner import Learner
from posttrain.grpo.rollouts import write_rollouts
from posttrain.grpo.scoring import Scorer
from posttrain.models.loading import load_model, new_model
from posttrain.rollout import Generator

TOKENIZER = arithmetic_tokenizer()
FIELDS: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "layer_types": ["sse", "full_attention"],
    "num_partitions": 4,
    "adapter_rank": 8,
    "gate_rank": 4,
    "chunk_size": 8,
    "max_position_embeddings": 128,
    "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.pad_token_id,
}


class CountingRewards:
    """A stand-in for RewardSet: the share of a completion's tokens that are the digit asked for; None where the answer says so."""

    weights = {"accuracy": 1.0}
    counters = {"timeouts": 0}

    def __init__(self) -> None:
        self.breakdown: dict[str, list[float | None]] = {}
        self.seen: list[list[str]] = []

    def __call__(self, *, prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        rewards = [None if gold == "?" else text.count(gold) / (len(text) + 1) for gold, text in zip(answer, completions, strict=True)]
        self.breakdown = {"accuracy": rewards}
        self.seen.append(list(prompts))
        return rewards


def prompts(count: int = 12, unreadable: tuple[int, ...] = ()) -> Dataset:
    texts = [f"what is {n}" for n in range(count)]
    return Dataset.from_list(
        [
            {
                "id": f"p{n}",
                "prompt": text,
                "prompt_ids": TOKENIZER(text)["input_ids"],
                "prompt_index": n,
                "answer": "?" if n in unreadable else "7",
            }
            for n, text in enumerate(texts)
        ]
    )


def make(folder: Path, *, data: Dataset | None = None, model: Any = None, scoring: dict[str, Any] | None = None, **given: Any) -> Learner:
    model = new_model(FIELDS, seed=3) if model is None else model
    options = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 11,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    args = GRPOConfig(output_dir=str(folder), **(options | given))
    generators: list[Generator] = []

    def generate(requests: list[Any], version: int) -> list[list[Any]]:
        if not generators:
            generators.append(
                Generator(model, eos_token_ids=[TOKENIZER.eos_token_id], max_sequences=16, max_length=64, return_router_indices=True)
            )
        generators[0].update_weights(version)
        return generators[0].generate(requests)

    learner = Learner(
        model,
        args=args,
        prompts=prompts() if data is None else data,
        tokenizer=TOKENIZER,
        generate=generate,
        scorer=Scorer(
            CountingRewards(),
            lambda ids: TOKENIZER.batch_decode(ids, skip_special_tokens=True),
            **({"truncated_completions": "keep"} if scoring is None else scoring),
        ),
        replay_router=True,
        record=lambda step, records: write_rollouts(folder / "rollouts", step, records),
    )
    learner.remove_callback(PrinterCallback)
    return learner


def history(learner: Learner, *names: str) -> list[tuple[float, ...]]:
    return [tuple(entry[name] for name in names) for entry in learner.state.log_history if "loss" in entry]


def test_it_learns(tmp_path: Path) -> None:
    learner = make(tmp_path, max_steps=25, per_device_train_batch_size=32, num_generations=8)
    learner.train()
    rewards = [reward for (reward,) in history(learner, "reward")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
    for absolute, k3, aux in history(learner, "mismatch/abs", "mismatch/k3", "aux_loss"):
        assert absolute < 1e-5 and k3 < 1e-8 and aux > 0


def test_resume_is_exact(tmp_path: Path) -> None:
    straight = make(tmp_path / "straight", max_steps=8)
    straight.train()
    first = make(tmp_path / "resumed", max_steps=8, save_strategy="steps", save_steps=4)
    first.add_callback(StopAfter(4))
    first.train()
    second = make(tmp_path / "resumed", max_steps=8)
    second.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-4"))
    names = ("loss", "reward", "completions/mean_length", "grad_norm", "entropy", "mismatch/abs")
    assert history(second, *names) == history(straight, *names)
    for (name, a), b in zip(straight.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for step in range(1, 9):
        # 12 prompts, 2 a step: steps 7 and 8 are a second pass over the prompts.
        assert rollout(tmp_path / "straight", step) == rollout(tmp_path / "resumed", step)
    assert len({row["prompt_index"] for step in range(1, 7) for row in rollout(tmp_path / "straight", step)}) == 12


@pytest.mark.parametrize(("every", "iterations"), [(2, 1), (1, 2), (2, 2)])
def test_resume_with_batches_that_serve_several_steps(tmp_path: Path, every: int, iterations: int) -> None:
    from posttrain.grpo.callbacks import RunCallback
    from posttrain.runtime.worker import WorkerContext

    options = {"steps_per_generation": every, "num_iterations": iterations, "max_steps": 8}
    straight = make(tmp_path / "straight", **options)
    straight.train()
    first = make(tmp_path / "resumed", save_strategy="steps", save_steps=3, **options)
    context = WorkerContext(stage="grpo", run_path=tmp_path)
    first.add_callback(RunCallback(context, lambda step, metrics: None, first.at_boundary))
    first.add_callback(StopAfter(4))
    first.train()
    # A save that falls into a batch waits for its end: never at step 3, where half a batch would be trained twice.
    assert sorted(path.name for path in (tmp_path / "resumed").glob("checkpoint-*")) == ["checkpoint-4"]
    second = make(tmp_path / "resumed", **options)
    second.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-4"))
    assert history(second, "loss", "grad_norm") == history(straight, "loss", "grad_norm")
    for (name, a), b in zip(straight.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def rollout(folder: Path, step: int) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
