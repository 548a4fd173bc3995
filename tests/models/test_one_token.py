"""The one-token forward that a CUDA graph holds: the numbers of the ordinary one, no trace of padding, nothing read back."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.kernels.backend import use_fused_backend
from posttrain.models import cache as cache_module
from posttrain.models.cache import SlotCache
from posttrain.models.paged import OneToken
from tests.models.test_decode import random_pieces, run_pieces

KINDS = ["sse", "sse_gdn", "full_attention", "sliding_attention", "hybrid"]
LENGTHS = [70, 3, 64, 129]
SLOTS = [4, 1, 0, 2]
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")


def prefilled(model, sequences, **options) -> SlotCache:
    cache = SlotCache(model.config, 6, max_length=256, **options)
    cache.bind(SLOTS)
    bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    with torch.no_grad():
        model(torch.cat(sequences)[None], cu_seq_lens_q=bounds, past_key_values=cache)
    return cache


def one_token(model, cache, tokens, slots):
    """A step in `slots`, negative ones padding -> logits [B, vocab]."""
    real = [slot for slot in slots if slot >= 0]
    cache.reserve_next(real)
    positions = torch.tensor([cache.lengths[slot] if slot >= 0 else 0 for slot in slots])
    with torch.no_grad():
        step = OneToken(positions=positions, slots=torch.tensor(slots))
        out = model(torch.tensor(tokens)[None], past_key_values=cache, one_token=step)
    cache.advance(real, [1] * len(real))
    return out.logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_ordinary_decode_steps(make_model, make_ids, kind):
    """Pages against rows a slot, over the ends of pages, of a window and of chunks: the same bits."""
    model = make_model(kind)
    sequences = make_ids(LENGTHS)
    paged, plain = prefilled(model, sequences, paged=True), prefilled(model, sequences)
    for step in range(70):
        tokens = [1 + (7 * step + i) % 40 for i in range(4)]
        with torch.no_grad():
            want = model(torch.tensor(tokens)[:, None], past_key_values=plain).logits[:, 0]
        assert torch.equal(one_token(model, paged, tokens, SLOTS), want)
    for slot in SLOTS:
        assert all(torch.equal(a, plain.export(slot)[name]) for name, a in paged.export(slot).items())


@pytest.mark.parametrize(("kind", "window"), [("hybrid", 8), ("sliding_attention", 70), ("full_attention", 8)])
def test_pieces_of_all_lengths_together(make_model, make_ids, kind, window):
    """Prompts that begin, prompts that go on and single tokens in one forward: the bits of a cache without pages."""
    model = make_model(kind, sliding_window=window)
    lengths = [1, 150, 33, 90, 5]
    sequences, draw = make_ids(lengths), torch.Generator().manual_seed(3)
    pieces = [random_pieces(n, draw) for n in lengths]
    pieces[1] = [20, 1, 100, 29]  # longer than a ring
    caches = [SlotCache(model.config, 8, max_length=200, paged=paged) for paged in (False, True)]
    plain, paged = (run_pieces(model, cache, [5, 2, 7, 0, 3], sequences, pieces) for cache in caches)
    for a, b in zip(paged, plain, strict=True):
        assert torch.equal(a, b)
    caches[1].fork(2, [1, 4])
    for slot in (1, 4):
        assert all(torch.equal(a, caches[0].export(2)[name]) for name, a in caches[1].export(slot).items())
    caches[1].reset()
    assert not any(caches[1].pages.holders)


def test_a_paged_cache_takes_prompts_in_pieces(make_model, make_ids):
    model = make_model()
    (s,) = make_ids([200])
    plain, paged = SlotCache(model.config, 1), SlotCache(model.config, 1, paged=True)
    for piece in s.split([1, 62, 2, 70, 65]):
        with torch.no_grad():
            want = model(piece[None], past_key_values=plain).logits
            assert torch.equal(model(piece[None], past_key_values=paged).logits, want)
    other = SlotCache(model.config, 3, paged=True)
    other.load(2, plain.export(0))
    assert all(torch.equal(a, paged.export(0)[name]) for name, a in other.export(2).items())
    with pytest.raises(ValueError, match="keys has shape"):
        SlotCache(make_model("full_attention").config, 1, paged=True).load(
            0, {"length": torch.tensor(3), **{f"{i}.{n}": torch.zeros(1) for i in range(2) for n in ("keys", "values")}}
        )


def triton_cache(monkeypatch, model) -> SlotCache:
    """Empty, of a GPU's decode states, which look at slots on a CPU only."""
    from posttrain.kernels.sse.triton_decode_pool import TritonChunkState

    monkeypatch.setattr(cache_module, "ChunkState", TritonChunkState)
    monkeypatch.setattr(TritonChunkState, "_check", lambda self, x, slots: slots)
    return SlotCache(model.config, 6, max_length=256, paged=True)


@INTERPRETED
@pytest.mark.slow
def test_a_gpus_kernels_and_padding(make_model, monkeypatch):
    """The kernels of a GPU's step, interpreted: close to PyTorch's, and rows of padding leave every real row's bits alone."""
    pytest.importorskip("triton")
    types = ["sse", "full_attention", "sliding_attention"]
    sizes = {"hidden_size": 32, "num_attention_heads": 1, "head_dim": 16, "num_key_value_heads": 1, "num_partitions": 2}
    model = make_model("hybrid", layer_types=types, num_hidden_layers=3, chunk_size=2, sliding_window=3, **sizes)
    want = SlotCache(model.config, 6, max_length=256, paged=True)
    caches = [triton_cache(monkeypatch, model) for _ in range(2)]
    with use_fused_backend("triton"):
        for step in range(4):
            tokens, slots = [1 + step, 20 - step], [4, 1]
            found = one_token(model, caches[0], tokens, slots)
            padded = one_token(model, caches[1], [*tokens, 9, 9], [*slots, -1, -1])
            assert torch.equal(padded[:2], found) and padded.isfinite().all()
            with use_fused_backend("torch"):
                torch.testing.assert_close(found, one_token(model, want, tokens, slots), rtol=0, atol=2e-3)
        before = caches[1].export(4)
        one_token(model, caches[1], [5] * 2, [-1] * 2)
        assert all(torch.equal(a, before[name]) for name, a in caches[1].export(4).items())
    for slot in (4, 1):
        assert all(torch.equal(a, caches[1].export(slot)[name]) for name, a in caches[0].export(slot).items())


class Reads(TorchDispatchMode):
    """Operators that would make a host wait for its GPU."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls += 1
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in self.WAITS or any(i is not None and i.dtype == torch.bool for i in indices):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@INTERPRETED
def test_a_step_reads_nothing_back(make_model, monkeypatch):
    """Values are checked on a CPU only, and kernels are not run here: what is left is what a GPU's step asks of PyTorch."""
    pytest.importorskip("triton")
    import triton.runtime.interpreter as interpreter

    from posttrain.kernels.sse import checks

    model = make_model("hybrid", layer_types=["sse", "full_attention", "sliding_attention"], num_hidden_layers=3, chunk_size=4)
    cache = triton_cache(monkeypatch, model)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(checks, "_check_index_values", lambda *_: None)
    monkeypatch.setattr(checks, "_check_cu_seqlens", lambda cu, tokens: (cu.shape[0] - 1, tokens))
    step = OneToken(positions=torch.tensor([9, 3, 5, 6]), slots=torch.tensor(SLOTS))
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad(), use_fused_backend("triton"), Reads() as reads:
        model(tokens, past_key_values=cache, one_token=step)
    assert not reads.found, reads.found
    with Reads() as reads:
        torch.tensor([1.0, 0.0])[torch.tensor([True, False])].sum().item()
    assert reads.found == ["index", "_local_scalar_dense"], "the spy sees what it looks for"
