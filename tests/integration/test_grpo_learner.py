"""The learner on a tiny model, without Ray: it learns, it resumes exactly, it leaves out what cannot be judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from posttrain.data.tokenizer import arithmetic_tokenizer
from posttrain.errors import PosttrainError
from posttrain.grpo.learner import Learner
from posttrain.grpo.rollouts import write_rollouts
from posttrain.grpo.scoring import Scorer
from posttrain.models.loading import new_model
from posttrain.rewards.registry import Reward, RewardSet
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


WANTED = "0123456789abcdefghijklmnopqrstuvwxyz"


def share_of_wanted(prompts: list[str], completions: list[str], *, answer: list[str], **_: Any) -> list[float | None]:
    """The share of a completion's characters that are wanted; None where the gold answer is a question mark."""
    return [
        None if gold == "?" else sum(character in gold for character in text) / (len(text) + 1)
        for gold, text in zip(answer, completions, strict=True)
    ]


def prompts(count: int = 12, unreadable: tuple[int, ...] = ()) -> Dataset:
    texts = [f"what is {n}" for n in range(count)]
    return Dataset.from_list(
        [
            {
                "id": f"p{n}",
                "prompt": text,
                "prompt_ids": TOKENIZER(text)["input_ids"],
                "prompt_index": n,
                "answer": "?" if n in unreadable else WANTED,
            }
            for n, text in enumerate(texts)
        ]
    )


# Many tokens end a completion here, so that an untrained model's completions differ in length.
ENDS = [TOKENIZER.eos_token_id, *range(20, 40)]


def make(
    folder: Path,
    *,
    data: Dataset | None = None,
    model: Any = None,
    scoring: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    **given: Any,
) -> Learner:
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
            generators.append(Generator(model, eos_token_ids=ENDS, max_sequences=16, max_length=64, return_router_indices=True))
        generators[0].update_weights(version)
        return generators[0].generate(requests)

    learner = Learner(
        model,
        args=args,
        prompts=prompts() if data is None else data,
        tokenizer=TOKENIZER,
        generate=generate,
        scorer=Scorer(
            RewardSet([Reward(name="share", function=share_of_wanted, required=True)]),
            lambda ids: TOKENIZER.batch_decode(ids, skip_special_tokens=True),
            **({"truncated_completions": "keep"} if scoring is None else scoring),
        ),
        replay_router=True,
        lora=lora,
        record=lambda step, records: write_rollouts(folder / "rollouts", step, records),
    )
    learner.remove_callback(PrinterCallback)
    return learner


def history(learner: Learner, *names: str) -> list[tuple[float, ...]]:
    return [tuple(entry[name] for name in names) for entry in learner.state.log_history if "loss" in entry]


def test_it_learns(tmp_path: Path) -> None:
    learner = make(
        tmp_path,
        max_steps=16,
        per_device_train_batch_size=32,
        num_generations=8,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
    )
    learner.train()
    rewards = [reward for (reward,) in history(learner, "reward")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.12, [round(reward, 2) for reward in rewards]
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


def batch_of(learner: Learner, *, unreadable: bool = False) -> dict[str, Any]:
    """One generation batch, sampled by the learner's own generator."""
    rows = [row for row in learner.train_dataset.select(range(2)) for _ in range(learner.num_generations)]
    if unreadable:
        rows = [{**row, "answer": "?"} for row in rows]
    learner.model.train()
    learner.current_gradient_accumulation_steps = learner.args.gradient_accumulation_steps
    return learner._generate_and_score_completions(rows)


def padded(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].size(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_log_probabilities_are_trls_padded_ones(tmp_path: Path, temperature: float) -> None:
    learner = make(tmp_path, temperature=temperature)
    learner._replay_router = False
    batch = batch_of(learner)
    arguments = padded(batch)
    ours = learner._get_per_token_logps_and_entropies(learner.model, *arguments, compute_entropy=True)
    trls = GRPOTrainer._get_per_token_logps_and_entropies(learner, learner.model, *arguments, compute_entropy=True)
    mask = batch["completion_mask"]
    assert mask.sum(1).unique().numel() > 1, "the completions should differ in length"
    for mine, theirs in zip(ours[:2], trls[:2], strict=True):
        torch.testing.assert_close(mine * mask, theirs * mask, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[0] * mask, batch["sampling_per_token_logps"] * mask, rtol=1e-5, atol=1e-5)


def test_splitting_by_the_token_budget_changes_nothing(tmp_path: Path) -> None:
    learner = make(tmp_path)
    batch = batch_of(learner)
    with torch.no_grad():
        whole = learner._get_per_token_logps_and_entropies(learner.model, *padded(batch))[0]
        learner._max_forward_tokens = 30
        split = learner._get_per_token_logps_and_entropies(learner.model, *padded(batch))[0]
    assert torch.equal(whole, split)


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo", "bnpo", "grpo", "cispo"])
def test_gradient_accumulation_is_one_batch(tmp_path: Path, loss_type: str) -> None:
    """Token means must be those of the whole batch, however it is cut; bnpo is by definition a mean of micro-batches."""
    grads = []
    for micro in (8, 2):
        learner = make(
            tmp_path,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=8 // micro,
            num_generations=4,
            loss_type=loss_type,
            max_grad_norm=0.0,
            learning_rate=0.0,
            max_steps=1,
        )
        # The balance loss is a mean of each micro-batch's own tokens, as in any MoE training.
        learner.router_aux_loss_coef = 0.0
        seen = Gradients()
        learner.add_callback(seen)
        learner.train()
        grads.append(seen.flat)
    assert grads[0].abs().max() > 1e-4
    if loss_type != "bnpo":
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    losses = []
    for checkpointing in (False, True):
        learner = make(tmp_path, gradient_checkpointing=checkpointing, max_steps=2)
        learner.train()
        losses.append(history(learner, "loss", "grad_norm", "aux_loss"))
    assert losses[0] == losses[1]


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_what_was_not_judged_is_left_out(tmp_path: Path) -> None:
    learner = make(tmp_path, data=prompts(12, unreadable=tuple(range(0, 12, 2))), max_steps=6)
    learner.train()
    counts = history(learner, "unreadable_gold", "reward", "loss")
    assert sum(count for count, _, _ in counts) == 6 * 4
    rows = [row for step in range(1, 7) for row in rollout(tmp_path, step)]
    for row in rows:
        assert (row["reward"] is None) == (row["answer"] == "?")
        assert row["reward"] is not None or row["advantage"] == 0
    batch = batch_of(make(tmp_path / "other"), unreadable=True)
    assert batch["completion_mask"].sum() == 0


def test_a_batch_with_nothing_to_learn_leaves_the_weights(tmp_path: Path) -> None:
    learner = make(tmp_path, data=prompts(12, unreadable=tuple(range(12))), max_steps=2)
    learner.aux_loss_enabled = False
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    learner.train()
    assert all(torch.equal(before[name], value) for name, value in learner.model.state_dict().items())
    assert all(loss == 0 for (loss,) in history(learner, "loss"))


def test_replayed_routing_is_used(tmp_path: Path) -> None:
    learner = make(tmp_path)
    batch = batch_of(learner)
    real = learner._get_per_token_logps_and_entropies(learner.model, *padded(batch))[0]
    batch["router_indices"] = [(indices + 1) % 4 for indices in batch["router_indices"]]
    other = learner._get_per_token_logps_and_entropies(learner.model, *padded(batch))[0]
    assert not torch.allclose(real, other, atol=1e-4)


def test_balance_loss_moves_the_router(tmp_path: Path) -> None:
    learner = make(tmp_path, data=prompts(12, unreadable=tuple(range(12))), max_steps=1, learning_rate=0.0)
    seen = Gradients()
    learner.add_callback(seen)
    learner.train()
    assert seen.flat.abs().max() > 0, "with nothing else to learn the balance loss is the gradient"


@pytest.mark.parametrize(
    ("given", "message"),
    [({"max_steps": -1}, "max_steps=-1"), ({"beta": 0.1, "sync_ref_model": True}, "sync_ref_model")],
)
def test_arguments_that_cannot_work(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **given)


def test_truncated_completions_are_masked(tmp_path: Path) -> None:
    learner = make(tmp_path, scoring={"truncated_completions": "mask"})
    batch = batch_of(learner)
    cut = [length == 0 for length in batch["completion_lengths"]]
    assert any(cut) and (batch["completion_mask"].sum(1) == 0).tolist() == cut


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch) -> None:
    learner = make(tmp_path)
    plain = learner._compute_loss
    monkeypatch.setattr(learner, "_compute_loss", lambda model, inputs: plain(model, inputs) * float("nan"))
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    with pytest.raises(PosttrainError, match="the loss is nan in step 1"):
        learner.train()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_seconds_are_those_of_a_step_and_counts_those_of_the_run(tmp_path: Path) -> None:
    learner = make(tmp_path, logging_steps=4)
    at_log, seen = learner._measures.at_log, []

    def count(accelerator, steps: int):
        seen.append((steps, dict(learner._measures.clock._seconds)))
        return at_log(accelerator, steps)

    learner._measures.at_log = count  # type: ignore[method-assign]
    learner.train()
    steps, seconds = seen[0]
    logged = learner.state.log_history[0]
    assert steps == 4 and logged["time/update"] == pytest.approx(seconds["update"] / 4)
    assert logged["num_tokens"] == learner.state.num_input_tokens_seen


def rollout(folder: Path, step: int) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet").to_pylist()


def right_or_flat(prompts: list[str], completions: list[str], *, answer: list[str], **_: Any) -> list[float | None]:
    """What `share_of_wanted` says, but always 0 where the gold answer is empty."""
    return [0.0 if not gold else len(set(text) & set(gold)) / 40 for gold, text in zip(answer, completions, strict=True)]


def test_groups_that_teach_nothing_are_replaced_and_a_resume_repeats_that(tmp_path: Path) -> None:
    rows = [{**row, "answer": "" if row["prompt_index"] % 2 else WANTED} for row in prompts()]

    def learner(folder: Path, **given: Any) -> Learner:
        made = make(folder, data=Dataset.from_list(rows), max_steps=4, **given)
        made.extra_groups = 4
        made._scorer = Scorer(
            RewardSet([Reward(name="share", function=right_or_flat, required=True)]),
            lambda ids: TOKENIZER.batch_decode(ids, skip_special_tokens=True),
            truncated_completions="keep",
        )
        return made

    straight = learner(tmp_path / "straight")
    straight.train()
    names = ("groups/flat", "groups/passed_over", "groups/short", "zero_variance_groups")
    seen = history(straight, *names)
    assert sum(flat for flat, *_ in seen) > 0 and all(flat == passed and not short for flat, passed, short, _ in seen)
    assert all(left == 0 for *_, left in seen), "none of them is trained on"
    assert all(row["answer"] for step in range(1, 5) for row in rollout(tmp_path / "straight", step))
    first = learner(tmp_path / "resumed", save_strategy="steps", save_steps=2)
    first.add_callback(StopAfter(2))
    first.train()
    second = learner(tmp_path / "resumed")
    second.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2"))
    assert history(second, "loss", "grad_norm", *names) == history(straight, "loss", "grad_norm", *names)
    for step in range(1, 5):
        assert rollout(tmp_path / "straight", step) == rollout(tmp_path / "resumed", step)


def test_a_curriculum_is_in_the_checkpoint(tmp_path: Path) -> None:
    def learner(folder: Path, **given: Any) -> Learner:
        made = make(folder, max_steps=10, **given)
        made.curriculum = made._make_curriculum({"every_batches": 2, "floor": 0.05, "memory": 0.5})
        made._scorer = Scorer(
            RewardSet([Reward(name="accuracy", function=solved)]),
            lambda ids: TOKENIZER.batch_decode(ids, skip_special_tokens=True),
            truncated_completions="keep",
        )
        return made

    straight = learner(tmp_path / "straight")
    straight.train()
    first = learner(tmp_path / "resumed", save_strategy="steps", save_steps=5)
    first.add_callback(StopAfter(5))
    first.train()
    second = learner(tmp_path / "resumed")
    checkpoint = tmp_path / "resumed" / "checkpoint-5"
    second.restore_extra_state(checkpoint)
    second.train(resume_from_checkpoint=str(checkpoint))
    order = [[row["prompt_index"] for row in rollout(tmp_path / "straight", step)] for step in range(1, 11)]
    assert order == [[row["prompt_index"] for row in rollout(tmp_path / "resumed", step)] for step in range(1, 11)]
    assert history(second, "loss", "pass_rate") == history(straight, "loss", "pass_rate")
    # What is always solved has a twentieth of the weight of what was never tried: it hardly comes back.
    late = [prompt for step in order[4:] for prompt in set(step)]
    assert sum(prompt % 2 for prompt in late) < len(late) / 2, late


def solved(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """Odd prompts are always solved; of the others every other completion is right."""
    return [float(prompt[-1] in "13579" or place % 2 == 0) for place, prompt in enumerate(prompts)]
