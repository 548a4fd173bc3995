"""The engine on real models: exactness, forks, what a completion holds, and requests that end early or are bad."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from posttrain.errors import PosttrainError
from posttrain.rollout import StreamedToken
from posttrain.types import Request
from tests.posttrain.rollout_models import (
    EOS,
    LENGTH,
    VOCAB,
    by_sample,
    make_generator,
    make_model,
    make_requests,
    plain_logprobs,
    run_out,
)

# -- exactness --------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_packed_forwards(model):
    """The hybrid gate for RL, live and with the router's choices replayed."""
    generator = make_generator(model, return_router_indices=True, max_prefill_tokens=16)
    for completions in generator.generate(make_requests(6)):
        for c in completions:
            live = plain_logprobs(model, c)
            assert (live - torch.tensor(c.plain_logprobs)).abs().max() < 1e-5
            if c.router_indices is None:
                assert not model.config.sse_layers
                continue
            shape = (len(model.config.sse_layers), len(c.prompt_ids) + len(c.token_ids) - 1, model.config.num_selected)
            assert tuple(c.router_indices.shape) == shape and c.router_indices.dtype == torch.uint8
            replayed = plain_logprobs(model, c, router_indices=c.router_indices.long())
            assert (replayed - torch.tensor(c.plain_logprobs)).abs().max() < 1e-5


def test_router_indices_are_the_packed_forwards(hybrid):
    completion = make_generator(hybrid, return_router_indices=True).generate([Request(prompt_ids=[5, 6, 7], max_tokens=30)])[0][0]
    ids = torch.tensor([(completion.prompt_ids + completion.token_ids)[:-1]])
    with torch.no_grad():
        out = hybrid(input_ids=ids, cu_seq_lens_q=torch.tensor([0, ids.shape[1]], dtype=torch.int32), output_router_indices=True)
    assert torch.equal(out.router_indices, completion.router_indices.long())


def test_a_sample_does_not_depend_on_company(model):
    """Alone, among 20 others, in other pools, in other orders, submitted late: the same tokens and the same bits."""
    mine = make_requests(3, seed=1)
    alone = {}
    for request in mine:
        alone |= by_sample(make_generator(model).generate([request])[0])
    others = make_requests(20, seed=2)
    for max_sequences in (2, 64):
        requests = [*others, *mine]
        random.Random(max_sequences).shuffle(requests)
        together = by_sample(c for group in make_generator(model, max_sequences=max_sequences).generate(requests) for c in group)
        assert {key: together[key] for key in alone} == alone, max_sequences

    generator = make_generator(model, max_sequences=6)
    arrivals = {0: others[:8], 3: mine[:1], 4: others[8:], 11: mine[1:]}
    late, step = [], 0
    while step < 12 or generator.has_unfinished:
        for request in arrivals.get(step, ()):
            generator.submit(request)
        late += generator.step()
        step += 1
    late = by_sample(late)
    assert {key: late[key] for key in alone} == alone


def test_reused_slots_carry_nothing_over(hybrid):
    request = Request(id="x", prompt_ids=[9, 8, 7], n=2, max_tokens=20, seed=4)
    fresh = by_sample(make_generator(hybrid).generate([request])[0])
    used = make_generator(hybrid)
    used.generate(make_requests(12, seed=6))
    assert by_sample(used.generate([request])[0]) == fresh


def test_long_prompts_are_prefilled_in_pieces(hybrid):
    rng = random.Random(3)
    request = Request(id="x", prompt_ids=[rng.randrange(2, VOCAB) for _ in range(61)], n=3, max_tokens=12, seed=8)
    pieces = make_generator(hybrid, max_prefill_tokens=24)
    completions = pieces.generate([*make_requests(5, seed=5), request])[-1]
    alone = make_generator(hybrid, max_prefill_tokens=24).generate([request])[0]
    assert by_sample(completions) == by_sample(alone)
    for c in completions:
        assert (plain_logprobs(hybrid, c) - torch.tensor(c.plain_logprobs)).abs().max() < 1e-5


def test_a_prompt_is_prefilled_once(hybrid):
    for max_sequences in (1, 3, 32):
        generator = make_generator(hybrid, max_sequences=max_sequences)
        requests = make_requests(6, seed=7, n=5, max_tokens=5)
        generator.generate(requests)
        assert generator.counts["prefilled"] == sum(len(request.prompt_ids) for request in requests), max_sequences


def test_samples_differ_and_seeds_matter(hybrid):
    ask = {"prompt_ids": [5, 6], "n": 6, "max_tokens": 20}
    one, two, again = (make_generator(hybrid).generate([Request(seed=seed, **ask)])[0] for seed in (1, 2, 1))
    assert len({tuple(c.token_ids) for c in one}) == 6
    assert {tuple(c.token_ids) for c in one}.isdisjoint(tuple(c.token_ids) for c in two)
    assert [c.token_ids for c in one] == [c.token_ids for c in again]


def test_running_sequences_never_exceed_the_pool(hybrid):
    generator = make_generator(hybrid, max_sequences=3)
    for request in make_requests(9, seed=9):
        generator.submit(request)
    highest = 0
    while generator.has_unfinished:
        generator.step()
        highest = max(highest, generator.num_running)
    assert highest == 3
    assert sorted(generator._scheduler.free) == list(range(4)), "every slot must come back"


# -- what a completion holds ------------------------------------------------------------------------------------------


def test_completions_end_for_the_right_reason(hybrid):
    groups = make_generator(hybrid, max_sequences=16).generate(make_requests(12, seed=10, max_tokens=60))
    reasons = set()
    for c in (c for group in groups for c in group):
        assert len(c.token_ids) == len(c.logprobs) == len(c.plain_logprobs) == len(c.versions) > 0
        assert EOS not in c.token_ids[:-1]
        assert (c.finish_reason == "stop") == (c.token_ids[-1] == EOS), "the end token stays in the ids"
        if c.finish_reason == "length":
            assert len(c.token_ids) == min(60, LENGTH - len(c.prompt_ids))
        reasons.add(c.finish_reason)
    assert reasons == {"stop", "length"}


def test_stop_strings_end_a_completion_and_stay_in_it(hybrid):
    """The stop string spans two tokens of a completion drawn without it; the prompt, which holds it too, does not count."""
    letters = [chr(0x4E00 + i) for i in range(VOCAB)]
    backend = Tokenizer(WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=letters[0]))
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    request = Request(id="x", prompt_ids=[5, 6], n=4, max_tokens=20, seed=1)
    free = make_generator(hybrid, eos_token_ids=[]).generate([request])[0]
    pair = free[2].token_ids[9:11]
    request = dataclasses.replace(request, prompt_ids=[5, 6], stop=("never", letters[pair[0]] + letters[pair[1]]))
    stopped = make_generator(hybrid, eos_token_ids=[], tokenizer=tokenizer).generate([request])[0]
    for before, after in zip(free, stopped, strict=True):
        ends = [i + 2 for i in range(19) if before.token_ids[i : i + 2] == pair]
        assert after.token_ids == before.token_ids[: ends[0] if ends else 20]
        assert after.finish_reason == ("stop" if ends else "length")
    assert stopped[2].finish_reason == "stop"
    prompted = dataclasses.replace(request, prompt_ids=pair, max_tokens=1)
    assert make_generator(hybrid, tokenizer=tokenizer).generate([prompted])[0][0].finish_reason == "length"


def test_the_context_limits_a_completion(hybrid):
    generator = make_generator(hybrid, eos_token_ids=[], max_length=12)
    completion = generator.generate([Request(prompt_ids=[3] * 11, max_tokens=100)])[0][0]
    assert (len(completion.token_ids), completion.finish_reason, completion.truncated) == (1, "length", True)
    completion = generator.generate([Request(prompt_ids=[3] * 5, max_tokens=100)])[0][0]
    assert len(completion.token_ids) == 7


def test_greedy_follows_the_packed_argmax(hybrid):
    completion = make_generator(hybrid).generate([Request(prompt_ids=[4, 5, 6], temperature=0, max_tokens=25)])[0][0]
    ids = torch.tensor([completion.prompt_ids + completion.token_ids])
    with torch.no_grad():
        logits = hybrid(input_ids=ids, cu_seq_lens_q=torch.tensor([0, ids.shape[1]], dtype=torch.int32)).logits[0]
    assert logits.argmax(-1)[2:-1].tolist() == completion.token_ids
    assert set(completion.logprobs) == {0.0}


def test_streaming_sees_every_token_in_order(hybrid):
    seen: list[StreamedToken] = []
    generator = make_generator(hybrid, on_token=seen.append, version=4)
    asked = [Request(id="a", prompt_ids=[7], n=3, max_tokens=15, temperature=0.6), Request(id="b", prompt_ids=[8])]
    for c in generator.generate(asked)[0]:
        mine = [token for token in seen if (token.request_id, token.sample) == ("a", c.sample)]
        assert [token.token_id for token in mine] == c.token_ids
        assert [token.logprob for token in mine] == c.logprobs
        assert [token.plain_logprob for token in mine] == c.plain_logprobs
        assert [token.index for token in mine] == list(range(len(mine)))
        assert [token.finish_reason for token in mine] == [None] * (len(mine) - 1) + [c.finish_reason]
        assert {token.version for token in mine} == {4}


def test_progress_reaches_the_total(hybrid):
    calls = []
    groups = make_generator(hybrid, max_sequences=4).generate(
        make_requests(5, seed=11), on_progress=lambda *call: calls.append(call)
    )
    completions = [c for group in groups for c in group]
    assert calls[-1] == (len(completions), len(completions), sum(len(c.token_ids) for c in completions))
    assert calls == sorted(calls)


# -- requests that end early, bad requests ----------------------------------------------------------------------------


def test_abort_returns_what_there_is_and_leaves_others_alone(hybrid):
    kept = Request(id="kept", prompt_ids=[5, 6], n=2, max_tokens=25, seed=3)
    alone = by_sample(make_generator(hybrid).generate([kept])[0])
    generator = make_generator(hybrid, eos_token_ids=[EOS], max_sequences=3)
    generator.submit(Request(id="gone", prompt_ids=[9, 9, 9], n=4, max_tokens=50, seed=12))
    generator.submit(kept)
    out = [c for _ in range(3) for c in generator.step()]
    assert generator.abort("gone") and not generator.abort("gone") and not generator.abort("never")
    out += run_out(generator)
    gone = sorted((c for c in out if c.request_id == "gone"), key=lambda c: c.sample)
    assert [c.sample for c in gone] == [0, 1, 2, 3]
    assert {len(c.token_ids) for c in gone if c.finish_reason == "abort"} == {0, 3}
    assert by_sample(c for c in out if c.request_id == "kept") == alone


def test_a_listener_may_abort(hybrid):
    def listen(token: StreamedToken) -> None:
        if token.index == 5:
            generator.abort(token.request_id)

    generator = make_generator(hybrid, eos_token_ids=[], on_token=listen)
    groups = generator.generate([Request(prompt_ids=[4], n=3, max_tokens=30), Request(prompt_ids=[5], max_tokens=4)])
    assert [c.finish_reason for c in groups[0]] == ["abort"] * 3
    assert {len(c.token_ids) for c in groups[0]} <= {5, 6}
    assert [c.finish_reason for c in groups[1]] == ["length"]


@pytest.mark.parametrize("read_late", [False, True])
@pytest.mark.parametrize("name", ["step", "generate", "snapshot", "update_weights"])
def test_a_listener_may_not_move_the_engine(hybrid, name, read_late):
    """Half of a step's tokens are appended while it listens: it is told so, and no sample changes."""
    requests = make_requests(3, seed=4)
    alone = by_sample(completion for group in make_generator(hybrid).generate(requests) for completion in group)
    refused = []

    def listen(token: StreamedToken) -> None:
        other = [Request(prompt_ids=[4])]
        given = {"generate": (other,), "snapshot": (token.request_id,), "update_weights": (1,)}.get(name, ())
        if token.index == 1:
            with pytest.raises(PosttrainError, match="after step"):
                getattr(generator, name)(*given)
            refused.append(token)

    generator = make_generator(hybrid, on_token=listen, read_late=read_late)
    for request in requests:
        generator.submit(request)
    assert by_sample(run_out(generator)) == alone and refused


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(id="r", prompt_ids=[3] * LENGTH), f"r: the prompt has {LENGTH} tokens, .*={LENGTH} leaves at most 95"),
        (Request(id="r", prompt_ids=[3, VOCAB]), f"token id {VOCAB} is outside the vocabulary, 0 to {VOCAB - 1}"),
        (Request(id="r", prompt_ids=[-1]), "token id -1"),
        (Request(id="used", prompt_ids=[3]), "used: an unfinished request already has this id"),
        (Request(id="r", prompt_ids=[3], stop=("x",)), "need a tokenizer"),
    ],
)
def test_bad_requests_are_refused(hybrid, request_, message):
    generator = make_generator(hybrid)
    generator.submit(Request(id="used", prompt_ids=[4]))
    with pytest.raises(ValueError, match=message):
        generator.submit(request_)
    with pytest.raises(ValueError, match=message):
        generator.generate([Request(id="fine", prompt_ids=[4]), request_])
    assert {c.request_id for c in run_out(generator)} == {"used"}, "a refused call leaves nothing behind"


def test_broken_logits_name_the_request_and_spare_others(hybrid):
    """One token's embedding is NaN: whoever reads it cannot be sampled, everybody else can."""
    poisoned = make_model()
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[40] = float("nan")
    good = Request(id="good", prompt_ids=[5, 6], max_tokens=4, top_k=5, seed=3)
    alone = by_sample(make_generator(poisoned, version=3).generate([good])[0])
    generator = make_generator(poisoned, version=3)
    generator.submit(Request(id="bad", prompt_ids=[5, 40], n=2))
    generator.submit(good)
    with pytest.raises(PosttrainError, match=r"version 3.*NaN.*bad;"):
        generator.step()
    assert by_sample(run_out(generator)) == alone
    assert sorted(generator._scheduler.free) == list(range(9))


def test_models_of_another_family_are_refused():
    with pytest.raises(ValueError, match="sse_h family .* 'Linear' was given"):
        make_generator(torch.nn.Linear(2, 2))


def test_sizes_are_checked(hybrid):
    for name, value in (("max_sequences", 0), ("max_length", 1), ("max_prefill_tokens", 0)):
        with pytest.raises(ValueError, match=name):
            make_generator(hybrid, **{name: value})
