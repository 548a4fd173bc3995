"""The GRPO stage from a recipe, in this process: whole, interrupted, resumed, and with bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from posttrain.config import Recipe
from posttrain.errors import CheckpointError, DataError, PosttrainError
from posttrain.grpo import train
from posttrain.models.loading import load_model
from posttrain.run_folder import RunFolder
from posttrain.runtime.prepare import ensure_base
from posttrain.runtime.worker import StageStopped, WorkerContext

GRPO: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "save_steps": 1,
    "save_total_limit": 2,
    "report_to": "none",
    "gradient_checkpointing": False,
    "truncated_completions": "keep",
}


def recipe(folder: Path, **sections: Any) -> Recipe:
    model = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "layer_types": ["sse", "full_attention"],
        "adapter_rank": 8,
        "gate_rank": 4,
        "chunk_size": 8,
        "max_position_embeddings": 256,
    }
    given: dict[str, Any] = {
        "name": "tiny",
        "run_dir": str(folder),
        "seed": 5,
        "stages": ["grpo"],
        "model": {"init": model, "tokenizer": "arithmetic"},
        "data": {"prompts": {"kind": "arithmetic", "limit": 24}, "max_prompt_length": 200},
        "rollout": {"max_sequences": 16},
        "reward": {"functions": [{"path": f"{reward_file(folder)}:digits"}], "workers": 1},
        "grpo": GRPO,
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section} if isinstance(section, dict) else section
    return Recipe.model_validate(given)


def reward_file(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / "tiny_rewards.py"
    path.write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in completions]\n"
        "def broken(prompts, completions, **columns):\n"
        "    raise RuntimeError('out of coffee')\n"
        "def hangs_once(prompts, completions, **columns):\n"
        "    import pathlib, time\n"
        "    if 'SECOND' in globals() and not pathlib.Path(__file__).with_name('hung').exists():\n"
        "        pathlib.Path(__file__).with_name('hung').touch()\n"
        "        time.sleep(3600)\n"
        "    globals()['SECOND'] = True\n"
        "    return digits(prompts, completions)\n"
    )
    return path


class Context(WorkerContext):
    """Asks to stop when its step is reached."""

    stop_at: int | None = None
    while_generating: bool = False
    now: int = 0
    generating: bool = False

    def report(self, step: int, total: int, *, note: str = "", force: bool = False, **metrics: float) -> None:
        self.now = step
        self.generating = note.startswith("generating")

    def stop_requested(self) -> bool:
        return self.stop_at is not None and self.now >= self.stop_at and (self.generating or not self.while_generating)


def run(given: Recipe, stop_at: int | None = None, *, while_generating: bool = False) -> RunFolder:
    folder = RunFolder(given.run_dir)
    folder.path.mkdir(parents=True, exist_ok=True)
    ensure_base(given, folder)
    context = Context(stage="grpo", run_path=folder.path)
    context.stop_at, context.while_generating = stop_at, while_generating
    train(given, folder.path, context)
    return folder


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_model(folder.final_checkpoint("grpo")).state_dict()


def test_whole_stage(tmp_path: Path) -> None:
    folder = run(recipe(tmp_path / "run"))
    assert sorted(p.name for p in (folder.path / "grpo").iterdir()) == ["checkpoint-2", "checkpoint-3", "final"]
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {p.name for p in folder.final_checkpoint("grpo").iterdir()}
    metrics = folder.read_metrics("grpo")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for name in (
        *("loss", "reward", "reward_std", "rewards/digits/mean", "completion_length", "truncated", "entropy", "clip_ratio"),
        *("grad_norm", "learning_rate", "mismatch_abs", "mismatch_k3", "zero_variance_groups", "unreadable_gold"),
        *("verifier_timeouts", "tokens_per_second", "balance_loss", "learner_tokens_per_second", "generator_tokens_per_second"),
        *("mismatch_fresh_k3", "importance_weight", "importance_weight_bounded", "flat_groups", "router/max_load_0"),
        *("time_generate", "time_reward", "time_logprobs", "time_update"),
    ):
        assert metrics[0][name] is not None, name
    assert max(line["mismatch_abs"] for line in metrics) < 1e-5
    rows = pq.read_table(folder.path / "rollouts" / "step-000003.parquet").to_pylist()
    assert len(rows) == 8 and {row["version"] for row in rows} == {2}


def test_a_reward_that_hangs_ends_the_run_which_resumes(tmp_path: Path) -> None:
    """In the second step: its name is said, the first step's checkpoint is there, and the run ends as if nothing had been."""
    straight = run(recipe(tmp_path / "straight" / "run"))
    reward = {"functions": [{"path": f"{reward_file(tmp_path / 'hung' / 'run')}:hangs_once"}], "workers": 1}
    given = recipe(tmp_path / "hung" / "run", reward=reward, grpo={**GRPO, "batch_timeout_s": 2.0})
    with pytest.raises(PosttrainError, match=r"'hangs_once' has not returned for 2 s, given 8 completions"):
        run(given)
    folder = run(given)
    a, b = weights(straight), weights(folder)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [line["step"] for line in folder.read_metrics("grpo")] == [1, 2, 3]


@pytest.mark.parametrize("stop_at", [1, 2])
def test_stopped_and_resumed_is_the_uninterrupted_run(tmp_path: Path, stop_at: int) -> None:
    straight = run(recipe(tmp_path / "straight"))
    given = recipe(tmp_path / "stopped")
    with pytest.raises(StageStopped, match=f"after step {stop_at}"):
        run(given, stop_at=stop_at)
    folder = run(given)
    a, b = weights(straight), weights(folder)
    assert all(torch.equal(a[name], b[name]) for name in a)
    wanted = ("step", "loss", "reward", "grad_norm", "entropy", "tokens")
    pick = lambda of: [[line[name] for name in wanted] for line in of.read_metrics("grpo")]  # noqa: E731
    assert pick(folder) == pick(straight)


def test_stop_while_generating_saves_the_step_before_and_resumes_exactly(tmp_path: Path) -> None:
    """Most of a step is generation, so this is where Ctrl-C falls; no checkpoint was due there."""
    options = {**GRPO, "save_steps": 50}
    straight = run(recipe(tmp_path / "straight", grpo=options))
    given = recipe(tmp_path / "stopped", grpo=options)
    with pytest.raises(StageStopped, match="after step 2"):
        run(given, stop_at=2, while_generating=True)
    assert [path.name for path in (tmp_path / "stopped" / "grpo").iterdir()] == ["checkpoint-2"]
    folder = run(given)
    a, b = weights(straight), weights(folder)
    assert all(torch.equal(a[name], b[name]) for name in a)
    pick = lambda of: [[line[name] for name in ("step", "loss", "reward", "tokens")] for line in of.read_metrics("grpo")]  # noqa: E731
    assert pick(folder) == pick(straight)


def test_stop_in_the_first_generation_leaves_no_checkpoint(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run")
    with pytest.raises(StageStopped, match="after step 0"):
        run(given, stop_at=0)
    assert not list((tmp_path / "run" / "grpo").glob("checkpoint-*"))
    assert len(run(given).read_metrics("grpo")) == 3


def test_reference_model_is_the_starting_checkpoint(tmp_path: Path) -> None:
    folder = run(recipe(tmp_path / "run", grpo={**GRPO, "beta": 0.1, "learning_rate": 1e-2}))
    kl = [line["kl"] for line in folder.read_metrics("grpo")]
    assert abs(kl[0]) < 1e-6 and kl[2] > 1e-5, kl


def test_reference_survives_a_resume(tmp_path: Path) -> None:
    options = {**GRPO, "beta": 0.1, "learning_rate": 1e-2}
    straight = run(recipe(tmp_path / "straight", grpo=options))
    given = recipe(tmp_path / "stopped", grpo=options)
    with pytest.raises(StageStopped):
        run(given, stop_at=2)
    assert [line["kl"] for line in run(given).read_metrics("grpo")] == [line["kl"] for line in straight.read_metrics("grpo")]


def test_epochs_instead_of_steps(tmp_path: Path) -> None:
    options = {name: value for name, value in GRPO.items() if name != "max_steps"} | {"num_train_epochs": 0.25}
    folder = run(recipe(tmp_path / "run", grpo=options))
    # 24 prompts, 2 a step: 12 steps a pass.
    assert len(folder.read_metrics("grpo")) == 3


def test_sft_final_comes_before_base(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run")
    folder = RunFolder(given.run_dir)
    folder.path.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="neither sft/final nor base"):
        train(given, folder.path, Context(stage="grpo", run_path=folder.path))
    ensure_base(given, folder)
    other = load_model(folder.final_checkpoint("base"))
    with torch.no_grad():
        other.lm_head.weight.mul_(0.5)
    other.save_pretrained(folder.final_checkpoint("sft"))
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder.final_checkpoint("base")).save_pretrained(folder.final_checkpoint("sft"))
    from posttrain.grpo.train_stage import build

    with build(given, folder, Context(stage="grpo", run_path=folder.path)) as stage:
        assert torch.equal(stage.learner.model.lm_head.weight, other.lm_head.weight)


def test_a_reward_that_raises(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run", reward={"functions": [{"path": f"{tmp_path / 'tiny_rewards.py'}:broken"}]})
    with pytest.raises(PosttrainError, match="'broken' raised RuntimeError: out of coffee"):
        run(given)


def test_a_prompt_that_leaves_no_room(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run", rollout={"max_length": 220}, grpo={**GRPO, "max_completion_length": 12})
    given.rollout.max_length = 30
    with pytest.raises(DataError, match=r"its prompt of \d+ tokens .* above rollout.max_length 30"):
        run(given)


def test_too_few_prompts(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run", data={"prompts": {"kind": "arithmetic", "limit": 1}, "max_prompt_length": 200})
    with pytest.raises(DataError, match="1 prompts, but one generation batch needs 2"):
        run(given)
