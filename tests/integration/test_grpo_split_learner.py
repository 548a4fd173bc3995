"""A batch from elsewhere in the learner: how far it is from the policy that is trained, and how that is weighed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.grpo.experience import build_requests
from posttrain.grpo.learner import Learner
from posttrain.grpo.source import Collected
from posttrain.models.loading import new_model
from tests.integration.test_grpo_learner import FIELDS, history, make

OFF: dict[str, Any] = {"vllm_importance_sampling_correction": False}


def trained(folder: Path, *, stale: bool, shift: float, steps: int = 1, **given: Any) -> Learner:
    """A learner after its first steps on samples whose log-probabilities are said to be lower by `shift` than they were, and
    whose last three tokens are of its own version (all, where the batch is not stale)."""
    # Without the balance loss all of the gradient has the weights as its factor.
    learner = make(folder, max_steps=steps, model=new_model({**FIELDS, "balance_loss_coef": 0.0}, seed=3), **given)
    generate, learner._generate_completions = learner._generate_completions, None

    def collect(rows: list[dict[str, Any]], step: int) -> Collected:
        requests = build_requests(rows, num_generations=4, step=step, **learner.sampling)
        sampled = generate(requests, step)
        moved = [
            [
                replace(
                    c,
                    logprobs=[logprob - shift for logprob in c.logprobs],
                    versions=[step - (stale and at < len(c.versions) - 3) for at in range(len(c.versions))],
                )
                for c in group
            ]
            for group in sampled
        ]
        return Collected(
            rows=rows,
            completions=moved,
            ratings=learner._scorer.rate(rows, moved),
            version=step,
            stale=stale,
            metrics={"staleness/max": 1.0},
            seconds={},
        )

    learner._collect = collect
    learner.train()
    assert learner.state.log_history[0]["staleness/max"] == 1.0
    return learner


def gradient(folder: Path, **given: Any) -> float:
    """Norm of the first gradient."""
    return history(trained(folder, **given), "grad_norm")[0][0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> float:
    """That of samples as they are, without weights."""
    norm = gradient(tmp_path_factory.mktemp("plain"), stale=False, shift=0.0, **OFF)
    assert norm > 0
    return norm


def test_without_correction_a_stale_batch_is_weighed_by_the_clipped_ratio_and_a_fresh_one_is_not(tmp_path, plain) -> None:
    assert gradient(tmp_path / "fresh", stale=False, shift=0.1, **OFF) == plain
    # All ratios are exp(0.1) = 1.105, inside the clip range of 0.2, and the gradient of r A is r times that of log r A.
    assert gradient(tmp_path / "stale", stale=True, shift=0.1, **OFF) == pytest.approx(math.exp(0.1) * plain, rel=1e-4)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(
    ("bounds", "factor"),
    [
        ({"mode": "token_truncate"}, math.exp(0.7)),
        ({"mode": "token_truncate", "clip_max": 1.5}, 1.5),
        ({"mode": "token_mask", "clip_max": 1.5}, 0.0),
        ({"mode": "token_truncate", "clip_max": 5, "clip_min": 4}, 4.0),
    ],
)
def test_weights_are_factors_of_the_gradient(tmp_path, plain, stale, bounds, factor) -> None:
    options = {f"vllm_importance_sampling_{name}": value for name, value in bounds.items()}
    assert gradient(tmp_path, stale=stale, shift=0.7, **options) == pytest.approx(factor * plain, rel=1e-4)


def test_a_completions_weight_is_the_product_of_its_tokens(tmp_path) -> None:
    learner = trained(tmp_path, stale=True, shift=0.05, vllm_importance_sampling_mode="sequence_truncate")
    import pyarrow.parquet as pq

    lengths = pq.read_table(tmp_path / "rollouts" / "step-000001.parquet")["length"].to_pylist()
    [(mean, low, high)] = history(learner, *(f"sampling/importance_sampling_ratio/{name}" for name in ("mean", "min", "max")))
    weights = [math.exp(0.05 * length) for length in lengths]
    assert (mean, low, high) == pytest.approx((sum(weights) / len(weights), min(weights), max(weights)), rel=1e-4)


@pytest.mark.parametrize(
    "given",
    [
        {},
        OFF,
        {"steps_per_generation": 2, "vllm_importance_sampling_mode": "token_truncate"},
        {"num_iterations": 2, **OFF},
    ],
)
def test_the_mismatch_is_measured_on_every_step_and_apart_for_fresh_tokens(tmp_path, given) -> None:
    steps = 2 * given.get("steps_per_generation", 1) * given.get("num_iterations", 1)
    learner = trained(tmp_path, stale=True, shift=0.1, steps=steps, learning_rate=0.0, **given)
    seen = [entry for entry in learner.state.log_history if "mismatch/k3" in entry]
    assert len(seen) == 2, "once a generation batch, whatever the number of steps that it serves"
    for entry in seen:
        for name in ("mismatch", "mismatch_fresh"):
            assert entry[f"{name}/abs"] == pytest.approx(0.1, rel=1e-4)
            assert entry[f"{name}/k3"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)


def test_of_a_distribution_with_its_tail_cut_off_the_models_own_log_probabilities_are_compared(tmp_path) -> None:
    options = {"top_k": 5}
    learner = trained(tmp_path / "stale", stale=True, shift=0.1, **options)
    plain = gradient(tmp_path / "plain", stale=False, shift=0.0, **OFF, **options)
    # Only the log-probabilities of the cut distribution were shifted.
    assert history(learner, "grad_norm")[0][0] == pytest.approx(plain, rel=1e-4)
    assert history(learner, "mismatch/abs")[0][0] < 1e-5
    hot = trained(tmp_path / "hot", stale=True, shift=0.1, temperature=0.9, **options)
    assert "mismatch/abs" not in hot.state.log_history[0], "at another temperature there is nothing to compare with"
