"""What a generator actor does with samples that have begun when newer weights arrive."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from posttrain.grpo.split.generator import GeneratorActor
from posttrain.types import Request
from tests.posttrain.rollout_models import make_generator, make_model


def make_actor(finish_first: bool, unfinished: str) -> GeneratorActor:
    """Without Ray: weights that have arrived already."""
    actor = GeneratorActor.__new__(GeneratorActor)
    arrived = [7]
    new = make_model(seed=1).state_dict()
    actor._inbox = SimpleNamespace(  # type: ignore[assignment]
        poll=lambda: arrived.pop() if arrived else None, staged=new, seconds=0.0, release=lambda: None
    )
    actor._board = SimpleNamespace(swapped=SimpleNamespace(remote=lambda *_: None))
    actor._plan = SimpleNamespace(num_generations=2)  # type: ignore[assignment]
    actor._engine = make_generator(make_model(), eos_token_ids=[], version=3, unfinished=unfinished)
    actor._name, actor._device, actor._max_sequences, actor._finish_first = "a", "cpu", 8, finish_first
    actor._version, actor._held, actor._making, actor._slots = 3, None, {}, {}
    return actor


def test_finish_holds_the_weights_until_no_sample_is_left():
    actor = make_actor(True, "finish")
    actor._engine.submit(Request(prompt_ids=[5, 6], n=2, max_tokens=6))
    done = []
    assert actor._room() == 4
    while not done:
        actor._update()
        assert actor._version == 3 and actor._room() == 0, "the new version waits, and no slot is taken meanwhile"
        done += actor._engine.step()
    assert [c.versions for c in done] == [[3] * 6] * 2
    actor._update()
    assert actor._version == 7 and actor._room() == 4


@pytest.mark.parametrize(("policy", "versions"), [("continue", [3, 3, 7, 7]), ("recompute", [3, 3, 7, 7]), ("restart", [7] * 4)])
def test_other_policies_take_them_at_once(policy, versions):
    actor = make_actor(False, policy)
    actor._engine.submit(Request(prompt_ids=[5, 6], n=2, max_tokens=4))
    for _ in range(2):
        actor._engine.step()
    actor._update()
    assert actor._version == 7
    done = []
    while not done:
        done += actor._engine.step()
    assert [c.versions for c in done] == [versions] * 2
