"""Dynamic sampling and the curriculum choose the same groups in split placement as in the learner's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RayConfig
from posttrain.runtime.session import ray_session
from tests.integration.test_grpo_split import trained
from tests.integration.test_grpo_stage import GRPO, recipe, reward_file, run


@pytest.mark.slow
def test_on_policy_the_choices_are_the_colocated_runs(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        **GRPO,
        "max_steps": 6,
        "max_completion_length": 2,
        "max_extra_groups": 3,
        "extra_groups_ahead": 1,
        "curriculum": {"every_batches": 2},
    }
    split = {"placement": "split", "generators": 1, "max_staleness": 0, "batch_timeout_s": 120.0}
    rewards = {"functions": [{"path": f"{reward_file(tmp_path / 'run')}:digits"}, {"name": "maths"}], "workers": 1}
    colocated = run(recipe(tmp_path / "colocated", grpo=options, reward=rewards))
    with ray_session(RayConfig(num_cpus=3)):
        folder = run(recipe(tmp_path / "split", grpo={**options, **split}, reward=rewards))
    assert trained(folder) == trained(colocated)
    counts = ("flat_groups", "flat_groups_kept", "pass_rate")
    mine, own = ([[line[name] for name in counts] for line in of.read_metrics("grpo")] for of in (folder, colocated))
    assert mine == own and sum(line[0] for line in own) > 0
