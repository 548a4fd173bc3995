"""The experience buffer without Ray: what is admitted, who makes what, leases, and the journal after every kind of death."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from posttrain.errors import RunFolderError
from posttrain.grpo.split.buffer import BufferError, ExperienceBuffer
from posttrain.grpo.split.groups import RatedGroup, from_fields, ratings_of, to_line
from posttrain.grpo.split.journal import Journal
from posttrain.types import Completion


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def buffer(folder: Path, *, staleness: int = 0, batches: int = 3, clock: Clock | None = None) -> ExperienceBuffer:
    """Two groups a batch: slots 0 1 | 2 3 | 4 5."""
    return ExperienceBuffer(
        folder, groups_per_batch=2, num_batches=batches, max_staleness=staleness, now=clock or Clock(), patience_s=0.0
    )


def group(slot: int, *versions: int, generator: str = "a") -> RatedGroup:
    """One completion, a token of each of `versions`."""
    versions = versions or (slot // 2,)
    completion = Completion(
        request_id=f"r{slot}",
        sample=0,
        prompt_ids=[5, 9],
        token_ids=[7 + v for v in versions],
        logprobs=[-0.1 * (v + 1) for v in versions],
        plain_logprobs=[-1 / 3] * len(versions),
        versions=list(versions),
        finish_reason="stop",
        router_indices=np.arange(6, dtype=np.uint8).reshape(1, 6, 1),
    )
    return RatedGroup(
        slot=slot, prompt_index=10 + slot, completions=(completion,), totals=(None,), parts={"maths": (1.0,)}, generator=generator
    )


def slots(lease) -> list[int]:
    return [g.slot for g in lease.groups]


def test_a_line_gives_back_what_was_written() -> None:
    before = group(3, 0, 1)
    after = from_fields(json.loads(to_line(before)))
    assert after.completions[0].router_indices.tolist() == before.completions[0].router_indices.tolist()
    assert after.completions[0].router_indices.dtype == np.uint8
    assert after.completions[0].logprobs == before.completions[0].logprobs, "to the last bit"
    assert (after.slot, after.prompt_index, after.totals, after.parts) == (3, 13, (None,), {"maths": (1.0,)})
    assert (after.oldest, after.completions[0].versions, after.completions[0].prompt_ids) == (0, [0, 1], [5, 9])
    assert ratings_of([after, after]).parts == {"maths": [[1.0], [1.0]]}


def test_a_group_needs_a_score_for_each_completion() -> None:
    with pytest.raises(ValueError, match="slot 0: a group needs one score a completion"):
        RatedGroup(slot=0, prompt_index=0, completions=(), totals=(), parts={})


def test_slots_go_out_in_order_and_no_further_than_the_version_allows(tmp_path) -> None:
    strict = buffer(tmp_path / "strict")
    assert strict.sync("a", version=-1, holding=[], want=9).take == (), "no weights, no work"
    assert strict.sync("a", version=0, holding=[], want=1).take == (0,)
    assert strict.sync("b", version=0, holding=[], want=9).take == (1,), "batch 1 needs version 1"
    ahead = buffer(tmp_path / "ahead", staleness=1)
    assert ahead.sync("a", version=0, holding=[], want=3).take == (0, 1, 2)
    assert ahead.sync("b", version=0, holding=[], want=9).take == (3,)
    assert ahead.sync("b", version=1, holding=[3], want=9).take == (4, 5), "and the run ends there"


def test_what_an_answer_lost_or_a_dead_generator_held_goes_to_others(tmp_path) -> None:
    made = buffer(tmp_path)
    assert made.sync("a", version=0, holding=[], want=2).take == (0, 1)
    # The answer never arrived: the generator says that it holds nothing, and gets the same again.
    assert made.sync("a", version=0, holding=[], want=2).take == (0, 1)
    assert made.retire("a") == [0, 1]
    assert made.sync("b", version=0, holding=[], want=2).take == (0, 1)
    late = made.sync("a", version=0, holding=[0, 1], want=2)
    assert late.stop and not late.take


def test_after_a_restart_generators_keep_what_they_hold(tmp_path) -> None:
    made = buffer(tmp_path)
    made.sync("a", version=0, holding=[], want=1)
    made.close()
    again = buffer(tmp_path)
    assert again.sync("a", version=0, holding=[0], want=0).drop == ()
    assert again.sync("b", version=0, holding=[], want=9).take == (1,)
    assert again.sync("b", version=0, holding=[0, 1], want=0).drop == (0,), "another makes it"


def test_stale_groups_are_refused_and_made_again(tmp_path) -> None:
    made = buffer(tmp_path, staleness=1)
    made.sync("a", version=1, holding=[], want=5)
    assert made.put(group(4, 2, 0)) == "stale", "one old token is enough: 2 - 0 > 1"
    assert made.put(group(4, 2, 1)) == "admitted"
    assert made.put(group(4, 2, 2)) == "duplicate"
    assert [made.counters()[name] for name in ("stale", "admitted", "duplicate")] == [1, 1, 1]
    with pytest.raises(BufferError, match="slot 6 does not exist: the run has 6"):
        made.put(group(6))


def test_a_batch_is_leased_in_order_once_and_acknowledged(tmp_path) -> None:
    made = buffer(tmp_path)
    made.attach("one", 0)
    assert made.put(group(1)) == "admitted"
    waiting = made.lease("one", 0)
    assert not waiting.groups and waiting.ready == 1
    made.put(group(0))
    assert slots(made.lease("one", 0)) == [0, 1], "in slot order, whoever was first"
    assert slots(made.lease("one", 0)) == [0, 1], "a repeated message gets the same"
    with pytest.raises(BufferError, match="batch 1 was asked for, but 0 is next"):
        made.lease("one", 1)
    made.ack("one", 0)
    made.ack("one", 0)
    with pytest.raises(BufferError, match="batch 0 was asked for, but 1 is next"):
        made.lease("one", 0)
    with pytest.raises(BufferError, match="batch 1 was acknowledged"):
        made.ack("one", 1)
    assert made.put(group(0)) == "trained"
    assert made.sync("a", version=1, holding=[0, 2], want=9) == made.sync("a", version=1, holding=[2, 3], want=0).__class__(
        take=(3,), drop=(0,), version=-1
    )


def test_a_learner_that_died_before_its_step_gets_the_batch_again_and_one_that_died_after_does_not(tmp_path) -> None:
    made = buffer(tmp_path)
    made.attach("one", 0)
    for slot in range(4):
        made.put(group(slot))
    made.lease("one", 0)
    made.attach("two", 0)  # died with the lease in its hands
    assert slots(made.lease("two", 0)) == [0, 1]
    made.ack("two", 0)
    made.attach("three", 1)  # died after its step, which its checkpoint holds
    assert slots(made.lease("three", 1)) == [2, 3]
    with pytest.raises(BufferError, match="learner two is not the one"):
        made.lease("two", 1)


def test_a_step_that_died_with_its_learner_is_taken_again_with_the_same_groups(tmp_path) -> None:
    made = buffer(tmp_path)
    made.attach("one", 0)
    for slot in range(2):
        made.put(group(slot))
    made.ack("one", 0)
    made.attach("two", 0)  # acknowledged, but no checkpoint held it
    assert slots(made.lease("two", 0)) == [0, 1]
    assert made.counters()["replayed"] == 1
    made.ack("two", 0)
    made.commit("two", 1)
    with pytest.raises(BufferError, match="learner continues at batch 0.*begins at 1.*Restore it"):
        made.attach("three", 0)


@pytest.mark.parametrize("torn", [b"", b'{"slot":1,"prompt', b"\x00\xff"])
def test_killed_at_any_moment_the_journal_gives_back_all_admitted_groups(tmp_path, torn) -> None:
    made = buffer(tmp_path, staleness=2)
    made.attach("one", 0)
    for slot in (0, 1, 3):
        made.put(group(slot, 0))
    made.ack("one", 0)
    made.close()
    with open(tmp_path / "batch-00000001.jsonl", "ab") as file:
        file.write(torn)
    again = buffer(tmp_path, staleness=2)
    assert again.state() == {"position": 1, "ready": 1, "taken": 0, "version": -1}
    assert again.sync("a", version=0, holding=[], want=9).take == (2, 4, 5)
    again.lease("one", 1)  # the learner lives on, and notices nothing
    again.put(group(2, 0))
    assert slots(again.lease("one", 1)) == [2, 3]
    again.close()
    third = buffer(tmp_path, staleness=2)
    assert slots(third.lease("one", 1)) == [2, 3], "what was appended after a torn line is whole"
    third.close()
    strict = buffer(tmp_path, staleness=0)
    assert strict.state()["ready"] == 0 and strict.counters()["stale"] == 2, "the recipe allows less than before"


def test_a_damaged_line_is_named_and_a_second_buffer_refused(tmp_path) -> None:
    made = buffer(tmp_path)
    made.put(group(0))
    with pytest.raises(RunFolderError, match="held by another process"):
        buffer(tmp_path)
    made.close()
    path = tmp_path / "batch-00000000.jsonl"
    path.write_bytes(b"garbage\n" + path.read_bytes())
    with pytest.raises(RunFolderError, match=r"batch-00000000.jsonl:1 is damaged.*delete that line"):
        buffer(tmp_path)


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch) -> None:
    journal = Journal(tmp_path)
    journal.add(0, group(0))
    whole = (tmp_path / "batch-00000000.jsonl").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("posttrain.grpo.split.journal.os.fsync", full)
        with pytest.raises(RunFolderError, match=r"no space left.*--resume"):
            journal.add(0, group(1))
    assert (tmp_path / "batch-00000000.jsonl").read_bytes() == whole
    journal.add(0, group(1))
    assert sorted(journal.read(0)) == [0, 1]


def test_who_is_late_is_named(tmp_path) -> None:
    clock = Clock()
    made = buffer(tmp_path, clock=clock)
    made.attach("one", 0)
    assert made.lease("one", 0).late[0] == "slot 0: nobody has taken it; generators: none has said a word yet"
    made.sync("a", version=0, holding=[], want=1)
    clock.seconds = 40.0
    made.sync("b", version=-1, holding=[], want=0)
    clock.seconds = 42.0
    assert made.lease("one", 0).late == (
        "slot 0: with a for 42 s, heard of 42 s ago at version 0",
        "slot 1: nobody has taken it; generators: a (version 0, heard of 42 s ago), b (version -1, heard of 2 s ago)",
    )


def test_settings_that_cannot_be(tmp_path) -> None:
    with pytest.raises(ValueError, match="max_staleness=-1, but it must be at least 0"):
        buffer(tmp_path, staleness=-1)


def split_recipe(**sections):
    from posttrain.config import recipe_from_dict

    grpo = {"placement": "split", "per_device_train_batch_size": 8, "num_generations": 4, **sections.pop("grpo", {})}
    init = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "layer_types": ["sse"]}
    given = {"name": "x", "stages": ["grpo"], "model": {"init": init, "tokenizer": "arithmetic"}, "grpo": grpo}
    return recipe_from_dict({**given, "data": {"prompts": {"kind": "arithmetic"}}, **sections})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"grpo": {"placement": "apart"}}, "grpo.placement"),
        ({"grpo": {"max_staleness": -1}}, "grpo.max_staleness"),
        (
            {"grpo": {"steps_per_generation": 1, "gradient_accumulation_steps": 2}},
            "a batch is 1 micro-steps and .* is 2",
        ),
        ({"ray": {"num_cpus": 2}, "grpo": {"generators": 2}}, "ray.num_cpus: 2, but 1 learners and 2 generators hold 3"),
    ],
)
def test_recipes_that_cannot_be_split(sections, message) -> None:
    from posttrain.errors import ConfigError

    with pytest.raises(ConfigError, match=message):
        split_recipe(**sections)


def test_a_split_recipe_keeps_trls_arguments_apart() -> None:
    made = split_recipe(grpo={"generators": 3, "max_staleness": 2})
    assert (made.grpo.placement, made.grpo.generators, made.grpo.max_staleness) == ("split", 3, 2)
    assert made.grpo.arguments == {"per_device_train_batch_size": 8, "num_generations": 4}
