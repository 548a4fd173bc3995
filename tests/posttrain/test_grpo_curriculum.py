"""The curriculum: weights and draws, lags, and the same order after a resume and in every placement."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import ConfigError, DataError
from posttrain.grpo.curriculum import Curriculum, weight
from posttrain.grpo.sampler import PromptSampler
from posttrain.grpo.split.buffer import ExperienceBuffer
from posttrain.grpo.train_stage import check_round
from tests.posttrain.test_grpo_split_buffer import group, split_recipe


def curriculum(prompts: int = 40, per_batch: int = 2, **given: Any) -> Curriculum:
    sampler = PromptSampler(
        prompts, prompts_per_batch=per_batch, num_generations=1, repeat_count=1, num_batches=99, shuffle=True, seed=1
    )
    options = {"every_batches": 4, "floor": 0.05, "memory": 0.5, "seed": 1}
    return Curriculum(sampler, num_prompts=prompts, prompts_per_batch=per_batch, **(options | given))


def measure(made: Curriculum, batch: int) -> list[int]:
    """Trains on a batch: prompts below 10 are always solved, below 20 half of the time, the others never."""
    prompts = made.batch(batch)
    made.record(batch, [(prompt, 4 if prompt < 10 else 2 if prompt < 20 else 0, 4) for prompt in prompts])
    return prompts


def test_weights_by_hand() -> None:
    assert [weight(rate, 0.05) for rate in (None, 0.5, 0.25, 0.0, 1.0)] == [1.0, 1.0, 0.75, 0.05, 0.05]


def test_each_round_is_without_repetition_and_later_ones_prefer_what_is_sometimes_solved() -> None:
    made = curriculum()
    rounds = [[prompt for batch in range(4 * r, 4 * r + 4) for prompt in measure(made, batch)] for r in range(24)]
    for one in rounds:
        assert len(set(one)) == 8
    assert set(rounds[0]) != set(rounds[1]), "unmeasured prompts are drawn evenly, and anew"
    late = [prompt for one in rounds[16:] for prompt in one]
    assert sum(10 <= prompt < 20 for prompt in late) > 0.7 * len(late), "10 of 40 prompts"
    assert any(prompt >= 20 or prompt < 10 for prompt in late), "the floor keeps the others"


def test_rates_are_remembered_in_part_and_the_unjudged_left_out() -> None:
    made = curriculum()
    made.record(0, [(3, 1, 4), (5, 0, 0)])
    made.record(1, [(3, 4, 4)])
    made.record(1, [(3, 4, 4)])  # told again after a resume
    assert made.rates(0) == {3: 0.5 * 0.25 + 0.5 * 1.0}
    made.record(4, [(3, 0, 4)])
    assert made.rates(0) == {3: 0.625} and made.rates(1) == {3: 0.3125}


def test_a_round_lies_between_measurement_and_draw() -> None:
    made, other = curriculum(), curriculum()
    for batch in range(4):
        measure(made, batch)
        other.record(batch, [(prompt, 0, 4) for prompt in other.batch(batch)])
    assert [made.batch(batch) for batch in range(4, 8)] == [other.batch(batch) for batch in range(4, 8)]
    with pytest.raises(ValueError, match=r"round 3 were asked for, but those of batches \[4, 5, 6, 7\] are not measured"):
        made.batch(12)
    assert made.batch(11), "but generators may begin on the next round while this one is trained on"


@pytest.mark.parametrize("at", [0, 3, 4, 9, 12, 17])
def test_a_resumed_run_draws_the_same(at: int) -> None:
    straight = curriculum()
    expected = [measure(straight, batch) for batch in range(24)]
    first = curriculum()
    for batch in range(at):
        measure(first, batch)
        first.batch(batch + 4)  # generators ahead
    second = curriculum()
    second.load(json.loads(json.dumps(first.state())))
    assert [measure(second, batch) for batch in range(at, 24)] == expected[at:]


def test_extra_prompts_are_not_those_of_the_batch() -> None:
    made = curriculum(prompts=6, every_batches=9)
    assert made.every_batches == 3, "no more than the prompts there are"
    extra = [made.extra(0, place) for place in range(4)]
    assert sorted([*extra, *made.batch(0)]) == list(range(6))


def test_the_buffer_gives_out_what_the_learner_chose(tmp_path: Path) -> None:
    made = ExperienceBuffer(
        tmp_path, groups_per_batch=2, num_batches=3, max_staleness=1, extra_groups=1, chosen=True, patience_s=0.0
    )
    made.attach("one", 0)
    assert made.sync("a", version=0, holding=[], want=9).take == (), "nothing is chosen yet"
    made.advance("one", 0, {0: [7, 8, 9], 1: [4, 5, 6]})
    orders = made.sync("a", version=0, holding=[], want=9)
    assert orders.take == (0, 1, 3, 4) and orders.prompts == {0: 7, 1: 8, 3: 4, 4: 5}
    for slot in (0, 1):
        made.put(group(slot, 0))
    made.ack("one", 0)
    made.advance("one", 1, {1: [4, 5, 6], 2: [1, 2, 3]})
    assert made.sync("a", version=1, holding=[3, 4], want=9).prompts == {6: 1, 7: 2}


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_few_prompts_leave_no_room_to_run_ahead(prompts: int, ahead: int) -> None:
    """A batch of one prompt: as many batches a round as there are prompts."""
    sampler = PromptSampler(prompts, prompts_per_batch=1, num_generations=2, repeat_count=1, num_batches=12, shuffle=True, seed=0)
    made = Curriculum(sampler, num_prompts=prompts, prompts_per_batch=1, every_batches=16, floor=0.05, memory=0.5, seed=0)

    def run() -> list[list[int]]:
        drawn = []
        for batch in range(12):
            drawn.append(made.batch(batch + ahead))
            made.record(batch, [(made.batch(batch)[0], 0, 2)])
        return drawn

    refused = ahead > prompts
    with pytest.raises(DataError, match=f"{prompts} prompts make rounds of {prompts}") if refused else nullcontext():
        check_round(made, ahead, prompts)
    with pytest.raises(ValueError, match="not measured") if refused else nullcontext():
        assert all(len(drawn) == 1 for drawn in run())


def test_what_a_recipe_must_have() -> None:
    made = split_recipe(grpo={"curriculum": {"every_batches": 2}})
    assert made.grpo.curriculum is not None and made.grpo.curriculum.floor == 0.05
    with pytest.raises(ConfigError, match="every_batches: 1 must be above grpo.max_staleness 1"):
        split_recipe(grpo={"curriculum": {"every_batches": 1}})
    with pytest.raises(ConfigError, match="reward.functions must have maths or accuracy"):
        split_recipe(grpo={"curriculum": {}}, reward={"functions": [{"name": "length"}]})
    with pytest.raises(ConfigError, match="curriculum.every"):
        split_recipe(grpo={"curriculum": {"every": 1}})
