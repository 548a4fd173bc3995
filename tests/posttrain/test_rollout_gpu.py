"""The engine on a GPU: CUDA graphs, steps that read nothing back, pages, and the learner's log-probabilities."""

from __future__ import annotations

import pytest
import torch

from posttrain.kernels.sse import decode
from posttrain.models.loading import new_model
from posttrain.rollout import Generator
from posttrain.rollout.sampling import Reading
from posttrain.types import Request
from tests.posttrain.rollout_models import by_sample, plain_logprobs, run_out

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TYPES = ["sse", "full_attention", "sse", "sliding_attention"]


@pytest.fixture(autouse=True)
def triton_states(monkeypatch):
    monkeypatch.setattr(decode, "TRITON_ON_GPU", True)


def make_model(dtype=torch.bfloat16, types=TYPES, seed: int = 0, **changes):
    fields = {
        "vocab_size": 500, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": len(types), "layer_types": types,
        "num_attention_heads": 2, "adapter_rank": 16, "chunk_size": 16, "sliding_window": 100, "initializer_range": 0.1,
        **changes,
    }  # fmt: skip
    return new_model(fields, seed, dtype=dtype, device="cuda")


def make_generator(model, **options) -> Generator:
    return Generator(model, **{"eos_token_ids": [], "max_sequences": 8, "max_length": 512, "cuda_graphs": True, **options})


def requests(count: int, n: int, max_tokens: int = 100) -> list[Request]:
    draw = torch.Generator().manual_seed(count)
    prompts = [torch.randint(500, (int(torch.randint(2, 150, (1,), generator=draw)),), generator=draw) for _ in range(count)]
    return [
        Request(id=str(i), prompt_ids=prompt.tolist(), n=n, seed=i, max_tokens=max_tokens) for i, prompt in enumerate(prompts)
    ]


def difference(model, completions) -> float:
    """Mean |logprob of the generator - logprob of the packed forward|, routes replayed."""
    total, count = 0.0, 0
    for c in completions:
        routes = {} if c.router_indices is None else {"router_indices": c.router_indices.long().cuda()}
        ids = torch.tensor([c.prompt_ids + c.token_ids], device="cuda")
        bounds = torch.tensor([0, ids.shape[1] - 1], dtype=torch.int32)
        with torch.no_grad():
            logits = model(input_ids=ids[:, :-1], cu_seq_lens_q=bounds, **routes).logits[0].float()
        want = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[len(c.prompt_ids) - 1 :, 0].cpu()
        total += float((want - torch.tensor(c.plain_logprobs)).abs().sum())
        count += len(c.token_ids)
    return total / count


@pytest.mark.parametrize("types", [TYPES, ["full_attention"] * 2, ["sse"] * 2])
def test_graphs_give_what_plain_calls_give(types):
    """Eight rows from beginning to end, so that both run the same products."""
    model = make_model(types=types)
    runs = []
    for options in ({}, {"cuda_graphs": False}, {"read_late": False}):
        generator = make_generator(model, return_router_indices=True, **options)
        assert (generator._runner.graphs is None) == ("cuda_graphs" in options)
        runs.append(by_sample(c for group in generator.generate(requests(1, 8)) for c in group))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("types", [TYPES, ["sse_gdn", "full_attention"]])
def test_logprobs_are_the_packed_forwards(dtype, types):
    """Padded graphs, prompts in pieces, sequences that start and end at different steps; the delta rule runs without graphs."""
    model = make_model(dtype, types)
    generator = make_generator(model, max_sequences=11, max_prefill_tokens=64, return_router_indices=True)
    completions = [c for group in generator.generate(requests(7, 3)) for c in group]
    assert len(completions) == 21 and all(len(c.token_ids) == 100 for c in completions)
    assert difference(model, completions) < (2e-4 if dtype == torch.float32 else 2e-2)


def test_grouped_queries_and_a_window():
    model = make_model(torch.float32, ["full_attention", "sliding_attention"], num_attention_heads=4, num_key_value_heads=2)
    completions = [c for group in make_generator(model).generate(requests(3, 2)) for c in group]
    assert difference(model, completions) < 2e-4


def test_a_step_waits_for_nothing():
    """PyTorch raises at every call that would make the host wait."""
    generator = make_generator(make_model(), max_length=1024, return_router_indices=True)
    for request in requests(2, 4, max_tokens=300):
        generator.submit(request)
    for _ in range(5):  # captures the graph
        generator.step()
    with torch.inference_mode():
        batch = generator._loop._batch
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(70):  # over the end of a page
                Reading(generator._runner.decode(batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


MIXED = [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 1.3}]


def submit_mixed(generator, max_tokens: int = 50) -> None:
    for i, option in enumerate(MIXED):
        generator.submit(Request(id=str(i), prompt_ids=[3 + i, 7], max_tokens=max_tokens, seed=i, **option))


def test_every_sampling_parameter_without_a_wait():
    generator = make_generator(make_model())
    submit_mixed(generator)
    for _ in range(4):
        generator.step()
    batch = generator._loop._batch
    assert (batch.kind.mode, batch.kind.cut) == ("mixed", 3), "truncated rows come first"
    with torch.inference_mode():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            reading = Reading(generator._runner.decode(batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(reading.rows()) == len(MIXED)


def test_graphs_sample_what_plain_calls_sample():
    """Every parameter, padded to a graph's size or not; the products of five and of eight rows may round differently."""
    model = make_model(torch.float32)
    runs = []
    for graphs in (True, False):
        generator = make_generator(model, max_sequences=5, cuda_graphs=graphs)
        submit_mixed(generator)
        runs.append({c.request_id: c for c in run_out(generator)})
        kinds = {kind.mode for _, kind in generator._runner.graphs._captured} if graphs else {"mixed"}
        assert "mixed" in kinds
    for name, c in runs[0].items():
        assert c.token_ids == runs[1][name].token_ids
        assert c.logprobs == pytest.approx(runs[1][name].logprobs, abs=1e-4)


def test_the_device_knows_who_has_ended():
    """A step launched before the host has read an end changes neither the entry nor the state of the sequence."""
    model = make_model(torch.float32)
    free = make_generator(model).generate([Request(prompt_ids=[3, 7], max_tokens=20)])[0][0]
    end = free.token_ids[9]
    generator = make_generator(model, eos_token_ids=[end])
    generator.submit(Request(id="x", prompt_ids=[3, 7], max_tokens=20))
    stop = free.token_ids.index(end)
    for _ in range(stop + 1):
        generator.step()
    state, (slot,) = generator._runner.state, [s.slot for s in generator._scheduler.running]
    assert bool(state.finished[slot]), "drawn, and not yet read"
    before = {name: tensor.clone() for name, tensor in generator._runner.cache.states[0]._tensors().items()}
    counted = state._integers[:, slot].clone()
    generator.step()
    assert torch.equal(state._integers[:, slot], counted)
    assert all(torch.equal(a, before[n]) for n, a in generator._runner.cache.states[0]._tensors().items())


def test_retraction_to_the_host_changes_nothing_that_counts():
    model = make_model()
    generator = make_generator(model, max_length=256, kv_tokens=640, return_router_indices=True)
    completions = [c for group in generator.generate(requests(4, 3)) for c in group]
    assert generator.counts["retracted"] > 0
    assert difference(model, completions) < 2e-2
    books = generator._runner.cache.pages
    assert sorted(books.free) == list(range(1, books.num_pages)) and len(generator._scheduler.free) == 9


def test_graphs_see_weights_that_change_in_place_and_forget_those_that_move():
    model, other = make_model(), make_model(seed=1)
    generator, fresh = make_generator(model), make_generator(other)
    ask = requests(1, 8, max_tokens=30)
    generator.generate(ask)
    want = by_sample(fresh.generate(ask)[0])
    generator.update_weights(0, other.state_dict())
    assert generator._runner.graphs._captured and by_sample(generator.generate(ask)[0]) == want
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    generator.update_weights(0)
    assert not generator._runner.graphs._captured
    assert by_sample(generator.generate(ask)[0]) == want


def test_a_generator_that_is_let_go_gives_its_memory_back():
    model = make_model()
    make_generator(model).generate(requests(1, 8, max_tokens=5))  # cuBLAS's workspaces stay
    before = torch.cuda.memory_allocated()
    generator = make_generator(model)
    generator.generate(requests(1, 8, max_tokens=5))
    held = generator.memory.pages * generator.memory.page_bytes + generator.memory.slots * generator.memory.slot_bytes
    assert torch.cuda.memory_allocated() - before >= held
    del generator
    assert torch.cuda.memory_allocated() - before < held / 4


def test_a_learner_under_autocast_samples_its_own_policy():
    model = make_model(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        completions = make_generator(model, return_router_indices=True).generate(requests(1, 8, max_tokens=40))[0]
        assert difference(model, completions) < 2e-2


def test_the_cpu_agrees():
    """The packed forward of the same weights on the CPU, routes replayed: a near-tie may fall the other way."""
    model = make_model(torch.float32)
    completions = make_generator(model, return_router_indices=True).generate(requests(1, 2, max_tokens=10))[0]
    host = model.cpu()
    for c in completions:
        want = plain_logprobs(host, c, router_indices=c.router_indices.long())
        assert (want - torch.tensor(c.plain_logprobs)).abs().max() < 1e-2
