"""Small models, requests of all kinds and exact comparisons for the rollout engine's tests."""

from __future__ import annotations

import dataclasses
import random

import torch

from posttrain.models.sse_h import SSEHConfig, SSEHForCausalLM
from posttrain.rollout import Generator
from posttrain.types import Completion, Request

VOCAB, EOS, LENGTH = 48, 1, 96
MODELS = {  # the fixture `model` in conftest.py names them too
    "hybrid": {"layer_types": ["sse", "sse_gdn", "full_attention"]},
    "two routed": {"layer_types": ["sse", "sse"], "num_selected": 2},
    "attention": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "num_key_value_heads": 1},
}


def make_model(kind: str = "hybrid", seed: int = 0) -> SSEHForCausalLM:
    options = MODELS[kind]
    torch.manual_seed(seed)
    config = SSEHConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(options["layer_types"]),
        num_attention_heads=2,
        adapter_rank=4,
        gate_rank=4,
        chunk_size=8,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        **options,
    )
    return SSEHForCausalLM(config)


def make_generator(model, **options) -> Generator:
    return Generator(model, **{"eos_token_ids": [EOS], "max_sequences": 8, "max_length": LENGTH, **options})


def make_requests(count: int, seed: int = 0, **fixed) -> list[Request]:
    """Requests of all kinds: prompts of 1 to 40 tokens, 1 to 4 samples, every sampling parameter."""
    rng = random.Random(seed)
    return [
        Request(
            id=f"{seed}-{i}",
            prompt_ids=[rng.randrange(2, VOCAB) for _ in range(rng.choice((1, 2, 7, 8, 9, 17, 40)))],
            n=fixed.get("n", rng.randrange(1, 5)),
            temperature=rng.choice((0.0, 0.7, 1.0, 1.0)),
            top_p=rng.choice((1.0, 1.0, 0.8)),
            top_k=rng.choice((0, 0, 10)),
            min_p=rng.choice((0.0, 0.0, 0.02)),
            max_tokens=fixed.get("max_tokens", rng.randrange(1, 20)),
            seed=rng.randrange(1000),
        )
        for i in range(count)
    ]


def essence(completion: Completion):
    """All that must be equal, bit for bit."""
    fields = dataclasses.asdict(completion)
    router = fields.pop("router_indices")
    return fields, None if router is None else router.tolist()


def run_out(generator: Generator) -> list[Completion]:
    out = []
    while generator.has_unfinished:
        out += generator.step()
    return out


def by_sample(completions) -> dict:
    return {(c.request_id, c.sample): essence(c) for c in completions}


def plain_logprobs(model, completion: Completion, **options) -> torch.Tensor:
    """What the learner computes: one packed forward over prompt + completion."""
    ids = torch.tensor([completion.prompt_ids + completion.token_ids])
    with torch.no_grad():
        out = model(input_ids=ids[:, :-1], cu_seq_lens_q=torch.tensor([0, ids.shape[1] - 1], dtype=torch.int32), **options)
    logprobs = torch.log_softmax(out.logits[0].float(), -1).gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[len(completion.prompt_ids) - 1 :]
