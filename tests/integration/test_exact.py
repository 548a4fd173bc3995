"""Strict mode end to end: the generator's log-probabilities are bitwise those of one packed forward over what it sampled.

Interpreted, with a tiny model, where there is no GPU; on one with a small bf16 model, graphs and pieces of every size."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from torch import Tensor

from posttrain.kernels import backend
from posttrain.kernels.backend import use_fused_backend
from posttrain.kernels.sse import use_backend
from posttrain.models import cache
from posttrain.models.exact import is_exact, make_exact, why_not_exact
from posttrain.models.loading import new_model
from posttrain.models.sse_h import SSEHConfig, SSEHForCausalLM
from posttrain.rollout import Generator
from posttrain.types import Completion, Request

pytest.importorskip("triton")
HAS_GPU = torch.cuda.is_available()
INTERPRETED = pytest.mark.skipif(HAS_GPU, reason="interpreted only where there is no GPU")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


@pytest.fixture
def interpreted(monkeypatch):
    from posttrain.kernels.sse.triton_decode_pool import TritonChunkState

    monkeypatch.setattr(cache, "ChunkState", TritonChunkState)
    with use_fused_backend("triton"), use_backend("triton"):
        yield


def tiny_model(types: list[str], seed: int = 0, **changes) -> SSEHForCausalLM:
    torch.manual_seed(seed)
    fields = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": len(types), "layer_types": types,
        "num_attention_heads": 2, "adapter_rank": 4, "gate_rank": 4, "num_partitions": 2, "chunk_size": 4,
        "initializer_range": 0.3, "sliding_window": 5, **changes,
    }  # fmt: skip
    return SSEHForCausalLM(SSEHConfig(**fields))


def scores(model, completions: list[Completion], temperature: float = 1.0, **options):
    """One packed forward over several completions, routes replayed -> log-probabilities of the sampled tokens of each."""
    device = next(model.parameters()).device
    inputs = [(c.prompt_ids + c.token_ids)[:-1] for c in completions]
    labels = [[-100] * (len(c.prompt_ids) - 1) + c.token_ids for c in completions]
    bounds = torch.tensor([0, *(len(row) for row in inputs)]).cumsum(0, dtype=torch.int32)
    given = {}
    if completions[0].router_indices is not None:
        given["router_indices"] = torch.cat([c.router_indices.long() for c in completions], dim=1).to(device)
    out = model(
        input_ids=torch.tensor([[*chain(*inputs)]], device=device), cu_seq_lens_q=bounds, temperature=temperature,
        score_labels=torch.tensor([[*chain(*labels)]], device=device), **given, **options,
    )  # fmt: skip
    found = out.log_probs[0].split(bounds.diff().tolist())
    return [row[len(c.prompt_ids) - 1 :] for row, c in zip(found, completions, strict=True)], out


def assert_same(model, completions: list[Completion], temperature: float = 1.0) -> None:
    with torch.no_grad():
        found, _ = scores(model, completions, temperature)
    for row, c in zip(found, completions, strict=True):
        want = torch.tensor(c.logprobs)
        assert torch.equal(row.cpu(), want), (c.request_id, float((row.cpu() - want).abs().max()))


def flat(generated: list[list[Completion]]) -> list[Completion]:
    return [c for group in generated for c in group]


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize("kinds", [["sse", "full_attention"], ["sliding_attention", "sse"]])
def test_logprobs_are_the_packed_forwards(interpreted, kinds):
    model = tiny_model(kinds).eval()
    requests = [
        Request(id="a", prompt_ids=[5, 9, 2, 8, 7, 3, 4], n=2, max_tokens=4, seed=1),
        Request(id="b", prompt_ids=[3, 2], n=1, max_tokens=3, seed=2),
    ]
    options = dict(eos_token_ids=[], max_sequences=3, max_length=64, return_router_indices=True, exact=True)
    completions = flat(Generator(model, max_prefill_tokens=3, **options).generate(requests))
    assert is_exact(model)
    assert_same(model, completions)
    # Another cut of the prompts and other company: the same samples, bit for bit.
    again = flat(Generator(model, max_prefill_tokens=64, **{**options, "max_sequences": 1}).generate(requests[:1]))
    assert [c.token_ids for c in again] == [c.token_ids for c in completions[:2]]
    assert [c.logprobs for c in again] == [c.logprobs for c in completions[:2]]


@pytest.mark.slow
@INTERPRETED
def test_gradients_are_those_of_the_ordinary_model(interpreted):
    """Entropies and log-probabilities at a temperature, a packed batch, gradient checkpointing."""
    types = ["sse", "full_attention"]
    exact, plain = tiny_model(types), tiny_model(types)
    make_exact(exact)
    ids = torch.randint(48, (1, 9), generator=torch.Generator().manual_seed(3))
    labels = torch.where(torch.arange(9) % 5 == 0, -100, torch.roll(ids, -1, 1))
    bounds = torch.tensor([0, 6, 9], dtype=torch.int32)
    a, b = torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(4))
    exact.gradient_checkpointing_enable()
    exact.train()
    plain.train()
    out = exact(input_ids=ids, cu_seq_lens_q=bounds, score_labels=labels, temperature=0.7)
    (out.log_probs * a + out.entropy * b).sum().backward()
    logp = torch.log_softmax(plain(input_ids=ids, cu_seq_lens_q=bounds).logits / 0.7, -1)
    scored = labels >= 0
    want = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * scored
    entropy = -(logp.exp() * logp).sum(-1) * scored
    assert (out.log_probs - want).abs().max() < 1e-5 and (out.entropy - entropy).abs().max() < 1e-5
    (want * a + entropy * b).sum().backward()
    for (name, p), q in zip(exact.named_parameters(), plain.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
        else:
            assert (p.grad - q.grad).norm() <= 1e-4 * q.grad.norm() + 1e-7, name


def test_refusals(monkeypatch):
    assert "sse_gdn" in str(why_not_exact(tiny_model(["sse", "sse_gdn"])))
    model = tiny_model(["sse"])
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(32, 48)
    with pytest.raises(ValueError, match="strict mode cannot hold for this model: model.layers.0.mlp.up_proj is a Linear"):
        make_exact(model)
    with pytest.raises(ValueError, match="for strict mode"):
        tiny_model(["sse"])(input_ids=torch.tensor([[1, 2]]), score_labels=torch.tensor([[2, -100]]))
    monkeypatch.setattr(backend, "_interpreted", lambda: False)
    assert why_not_exact(tiny_model(["sse"])) == "its kernels need a GPU, but the model lies on cpu"


def test_a_generator_that_was_not_made_leaves_the_model_alone():
    model = tiny_model(["sse"])
    with pytest.raises(ValueError, match="memory_fraction=2"):
        Generator(model, eos_token_ids=[], max_sequences=1, max_length=8, memory_fraction=2, exact=True)
    assert not is_exact(model)


TYPES = ["sse", "full_attention", "sse", "sliding_attention"]
ON_GPU = {
    "hybrid": {},
    "wide heads": {"hidden_size": 256, "head_dim": 128, "chunk_size": 64, "num_key_value_heads": 1},
    "two routes": {"num_selected": 2, "num_partitions": 6, "qk_norm": True},
    "odd": {"vocab_size": 501, "projections": "shared", "shared_partition": False, "use_output_gate": False},
    "a projection a partition": {"projections": "partition", "layer_types": ["sse", "sse"], "num_hidden_layers": 2},
}


def gpu_model(name: str) -> SSEHForCausalLM:
    fields = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": len(TYPES), "layer_types": TYPES,
        "num_attention_heads": 2, "adapter_rank": 16, "chunk_size": 16, "sliding_window": 100, "initializer_range": 0.1,
        "max_position_embeddings": 4096, **ON_GPU[name],
    }  # fmt: skip
    return new_model(fields, 0, dtype=torch.bfloat16, device="cuda")


def gpu_requests(longest: int, **options) -> list[Request]:
    draw = torch.Generator().manual_seed(longest)
    lengths = [1, 2, longest, *torch.randint(2, longest, (6,), generator=draw).tolist()]
    return [
        Request(
            id=str(i), prompt_ids=torch.randint(500, (n,), generator=draw).tolist(), n=1 + i % 4, seed=i, max_tokens=30 + 11 * i,
            **options,
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=GPU) for n in ON_GPU])
@pytest.mark.parametrize("graphs", [False, True])
def test_generator_and_trainer_agree_bitwise_on_a_gpu(name, graphs):
    model = gpu_model(name)
    options = dict(eos_token_ids=[], max_length=2048, return_router_indices=True, exact=True, cuda_graphs=graphs)
    requests = gpu_requests(1500)
    completions = flat(Generator(model, max_sequences=11, max_prefill_tokens=300, **options).generate(requests))
    assert_same(model, completions)
    for c in completions[::5]:
        assert_same(model, [c])
    other = flat(Generator(model, max_sequences=3, max_prefill_tokens=2048, **options).generate(requests))
    assert [(c.token_ids, c.logprobs) for c in other] == [(c.token_ids, c.logprobs) for c in completions]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_temperature_training_and_autocast_on_a_gpu():
    """The learner's forward: training mode, gradients, checkpointing, autocast; they change no bit."""
    model = gpu_model("hybrid")
    options = dict(eos_token_ids=[], max_length=1024, return_router_indices=True, exact=True, max_sequences=9)
    completions = flat(Generator(model, **options).generate(gpu_requests(400, temperature=0.8)))
    model.train()
    model.gradient_checkpointing_enable()
    for autocast in (False, True):
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            found, out = scores(model, completions, 0.8)
        for row, c in zip(found, completions, strict=True):
            assert torch.equal(row.detach().cpu(), torch.tensor(c.logprobs))
        out.log_probs.sum().backward()
        grads: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(grads) > 20 and all(bool(g.isfinite().all()) for g in grads)
        model.zero_grad()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_snapshots_go_on_bitwise_on_a_gpu():
    model = gpu_model("hybrid")
    options = dict(eos_token_ids=[], max_length=1024, return_router_indices=True, exact=True, max_sequences=4)
    request = Request(id="x", prompt_ids=list(range(1, 90)), n=2, max_tokens=120, seed=5)
    want = flat(Generator(model, **options).generate([request]))
    first = Generator(model, **options)
    first.submit(request)
    for _ in range(50):
        first.step()
    second = Generator(model, **options)
    second.restore(first.snapshot("x"))
    found = []
    while second.has_unfinished:
        found += second.step()
    found.sort(key=lambda c: c.sample)
    assert [(c.token_ids, c.logprobs) for c in found] == [(c.token_ids, c.logprobs) for c in want]
    assert_same(model, found)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_grpo_reports_no_mismatch_on_a_gpu(tmp_path):
    """TRL's trainer asks for log-probabilities by our head: every step's mismatch is exactly 0, while the weights move."""
    from tests.integration.test_grpo_learner import FIELDS, history, make

    fields = {**FIELDS, "hidden_size": 128, "intermediate_size": 256, "chunk_size": 16}
    model = new_model(fields, 3, dtype=torch.bfloat16, device="cuda")
    make_exact(model)
    options = dict(use_cpu=False, gradient_checkpointing=True, temperature=0.9, learning_rate=1e-3)
    learner = make(tmp_path, model=model, max_steps=4, **options)
    before = [p.detach().clone() for p in model.parameters()]
    learner.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    found = history(learner, "mismatch/abs", "mismatch/k3", "entropy")
    assert len(found) == 4 and all(absolute == 0 and k3 == 0 and entropy > 0 for absolute, k3, entropy in found)
