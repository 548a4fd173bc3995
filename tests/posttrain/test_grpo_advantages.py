"""Advantages against numbers worked out by hand, and against TRL's formula."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.grpo.advantages import (
    batch_advantages,
    group_advantages,
    group_std,
    normalise_then_sum,
    penalise_truncated,
    reward_matrix,
    zero_variance,
)

NAN = float("nan")


def close(values: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)


def test_group_normalised_by_hand():
    # 1 1 0 0: mean 0.5, deviation sqrt(4 * 0.25 / 3) = 0.57735, +-0.5 / 0.57745 = 0.86588
    close(group_advantages(reward_matrix([[1, 1, 0, 0]])), [[0.865875, 0.865875, -0.865875, -0.865875]])


def test_scale_none_by_hand():
    close(group_advantages(reward_matrix([[3, 1], [0, 1]]), scale="none"), [[1, -1], [-0.5, 0.5]])


def test_scale_batch_divides_by_the_deviation_of_all_rewards():
    # 3 1 0 1: mean 1.25, squares 3.0625 + 0.0625 + 1.5625 + 0.0625 = 4.75, deviation sqrt(4.75 / 3) = 1.258306
    std = math.sqrt(4.75 / 3) + 1e-4
    close(group_advantages(reward_matrix([[3, 1], [0, 1]]), scale="batch"), [[1 / std, -1 / std], [-0.5 / std, 0.5 / std]])


def test_scale_batch_counts_the_other_processes():
    mine, everybody = reward_matrix([[3, 1]]), reward_matrix([[3, 1], [0, 1]])
    assert torch.equal(group_advantages(mine, scale="batch", batch=everybody), group_advantages(everybody, scale="batch")[:1])


def test_group_without_variance_teaches_nothing():
    rewards = reward_matrix([[1, 1, 1], [0, 0, 0], [0.1 + 0.2, 0.3, 0.3]])
    close(group_advantages(rewards), [[0, 0, 0]] * 3)
    assert zero_variance(rewards).tolist() == [True, True, True]


def test_none_takes_no_part():
    # Judged: 1 and 0, mean 0.5, deviation 0.70711; the None neither moves the mean nor gets an advantage.
    rewards = reward_matrix([[1, None, 0]])
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    close(group_advantages(rewards), [[half, 0, -half]])
    close(group_advantages(rewards, scale="none"), [[0.5, 0, -0.5]])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_all_none_and_one_judged(scale, baseline):
    rewards = reward_matrix([[None, None], [1, None], [1, 0]])
    advantages = group_advantages(rewards, scale=scale, baseline=baseline)
    assert advantages[0].tolist() == [0, 0] and advantages[1].tolist() == [0, 0] and advantages[2, 0] > 0
    assert zero_variance(rewards).tolist() == [False, True, False]


def test_leave_one_out_by_hand():
    # 1 0 0 and a None: others' means are 0, 0.5, 0.5
    close(group_advantages(reward_matrix([[1, 0, 0, None]]), scale="none", baseline="leave_one_out"), [[1, -0.5, -0.5, 0]])


def test_one_truncated_sample_is_penalised():
    rewards, truncated = reward_matrix([[1, 1, 0, None]]), torch.tensor([[False, True, False, True]])
    penalised = penalise_truncated(rewards, truncated, -1.0)
    assert penalised[0, :3].tolist() == [1, -1, 0] and penalised[0, 3].isnan()
    close(group_advantages(penalised, scale="none"), [[1, -1, 0, 0]])


def test_as_trl_computes_them():
    from trl.trainer.utils import nanstd

    torch.manual_seed(0)
    rewards = torch.randn(5, 8)
    rewards[rewards > 1.2] = NAN
    mean = torch.nanmean(rewards, dim=1, keepdim=True)
    expected = torch.nan_to_num((rewards - mean) / (nanstd(rewards, dim=1).unsqueeze(1) + 1e-4), nan=0.0)
    torch.testing.assert_close(group_advantages(rewards), expected)
    torch.testing.assert_close(group_std(rewards).squeeze(1), nanstd(rewards, dim=1))
    expected = torch.nan_to_num((rewards - mean) / (nanstd(rewards) + 1e-4), nan=0.0)
    torch.testing.assert_close(group_advantages(rewards, scale="batch"), expected)


def test_normalise_then_sum_as_trl():
    from trl.trainer.utils import nanstd

    torch.manual_seed(1)
    parts, weights = torch.randn(3, 4, 2), torch.tensor([1.0, 0.5])
    parts[0, 1] = NAN
    parts[1, 2, 0] = NAN
    normal = (parts - torch.nanmean(parts, dim=1, keepdim=True)) / (nanstd(parts, dim=1, keepdim=True) + 1e-4)
    rewards = (normal * weights).nansum(dim=-1)
    rewards[0, 1] = NAN
    torch.testing.assert_close(normalise_then_sum(parts, weights), rewards, equal_nan=True)
    expected = torch.nan_to_num((rewards - torch.nanmean(rewards)) / (nanstd(rewards) + 1e-4), nan=0.0)
    torch.testing.assert_close(batch_advantages(rewards), expected)


def test_bad_arguments():
    with pytest.raises(ValueError, match="scale_rewards='std'"):
        group_advantages(reward_matrix([[1, 0]]), scale="std")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="baseline='median'"):
        group_advantages(reward_matrix([[1, 0]]), baseline="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"groups of \[1, 2\]"):
        reward_matrix([[1, 0], [1]])
