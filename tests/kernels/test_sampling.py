"""Tokens from distributions: by hand, by PyTorch's operators and by the Triton kernels."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.kernels.sampling import advance, draw, fixed_point, random_bits, uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(batch: int, vocab: int, spread: float, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, vocab, generator=generator) * spread
    keys = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    counters = torch.randint(0, 10_000, (batch,), generator=generator)
    return logits.to(DEVICE), keys.to(DEVICE), counters.to(DEVICE)


def tempered(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Temperatures with a greedy row among them, and a first and second row of which the upper half of the tokens is cut off."""
    batch, vocab = logits.shape
    temperature = torch.tensor([0.7, 1.0, 0.0, 1.3], device=DEVICE).repeat(-(-batch // 4))[:batch]
    truncated = logits[: min(batch, 2)] / temperature[: min(batch, 2), None]
    truncated[:, (vocab + 1) // 2 :] = -math.inf
    return {"temperature": temperature, "truncated": truncated}


def by_hand(logits: list[float], number: float) -> int:
    """The first token whose cumulative mass is above the number's part of the whole, in Python's integers."""
    masses = [int(math.exp(x - max(logits)) * 2**42) for x in logits]
    target, total = min(int(number * sum(masses)), sum(masses) - 1), 0
    for token, mass in enumerate(masses):
        total += mass
        if total > target:
            return token
    raise AssertionError


def test_a_token_is_where_the_number_falls():
    logits, keys, counters = make(200, 13, 2.0)
    tokens, found, plain, broken = draw(logits, keys, counters, backend="torch")
    numbers = uniform(keys, counters).tolist()
    assert tokens.tolist() == [by_hand(row, number) for row, number in zip(logits.tolist(), numbers, strict=True)]
    wanted = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(found, plain) and not broken.any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_blocks_of_a_large_vocabulary_are_one_distribution(backend):
    """Tokens by a float64 inverse CDF over blocks whose largest logits are 40 apart; the last block is short."""
    if backend == "triton":
        pytest.importorskip("triton")
    logits, keys, counters = make(12, 5003, 2.0)
    logits[:, 2048:4096] += torch.linspace(-20, 20, 12, device=DEVICE)[:, None]
    tokens, found, _, _ = draw(logits, keys, counters, backend=backend)
    cumulative = torch.softmax(logits.double(), -1).cumsum(1)
    wanted = torch.searchsorted(cumulative, uniform(keys, counters)[:, None] * cumulative[:, -1:])[:, 0]
    assert torch.equal(tokens, wanted)
    assert (tokens // 2048).unique().tolist() == [0, 1, 2]
    exact = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_blocks_without_mass_beside_very_negative_logits(backend):
    """Three blocks, with room for a fourth. Largest logits of -20, at a temperature of 0.01 beyond what exp can undo."""
    if backend == "triton":
        pytest.importorskip("triton")
    logits, keys, counters = make(6, 5003, 1.0)
    logits = (logits - logits.amax(1, keepdim=True)) * 1e-3 - 20
    temperature = torch.full((6,), 0.01, device=DEVICE)
    truncated = logits[:4] / 0.01
    truncated[:2, 1000:], truncated[2:, :4096] = -math.inf, -math.inf
    tokens, found, _, broken = draw(logits, keys, counters, temperature=temperature, truncated=truncated, backend=backend)
    scaled = logits / 0.01
    scaled[:4] = truncated
    cumulative = torch.softmax(scaled.double(), -1).cumsum(1)
    wanted = torch.searchsorted(cumulative, uniform(keys, counters)[:, None] * cumulative[:, -1:])[:, 0]
    assert torch.equal(tokens, wanted) and not broken.any()
    exact = torch.log_softmax(scaled.double(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_temperature_truncation_and_greedy_rows(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    logits, keys, counters = make(8, 2500, 3.0)
    logits[2, [5, 2400]] = 30.0  # a tie in two blocks
    options = tempered(logits)
    tokens, found, plain, _ = draw(logits, keys, counters, **options, backend=backend)
    scaled = logits.double() / options["temperature"].double().where(options["temperature"] > 0, 1.0)[:, None]
    scaled[:2, 1250:] = -math.inf
    wanted = torch.log_softmax(scaled, -1).gather(1, tokens[:, None])[:, 0]
    wanted[[2, 6]] = 0.0
    assert tokens[2] == 5 and tokens[6] == logits[6].argmax() and bool((tokens[:2] < 1250).all())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    exact = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(plain.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("batch", "vocab", "spread"),
    [(9, 13, 2.0), (9, 2048, 1.0), (5, 2049, 5.0), (5, 20_000, 0.0), (3, 70_001, 8.0), (1, 1, 1.0)],
)
def test_triton_draws_the_same_tokens(batch, vocab, spread, mixed):
    """The random bits, the blocks and their sums; a token would differ only where exp's last bit decides."""
    pytest.importorskip("triton")
    logits, keys, counters = make(batch, vocab, spread, seed=vocab)
    logits[0, : vocab // 2] = -math.inf
    options = tempered(logits) if mixed and vocab > 1 else {}
    if options:
        options["truncated"][0, : vocab // 2 + 1] = 0.0
    want, found = (draw(logits, keys, counters, **options, backend=backend) for backend in ("torch", "triton"))
    assert torch.equal(found[0], want[0]) and torch.equal(found[3], want[3])
    for a, b in zip(found[1:3], want[1:3], strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=3e-7)
    for row in range(min(batch, 3)):
        some = {n: a[row : row + 1] for n, a in options.items() if n != "truncated" or row < 2}
        alone = draw(logits[row : row + 1], keys[row : row + 1], counters[row : row + 1], **some, backend="triton")
        assert [a.item() for a in alone] == [a[row].item() for a in found]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_that_cannot_be_sampled_get_a_token_inside(backend, mixed):
    if backend == "triton":
        pytest.importorskip("triton")
    logits, keys, counters = make(5, 5000, 1.0)
    clean = draw(logits, keys, counters, **(tempered(logits) if mixed else {}), backend=backend)
    logits[0], logits[1, 7], logits[2, 4990] = -math.inf, math.nan, math.inf
    tokens, _, _, broken = draw(logits, keys, counters, **(tempered(logits) if mixed else {}), backend=backend)
    assert broken.tolist() == [True, True, True, False, False] and bool(((tokens >= 0) & (tokens < 5000)).all())
    assert torch.equal(tokens[3:], clean[0][3:]) and not clean[3].any()


def test_masses_are_exact():
    assert fixed_point(torch.tensor([0.0, -math.inf])).tolist() == [2**42, 0]
    assert [value % 2**64 for value in random_bits(torch.zeros(2, dtype=torch.int64), torch.arange(2)).tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
    ]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("ends", [[], [3], [3, 9]])
def test_entries_go_forward(backend, ends):
    """Seven places, the last one padding's, which two rows name: who ends, who is left alone, and what the host is told."""
    if backend == "triton":
        pytest.importorskip("triton")
    integers = torch.tensor(
        [[0] * 7, [10, 11, 12, 13, 14, 15, 0], [0, 1, 2, 3, 4, 5, 0], [9, 2, 9, 9, 9, 9, 0], [70, 71, 72, 73, 74, 75, 76]],
        device=DEVICE,
    )
    finished = torch.tensor([False, False, True, False, False, False, True], device=DEVICE)
    rows = torch.tensor([4, 1, 2, 6, 6, 0], device=DEVICE)
    token = torch.tensor([9, 5, 8, 7, 7, 3], device=DEVICE)
    logprob = torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.4, -0.6], device=DEVICE)
    broken = torch.tensor([False, False, False, True, True, False], device=DEVICE)
    before = integers.clone()
    table = advance(
        integers, finished, torch.tensor(ends, dtype=torch.int64, device=DEVICE), rows, token, logprob, 2 * logprob, broken,
        backend=backend,
    )  # fmt: skip
    assert integers[:3, [4, 1, 0]].tolist() == [[9, 5, 3], [15, 12, 11], [5, 2, 1]]
    assert torch.equal(integers[3:], before[3:]) and torch.equal(integers[:, [2, 3, 5, 6]], before[:, [2, 3, 5, 6]])
    assert finished.tolist() == [3 in ends, True, True, False, 9 in ends, False, True]
    assert table.dtype == torch.float64 and torch.equal(table[:, 1], logprob.double())
    assert torch.equal(table[:, 2], 2 * table[:, 1]) and table[:, 0].tolist() == token.tolist()
    assert table[:, 3].tolist() == [0, 0, 0, 1, 1, 0]
    assert table[[0, 1, 3, 5], 4].tolist() == [9 in ends, 1, 1, 3 in ends]


def test_bad_inputs_are_refused():
    logits, keys, counters = make(3, 5, 1.0)
    heat = torch.ones(3, device=DEVICE)
    for given, options, message in (
        ((logits.double(), keys, counters), {}, "in float32"),
        ((logits[0], keys, counters), {}, r"must be \[B, vocab\]"),
        ((logits[:, :0], keys, counters), {}, "vocab 1 to"),
        ((logits, keys[:2], counters), {}, r"keys must be \[3\]"),
        ((logits, keys, counters), {"temperature": heat[:2]}, r"temperature must be \[3\]"),
        ((logits, keys, counters), {"truncated": logits}, "with a temperature"),
        ((logits, keys, counters), {"temperature": heat, "truncated": logits[:, :4]}, "truncated must be"),
    ):
        with pytest.raises(ValueError, match=message):
            draw(*given, **options)
    some = torch.zeros(3, device=DEVICE)
    with pytest.raises(ValueError, match=r"finished \[places\]"):
        advance(torch.zeros(3, 4), some, some, keys, keys, some, some, some)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_large_vocabulary_in_a_graph():
    """CUDA's exp on both sides: the tokens of 256 rows of 152K, eager and replayed."""
    logits, keys, counters = make(256, 151_936, 3.0)
    for options in ({}, tempered(logits)):
        want = draw(logits, keys, counters, **options, backend="torch")
        found = draw(logits, keys, counters, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = draw(logits, keys, counters, **options)
        again[0].zero_()
        graph.replay()
        assert torch.equal(again[0], want[0])
