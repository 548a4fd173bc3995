"""The generator on Triton's decode state samples what it samples on the plain one, and its snapshots go on bitwise."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.kernels.backend import use_fused_backend
from posttrain.models import cache
from posttrain.models.sse_h import SSEHConfig, SSEHForCausalLM
from posttrain.rollout.engine import Generator
from posttrain.rollout.graphs import DecodeGraphs
from posttrain.types import Completion, Request

pytest.importorskip("triton")
from posttrain.kernels.sse.triton_decode_pool import TritonChunkState

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")]

LAYERS = ["sse", "full_attention", "sse"]  # two that share pools
REQUESTS = [
    dict(prompt_ids=[5, 9, 2, 8, 7, 3, 4, 4, 6], n=2, max_tokens=7, seed=17, id="long"),
    dict(prompt_ids=[3, 2], n=1, max_tokens=5, seed=3, id="short"),
]


def make_generator(ends: Sequence[int] = (1,), **options: Any) -> Generator:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
    config = SSEHConfig(**sizes, layer_types=LAYERS, num_partitions=2, chunk_size=4)
    model = SSEHForCausalLM(config).eval()
    sizes = {"max_sequences": 3, "max_length": 40, "max_prefill_tokens": 7}
    return Generator(model, eos_token_ids=ends, **{**sizes, **options})


class FakeGraphs(DecodeGraphs):
    """Graphs without a GPU: a replay is a call with the captured tensors."""

    def _capture(self, step, size, kind):
        table = step(self._slots[:size], kind)
        if self._table is None:
            self._table = torch.zeros(self.sizes[-1], table.shape[1], dtype=table.dtype)
        shown = self._table[:size]
        return SimpleNamespace(replay=lambda: shown.copy_(step(self._slots[:size], kind)))

    def run(self, *args, **options):
        return super().run(*args, **options).clone()  # a GPU's copy to the host is in the stream


MIXED = [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 1.3}]


@pytest.mark.parametrize("mixed", [False, True])
def test_steps_as_a_gpu_takes_them(monkeypatch, mixed):
    """Padded rows, kinds of sampling, ends found on the device and tokens read a step late change no sample; the state of a
    sequence that has ended is left as it was."""
    options = MIXED if mixed else [{}] * 3
    requests = [
        Request(id=str(i), prompt_ids=[3 + i, 9, 5][: 1 + i % 3], max_tokens=4 + i, seed=i, **option)
        for i, option in enumerate(options)
    ]
    free = make_generator(max_sequences=5).generate(requests)
    end = free[2][0].token_ids[2]
    want = {c[0].request_id: c[0] for c in make_generator(ends=[1, end], max_sequences=5).generate(requests)}
    assert want["2"].finish_reason == "stop"
    monkeypatch.setattr(cache, "ChunkState", TritonChunkState)
    monkeypatch.setattr(TritonChunkState, "_check", lambda self, x, slots: slots)  # slots on a GPU are not looked at
    with use_fused_backend("triton"), torch.inference_mode():
        generator = make_generator(ends=[1, end], max_sequences=5, read_late=True, return_router_indices=True)
        runner = generator._runner
        runner._skips_ended = True
        runner.graphs = FakeGraphs(generator.model, 5, torch.device("cpu"))
        for request in requests:
            generator.submit(request)
        done, frozen = [], 0
        while generator.has_unfinished:
            ended = [s.slot for s in generator._scheduler.running if bool(runner.state.finished[s.slot])]
            before = [copy(runner, slot) for slot in ended]
            done += generator.step()
            frozen += len(ended)
            for slot, state in zip(ended, before, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(copy(runner, slot), state, strict=True))
    assert frozen >= 1
    found = {c.request_id: c for c in done}
    for name, c in want.items():
        assert found[name].token_ids == c.token_ids and found[name].finish_reason == c.finish_reason
        assert found[name].logprobs == pytest.approx(c.logprobs, abs=2e-6)
        assert found[name].router_indices.shape[1] == len(c.prompt_ids) + len(c.token_ids) - 1
    kinds = {kind for _, kind in runner.graphs._captured}
    assert {kind.mode for kind in kinds} >= ({"mixed"} if mixed else {"plain"})
    assert all(kind.cut in (0, 1, 2, 4) for kind in kinds), "few sizes of what is truncated"


def copy(runner, slot: int) -> list[torch.Tensor]:
    entry = runner.state._integers[:, slot].clone()
    states = [state for state in runner.cache.states if isinstance(state, TritonChunkState)]
    return [entry, *(tensor[slot].clone() for state in states for tensor in state._tensors().values())]


def finish(generator: Generator) -> dict[tuple[str, int], Completion]:
    done = []
    while len(done) < 3:
        done += generator.step()
    return {(c.request_id, c.sample): c for c in done}


def test_samples_and_snapshots(monkeypatch):
    plain = make_generator()
    for request in REQUESTS:
        plain.submit(Request(**request))
    want = finish(plain)
    monkeypatch.setattr(cache, "ChunkState", TritonChunkState)
    generator = make_generator()
    assert isinstance(generator._runner.cache.states[0], TritonChunkState)
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
