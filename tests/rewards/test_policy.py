"""Each field of the answer policy, in both its behaviours; the recipe's section has the same fields and defaults."""

import dataclasses
import pickle
import subprocess
import sys

import pytest
import yaml

pytest.importorskip("math_verify")

from posttrain.config.answers import AnswerConfig
from posttrain.rewards.compare import matches, read_gold
from posttrain.rewards.errors import RewardError
from posttrain.rewards.extract import find_answer
from posttrain.rewards.policy import DEFAULT, AnswerPolicy


def found(output, prompt=None, **fields):
    answer = find_answer(output, policy=AnswerPolicy(**fields), prompt=prompt)
    return None if answer is None else answer.text


def same(gold, answer, **fields):
    read = read_gold(gold)
    assert read is not None
    return matches(read, answer, policy=AnswerPolicy(**fields))


@pytest.mark.parametrize(
    ("field", "output", "answers"),
    [
        ("thinking", r"<think>\boxed{3}</think> \boxed{4}", {"strip": "4", "require": "4", "keep": "4"}),
        ("thinking", r"<think>\boxed{3}</think> so", {"strip": "so", "require": "so", "keep": "3"}),
        ("thinking", r"<think>\boxed{3}", {"strip": None, "require": None, "keep": "3"}),
        ("thinking", r"<think>a</think><think>\boxed{3}", {"strip": None, "require": None, "keep": "3"}),
        ("thinking", r"\boxed{3}", {"strip": "3", "require": None, "keep": "3"}),
        (
            "answer_tag",
            r"\boxed{3} <answer>4</answer>",
            {"fallback": "3", "prefer": "4", "require": "4", "ignore": "3"},
        ),
        (
            "answer_tag",
            "<answer>4</answer> The answer is 5",
            {"fallback": "4", "prefer": "4", "require": "4", "ignore": "5"},
        ),
        ("answer_tag", r"\boxed{3}", {"fallback": "3", "prefer": "3", "require": None, "ignore": "3"}),
        ("answer_tag", r"<answer>so \boxed{4}</answer>", {"prefer": "4", "require": "4"}),
        ("boxes", r"\boxed{1} and \boxed{2}", {"joined": "1, 2", "last": "2", "same": None}),
        ("boxes", r"First \boxed{1}. Then we find \boxed{2}", {"joined": "2", "last": "2", "same": None}),
        ("boxes", r"\boxed{2}, so again \boxed{ 2}", {"joined": " 2", "last": " 2", "same": " 2"}),
        ("unboxed_fallback", "The answer is 7.", {True: "7", False: None}),
        ("open_box", r"\boxed{7}. Check: \boxed{", {"none": None, "previous": "7"}),
        ("open_box", r"\boxed{7", {"none": None, "previous": None}),
        ("run_on", "\\boxed{6}\n\nQuestion: 2+2? \\boxed{4}", {"keep": "4", "cut": "6"}),
        ("run_on", "Question: 1+1?\n\nQuestion: 2+2? \\boxed{4}", {"keep": "4", "cut": "4"}),
    ],
)
def test_where_an_answer_stands(field, output, answers):
    for value, expected in answers.items():
        assert found(output, **{field: value}) == expected, (field, value)


def test_an_echo_of_the_prompt():
    prompt = "For example 2+2 gives \\boxed{4}. What is 4+5?"
    assert found(prompt + " I cannot say.", prompt) == "I cannot say."
    assert found(prompt + " I cannot say.", prompt, prompt_echo="keep") == "4"
    assert found(prompt + " It is \\boxed{9}", prompt) == "9"
    assert found("\\boxed{x}", "\\boxed{x}") == "x", "a short prompt may stand in an answer"


@pytest.mark.parametrize(
    ("field", "gold", "answer", "verdicts"),
    [
        ("units", r"12\text{ cm}", r"12\text{ m}", {"check": False, "ignore": True}),
        ("units", r"12\text{ cm}", "12", {"check": True, "ignore": True}),
        ("units", r"9\text{ m}^2", r"9\text{ square meters}", {"check": True, "ignore": True}),
        ("percent", r"35\%", "35", {"lenient": True, "value": False}),
        ("percent", r"35\%", "0.35", {"lenient": True, "value": True}),
        ("percent", r"1\%", r"100\%", {"lenient": False, "value": False}),
        ("tolerance", r"\sqrt{2}", "1.41", {1e-6: False, 1e-2: True}),
        ("tolerance", r"\sqrt{2}", "1.414214", {1e-6: True, 0: False}),
        ("tolerance", "2.5", "2.501", {1e-6: False, 1e-3: True}),
        ("tolerance", r"\frac{1}{3}", "0.333333", {1e-6: True, 0: False}),
        ("tolerance", r"\pi", r"\frac{355}{113}", {1e-6: False, 1e-2: False}),
        ("choices", "C", r"\text{(C)}", {True: True}),
        ("choices", "C", r"\textbf{(C)}\ 12", {True: True, False: False}),
        ("ordered_lists", "1, 2", "2, 1", {False: True, True: False}),
        ("ordered_lists", "1, 2", "1.0, 2", {False: True, True: True}),
        ("ordered_lists", r"\{1, 2\}", r"\{2, 1\}", {False: True, True: True}),
        ("ordered_lists", "(1, 2)", "(2, 1)", {False: False, True: False}),
    ],
)
def test_what_equals_the_gold(field, gold, answer, verdicts):
    for value, expected in verdicts.items():
        assert same(gold, answer, **{field: value}) is expected, (field, value)


def test_the_recipe_has_the_same_fields_and_defaults():
    assert AnswerConfig().model_dump() == DEFAULT.as_dict()
    given = AnswerConfig.model_validate({"units": "ignore"})
    assert AnswerPolicy.of(given) == AnswerPolicy.of(pickle.loads(pickle.dumps(given))) == AnswerPolicy(units="ignore")
    for wrong, message in (("units: convert", "'check'"), ("tolerance: 1", "from 0 to below 1"), ("unit: check", "unit")):
        with pytest.raises(ValueError, match=message):
            AnswerConfig.model_validate(yaml.safe_load(wrong))
    source = (AnswerPolicy.__doc__ or "").split("Attributes:")[1]
    assert all(f"{field.name}: " in source for field in dataclasses.fields(AnswerPolicy))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"units": "convert"}, "'check', 'ignore'"),
        ({"tolerance": 2}, "tolerance=2"),
        ({"choices": 1}, "true or false"),
        ({"unit": "check"}, "unknown unit; known: thinking"),
    ],
)
def test_bad_policies(given, message):
    with pytest.raises(RewardError, match=message):
        AnswerPolicy.of(given)


def test_the_script_takes_a_policy(root, tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text(r'{"gold": "12\\text{ cm}", "output": "12\\text{ m}", "expected": false, "scope": "pair"}' + "\n")

    def last_line(*arguments):
        command = [sys.executable, "scripts/check_verifier.py", str(path), *arguments]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)

    assert "1/1 agree" in last_line().stdout
    assert "0/1 agree, 1 wrong acceptances" in last_line("--policy", "units=ignore", "tolerance=1e-3").stdout
    assert "unknown unit" in last_line("--policy", "unit=x").stderr
