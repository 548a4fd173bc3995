"""The SFT stage in one process: the loss, accumulation, exact resume, whole-or-absent checkpoints, metrics."""

import errno
import json
import math
from pathlib import Path

import pytest
import torch

from posttrain.errors import CheckpointError
from posttrain.run_folder import RunFolder, last_checkpoint
from posttrain.runtime.prepare import prepare
from posttrain.runtime.worker import StageStopped, WorkerContext
from posttrain.sft import train
from posttrain.sft.train_stage import build
from tests.sft_runs import losses, recipe, weights


def start(folder, **changes):
    """A run folder with packed rows and base/, ready for the stage."""
    made = recipe(folder, **changes)
    with RunFolder.open(made, resume=True) as run:
        prepare(made, run, ["sft"])
    return made


class StopAfter(WorkerContext):
    """A worker whose user presses Ctrl-C during some step."""

    def __init__(self, path: Path, steps: int) -> None:
        super().__init__(stage="sft", run_path=path)
        self._left = steps

    def stop_requested(self) -> bool:
        self._left -= 1
        return self._left <= 0


def context(path):
    return WorkerContext(stage="sft", run_path=path)


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 6 steps without interruption."""
    path = tmp_path_factory.mktemp("straight") / "run"
    train(start(path), path, context(path))
    return path


def test_the_stage_leaves_checkpoints_and_a_final_model(straight):
    folder = straight / "sft"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-3", "checkpoint-6", "final"]
    names = {path.name for path in (folder / "checkpoint-6").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "tokenizer.json"} <= names
    names = {path.name for path in (folder / "final").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pth")) for name in names)
    assert_same_bits(weights(folder / "final"), weights(folder / "checkpoint-6"))


def test_metrics_of_every_step(straight):
    records = RunFolder(straight).read_metrics("sft")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        for name in ("loss", "learning_rate", "grad_norm", "tokens", "entropy", "accuracy", "balance_loss"):
            assert math.isfinite(record[name]), name
        assert 0 < record["balance_loss"] < 0.1  # coefficient 0.01, one layer, about 1 when balanced
    assert all(record["tokens_per_second"] > 0 for record in records)
    assert records[-1]["loss"] < records[0]["loss"]
    tokens = [record["tokens"] for record in records]
    assert tokens == sorted(tokens) and tokens[-1] > 5 * 100


def test_stopped_and_resumed_equals_uninterrupted(straight, tmp_path):
    path = tmp_path / "run"
    made = start(path)
    with pytest.raises(StageStopped, match="after step 4"):
        train(made, path, StopAfter(path, 4))
    assert last_checkpoint(path / "sft").name == "checkpoint-4"
    assert not (path / "sft" / "final").exists()
    train(made, path, context(path))
    assert losses(path) == losses(straight)
    assert [r["tokens"] for r in RunFolder(path).read_metrics("sft")] == [
        r["tokens"] for r in RunFolder(straight).read_metrics("sft")
    ]
    assert_same_bits(weights(path / "sft" / "final"), weights(straight / "sft" / "final"))


def test_resume_in_a_later_epoch_with_accumulation(tmp_path):
    changes = {
        "trainer": {"gradient_accumulation_steps": 4, "max_steps": 8, "save_steps": 100},
        "data": {"train": {"kind": "arithmetic", "limit": 40}, "max_length": 128},
    }
    one, two = tmp_path / "one", tmp_path / "two"
    train(start(one, **changes), one, context(one))
    made = start(two, **changes)
    rows = json.loads((two / "data" / "sft" / "info.json").read_text())["rows"]
    second_epoch = math.ceil(rows / 4) + 1
    assert rows % 4 and second_epoch < 8, "the last step of an epoch should be a short one; choose another limit"
    with pytest.raises(StageStopped):
        train(made, two, StopAfter(two, second_epoch))
    train(made, two, context(two))
    assert losses(one) == losses(two)
    assert_same_bits(weights(one / "sft" / "final"), weights(two / "sft" / "final"))


def test_rows_of_a_started_run_do_not_follow_the_source(straight):
    before = (straight / "data" / "sft" / "rows.arrow").stat().st_mtime_ns
    start(straight)
    assert (straight / "data" / "sft" / "rows.arrow").stat().st_mtime_ns == before


def first_gradients(path, made):
    """Gradients of the first optimiser step, and its logged loss."""
    trainer, _ = build(made, RunFolder(path), context(path))
    found = {}
    step = trainer.create_optimizer

    def spy():
        optimizer = step()
        optimizer.register_step_pre_hook(
            lambda *_: found.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
        )
        return optimizer

    trainer.create_optimizer = spy
    trainer.train()
    return found, trainer.state.log_history[0]["loss"]


def test_accumulation_of_4_equals_a_batch_of_4(tmp_path):
    """Rows hold different numbers of completion tokens, so a mean of means would differ."""
    gradients, shown = [], []
    for name, rows, steps in (("batch", 4, 1), ("accumulated", 1, 4)):
        changes = {
            "init": {"balance_loss_coef": 0.0},
            "trainer": {
                "per_device_train_batch_size": rows,
                "gradient_accumulation_steps": steps,
                "max_steps": 1,
                "save_strategy": "no",
            },
        }
        grads, loss = first_gradients(tmp_path / name, start(tmp_path / name, **changes))
        gradients.append(grads)
        shown.append(loss)
    assert shown[0] == pytest.approx(shown[1], rel=1e-5)
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_loss_is_the_mean_over_completion_tokens_of_each_sample_alone_plus_the_balance_loss(tmp_path):
    made = start(tmp_path, trainer={"max_steps": 1, "save_strategy": "no"})
    trainer, _ = build(made, RunFolder(tmp_path), context(tmp_path))
    row = trainer.train_dataset[0]
    batch = trainer.data_collator([row])
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    tokens = torch.tensor(50)
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=tokens)
    balance = model.model.balance_loss
    total, begin = 0.0, 0
    model.eval()
    for length in row["seq_lengths"]:
        ids = torch.tensor([row["input_ids"][begin : begin + length]])
        labels = torch.tensor(row["labels"][begin : begin + length])
        logits = model(ids).logits[0]
        total += torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum").item()
        begin += length
    assert len(row["seq_lengths"]) > 1
    assert balance > 0
    assert loss.item() == pytest.approx(total / 50 + balance.item() / 2, rel=1e-5)


def test_the_balance_loss_reaches_the_router(tmp_path):
    grads = {}
    for coefficient in (0.0, 1.0):
        path = tmp_path / str(coefficient)
        made = start(
            path, init={"balance_loss_coef": coefficient}, trainer={"max_steps": 1, "save_strategy": "no", "max_grad_norm": 0}
        )
        grads[coefficient], _ = first_gradients(path, made)
    router = next(name for name in grads[0.0] if "e_proj" in name)
    assert not torch.allclose(grads[0.0][router], grads[1.0][router])
    assert torch.equal(grads[0.0]["lm_head.weight"], grads[1.0]["lm_head.weight"])


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")]
)
def test_a_full_disk_leaves_the_older_checkpoint(straight, tmp_path, monkeypatch, failure):
    path = tmp_path / "run"
    made = start(path)
    save, calls = torch.save, []

    def full(value, file, *args, **kwargs):
        if "checkpoint-6" in str(file) and str(file).endswith("optimizer.pt"):
            calls.append(file)
            raise failure
        return save(value, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="no space left on the disk.*checkpoint-6"):
        train(made, path, context(path))
    assert calls
    assert [p.name for p in (path / "sft").iterdir()] == ["checkpoint-3"]
    monkeypatch.setattr(torch, "save", save)
    train(made, path, context(path))
    assert_same_bits(weights(path / "sft" / "final"), weights(straight / "sft" / "final"))


def test_save_total_limit(tmp_path):
    made = start(tmp_path, trainer={"save_steps": 1, "save_total_limit": 2, "max_steps": 5})
    train(made, tmp_path, context(tmp_path))
    assert sorted(p.name for p in (tmp_path / "sft").iterdir()) == ["checkpoint-4", "checkpoint-5", "final"]


def test_rows_or_base_missing(tmp_path):
    made = start(tmp_path)
    base = tmp_path / "base"
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="base is missing"):
        train(made, tmp_path, context(tmp_path))
