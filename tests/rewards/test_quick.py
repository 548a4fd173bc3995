"""Plain numbers, which are compared without a process; the child must say the same."""

import itertools

import pytest

pytest.importorskip("math_verify")

from posttrain.rewards.compare import matches, read_gold
from posttrain.rewards.policy import AnswerPolicy
from posttrain.rewards.quick import is_plain, same_number

DEFAULT = AnswerPolicy()
NUMBERS = (
    "0",
    "-0",
    "7",
    "-7",
    "007",
    "7.0",
    "0.7",
    "-0.70",
    "7/10",
    r"\frac{7}{10}",
    r"-\frac{14}{20}",
    r"\dfrac{1}{3}",
    "2/6",
    "0.333",
)


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("7", "7", True),
        ("7", "-7", False),
        ("0", "-0", True),
        ("7", "7.0", True),
        ("7", "007", True),
        ("0.7", r"\frac{14}{20}", True),
        ("0.7", "7/9", None),
        (r"\frac{1}{3}", "2/6", True),
        (r"\frac{1}{3}", "0.333333", None),
        (r"\frac{1}{12345}", r"\frac{1}{12346}", False),
        ("1", r"\frac{0}{0}", None),
        ("7", "７", None),
        ("7", "7,000", None),
        ("7", "+7", None),
        ("7", r"7\%", None),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "9" * 4999 + "8", False),
    ],
)
def test_by_hand(gold, answer, verdict):
    assert same_number(gold, answer, DEFAULT) is verdict


def test_a_tolerance_is_left_to_the_child():
    loose = AnswerPolicy(tolerance=1e-2)
    assert same_number("100", "100.5", loose) is None and same_number("100", "101", loose) is None
    assert same_number("100", "100", loose) is True


def test_the_child_agrees():
    for gold, answer in itertools.product(NUMBERS, NUMBERS):
        quick = same_number(gold, answer, DEFAULT)
        if quick is not None:
            read = read_gold(gold)
            assert read is not None and is_plain(gold)
            assert matches(read, answer) is quick, (gold, answer)
