"""Sampling: random numbers, truncation, the distribution drawn from, and independence of the rest of the batch."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.rollout import sampling
from posttrain.rollout.random import random_bits, stream_key, uniform
from posttrain.rollout.sampling import SamplingParams, sample, truncate

INF = float("inf")


def params(rows: int, *, seed: int = 0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> SamplingParams:
    """Parameters of `rows` rows; a scalar counts for every row. Row i is sample i of the seed."""

    def column(value):
        return list(value) if isinstance(value, list | tuple) else [value] * rows

    return SamplingParams.build(
        keys=[stream_key(seed, row) for row in range(rows)],
        temperature=column(temperature),
        top_k=column(top_k),
        top_p=column(top_p),
        min_p=column(min_p),
    )


def zeros(rows: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.int64)


def kept(logits: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """Ids that truncation leaves in one row."""
    out = truncate(
        torch.tensor([logits]),
        torch.tensor([[top_k or 2**62]]),
        torch.tensor([[top_p]], dtype=torch.float64),
        torch.tensor([[min_p]]).log(),
    )
    return out.isfinite()[0].nonzero()[:, 0].tolist()


def test_bits_are_splitmix64():
    """The published first outputs of SplitMix64 from state 0."""
    bits = random_bits(torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert [value % 2**64 for value in bits.tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniform_is_uniform_and_streams_are_unrelated():
    keys = torch.tensor([stream_key(seed, row) for seed in range(40) for row in range(5)])
    numbers = uniform(keys[:, None].expand(-1, 500), torch.arange(500)[None].expand(200, -1))
    assert numbers.dtype == torch.float64
    assert numbers.min() > 0 and numbers.max() < 1
    counts = torch.histc(numbers.flatten().float(), bins=20, min=0, max=1)
    expected = numbers.numel() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    centred = numbers - 0.5
    correlation = (centred @ centred.T) / (centred.norm(dim=1)[:, None] * centred.norm(dim=1)[None])
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 0.25  # 5.6 standard deviations over 19,900 pairs
    assert len(set(keys.tolist())) == len(keys)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bits_and_tokens_are_the_same_on_gpu():
    keys = torch.tensor([stream_key(9, row) for row in range(64)])
    positions = torch.arange(64)
    assert torch.equal(uniform(keys, positions), uniform(keys.cuda(), positions.cuda()).cpu())


def test_top_k_breaks_ties_by_id_and_keeps_exactly_k():
    assert kept([1.0, 3.0, 2.0, 3.0, 0.0], top_k=2) == [1, 3]
    assert kept([1.0, 1.0, 1.0, 1.0], top_k=3) == [0, 1, 2]
    assert kept([1.0, 2.0], top_k=50) == [0, 1]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert kept(logits, top_p=0.35) == [1]
    assert kept(logits, top_p=0.45) == [1, 3]
    assert kept(logits, top_p=0.75) == [1, 2, 3]
    assert kept(logits, top_p=0.95) == [0, 1, 2, 3]
    assert kept(logits, top_p=1e-9) == [1], "at least one token stays"
    assert kept([0.0, -INF, 0.0], top_p=0.999) == [0, 2]


def test_top_p_counts_the_mass_that_top_k_left():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of (4/7, 3/7) the first alone reaches 0.5; of the whole distribution it would not.
    assert kept(logits, top_k=2, top_p=0.5) == [0]
    assert kept(logits, top_p=0.5) == [0, 1]


def test_min_p_is_relative_to_the_likeliest():
    logits = [math.log(p) for p in (0.5, 0.3, 0.12, 0.08)]
    assert kept(logits, min_p=0.2) == [0, 1, 2]
    assert kept(logits, min_p=0.5) == [0, 1]
    assert kept(logits, min_p=0.999) == [0]


def test_temperature_comes_before_top_p():
    logits = torch.tensor([[math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]]).expand(200, -1)
    cold = sample(logits, params(200, temperature=0.1, top_p=0.9), zeros(200))
    assert set(cold.token.tolist()) == {0}, "at temperature 0.1 the first token alone has 94%"
    assert torch.equal(cold.logprob, torch.zeros(200))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_distribution(options):
    torch.manual_seed(1)
    rows, vocab = 20000, 11
    row = torch.randn(vocab, dtype=torch.float64) * 1.5
    draw = sample(row.float().expand(rows, -1), params(rows, seed=5, **options), zeros(rows))
    scaled = row / options.get("temperature", 1.0)
    ids = kept(scaled.float().tolist(), **{name: value for name, value in options.items() if name != "temperature"})
    wanted = torch.full((vocab,), -INF, dtype=torch.float64)
    wanted[ids] = torch.log_softmax(scaled[ids], dim=-1)
    counts = torch.bincount(draw.token, minlength=vocab).double()
    expected = wanted.exp() * rows
    assert counts[expected == 0].sum() == 0
    chi = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    assert chi < 29.6  # p = 0.001 at 10 degrees of freedom, an upper bound for fewer
    torch.testing.assert_close(draw.logprob.double(), wanted[draw.token], rtol=0, atol=2e-6)
    torch.testing.assert_close(draw.plain_logprob.double(), torch.log_softmax(row, -1)[draw.token], rtol=0, atol=2e-6)


def test_rows_with_mixed_parameters_are_those_that_they_are_alone():
    torch.manual_seed(2)
    rows, vocab = 37, 515
    logits = torch.randn(rows, vocab) * 4
    options = {
        "temperature": [(0.0, 0.3, 1.0, 1.7)[row % 4] for row in range(rows)],
        "top_k": [(0, 3, 0, 100, 1)[row % 5] for row in range(rows)],
        "top_p": [(1.0, 0.5, 0.95)[row % 3] for row in range(rows)],
        "min_p": [(0.0, 0.0, 0.01, 0.2, 0.0, 0.0, 0.0)[row % 7] for row in range(rows)],
    }
    together = sample(logits, params(rows, **options), torch.arange(rows))
    for row in range(rows):
        alone = SamplingParams.build(keys=[stream_key(0, row)], **{name: [values[row]] for name, values in options.items()})
        draw = sample(logits[row : row + 1].clone(), alone, torch.tensor([row]))
        for name in ("token", "logprob", "plain_logprob"):
            assert torch.equal(getattr(draw, name)[0], getattr(together, name)[row]), (row, name)


def test_blocks_of_rows_change_nothing(monkeypatch):
    torch.manual_seed(3)
    logits = torch.randn(23, 64)
    options = {"top_p": [1.0, 0.8, 1.0] * 7 + [0.6, 1.0], "temperature": [0.0, 1.0] * 11 + [2.0]}
    whole = sample(logits, params(23, **options), zeros(23))
    monkeypatch.setattr(sampling, "_BLOCK", 64 * 3)
    blocks = sample(logits, params(23, **options), zeros(23))
    for name in ("token", "logprob", "plain_logprob", "broken"):
        assert torch.equal(getattr(whole, name), getattr(blocks, name))


def test_greedy_takes_the_lowest_of_equals_with_logprob_zero():
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    draw = sample(logits, params(2, temperature=0.0), zeros(2))
    assert draw.token.tolist() == [1, 0]
    assert draw.logprob.tolist() == [0.0, 0.0]
    torch.testing.assert_close(draw.plain_logprob, torch.log_softmax(logits, -1).gather(-1, draw.token[:, None])[:, 0])


def test_tiny_temperature_and_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, 9.9e3, -1e4], [3e4, 3e4, 3e4]])
    draw = sample(logits, params(2, temperature=2e-5), zeros(2))
    assert draw.token[0] == 0 and draw.logprob.isfinite().all() and not draw.broken.any()


def test_broken_rows_are_flagged_and_leave_others_alone():
    logits = torch.randn(5, 16)
    clean = sample(logits, params(5, top_p=[1.0, 0.5, 1.0, 0.5, 1.0]), zeros(5))
    logits[0, 3], logits[1, 2], logits[3] = math.nan, INF, -INF
    draw = sample(logits, params(5, top_p=[1.0, 0.5, 1.0, 0.5, 1.0]), zeros(5))
    assert draw.broken.tolist() == [True, True, False, True, False]
    for row in (2, 4):
        assert draw.token[row] == clean.token[row] and draw.logprob[row] == clean.logprob[row]


def test_masked_vocabulary_is_never_drawn():
    logits = torch.zeros(3000, 7)
    logits[:, [0, 3, 6]] = -INF
    draw = sample(logits, params(3000), zeros(3000))
    assert set(draw.token.tolist()) == {1, 2, 4, 5}


def test_large_vocabulary_tail_keeps_its_mass():
    """A float32 cumulative sum would lose a tail whose tokens have 1e-9 each."""
    vocab, rows = 150_000, 400
    logits = torch.zeros(vocab)
    logits[0] = math.log(vocab)  # half the mass on one token, half spread over the rest
    draw = sample(logits.expand(rows, -1), params(rows), zeros(rows))
    tail = (draw.token > 0).double().mean()
    assert abs(tail - 0.5) < 0.1
    assert len(set(draw.token[draw.token > 0].tolist())) > 150
