"""The generator on Triton's decode state samples what it samples on the plain one, and its snapshots go on bitwise."""

import pytest
import torch

from posttrain.models import cache
from posttrain.models.sse_h import SSEHConfig, SSEHForCausalLM
from posttrain.rollout.engine import Generator
from posttrain.types import Completion, Request

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")]

LAYERS = ["sse", "full_attention"]
REQUESTS = [
    dict(prompt_ids=[5, 9, 2, 8, 7, 3, 4, 4, 6], n=2, max_tokens=7, seed=17, id="long"),
    dict(prompt_ids=[3, 2], n=1, max_tokens=5, seed=3, id="short"),
]


def make_generator() -> Generator:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = SSEHConfig(**sizes, layer_types=LAYERS, num_partitions=2, chunk_size=4)
    model = SSEHForCausalLM(config).eval()
    return Generator(model, eos_token_ids=[1], max_sequences=3, max_length=40, max_prefill_tokens=7)


def finish(generator: Generator) -> dict[tuple[str, int], Completion]:
    done = []
    while len(done) < 3:
        done += generator.step()
    return {(c.request_id, c.sample): c for c in done}


def test_samples_and_snapshots(monkeypatch):
    from posttrain.kernels.sse.triton_decode_pool import TritonChunkState

    plain = make_generator()
    for request in REQUESTS:
        plain.submit(Request(**request))
    want = finish(plain)
    monkeypatch.setattr(cache, "ChunkState", TritonChunkState)
    generator = make_generator()
    assert isinstance(generator._cache.states[0], TritonChunkState)
    for request in REQUESTS:
        generator.submit(Request(**request))
    for _ in range(4):
        assert not generator.step()
    snapshots = [generator.snapshot(request["id"]) for request in REQUESTS]
    found = finish(generator)
    for key, completion in want.items():
        assert found[key].token_ids == completion.token_ids
        assert found[key].logprobs == pytest.approx(completion.logprobs, abs=2e-6)
    other = make_generator()
    for snapshot in snapshots:
        other.restore(snapshot)
    for key, completion in finish(other).items():
        assert completion.token_ids == found[key].token_ids and completion.logprobs == found[key].logprobs
