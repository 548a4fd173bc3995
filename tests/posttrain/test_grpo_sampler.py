"""The order of prompts and the seeds of requests."""

from __future__ import annotations

import pytest

from posttrain.grpo.experience import build_requests
from posttrain.grpo.sampler import PromptSampler, derived_seed


def sampler(**given: object) -> PromptSampler:
    options = {
        "prompts_per_batch": 2,
        "num_generations": 2,
        "repeat_count": 1,
        "num_batches": 3,
        "shuffle": False,
        "seed": 0,
    }
    return PromptSampler(4, **(options | given))  # type: ignore[arg-type]


def test_order_by_hand():
    assert list(sampler()) == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1]
    assert list(sampler(num_batches=1, repeat_count=2)) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert len(sampler(repeat_count=2)) == len(list(sampler(repeat_count=2))) == 24


def test_iterating_again_gives_the_same():
    shuffled = sampler(shuffle=True, num_batches=6)
    assert list(shuffled) == list(shuffled) == list(sampler(shuffle=True, num_batches=6))


def test_a_longer_run_begins_like_a_shorter_one():
    assert list(sampler(shuffle=True, num_batches=9))[:24] == list(sampler(shuffle=True, num_batches=6))


def test_each_pass_is_a_shuffle_of_all():
    many = PromptSampler(50, prompts_per_batch=10, num_generations=1, repeat_count=1, num_batches=10, shuffle=True, seed=5)
    order = list(many)
    assert sorted(order[:50]) == sorted(order[50:]) == list(range(50)) and order[:50] != order[50:]
    other = PromptSampler(50, prompts_per_batch=10, num_generations=1, repeat_count=1, num_batches=10, shuffle=True, seed=6)
    assert list(other) != order


def test_leftover_prompts_wait():
    odd = PromptSampler(5, prompts_per_batch=2, num_generations=1, repeat_count=1, num_batches=4, shuffle=False, seed=0)
    assert list(odd) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_too_few_prompts():
    with pytest.raises(ValueError, match="4 prompts, but one generation batch needs 8 different ones"):
        sampler(prompts_per_batch=8)


def requests(step: int = 3, run_seed: int = 1):
    rows = [{"prompt_ids": [5, 6], "prompt_index": 9}, {"prompt_ids": [7], "prompt_index": 2}]
    return build_requests(
        rows,
        num_generations=4,
        temperature=0.8,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=16,
        stop=["\n\n"],
        run_seed=run_seed,
        step=step,
    )


def test_requests():
    first, second = requests()
    assert first.prompt_ids == [5, 6] and first.n == 4 and first.temperature == 0.8 and first.stop == ("\n\n",)
    assert first.seed == derived_seed("rollout", 1, 3, 9) and first.id != second.id
    seeds = {r.seed for step in range(20) for run in range(20) for r in requests(step, run)}
    assert len(seeds) == 800 and all(0 <= seed < 2**63 for seed in seeds)
    assert [r.seed for r in requests()] == [first.seed, second.seed]
