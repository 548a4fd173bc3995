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
    return torch.log_softmax(logits, -1).to(DEVICE), keys.to(DEVICE), counters.to(DEVICE)


def by_hand(logprobs: list[float], number: float) -> int:
    """The first token whose cumulative mass is above the number's part of the whole, in Python's integers."""
    masses = [int(math.exp(x) * 2**46) for x in logprobs]
    target, total = min(int(number * sum(masses)), sum(masses) - 1), 0
    for token, mass in enumerate(masses):
        total += mass
        if total > target:
            return token
    raise AssertionError


def test_a_token_is_where_the_number_falls():
    logprobs, keys, counters = make(200, 13, 2.0)
    tokens, found = draw(logprobs, keys, counters, backend="torch")
    numbers = uniform(keys, counters).tolist()
    assert tokens.tolist() == [by_hand(row, number) for row, number in zip(logprobs.tolist(), numbers, strict=True)]
    assert torch.equal(found, logprobs.gather(1, tokens[:, None])[:, 0])


@pytest.mark.parametrize(
    ("batch", "vocab", "spread"),
    [(9, 13, 2.0), (9, 2048, 1.0), (5, 2049, 5.0), (5, 20_000, 0.0), (3, 70_001, 8.0), (1, 1, 1.0)],
)
def test_triton_draws_the_same_tokens(batch, vocab, spread):
    """The random bits, the blocks and their sums; a token would differ only where exp's last bit decides."""
    pytest.importorskip("triton")
    logprobs, keys, counters = make(batch, vocab, spread, seed=vocab)
    logprobs[0, : vocab // 2] = -math.inf
    want, found = (draw(logprobs, keys, counters, backend=backend) for backend in ("torch", "triton"))
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    for row in range(min(batch, 3)):
        alone = draw(logprobs[row : row + 1], keys[row : row + 1], counters[row : row + 1], backend="triton")
        assert alone[0] == found[0][row] and alone[1] == found[1][row]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # numpy's, where a GPU says nothing
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_that_cannot_be_sampled_get_a_token_inside(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    logprobs, keys, counters = make(3, 5000, 1.0)
    logprobs[0], logprobs[1, 7] = -math.inf, math.nan
    tokens, _ = draw(logprobs, keys, counters, backend=backend)
    assert tokens[0] == 0 and bool(((tokens >= 0) & (tokens < 5000)).all())


def test_masses_are_exact():
    assert fixed_point(torch.tensor([0.0, -math.inf])).tolist() == [2**46, 0]
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
    logprobs, keys, counters = make(3, 5, 1.0)
    for given, message in (
        ((logprobs.double(), keys, counters), "in float32"),
        ((logprobs[0], keys, counters), r"must be \[B, vocab\]"),
        ((logprobs, keys[:2], counters), r"keys must be \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            draw(*given)
    some = torch.zeros(3, device=DEVICE)
    with pytest.raises(ValueError, match=r"finished \[places\]"):
        advance(torch.zeros(3, 4), some, some, keys, keys, some, some, some)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_large_vocabulary_in_a_graph():
    """CUDA's exp on both sides: the tokens of 256 rows of 152K, eager and replayed."""
    logprobs, keys, counters = make(256, 151_936, 3.0)
    want = draw(logprobs, keys, counters, backend="torch")
    found = draw(logprobs, keys, counters)
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = draw(logprobs, keys, counters)
    again[0].zero_()
    graph.replay()
    assert torch.equal(again[0], want[0])
