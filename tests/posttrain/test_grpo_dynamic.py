"""Dynamic sampling: which groups replace those that teach nothing, whatever the order in which they are finished."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from posttrain.grpo.dynamic import Choice, choose, extras_due
from posttrain.grpo.sampler import PromptSampler, derived_seed
from posttrain.grpo.scoring import Scorer, answers
from posttrain.grpo.source import OwnSource
from posttrain.grpo.split.buffer import ExperienceBuffer
from posttrain.grpo.split.groups import RatedGroup
from posttrain.grpo.split.plan import Plan
from posttrain.rewards.registry import Reward, RewardSet
from posttrain.types import Completion, Request


def test_choices_by_hand() -> None:
    assert choose([True, True, None, None], 2) == Choice(take=(0, 1)), "nothing more is needed"
    assert choose([False, True, None, None], 2) == Choice(missing=(2,))
    assert choose([False, True, True, None], 2) == Choice(take=(1, 2))
    assert choose([False, None, True, None], 2) == Choice(missing=(1,)), "candidate 3 only if 1 is flat"
    assert choose([False, False, True, False], 2) == Choice(take=(0, 2), short=1), "the bound: a flat one stays"
    assert choose([False, False], 2) == Choice(take=(0, 1), short=2)
    assert [extras_due(flat, 3, 1) for flat in range(6)] == [1, 1, 2, 3, 3, 3]


def sampler(prompts: int, **given: Any) -> PromptSampler:
    options = {"prompts_per_batch": 2, "num_generations": 2, "repeat_count": 1, "num_batches": 4, "shuffle": True, "seed": 3}
    return PromptSampler(prompts, **(options | given))


def test_extra_prompts_are_others_each_once_before_any_comes_again() -> None:
    made = sampler(7)
    for batch in range(4):
        extra = [made.extra(batch, place) for place in range(10)]
        assert sorted(extra[:5] + made.batch(batch)) == list(range(7)) and extra[5:] == extra[:5]
        assert extra == [sampler(7).extra(batch, place) for place in range(10)]
    assert sampler(2).extra(0, 0) == sampler(2).batch(0)[0], "a batch of all prompts has no others"


def plan(extra: int) -> Plan:
    """Prompts 0 to 9, two a batch; completions are right where the scripted verdict says so."""
    prompts = [{"prompt_index": n, "prompt": f"p{n}", "prompt_ids": [n + 1], "answer": str(n)} for n in range(10)]
    sampling = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=4, stop=(), run_seed=3)
    return Plan(
        prompts=prompts,
        sampler=sampler(10),
        groups_per_batch=2,
        num_batches=3,
        num_generations=2,
        sampling=sampling,
        extra_groups=extra,
    )


def flat_prompt(index: int) -> bool:
    return index % 3 != 0


def completions(request: Request) -> list[Completion]:
    """Tokens that say which prompt and seed they are of; both samples of a flat prompt are right, else the first alone."""
    index = request.prompt_ids[0] - 1
    return [
        Completion(
            request_id=request.id,
            sample=sample,
            prompt_ids=request.prompt_ids,
            token_ids=[index if flat_prompt(index) or sample == 0 else 99, request.seed % 97],
            logprobs=[-1.0, -1.0],
            plain_logprobs=[-1.0, -1.0],
            versions=[0, 0],
            finish_reason="stop",
        )
        for sample in range(2)
    ]


def right(prompts, completions, *, answer, **_):
    return [float(text.split()[0] == gold) for text, gold in zip(completions, answer, strict=True)]


def scorer() -> Scorer:
    return Scorer(RewardSet([Reward(name="maths", function=right)]), lambda ids: [" ".join(map(str, one)) for one in ids])


def own(batch: int, extra: int, ahead: int = 0) -> Any:
    """(collected, prompts asked for)."""
    asked: list[int] = []

    def generate(requests: list[Request], version: int) -> list[list[Completion]]:
        asked.extend(request.prompt_ids[0] - 1 for request in requests)
        return [completions(request) for request in requests]

    made = plan(extra)
    source = OwnSource(
        generate=generate,
        scorer=scorer(),
        prompts=made.prompts,
        order=made.sampler,
        sampling=made.sampling,
        num_generations=2,
        extra_groups=extra,
        ahead=ahead,
    )
    rows = [made.prompts[index] for index in made.sampler.batch(batch)]
    return source.collect(rows, step=batch, batch=batch), asked


def by_hand(batch: int, extra: int) -> tuple[list[int], list[int], int]:
    """(prompts trained on, prompts sampled, places left flat), walking along the candidates."""
    order = [*sampler(10).batch(batch), *(sampler(10).extra(batch, place) for place in range(extra))]
    count = 2
    while count < len(order) and sum(not flat_prompt(index) for index in order[:count]) < 2:
        count += 1
    good = [index for index in order[:count] if not flat_prompt(index)][:2]
    flat = [index for index in order[:count] if flat_prompt(index)][: 2 - len(good)]
    return [index for index in order if index in good + flat], order[:count], len(flat)


@pytest.mark.parametrize("extra", [0, 1, 3, 8])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_learner_that_samples_itself(batch: int, extra: int) -> None:
    collected, asked = own(batch, extra)
    trained, sampled, short = by_hand(batch, extra) if extra else (sampler(10).batch(batch), sampler(10).batch(batch), 0)
    assert [row["prompt_index"] for row in collected.rows] == trained
    assert sorted(asked) == sorted(sampled) and collected.short == short
    assert [group[0].prompt_ids[0] - 1 for group in collected.completions] == trained
    assert collected.ratings.flat == [flat_prompt(index) for index in trained]
    counts = collected.counts()
    assert counts["groups/flat"] == sum(flat_prompt(index) for index in sampled)
    assert counts["groups/passed_over"] == len(sampled) - 2 and counts["groups/short"] == short
    if collected.passed_over:
        assert all(judged == 2 for _, _, judged in answers(*collected.passed_over))


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_over_sampling_takes_the_same_groups_sooner(batch: int) -> None:
    collected, asked = own(batch, 8, ahead=8)
    plain, _ = own(batch, 8)
    assert collected.rows == plain.rows and collected.completions == plain.completions and len(asked) == 10
    assert collected.counts()["groups/passed_over"] == 8


def test_seeds_of_extra_samples_are_their_own() -> None:
    made = plan(3)
    slot = 5 * 1 + 2  # first extra candidate of batch 1
    row = made.row(slot)
    request = made.request(slot, row)
    assert row["prompt_index"] == made.sampler.extra(1, 0)
    assert request.seed == derived_seed("rollout", 3, 1, row["prompt_index"], "extra", 0)
    assert request.id == f"step-1-prompt-{row['prompt_index']}-extra-0"


def rated(slot: int, made: Plan) -> RatedGroup:
    row = made.row(slot)
    sampled = completions(made.request(slot, row))
    ratings = scorer().rate([row], [sampled])
    return RatedGroup(
        slot=slot,
        prompt_index=row["prompt_index"],
        completions=tuple(sampled),
        totals=tuple(ratings.totals[0]),
        parts={"maths": tuple(ratings.parts["maths"][0])},
        flat=ratings.flat[0],
        generator="a",
    )


def buffer(folder, extra: int, ahead: int = 0) -> ExperienceBuffer:
    return ExperienceBuffer(
        folder, groups_per_batch=2, num_batches=3, max_staleness=9, extra_groups=extra, ahead=ahead, patience_s=0.0
    )


@pytest.mark.parametrize(("extra", "ahead"), [(0, 0), (1, 0), (4, 0), (4, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_the_buffer_takes_what_the_learner_would_whatever_comes_first(tmp_path, extra: int, ahead: int, seed: int) -> None:
    """Slots are finished in random order, and the buffer is killed at random moments."""
    made, rng = plan(extra), random.Random(seed)
    served = buffer(tmp_path, extra, ahead)
    served.attach("one", 0)
    holding: list[int] = []
    for batch in range(3):
        while not (lease := served.lease("one", batch)).groups:
            orders = served.sync("a", version=0, holding=holding, want=rng.randrange(1, 4))
            holding = [slot for slot in holding if slot not in orders.drop] + list(orders.take)
            if holding and rng.random() < 0.7:
                slot = holding.pop(rng.randrange(len(holding)))
                served.put(rated(slot, made))
            if rng.random() < 0.1:
                served.close()
                served = buffer(tmp_path, extra, ahead)
        collected, _ = own(batch, extra, ahead)
        assert [group.prompt_index for group in lease.groups] == [row["prompt_index"] for row in collected.rows]
        assert [list(group.completions) for group in lease.groups] == [
            [Completion(**{**vars(c), "request_id": c.request_id}) for c in group] for group in collected.completions
        ]
        assert lease.short == collected.short
        if not ahead:
            passed = [] if collected.passed_over is None else [row["prompt_index"] for row in collected.passed_over[0]]
            assert [group.prompt_index for group in lease.passed_over] == passed
        served.ack("one", batch)
    served.close()


def test_a_flat_group_is_a_sign_of_life_too(tmp_path) -> None:
    made, served = plan(2), buffer(tmp_path, 2)
    served.attach("one", 0)
    slots = (0, 2)  # one of the batch's own, and an extra one
    seen = [served.lease("one", 0)]
    for slot in slots:
        served.put(replace(rated(slot, made), flat=True))
        seen.append(served.lease("one", 0))
    assert [lease.ready for lease in seen] == [0, 0, 0] and [lease.made for lease in seen] == [0, 1, 2]


def test_what_is_needed_no_more_is_dropped_and_not_kept(tmp_path) -> None:
    made = plan(4)
    served = buffer(tmp_path, 4, ahead=4)
    served.attach("one", 0)
    assert served.sync("a", version=0, holding=[], want=6).take == (0, 1, 2, 3, 4, 5)
    for slot in (2, 1, 0):
        assert served.put(replace(rated(slot, made), flat=slot == 0)) == "admitted"
    assert served.sync("a", version=0, holding=[3, 4, 5], want=0).drop == (3, 4, 5)
    assert served.put(rated(3, made)) == "spare" and served.counters()["spare"] == 1
    assert [group.slot for group in served.lease("one", 0).groups] == [1, 2]
    assert [group.slot for group in served.lease("one", 0).passed_over] == [0]


@pytest.mark.parametrize(
    ("truncated", "mode", "flat"),
    [
        ([False, False], "mask", True),
        ([True, False], "keep", True),
        ([True, False], "penalise", False),
        ([True, True], "penalise", True),
    ],
)
def test_flat_is_what_has_no_advantage_after_penalties(truncated, mode, flat) -> None:
    request = plan(0).request(0, plan(0).prompts[1])
    pair = [
        Completion(**{**vars(c), "finish_reason": "length" if cut else "stop"})
        for c, cut in zip(completions(request), truncated, strict=True)
    ]
    made = Scorer(
        RewardSet([Reward(name="maths", function=right)]),
        lambda ids: [" ".join(map(str, one)) for one in ids],
        truncated_completions=mode,
    )
    assert made.rate([plan(0).prompts[1]], [pair]).flat == [flat]


def test_a_group_of_which_nothing_is_trained_is_flat() -> None:
    made = plan(0)
    request = made.request(0, made.prompts[0])
    both = [Completion(**{**vars(c), "finish_reason": "length"}) for c in completions(request)]
    assert scorer().rate([made.prompts[0]], [both]).flat == [True], "rewards differ, but both are masked"
    unread = Scorer(RewardSet([Reward(name="none", function=lambda **_: [None, None])]), lambda ids: ["", ""])
    assert unread.rate([made.prompts[0]], [completions(request)]).flat == [True]


def test_ranks_share_the_extra_candidates() -> None:
    """Two ranks of one place each have the extra candidates 0, 2 and 1, 3."""
    made = plan(4)
    asked: dict[int, list[int]] = {0: [], 1: []}
    for rank, own_prompt in itertools.product((0, 1), [1]):

        def generate(requests: list[Request], version: int, rank: int = rank) -> list[list[Completion]]:
            asked[rank].extend(request.prompt_ids[0] - 1 for request in requests)
            return [[Completion(**{**vars(c), "token_ids": [99]}) for c in completions(request)] for request in requests]

        source = OwnSource(
            generate=generate,
            scorer=scorer(),
            prompts=made.prompts,
            order=made.sampler,
            sampling=made.sampling,
            num_generations=2,
            extra_groups=4,
            rank=rank,
            world_size=2,
        )
        collected = source.collect([made.prompts[own_prompt]], step=0, batch=0)
        assert collected.short == 1, "all are wrong, so all are flat"
    assert asked[0][1:] == [made.sampler.extra(0, 0), made.sampler.extra(0, 2)]
    assert asked[1][1:] == [made.sampler.extra(0, 1), made.sampler.extra(0, 3)]


def test_a_recipe_says_how_many() -> None:
    from posttrain.errors import ConfigError
    from tests.posttrain.test_grpo_split_buffer import split_recipe

    assert split_recipe(grpo={"max_extra_groups": 4, "extra_groups_ahead": 2}).grpo.max_extra_groups == 4
    with pytest.raises(ConfigError, match="extra_groups_ahead: 3, but grpo.max_extra_groups allows 2"):
        split_recipe(grpo={"max_extra_groups": 2, "extra_groups_ahead": 3})


def test_a_batch_is_dealt_in_contiguous_parts_and_what_concerns_all_of_it_once() -> None:
    from posttrain.grpo.split.deal import shares

    collected = replace(own(0, 8, ahead=8)[0], short=1, metrics={"staleness/max": 1.0})
    first, second = shares(collected, 2)
    assert [*first.rows, *second.rows] == collected.rows and [*first.completions, *second.completions] == collected.completions
    assert first.ratings.totals + second.ratings.totals == collected.ratings.totals
    sums = {name: value + second.counts()[name] for name, value in first.counts().items()}
    assert sums == collected.counts() and (first.metrics, second.metrics) == ({"staleness/max": 1.0}, {})
    with pytest.raises(ValueError, match="2 groups cannot be dealt evenly to 3 ranks"):
        shares(collected, 3)
