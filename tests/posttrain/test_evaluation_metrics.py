"""Scores against numbers worked out by hand."""

import itertools

import pytest

from posttrain.evaluation.metrics import avg_at_k, bootstrap_interval, maj_at_k, pass_at_k


def test_avg_at_k():
    assert avg_at_k([True, False, False, True]) == 0.5
    with pytest.raises(ValueError, match="at least one"):
        avg_at_k([])


def test_pass_at_k_equals_enumeration():
    correct = [True, False, False, True, False]
    for k in range(1, 6):
        subsets = list(itertools.combinations(correct, k))
        assert pass_at_k(correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="n=2"):
        pass_at_k([True, False], 3)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["4", "5", "5"], [True, False, False], 0.0),
        (["4", "5"], [True, False], 0.5),
        ([None, None, "4"], [False, False, True], 1.0),
        ([None], [False], 0.0),
    ],
)
def test_maj_at_k(answers, correct, expected):
    assert maj_at_k(answers, correct) == expected


def test_interval_covers_the_normal_one():
    values = [1.0] * 60 + [0.0] * 40
    got = bootstrap_interval(values, seed=3)
    # normal approximation: 0.6 +- 1.96 * sqrt(0.24 / 100)
    assert got.mean == pytest.approx(0.6)
    assert got.low == pytest.approx(0.504, abs=0.015)
    assert got.high == pytest.approx(0.696, abs=0.015)
    assert got == bootstrap_interval(values, seed=3)


def test_interval_of_one_problem_has_no_width():
    got = bootstrap_interval([0.25])
    assert (got.mean, got.low, got.high) == (0.25, 0.25, 0.25)


def test_all_wrong_is_still_uncertain():
    got = bootstrap_interval([0.0] * 50)
    # Wilson at 0 of 50: z^2 / (50 + z^2) = 3.8415 / 53.8415
    assert (got.mean, got.low) == (0.0, 0.0)
    assert got.high == pytest.approx(0.07135, abs=1e-4)
    assert bootstrap_interval([1.0] * 50).low == pytest.approx(1 - 0.07135, abs=1e-4)
