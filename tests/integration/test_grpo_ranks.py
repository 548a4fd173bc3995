"""One optimiser step is one optimiser step: in one batch, accumulated, or dealt to ranks, placed either way."""

from __future__ import annotations

import pytest
import torch

from tests.posttrain.grpo_ranks import errors_where_one_is_nan, on_ranks, one_step


def same(given: torch.Tensor, expected: torch.Tensor) -> None:
    """To fp32 rounding: a few hundred additions in another order, at the scale of the largest entry."""
    torch.testing.assert_close(given, expected, rtol=0, atol=float(expected.abs().max()) * 2e-6)


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_accumulated_is_one_batch(tmp_path, loss_type) -> None:
    whole = one_step(str(tmp_path / "whole"), micro=8, accumulation=1, loss_type=loss_type)
    assert whole.abs().max() > 1e-4
    for micro in (4, 2, 1):
        same(one_step(str(tmp_path / f"{micro}"), micro=micro, accumulation=8 // micro, loss_type=loss_type), whole)


@pytest.mark.slow
def test_two_ranks_are_one_batch_whether_they_sample_themselves_or_are_dealt_to(tmp_path) -> None:
    whole = one_step(str(tmp_path / "whole"), micro=8, accumulation=1, beta=0.1)
    runs = {
        "own": {"micro": 4, "accumulation": 1, "beta": 0.1},
        "accumulated": {"micro": 2, "accumulation": 2, "beta": 0.1},
        "dealt": {"micro": 4, "accumulation": 1, "beta": 0.1, "split": True},
    }
    for first, second in on_ranks(2, tmp_path, runs).values():
        assert torch.equal(first, second)
        same(first, whole)


@pytest.mark.slow
def test_a_loss_that_is_nan_on_one_rank_ends_all(tmp_path) -> None:
    """None waits for the other in a collective that it will never enter."""
    first, second = errors_where_one_is_nan(2, tmp_path)
    assert first == second and first.startswith("the loss is nan in step 1 on learner 1 of 2:")
