"""Importance weights against numbers worked out by hand, and against TRL's own lines where they can be had."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from posttrain.config import recipe_from_dict
from posttrain.errors import ConfigError
from posttrain.grpo.correction import importance_weights
from posttrain.grpo.metrics import WeightStatistics, mismatch_metrics, mismatch_sums, router_counts, router_metrics

# Ratios by token: 2, 1/2, 4 | 8, padding, padding | nothing trained. By completion: 4, 8, -.
LOGS = torch.tensor([[2.0, 0.5, 4.0], [8.0, 1e9, 1e-9], [5.0, 5.0, 5.0]]).log()
GENERATOR = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "low", "high", "values", "bounded"),
    [
        ("token_truncate", None, 3.0, [[2, 0.5, 3], [3, 1, 1], [1, 1, 1]], 2),
        ("token_truncate", 1.0, 3.0, [[2, 1, 3], [3, 1, 1], [1, 1, 1]], 3),
        ("token_mask", None, 3.0, [[2, 0.5, 0], [0, 1, 1], [1, 1, 1]], 2),
        ("token_mask", 0.75, None, [[2, 0, 4], [8, 1, 1], [1, 1, 1]], 1),
        ("sequence_truncate", None, 5.0, [[4], [5], [1]], 1),
        ("sequence_truncate", 6.0, 9.0, [[6], [8], [1]], 1),
        ("sequence_mask", None, 5.0, [[4], [0], [1]], 1),
        ("sequence_mask", 5.0, None, [[0], [8], [1]], 1),
        ("sequence_mask", None, None, [[4], [8], [1]], 0),
    ],
)
def test_by_hand(mode, low, high, values, bounded) -> None:
    made = importance_weights(GENERATOR + LOGS, GENERATOR, MASK, mode=mode, clip_min=low, clip_max=high)
    torch.testing.assert_close(made.values, torch.tensor(values, dtype=torch.float32), rtol=1e-5, atol=0)
    assert made.bounded.sum() == bounded
    assert made.counted.tolist() == (MASK.bool().tolist() if mode.startswith("token") else [[True], [True], [False]])


def test_the_defaults_are_trls_and_unknown_modes_are_refused() -> None:
    from trl.trainer.grpo_config import GRPOConfig

    fields = GRPOConfig.__dataclass_fields__
    assert importance_weights.__kwdefaults__ == {
        name: fields[f"vllm_importance_sampling_{name}"].default for name in ("mode", "clip_min", "clip_max")
    }
    with pytest.raises(ValueError, match="must be one of token_truncate, token_mask"):
        importance_weights(GENERATOR, GENERATOR, MASK, mode="token")  # pyright: ignore[reportArgumentType]


def test_an_upper_bound_of_an_infinite_ratio_is_finite() -> None:
    far = importance_weights(torch.tensor([[500.0]]), torch.tensor([[-500.0]]), torch.ones(1, 1), mode="token_truncate")
    gone = importance_weights(torch.tensor([[500.0]]), torch.tensor([[-500.0]]), torch.ones(1, 1), mode="token_mask")
    assert far.values.tolist() == [[3.0]] and gone.values.tolist() == [[0.0]]


def test_statistics_by_hand() -> None:
    statistics = WeightStatistics()
    one = SimpleNamespace(reduce=lambda sums, reduction: sums, gather=lambda values: values)
    assert statistics.take(one) == {}  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        statistics.add(importance_weights(GENERATOR + LOGS, GENERATOR, MASK, mode="token_truncate"))
    taken = statistics.take(one)  # pyright: ignore[reportArgumentType]
    name = "sampling/importance_sampling_ratio"
    assert taken[f"{name}/mean"] == pytest.approx((2 + 0.5 + 3 + 3) / 4)
    assert (taken[f"{name}/min"], taken[f"{name}/max"], taken[f"{name}/bounded"]) == (pytest.approx(0.5), 3.0, 0.5)
    assert statistics.take(one) == {}, "each log starts anew"  # pyright: ignore[reportArgumentType]


def test_the_mismatch_of_fresh_tokens_stands_beside_that_of_all() -> None:
    trainer, generator = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -2.25, 0.0]])
    fresh = torch.tensor([[False, True, True]])
    metrics = mismatch_metrics(mismatch_sums(trainer, generator, torch.tensor([[1, 1, 0]]), fresh))
    assert metrics == pytest.approx(
        {
            "mismatch/abs": (0.5 + 0.25) / 2,
            "mismatch/k3": (math.exp(0.5) - 1.5 + math.exp(0.25) - 1.25) / 2,
            "mismatch_fresh/abs": 0.25,
            "mismatch_fresh/k3": math.exp(0.25) - 1.25,
        }
    )
    none = mismatch_metrics(mismatch_sums(trainer, generator, torch.tensor([[1, 0, 0]]), fresh))
    assert list(none) == ["mismatch/abs", "mismatch/k3"], "of no token there is no mean"


def recipe(**grpo):
    init = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "layer_types": ["sse"]}
    return recipe_from_dict(
        {
            "name": "x",
            "stages": ["grpo"],
            "model": {"init": init, "tokenizer": "arithmetic"},
            "data": {"prompts": {"kind": "arithmetic"}},
            "grpo": {"per_device_train_batch_size": 8, "num_generations": 4, **grpo},
        }
    )


def test_a_recipe_takes_trls_names() -> None:
    made = recipe(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2)
    assert made.grpo.arguments["vllm_importance_sampling_clip_max"] == 2.0
    for given, message in (
        ({"vllm_importance_sampling_mode": "token_clip"}, "must be one of token_truncate"),
        ({"vllm_importance_sampling_clip_min": 3.0}, "clip_min: 3.0 must be below vllm_importance_sampling_clip_max 3.0"),
        ({"loss_type": "vespo"}, "vespo needs token_truncate or token_mask, not sequence_mask"),
        ({"vllm_importance_sampling_clip_max": 0}, "clip_max: 0.0 leaves no weight above 0"),
        ({"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None}, "needs a bound"),
        ({"multi_objective_aggregation": "normalize_then_sum", "baseline": "leave_one_out"}, "leave baseline out"),
        ({"learners": 2, "per_device_train_batch_size": 2}, "each of 2 has 2 of the 4 completions of a batch"),
        ({"vllm_mode": "colocate"}, "posttrain's own generator draws the completions"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe(**given)


def test_routing_by_hand() -> None:
    """Two layers, three partitions, two choices a token."""
    first, second = (
        SimpleNamespace(router_indices=torch.tensor(layers, dtype=torch.uint8))
        for layers in ([[[0, 1]], [[2, 2]]], [[[0, 2], [0, 1]], [[2, 2], [2, 1]]])
    )
    counts = router_counts([first, SimpleNamespace(router_indices=None), second], 3)  # pyright: ignore[reportArgumentType]
    assert counts is not None and counts.tolist() == [[3, 2, 1], [0, 1, 5]]
    assert router_metrics(counts) == {"router/max_load_0": 1.5, "router/max_load_1": 2.5}
    assert router_counts([SimpleNamespace(router_indices=None)], 3) is None  # pyright: ignore[reportArgumentType]
