"""The procedural task: right answers, disjoint splits, difficulty that is kept to."""

import re

import pytest

from posttrain.data.arithmetic import Difficulty, evaluate, generate, render, split_of
from posttrain.errors import DataError


def python_value(expression: str) -> int:
    """Value by Python's own parser; quotients are exact, so true division gives the integer."""
    assert re.fullmatch(r"[-+*/()0-9]+", expression)
    value = eval(expression)
    assert value == int(value)
    return int(value)


@pytest.mark.parametrize(
    "knobs", [{}, {"max_operations": 6, "operators": "+-*/", "allow_negative": True, "bracket_fraction": 0.6}]
)
def test_answers_and_steps_are_right(knobs):
    for row in generate(600, 3, **knobs):
        *steps, boxed = row["solution"].split("\n")
        assert boxed == f"\\boxed{{{row['answer']}}}"
        assert len(steps) == row["level"]
        for step in steps:
            left, right = step.split("=")
            assert python_value(left) == int(right), step
        assert steps[-1].endswith(f"={row['answer']}")
        if row["kind"] != "word":
            assert python_value(row["problem"].removesuffix("=?")) == int(row["answer"])
        assert ("(" in row["problem"]) == (row["kind"] == "bracket")


def test_same_seed_same_problems_and_a_prefix_does_not_depend_on_n():
    rows = generate(300, 11)
    assert rows == generate(300, 11)
    assert rows[:50] == generate(50, 11)
    assert rows != generate(300, 12)


def test_no_duplicates():
    rows = generate(5000, 0)
    assert len({row["problem"] for row in rows}) == len({row["id"] for row in rows}) == 5000


def test_train_and_eval_never_share_a_problem():
    """Small numbers, so that both sides cover most of what there is and any leak would show."""
    knobs = {"max_operand": 6, "max_operations": 2, "bracket_fraction": 0.3, "word_fraction": 0.3}
    train = {row["problem"] for seed in range(3) for row in generate(2000, seed, **knobs)}
    held_out = {row["problem"] for seed in range(3) for row in generate(150, seed, "eval", **knobs)}
    assert train
    assert held_out
    assert not train & held_out


def test_a_word_problem_is_held_out_whoever_it_is_about():
    knobs = {"word_fraction": 1.0, "bracket_fraction": 0.0, "max_operand": 8, "max_operations": 2}
    train = {row["solution"] for row in generate(3000, 0, **knobs)}
    held_out = {row["solution"] for row in generate(300, 0, "eval", **knobs)}
    assert not train & held_out  # the worked steps are the arithmetic itself


def test_the_split_is_a_stable_hash():
    """Fixed values: another hash would let earlier runs' training problems into evaluation."""
    assert [split_of(text) for text in ("1+4", "2+3", "word:1+4")] == ["eval", "train", "train"]
    share = sum(split_of(str(number)) == "eval" for number in range(20_000)) / 20_000
    assert 0.09 < share < 0.11


def test_difficulty_is_kept_to():
    knobs = {
        "min_operations": 2,
        "max_operations": 4,
        "max_operand": 15,
        "max_multiplier": 4,
        "max_value": 60,
        "operators": "+-*/",
    }
    rows = generate(1500, 5, bracket_fraction=0.5, word_fraction=0.25, **knobs)
    assert {row["level"] for row in rows} == {2, 3, 4}
    for row in rows:
        assert all(1 <= int(number) <= 15 for number in re.findall(r"\d+", row["problem"]))
        for a, operator, b, value in re.findall(r"(\d+)([-+*/])(\d+)=(-?\d+)", row["solution"]):
            assert 0 <= int(value) <= 60
            assert operator != "*" or min(int(a), int(b)) <= 4
            assert operator != "/" or 2 <= int(b) <= 4
    kinds = [row["kind"] for row in rows]
    assert 0.2 < kinds.count("word") / len(rows) < 0.4
    assert kinds.count("bracket") > 300


def test_difficulty_from_an_object_and_overrides():
    class Section:
        max_operations = 5
        max_value = 70
        something_else = "ignored"

    hard = Difficulty.of(Section(), max_value=80)
    assert (hard.max_operations, hard.max_value, hard.min_operations) == (5, 80, Difficulty().min_operations)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"min_operations": 0}, "min_operations"),
        ({"min_operations": 4, "max_operations": 3}, "max_operations"),
        ({"operators": "+^"}, "operators"),
        ({"max_value": 5}, "max_value"),
        ({"word_fraction": 0.8, "bracket_fraction": 0.4}, "word_fraction"),
        ({"max_operant": 3}, "max_operant"),
    ],
)
def test_impossible_settings_are_named(knobs, named):
    with pytest.raises(ValueError, match=named):
        generate(1, **knobs)


def test_bad_split_and_count():
    with pytest.raises(ValueError, match="split"):
        generate(1, 0, "test")
    with pytest.raises(ValueError, match="n=-1"):
        generate(-1)
    assert generate(0) == []


def test_an_exhausted_difficulty_says_so():
    with pytest.raises(DataError, match=r"only .* different eval problems"):
        generate(5000, 0, "eval", max_operand=3, max_operations=2, max_value=9, word_fraction=0.0)


def test_render_brackets_only_where_needed():
    tree = ("-", ("*", ("+", 3, 5), 2), ("-", 4, ("+", 1, 2)))
    assert render(tree) == "(3+5)*2-(4-(1+2))"
    steps: list[str] = []
    assert evaluate(tree, steps) == 15
    assert steps == ["3+5=8", "8*2=16", "1+2=3", "4-3=1", "16-1=15"]


def test_an_unverified_teacher_errs_at_its_rate_and_carries_on():
    rows = generate(3000, 5, teacher_error_rate=0.2)
    clean = generate(3000, 5)
    assert [(row["problem"], row["answer"]) for row in rows] == [(row["problem"], row["answer"]) for row in clean]
    wrong = total = 0
    for row in rows:
        *steps, boxed = row["solution"].split("\n")
        for step in steps:
            left, right = step.split("=")
            total += 1
            wrong += python_value(left) != int(right)
        assert boxed == f"\\boxed{{{steps[-1].split('=')[1]}}}", "the box holds what the steps led to"
    # 7,500 steps at 0.2: three standard deviations are 0.014
    assert wrong / total == pytest.approx(0.2, abs=0.014)
