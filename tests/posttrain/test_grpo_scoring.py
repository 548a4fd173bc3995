"""Completions -> rewards -> groups -> tensors, with what must be left out left out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from posttrain.grpo.experience import collate
from posttrain.grpo.metrics import mismatch_sums
from posttrain.grpo.rollouts import write_rollouts
from posttrain.grpo.scoring import Scorer
from posttrain.rewards.registry import Reward, RewardSet
from posttrain.types import Completion

ROWS = [
    {"id": "a", "prompt": "1+1", "prompt_ids": [1, 2], "prompt_index": 4, "answer": "2", "level": 1},
    {"id": "b", "prompt": "?", "prompt_ids": [3], "prompt_index": 5, "answer": "no number", "level": 2},
]


class Calls:
    """Rewards that remember what they were given; the gold "no number" cannot be read."""

    def __init__(self) -> None:
        self.columns: dict[str, list[object]] = {}

    def accuracy(self, prompts, completions, **columns):
        self.columns = {"prompts": prompts, "completions": completions, **columns}
        golds = columns["answer"]
        return [
            None if gold == "no number" else float(text.endswith(gold)) for gold, text in zip(golds, completions, strict=True)
        ]

    def format(self, prompts, completions, **columns):
        return [1.0] * len(completions)

    def as_set(self) -> RewardSet:
        return RewardSet(
            [
                Reward(name="accuracy", function=self.accuracy, required=True),
                Reward(name="format", function=self.format, weight=0.5),
            ]
        )


def completion(row: int, sample: int, ids: list[int], reason: str = "stop") -> Completion:
    return Completion(
        request_id=str(row),
        sample=sample,
        prompt_ids=ROWS[row]["prompt_ids"],
        token_ids=ids,
        logprobs=[-0.5] * len(ids),
        plain_logprobs=[-0.5] * len(ids),
        versions=[7] * len(ids),
        finish_reason=reason,  # type: ignore[arg-type]
        router_indices=torch.zeros(2, len(ROWS[row]["prompt_ids"]) + len(ids) - 1, 1, dtype=torch.int64),
    )


COMPLETIONS = [
    [completion(0, 0, [5, 2]), completion(0, 1, [3]), completion(0, 2, [4, 4, 2], "length"), completion(0, 3, [2])],
    [completion(1, 0, [2]), completion(1, 1, [3]), completion(1, 2, [3, 3], "length"), completion(1, 3, [2])],
]


def scorer(calls: Calls | None = None, **given) -> Scorer:
    return Scorer((calls or Calls()).as_set(), lambda rows: ["".join(map(str, ids)) for ids in rows], **given)


def score(calls: Calls | None = None, **given):
    return scorer(calls, **given).score(ROWS, COMPLETIONS, gather=lambda x: x)


def test_rewards_get_text_ids_and_columns_once_a_completion():
    calls = Calls()
    score(calls)
    assert calls.columns["completions"] == ["52", "3", "442", "2", "2", "3", "33", "2"]
    assert calls.columns["prompts"] == ["1+1"] * 4 + ["?"] * 4
    assert calls.columns["answer"] == ["2"] * 4 + ["no number"] * 4 and calls.columns["level"] == [1] * 4 + [2] * 4
    assert calls.columns["completion_ids"][0] == [5, 2] and "prompt_ids" not in calls.columns


def test_columns_named_like_what_rewards_are_given_do_not_collide():
    calls = Calls()
    rows = [{**row, "completions": "x", "prompts": "y", "completion_ids": "z"} for row in ROWS]
    scorer(calls).score(rows, COMPLETIONS, gather=lambda x: x)
    assert calls.columns["completions"][0] == "52" and calls.columns["prompts"][0] == "1+1"


def test_none_is_never_a_wrong_zero():
    scored = score(scale_rewards="none")
    # Rewards 1.5 0.5 1.5 1.5, mean 1.25.
    assert scored.groups[0].advantages == (0.25, -0.75, 0.25, 0.25)
    assert scored.groups[1].rewards == (None,) * 4 and scored.groups[1].advantages == (0.0,) * 4
    metrics = scored.metrics(lambda x: x)
    assert metrics["unreadable_gold"] == 4 and metrics["zero_variance_groups"] == 0 and metrics["verifier_timeouts"] == 0
    assert metrics["reward"] == 1.25 and metrics["accuracy"] == 0.75 and metrics["rewards/format/mean"] == 1
    assert metrics["completions/clipped_ratio"] == 0.25


@pytest.mark.parametrize(
    ("mode", "masked", "rewards"),
    [
        ("mask", [False, False, True, False], (1.5, 0.5, 1.5, 1.5)),
        ("penalise", [False, False, False, False], (1.5, 0.5, -2.0, 1.5)),
        ("keep", [False, False, False, False], (1.5, 0.5, 1.5, 1.5)),
    ],
)
def test_truncated_completions(mode, masked, rewards):
    scored = score(truncated_completions=mode, truncation_penalty=-2.0)
    assert scored.masked[0] == masked and scored.groups[0].rewards == rewards
    assert scored.masked[1] == [True] * 4, "what was not judged never enters the loss"


def test_collate_by_hand():
    scored = score()
    batch = collate(scored.groups, pad_token_id=0, masked=scored.masked, version=7, replay_router=True)
    assert batch["prompt_ids"][[0, 4]].tolist() == [[1, 2], [0, 3]] and batch["prompt_mask"][[0, 4]].tolist() == [[1, 1], [0, 1]]
    assert batch["completion_ids"][:3].tolist() == [[5, 2, 0], [3, 0, 0], [4, 4, 2]]
    assert batch["completion_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]] + [[0, 0, 0]] * 4
    assert batch["completion_lengths"] == [2, 1, 0, 1, 0, 0, 0, 0] and batch["prompt_lengths"] == [2] * 4 + [1] * 4
    assert batch["sampling_per_token_logps"][0].tolist() == [-0.5, -0.5, 0.0]
    assert len(batch["router_indices"]) == 8 and next(iter(batch)) == "prompt_ids"
    with pytest.raises(ValueError, match="no router choices"):
        bare = [[Completion(**{**vars(c), "router_indices": None}) for c in group] for group in COMPLETIONS]
        collate(
            scorer().score(ROWS, bare, gather=lambda x: x).groups,
            pad_token_id=0,
            masked=scored.masked,
            version=7,
            replay_router=True,
        )


def test_what_a_required_reward_did_not_judge_is_left_out_of_normalised_sums_too():
    required = Reward(name="a", function=lambda **_: [None, 1.0, 0.0, 1.0], required=True)
    other = Reward(name="b", function=lambda **_: [9.0, 0.0, 1.0, 1.0])
    made = Scorer(RewardSet([required, other]), lambda rows: [""] * len(rows), aggregation="normalize_then_sum")
    scored = made.score(ROWS[:1], COMPLETIONS[:1], gather=lambda x: x)
    assert scored.masked[0][0] and scored.groups[0].rewards[0] is None and scored.groups[0].advantages[0] == 0
    # a: 1 0 1 and b: 0 1 1 have mean 2/3 and deviation 1/sqrt(3), so that the sums are -1, -1, 2 times 1/sqrt(3).
    scale = 1 / 3 / (3**-0.5 + 1e-4)
    assert scored.groups[0].rewards[1:] == pytest.approx((-scale, -scale, 2 * scale), rel=1e-5)


def test_log_probabilities_that_are_not_finite_are_refused():
    scored = score()
    broken = Completion(**{**vars(COMPLETIONS[0][1]), "logprobs": [math.nan]})
    groups = [replace(scored.groups[0], completions=(COMPLETIONS[0][0], broken, *COMPLETIONS[0][2:]))]
    with pytest.raises(ValueError, match="0, sample 1: the generator's log-probabilities are not finite"):
        collate(groups, pad_token_id=0, masked=scored.masked[:1], version=7)


def test_rollout_table(tmp_path: Path):
    path = write_rollouts(tmp_path / "rollouts", 12, score().records(12))
    assert path.name == "step-000012.parquet" and [p.name for p in path.parent.iterdir()] == [path.name]
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == 8 and rows[0]["completion"] == "52" and rows[0]["completion_ids"] == [5, 2] and rows[0]["id"] == "a"
    assert dict(rows[0]["rewards"]) == {"accuracy": 1.0, "format": 1.0} and rows[0]["correct"] is True
    assert rows[5]["reward"] is None and rows[5]["correct"] is None and rows[2]["finish_reason"] == "length"
    assert rows[0]["version"] == 7 and rows[0]["logprob_mean"] == -0.5 and rows[4]["prompt_index"] == 5


def test_mismatch_by_hand():
    trainer, generator = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -2.0, 0.0]])
    absolute, k3, count = mismatch_sums(trainer, generator, torch.tensor([[1, 1, 0]])).tolist()[0]
    assert (absolute, count) == (0.5, 2)
    assert k3 == pytest.approx(math.exp(0.5) - 1 - 0.5)
