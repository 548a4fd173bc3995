"""What one bad request or a mixed-precision learner must not do to the others."""

from __future__ import annotations

import contextlib

import pytest
import torch

from posttrain.errors import PosttrainError
from posttrain.models.loading import new_model
from posttrain.rollout import Generator
from posttrain.types import Request
from tests.posttrain.rollout_models import by_sample, run_out

TYPES = [["sse"], ["sse_gdn"], ["full_attention"], ["sliding_attention"], ["sse", "sse_gdn", "full_attention"]]


def make_model(types: list[str]):
    fields = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": len(types), "layer_types": types,
        "num_attention_heads": 2, "adapter_rank": 4, "chunk_size": 8, "sliding_window": 8, "initializer_range": 0.2,
    }  # fmt: skip
    return new_model(fields, 0)


@pytest.mark.parametrize("types", TYPES)
def test_slots_of_a_broken_request_are_clean_again(types):
    """One token's embedding is NaN. Whoever gets the slots of a request that read it is as well as before."""
    model = make_model(types)
    generator = Generator(model, eos_token_ids=[], max_sequences=2, max_length=64)
    good = Request(id="good", prompt_ids=[5, 6], n=2, max_tokens=12)
    before = generator.generate([good])[0]
    poison = min(set(range(10, 50)).difference(*(c.token_ids for c in before)))
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    for _ in range(3):  # more often than there are slots
        with pytest.raises(PosttrainError, match="NaN"):
            generator.generate([Request(prompt_ids=[5, 6, 7, 8, 9, poison], n=4, max_tokens=3)])
    after = generator.generate([good])[0]
    assert [(c.token_ids, c.logprobs) for c in after] == [(c.token_ids, c.logprobs) for c in before]


@pytest.mark.parametrize("read_late", [False, True])
@pytest.mark.parametrize("end", ["abort", "update"])
@pytest.mark.parametrize("types", TYPES)
def test_what_ends_before_its_nan_was_seen_harms_nobody(types, end, read_late):
    """A request leaves NaN in states and pages, and goes before its logits were read: while its prompt is read in pieces, or
    with its first tokens on their way."""
    model = make_model(types)
    good = Request(id="good", prompt_ids=[5, 6], n=2, max_tokens=12)
    options = {"eos_token_ids": [], "max_sequences": 2, "max_length": 64, "max_prefill_tokens": 16, "read_late": read_late}
    before = Generator(model, **options).generate([good])[0]
    poison = min(set(range(10, 50)).difference(*(c.token_ids for c in before)))
    healthy = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for steps in (1, 2) if read_late else (1,):
        with torch.no_grad():
            model.model.embed_tokens.weight[poison] = float("nan")
        generator = Generator(model, **options)
        generator.submit(Request(id="bad", prompt_ids=[poison] + [7] * 31, n=2, max_tokens=3))
        for _ in range(steps):
            generator.step()
        if end == "update":
            with contextlib.suppress(PosttrainError):
                generator.update_weights(1, healthy)
        generator.abort("bad")
        with contextlib.suppress(PosttrainError):  # drained by the update, and told by the next step
            run_out(generator)
        after = generator.generate([good])[0]
        assert [(c.token_ids, c.logprobs) for c in after] == [(c.token_ids, c.logprobs) for c in before]


@pytest.mark.parametrize("types", TYPES)
def test_generation_under_autocast_is_the_learners_policy(types):
    """A learner in mixed precision keeps float32 weights and samples under autocast."""
    model = make_model(types).train()
    with torch.autocast("cpu", torch.bfloat16):
        generator = Generator(model, eos_token_ids=[], max_sequences=3, max_length=64, return_router_indices=True)
        completions = generator.generate([Request(prompt_ids=[5, 6, 7], n=3, max_tokens=30, seed=2)])[0]
        for c in completions:
            ids = torch.tensor([c.prompt_ids + c.token_ids])
            routes = {} if c.router_indices is None else {"router_indices": c.router_indices.long()}
            with torch.no_grad():
                logits = model(ids[:, :-1], **routes).logits[0].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[2:, 0]
            assert (logprobs - torch.tensor(c.plain_logprobs)).abs().mean() < 2e-2


BAD_REQUESTS = [
    ({"prompt_ids": []}, "bad: the prompt is empty; at least one token id is needed"),
    ({"prompt_ids": [3] * 64}, "bad: the prompt has 64 tokens, but max_length=64 leaves at most 63 for it; shorten the prompt"),
    ({"prompt_ids": [3, 50]}, "bad: token id 50 is outside the vocabulary, 0 to 49"),
    ({"prompt_ids": [3, -1]}, "bad: token id -1 is outside the vocabulary, 0 to 49"),
    ({"n": 0}, "bad: n=0, but it must be at least 1"),
    ({"temperature": -0.1}, r"bad: temperature=-0.1, but it must be 0 \(greedy\) or a finite number above it"),
    ({"temperature": float("nan")}, "bad: temperature=nan"),
    ({"temperature": float("inf")}, "bad: temperature=inf"),
    ({"top_p": 0.0}, r"bad: top_p=0.0, but it must be in \(0, 1\]"),
    ({"top_p": float("nan")}, "bad: top_p=nan"),
    ({"top_k": -1}, r"bad: top_k=-1, but it must be 0 \(off\) or more"),
    ({"min_p": 1.0}, r"bad: min_p=1.0, but it must be in \[0, 1\)"),
    ({"max_tokens": 0}, "bad: max_tokens=0, but it must be at least 1"),
    ({"seed": -1}, "bad: seed=-1"),
    ({"stop": ("x",)}, "bad: stop strings .* need a tokenizer"),
    ({"id": "good0"}, "good0: an unfinished request already has this id"),
]


@pytest.mark.parametrize("read_late", [False, True])
def test_bad_requests_leave_those_in_flight_alone(read_late):
    """One of every kind at every step of two requests that run; none of them is noticed."""
    good = [Request(id=f"good{i}", prompt_ids=[5, 6 + i], n=2, max_tokens=2 * len(BAD_REQUESTS), seed=i) for i in range(2)]
    model = make_model(TYPES[-1])
    options = {"eos_token_ids": [], "max_sequences": 4, "max_length": 64}
    alone = by_sample(c for group in Generator(model, **options).generate(good) for c in group)
    generator = Generator(model, **options, read_late=read_late)
    for request in good:
        generator.submit(request)
    out = []
    for fields, message in BAD_REQUESTS:
        out += generator.step()
        with pytest.raises(ValueError, match=message):
            generator.submit(Request(**{"id": "bad", "prompt_ids": [4], **fields}))
    assert not out and generator.num_running == 4
    assert by_sample(run_out(generator)) == alone


def test_a_top_k_beyond_every_number_is_off():
    """Above the vocabulary nothing is cut off, and no size of the number may stop the engine."""
    generator = Generator(make_model(["sse"]), eos_token_ids=[], max_sequences=4, max_length=64)
    limits = (0, 50, 2**63 - 1, 2**63, 10**30)
    groups = generator.generate([Request(prompt_ids=[5, 6], max_tokens=5, seed=3, top_k=limit) for limit in limits])
    tokens = [group[0].token_ids for group in groups]
    assert all(own == tokens[0] for own in tokens)


def test_greedy_runs_beside_sampled_requests():
    """Temperature 0 is a request like others: its tokens are the likeliest ones, and the sampled ones beside it are as alone."""
    model = make_model(TYPES[-1])
    options = {"eos_token_ids": [], "max_sequences": 4, "max_length": 64}
    asked = [
        Request(id="greedy", prompt_ids=[5, 6], temperature=0, max_tokens=12),
        Request(id="almost", prompt_ids=[5, 6], temperature=1e-6, max_tokens=12, top_k=3),
        Request(id="cut", prompt_ids=[5, 6], temperature=0.8, top_p=0.9, max_tokens=12, seed=1),
        Request(id="plain", prompt_ids=[5, 6], max_tokens=12, seed=2),
    ]
    alone = by_sample(Generator(model, **options).generate([request])[0][0] for request in asked)
    together = [group[0] for group in Generator(model, **options).generate(asked)]
    assert by_sample(together) == alone
    greedy, almost = together[:2]
    assert greedy.token_ids == almost.token_ids and greedy.logprobs == [0.0] * 12
    ids = torch.tensor([[5, 6, *greedy.token_ids]])
    with torch.no_grad():
        assert model(ids).logits[0].argmax(-1)[1:-1].tolist() == greedy.token_ids


@pytest.mark.parametrize("read_late", [False, True])
@pytest.mark.parametrize("types", TYPES)
def test_weights_that_went_nan_name_every_request_and_good_ones_mend_it(types, read_late):
    model = make_model(types)
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in good.items()}
    options = {"eos_token_ids": [], "max_sequences": 2, "max_length": 64, "read_late": read_late}
    asked = [Request(id=name, prompt_ids=[5, 6, 7], n=2, max_tokens=12, seed=3) for name in "ab"]
    want = by_sample(c for group in Generator(model, **options).generate(asked) for c in group)
    generator = Generator(model, **options)
    for request in asked:
        generator.submit(request)
    for _ in range(4):
        generator.step()
    generator.update_weights(1, bad)
    for name in "ab":  # b gets the slots of a
        if read_late:
            assert not generator.step(), "the first tokens of the new weights are on their way"
        with pytest.raises(PosttrainError, match=rf"version 1.* for request\(s\) {name}; they were dropped. Look at the weights"):
            generator.step()
    assert not generator.has_unfinished
    generator.update_weights(0, good)
    found = by_sample(c for group in generator.generate(asked) for c in group)
    assert found == want, "no NaN is left in a state, a page or a ring"
