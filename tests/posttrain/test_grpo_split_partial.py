"""Unfinished groups outlive the generator that began them: what the buffer keeps of them, and how another goes on."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from posttrain.grpo.sampler import PromptSampler
from posttrain.grpo.scoring import Scorer
from posttrain.grpo.split.buffer import ExperienceBuffer
from posttrain.grpo.split.generator import GeneratorActor
from posttrain.grpo.split.partial import COLUMNS, Note, Partial, Piece, TokenLog, snapshot_of
from posttrain.grpo.split.plan import Plan
from posttrain.rewards.registry import Reward, RewardSet
from posttrain.rollout import StreamedToken
from posttrain.types import Completion, Request
from tests.posttrain.rollout_models import essence, make_generator, make_model


def token(index: int, value: int, *, sample: int = 0, version: int = 0) -> StreamedToken:
    return StreamedToken(
        request_id="r",
        sample=sample,
        index=index,
        token_id=value,
        logprob=-value / 3,
        plain_logprob=-value / 7,
        version=version,
        finish_reason=None,
    )


def finished(sample: int, tokens: list[int]) -> Completion:
    return Completion(
        request_id="r",
        sample=sample,
        prompt_ids=[5],
        token_ids=tokens,
        logprobs=[-1.0] * len(tokens),
        plain_logprobs=[-1.0] * len(tokens),
        versions=[3] * len(tokens),
        finish_reason="stop",
    )


def test_notes_say_what_is_new_and_may_come_twice_or_be_lost() -> None:
    log, partial = TokenLog(), Partial()
    log.open("r")
    log.token(token(0, 1, version=2))
    log.token(token(1, 2, version=3))
    log.token(token(0, 9, sample=1))
    first = pickle.loads(pickle.dumps(log.note("r", [], partial.kept)))
    partial.add(first)
    assert partial.kept.lengths == {0: 2, 1: 1} and partial.oldest == 0
    lost = log.note("r", [], partial.kept)
    assert lost == Note(), "nothing is said twice"
    log.token(token(2, 3, version=3))
    second = log.note("r", [finished(1, [9, 8])], partial.kept)
    assert second.pieces[0].start == 2 and [c.sample for c in second.done] == [1]
    for note in (second, first, second):
        partial.add(note)
    assert partial.begun[0]["token_ids"].tolist() == [1, 2, 3] and partial.begun[0]["versions"].tolist() == [2, 3, 3]
    assert partial.begun[0]["logprobs"].tolist() == [-1 / 3, -2 / 3, -1.0], "to the last bit"
    assert list(partial.done) == [1] and 1 not in partial.begun
    empty = Partial()
    empty.add(second)  # a buffer that was restarted: what begins at token 2 is of no use
    assert empty.kept.lengths == {} and empty.kept.done == {1}
    again = log.note("r", [finished(1, [9, 8])], empty.kept)
    assert again.pieces[0].start == 0 and not again.done


def test_a_sample_that_begins_again_replaces_its_tokens() -> None:
    log, partial = TokenLog(), Partial()
    log.open("r")
    for index in range(3):
        log.token(token(index, index))
    partial.add(log.note("r", [], partial.kept))
    log.token(token(0, 7))
    partial.add(log.note("r", [], partial.kept))
    assert partial.begun[0]["token_ids"].tolist() == [7]
    assert log.note("r", [], partial.kept) == Note()


@pytest.mark.parametrize("length", [2, 3, 5])
def test_a_note_of_a_sample_that_began_again_starts_there(length: int) -> None:
    """Shorter than, as long as, and longer than what the buffer has: never two samples joined."""
    log, partial = TokenLog(), Partial()
    log.open("r")
    for index in range(3):
        log.token(token(index, 10 + index))
    partial.add(log.note("r", [], partial.kept))
    for index in range(1, length):
        log.token(token(index, 20 + index, version=1))
    note = log.note("r", [], partial.kept)
    assert note.pieces[0].start == 1
    partial.add(note)
    assert partial.begun[0]["token_ids"].tolist() == [10, *range(21, 20 + length)]
    log.token(token(length, 30, version=1))
    assert log.note("r", [], partial.kept).pieces[0].start == length, "once said, it is as new as any other"


def test_a_snapshot_has_what_is_not_done() -> None:
    request = Request(id="r", prompt_ids=[5], n=3)
    partial = Partial()
    columns = {name: np.asarray([7], dtype) for name, dtype in COLUMNS.items()}
    partial.add(Note(done=(finished(0, [1]),), pieces={2: Piece(start=0, columns=columns)}))
    made = snapshot_of(partial, request)
    assert made is not None
    assert (made["pending"], [saved["sample"] for saved in made["sequences"]]) == ([1], [2])
    partial.add(Note(done=(finished(1, [1]), finished(2, [1]))))
    assert snapshot_of(partial, request) is None


def buffer(folder, *, staleness: int = 0) -> ExperienceBuffer:
    return ExperienceBuffer(folder, groups_per_batch=2, num_batches=2, max_staleness=staleness, patience_s=0.0)


def piece(start: int, *versions: int) -> Piece:
    return Piece(start=start, columns={name: np.asarray(versions, dtype) for name, dtype in COLUMNS.items()})


def test_the_buffer_gives_a_dead_generators_tokens_to_the_next(tmp_path) -> None:
    made = buffer(tmp_path)
    made.sync("a", version=0, holding=[], want=2)
    kept = made.keep("a", {0: Note(pieces={1: piece(0, 0, 0)}), 7: Note()})
    assert list(kept) == [0] and kept[0].lengths == {1: 2}, "slot 7 is not the generator's"
    assert made.sync("a", version=0, holding=[0, 1], want=0).partials == {}
    made.retire("a")
    assert made.keep("a", {0: Note(pieces={1: piece(2, 0)})}) == {}, "a message that was still on its way"
    orders = made.sync("b", version=0, holding=[], want=2)
    assert orders.take == (0, 1) and list(orders.partials) == [0] and made.counters()["continued"] == 1
    assert orders.partials[0].kept.lengths == {1: 2}
    made.retire("b")  # before it said a word
    assert made.sync("c", version=0, holding=[], want=1).partials[0].kept.lengths == {1: 2}


def test_tokens_that_have_become_too_old_are_not_continued(tmp_path) -> None:
    made = buffer(tmp_path, staleness=1)
    made.sync("a", version=0, holding=[], want=4)
    made.keep("a", {3: Note(pieces={0: piece(0, 0, 1)})})
    made.close()
    strict = buffer(tmp_path, staleness=0)
    strict.sync("a", version=1, holding=[3], want=0)
    strict.keep("a", {3: Note(pieces={0: piece(0, 0, 1)})})
    strict.retire("a")
    orders = strict.sync("b", version=1, holding=[], want=4)
    assert orders.take == (0, 1, 2, 3) and orders.partials == {}


class Here:
    """An actor's handle for an object of this process: a reference is the value."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(getattr(self._target, name))})


class Turns(GeneratorActor):
    """A generator whose turns the test takes."""

    def _arrived(self, reference: Any, since: float, late: str) -> Any:
        return reference

    def begin(self, engine: Any, version: int = 0) -> Turns:
        self._engine, self._max_sequences, self._version = engine, 8, version
        engine.on_token = self._log.token
        return self

    def turn(self, *, keep: bool = True) -> None:
        for _ in range(2):  # a question, and its answer
            self._talk()
        self._step()
        self._deliver()
        if keep:
            self._kept_at = -float("inf")
            for _ in range(2):
                self._keep()


def plan() -> Plan:
    prompts = [{"prompt_index": n, "prompt": f"p{n}", "prompt_ids": list(range(5, 9 + 6 * n)), "answer": ""} for n in range(4)]
    sampler = PromptSampler(4, prompts_per_batch=2, num_generations=3, repeat_count=1, num_batches=2, shuffle=False, seed=3)
    sampling = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=24, stop=(), run_seed=3)
    return Plan(prompts=prompts, sampler=sampler, groups_per_batch=2, num_batches=2, num_generations=3, sampling=sampling)


def actor(name: str, served: ExperienceBuffer, model: Any, **options: Any) -> Turns:
    always = Reward(name="always", function=lambda completions, **_: [1.0] * len(completions))
    rewards = Scorer(RewardSet([always]), lambda ids: [""] * len(ids))

    class Rewards:
        def rate(self, row: dict[str, Any], completions: list[Completion]) -> Any:
            return rewards.rate([row], [completions])

    made = Turns(
        name, lambda _: None, plan(), buffer=Here(served), rewards=[Here(Rewards())], board=None, limit_s=9.0, folder="."  # pyright: ignore
    )  # fmt: skip
    return made.begin(make_generator(model, return_router_indices=True, **options))


def groups(served: ExperienceBuffer) -> list[Any]:
    served.attach("one", 0)
    lease = served.lease("one", 0)
    assert lease.groups, lease.late
    return [essence(completion) for group in lease.groups for completion in group.completions]


@pytest.mark.parametrize("turns", [1, 5, 12])
def test_another_generator_goes_on_where_a_dead_one_was_token_for_token(tmp_path, turns: int) -> None:
    """Some samples have ended, some are running, some have not begun: two slots of three samples, four at once."""
    model = make_model()
    whole = buffer(tmp_path / "whole")
    alone = actor("a", whole, model, max_sequences=4)
    while not whole._is_complete(0):
        alone.turn(keep=False)
    served = buffer(tmp_path / "killed")
    first = actor("a", served, model, max_sequences=4)
    for _ in range(turns):
        first.turn()
    first.turn(keep=False)  # the last tokens are lost with it
    known = {slot: sum(partial.kept.lengths.values()) for slot, partial in served._partials.items()}
    assert sum(known.values()) > 0
    served.retire("a")
    second = actor("b", served, model, max_sequences=5)
    while not served._is_complete(0):
        second.turn()
    for (one, routes), (other, expected_routes) in zip(groups(served), groups(whole), strict=True):
        for name in ("logprobs", "plain_logprobs"):  # a state from a prefill differs in its last bits
            assert one.pop(name) == pytest.approx(other.pop(name), abs=1e-5)
        assert (one, routes) == (other, expected_routes)
    assert second._engine.counts["recomputed"] > 0, "states were computed from tokens"
    assert second._engine.counts["generated"] < alone._engine.counts["generated"], "and tokens were not sampled again"
    assert served.counters()["continued"] > 0 and not served._partials, "what is admitted needs no memory"


def test_a_sample_that_goes_on_under_newer_weights_says_so_token_by_token(tmp_path) -> None:
    served = buffer(tmp_path, staleness=1)
    first = actor("a", served, make_model(), eos_token_ids=[])
    for _ in range(6):
        first.turn()
    served.retire("a")
    new = make_model(seed=1)
    second = actor("b", served, new, eos_token_ids=[], version=1)
    second._version = 1
    while not served._is_complete(0):
        second.turn()
    served.attach("one", 0)
    for group in served.lease("one", 0).groups:
        for completion in group.completions:
            assert completion.versions == sorted(completion.versions) and set(completion.versions) <= {0, 1}
            assert len(completion.versions) == 24
        assert group.oldest == 0, "a group is as old as its oldest token"
    assert any(set(c.versions) == {0, 1} for group in served.lease("one", 0).groups for c in group.completions)
