"""What one bad request or a mixed-precision learner must not do to the others."""

from __future__ import annotations

import pytest
import torch

from posttrain.errors import PosttrainError
from posttrain.models.loading import new_model
from posttrain.rollout import Generator
from posttrain.types import Request

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
