"""LoRA and the reference model: what is trained, what the reference is, and that both work in both placements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.grpo.adapters import merged_state
from posttrain.models.loading import load_model, new_model
from posttrain.run_folder import RunFolder
from posttrain.runtime.worker import StageStopped
from tests.integration.test_grpo_learner import FIELDS, Learner, batch_of, history, make, padded
from tests.integration.test_grpo_stage import GRPO, recipe, run, weights

LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}


def learner(folder: Path, **given: Any) -> Learner:
    return make(folder, lora=LORA, model=new_model(FIELDS, seed=3), learning_rate=5e-2, **given)


def test_adapters_alone_are_trained_and_merge_into_what_they_compute(tmp_path: Path) -> None:
    made = learner(tmp_path, max_steps=3)
    trained = [name for name, parameter in made.model.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained), "lora_q_proj of SSE is no adapter"
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    made.train()
    moved = {name for name, value in made.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and moved <= set(trained)
    for absolute, _ in history(made, "mismatch/abs", "mismatch/k3"):
        assert absolute < 1e-5, "the generator on this model sees the adapters"
    plain = new_model(FIELDS, seed=3)
    plain.load_state_dict(merged_state(made.model), strict=True)
    batch = batch_of(made)
    made._rows = batch
    with torch.no_grad():
        ours = made._get_per_token_logps_and_entropies(made.model, *padded(batch))[0]
        other = make(tmp_path / "plain", model=plain)
        other._rows = batch
        merged = other._get_per_token_logps_and_entropies(other.model, *padded(batch))[0]
    torch.testing.assert_close(ours, merged, rtol=1e-4, atol=1e-5)


def test_the_reference_is_the_model_without_its_adapters(tmp_path: Path) -> None:
    made = learner(tmp_path, max_steps=3, beta=0.1)
    assert made.ref_model is None, "no copy of the model is kept"
    made.train()
    kl = [value for (value,) in history(made, "kl")]
    assert abs(kl[0]) < 1e-6 and kl[-1] > 1e-4, kl


def test_a_stage_with_adapters_resumes_exactly_and_leaves_a_plain_checkpoint(tmp_path: Path) -> None:
    options = {**GRPO, "learning_rate": 5e-2, "lora": {"r": 4}, "beta": 0.05}
    straight = run(recipe(tmp_path / "straight", grpo=options))
    given = recipe(tmp_path / "stopped", grpo=options)
    with pytest.raises(StageStopped):
        run(given, stop_at=2)
    assert (tmp_path / "stopped" / "grpo" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    folder = run(given)
    a, b = weights(straight), weights(folder)
    assert all(torch.equal(a[name], b[name]) for name in a)
    base = load_model(folder.final_checkpoint("base")).state_dict()
    assert set(base) == set(b), "no trace of the adapters"
    assert any(not torch.equal(base[name], b[name]) for name in base if name.endswith("q_proj.weight"))
    assert AutoModelForCausalLM.from_pretrained(folder.final_checkpoint("grpo")) is not None


def columns(folder: RunFolder, *names: str) -> list[list[float]]:
    return [[line[name] for name in names] for line in folder.read_metrics("grpo")]


@pytest.mark.slow
def test_both_work_in_split_placement_too(tmp_path: Path) -> None:
    from posttrain.config import RayConfig
    from posttrain.runtime.session import ray_session

    split = {"placement": "split", "generators": 1, "max_staleness": 0, "batch_timeout_s": 120.0}
    cases = {"reference": {"beta": 0.1}, "lora": {"beta": 0.1, "lora": {"r": 4}}}
    with ray_session(RayConfig(num_cpus=3)):
        for name, case in cases.items():
            options = {**GRPO, "learning_rate": 1e-2, **case}
            colocated = run(recipe(tmp_path / f"{name}-colocated", grpo=options))
            folder = run(recipe(tmp_path / f"{name}-split", grpo={**options, **split}))
            kept = ("loss", "reward", "kl")
            # Merged weights are those of base and adapter to rounding, and so are the samples' log-probabilities.
            for one, other in zip(columns(folder, *kept), columns(colocated, *kept), strict=True):
                assert one == pytest.approx(other, abs=1e-4)
            assert columns(folder, "kl")[-1][0] > 1e-6
            assert max(value for (value,) in columns(folder, "mismatch_abs")) < 1e-4
