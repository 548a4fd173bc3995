"""A batch from elsewhere in the learner: the ratio of the loss is taken against the policy that sampled."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.grpo.experience import build_requests
from posttrain.grpo.split.experience import Collected
from posttrain.models.loading import new_model
from tests.integration.test_grpo_learner import FIELDS, history, make


def gradient(folder: Path, *, stale: bool, shift: float, **given: Any) -> float:
    """Norm of the first gradient on samples whose log-probabilities are said to be lower by `shift` than they were."""
    # Without the balance loss all of the gradient has the ratio as its factor.
    learner = make(folder, max_steps=1, model=new_model({**FIELDS, "balance_loss_coef": 0.0}, seed=3), **given)
    generate, learner._generate_completions = learner._generate_completions, None

    def collect(rows: list[dict[str, Any]], step: int) -> Collected:
        requests = build_requests(rows, num_generations=4, step=step, **learner.sampling)
        sampled = generate(requests, step)
        moved = [[replace(c, logprobs=[logprob - shift for logprob in c.logprobs]) for c in group] for group in sampled]
        return Collected(
            completions=moved, ratings=learner._scorer.rate(rows, moved), stale=stale, metrics={"staleness/max": 1.0}, seconds={}
        )

    learner._collect = collect
    learner.train()
    assert history(learner, "staleness/max") == [(1.0,)]
    return history(learner, "grad_norm")[0][0]


@pytest.mark.slow
def test_a_stale_batch_is_weighed_by_the_ratio_and_a_fresh_one_is_not(tmp_path: Path) -> None:
    plain = gradient(tmp_path / "plain", stale=False, shift=0.0)
    assert plain > 0
    assert gradient(tmp_path / "fresh", stale=False, shift=0.1) == plain
    # All ratios are exp(0.1) = 1.105, inside the clip range of 0.2, and the gradient of r A is r times that of log r A.
    assert gradient(tmp_path / "stale", stale=True, shift=0.1) == pytest.approx(math.exp(0.1) * plain, rel=1e-4)


def test_of_a_distribution_with_its_tail_cut_off_no_ratio_is_taken(tmp_path: Path) -> None:
    options = {"top_k": 5}
    plain = gradient(tmp_path / "plain", stale=False, shift=0.0, **options)
    assert gradient(tmp_path / "stale", stale=True, shift=0.1, **options) == plain
