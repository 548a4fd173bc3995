"""Where the answer is found in an output."""

import time

import pytest

from posttrain.rewards.extract import Answer, completion_text, find_answer, gold_text, last_box
from posttrain.rewards.policy import AnswerPolicy

BOXED = AnswerPolicy(unboxed_fallback=False)


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1}. No, that misses a case; \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x : x > 3\right\}}", r"\left\{x : x > 3\right\}"),
        (r"\boxed {12}", "12"),
        (r"\fbox{12}", "12"),
        (r"\boxed 9 is it", "9"),
        (r"<think>\boxed{3}</think> It is \boxed{4}.", "4"),
        (r"\boxed{x=3} \text{ and } \boxed{x=-3}", "x=3, x=-3"),
        (r"\boxed{2}, \boxed{2}", "2"),
        (r"Step 1: \boxed{2}. Step 2: \boxed{5}", "5"),
        (r"\boxed{a{b}c", None),
        (r"first \boxed{7}, no wait, \boxed{", None),
        (r"\boxed{}", None),
        (r"<think> it is \boxed{4} or", None),
        ("", None),
    ],
)
def test_boxed(output, answer):
    found = find_answer(output, policy=BOXED)
    assert (found.text if found else None) == answer


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("12 * 6 is\n#### 72", "72"),
        ("The answer is 72.", "72"),
        ("The answer is 72, because 6 * 12 is", "72"),
        ("The answer is 72, in total", "72"),
        ("The answer is 72<|end|>", "72"),
        ("We get 3.\nAnswer: -4.5", "-4.5"),
        ("Answer:\n81", "81"),
        ("so <<6*7=42>>42 dollars\nA: 42", "42"),
        ("answer is 3\nThe final answer is **5**.", "5"),
        ("<think>hm</think><answer>8</answer> The answer is 9", "8"),
        (r"a step \boxed{2}. Final Answer: The final answer is $10$. I hope it is correct.", "$10$"),
        (r"It is \boxed{42}. Actually, the answer is 43.", "43"),
        (r"\boxed{42}. Wait, I missed one. It should be $\frac{1}{2}$, since 1 < 2", r"$\frac{1}{2}$"),
    ],
)
def test_marked(output, answer):
    assert find_answer(output) == Answer(answer, "marked")


def test_fallback_is_a_choice():
    assert find_answer("The answer is 72", policy=BOXED) is None
    assert find_answer("so 72 remain") == Answer("so 72 remain", "tail")
    assert find_answer(r"\boxed{5} and the answer is 6") == Answer("5", "boxed")
    assert find_answer(r"\boxed{5}. Actually, the answer is 6.", policy=BOXED) is None
    assert find_answer(r"\boxed{5}. Actually, the answer is easy to check.", policy=BOXED) == Answer("5", "boxed")


@pytest.mark.parametrize(
    "output",
    [
        r"2\boxed{42}", r"$x \boxed{42}$", r"$\frac{1}{2}\boxed{42}$", r"0.\boxed{42}", r"\boxed{42}{8}", r"$\boxed{42}\pi$",
        r"\boxed{42}.5", r"\boxed{42},000", r"$\left(\boxed{42}, 8\right)$", r"$\{8, \boxed{42}\}$", r"\cancel{\boxed{42}} 43",
        r"$\lnot \boxed{42}$", r"anything but \boxed{42}", r"$\boxed{42} \times 10^3$", r"$\binom{\boxed{42}}{2}$",
        r"$\boxed{42}\text{th root of 2}$", r"I think \boxed{42}, no: 43", r"\boxed{42} Correction: 43",
        r"\boxed{42}. Edit: the answer is 43", r"It isn't quite $\boxed{42}$, it's 43",
    ],
)  # fmt: skip
def test_a_box_that_is_part_of_more_or_struck_out_is_no_answer(output):
    assert find_answer(output) is None


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (r"Since $a = 3$, the total in part 2 \boxed{42}", "42"),
        (r"$2\boxed{42} = 84$", "42"),
        (r"is\boxed{42}", "42"),
        (r"$\boxed{42}m$", "42"),
        (r"$f(3, 4) = \boxed{42}$", "42"),
        (r"(see $x$, combined: $\boxed{42}$)", "42"),
        (r"$\boxed{7}$ million people", r"7\text{ million}"),
        (r"(i) \boxed{7} (ii) \boxed{8}", "7, 8"),
        (r"\boxed{7}, failing that \boxed{8}", "7, 8"),
    ],
)
def test_what_stands_beside_a_box(output, answer):
    assert find_answer(output) == Answer(answer, "boxed")


@pytest.mark.parametrize("part", [".", "*", "\n* ", "\n• ", "y =", "y ", ", 1", "(1) ", r"\ ", "and ", "if "])
def test_gaps_between_boxes_are_read_once(part):
    started = time.monotonic()
    for end in "x!?(":
        find_answer(r"$(\boxed{1}" + (part * 60)[:58] + end + r"\boxed{2}" + part * 30 + end)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "output",
    [
        r"\boxed{" * 60_000,
        "{" * 400_000 + r"\boxed{",
        r"\boxed{1}" * 40_000,
        r"\boxed{1} and " * 20_000,
        "answer is " * 40_000,
        "#" * 1_000_000,
        r"\boxed{1}" + "wait " * 70_000,
        "$(" * 100_000 + r"\boxed{1}" + ", 1" * 50_000,
    ],
    ids=["open boxes", "open braces", "boxes", "joined", "marks", "hashes", "corrections", "elements"],
)
def test_long_outputs_take_linear_time(output):
    started = time.monotonic()
    find_answer(output)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "line", ["3+4=7", "so x = 7", "4 \\cdot 2", "= 3(4)", "1.", "$x=7$", "\\[ 3+4=7 \\]", "7 -", "12/3", "a)", "3^2"]
)
@pytest.mark.parametrize("between", ["\n", "\n\n", " \n", "\r\n"])
@pytest.mark.parametrize("box", ["\\boxed{7}", "$\\boxed{7}$", "$$\\boxed{7}$$", "\\[\\boxed{7}\\]"])
def test_a_box_on_a_line_of_its_own_is_no_part_of_the_line_before(line, between, box):
    assert last_box(f"{line}{between}{box}") == (True, "7")


def test_only_the_end_counts():
    assert find_answer(r"\boxed{7}" + " and so on" * 50_000, policy=BOXED) is None


def test_last_box_tells_no_box_from_an_open_one():
    assert last_box("nothing") == (False, None)
    assert last_box(r"\boxed{1") == (True, None)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{4} and \boxed{5}", "4, 5"),
        (r"\boxed{4} or 5.", "4, 5"),
        (r"3 or $\boxed{4}$", "3, 4"),
        (r"Case 1: \boxed{4}. Case 2: \boxed{5}.", "4, 5"),
        (r"\boxed{4} = \boxed{5}", "4, 5"),
        (r"\boxed{3} + \boxed{1} = \boxed{4}", "4"),
        (r"\boxed{4}, or in words four", "4"),
        (r"$x = -\boxed{4}$", "-4"),
        (r"$x = -\boxed{a+b}$", "-(a+b)"),
        (r"- \boxed{4}", "4"),
        (r"$\boxed{90}^\circ$", "90"),
        (r"$\boxed{4}^2$", None),
        (r"$\sqrt{\boxed{4}}$", None),
        (r"$\boxed{4} + 1$", None),
        (r"\boxed{4}? No", None),
        (r"\boxed{4} would be wrong", None),
        (r"\boxed{4}. Wait, that is wrong.", None),
        (r"\boxed{4}? Or 5.", "4, 5"),
        (r"$10-\boxed{4}$", None),
        (r"$3+\boxed{4}=7$", "4"),
        (r"Problem 20 - \boxed{4}", "4"),
        (r"$n = 6$ - $\boxed{4}$", "4"),
        (r"$\log \boxed{4}$", None),
        (r"$\boxed{4}!$", None),
        (r"\boxed{4}!", "4"),
        (r"$\boxed{204}_6$", "204_{6}"),
        (r"it is not true that we get \boxed{4}", None),
        (r"\boxed{x = \boxed{4}", None),
        (" ".join(rf"\boxed{{{n}}}" for n in range(12)), None),
        (" ".join(r"\boxed{4}" for _ in range(12)), "4"),
    ],
)
def test_what_the_sentence_says_about_a_box(text, content):
    assert last_box(text) == (True, content)


def test_completion_text():
    assert completion_text("plain") == "plain"
    assert completion_text([{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]) == "yes"
    assert completion_text([{"role": "assistant", "content": [{"type": "text", "text": "block"}]}]) == "block"
    assert completion_text([{"role": "assistant", "content": None}]) == ""
    with pytest.raises(TypeError, match="string or a list"):
        completion_text(3)


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("72", "72"),
        (72, "72"),
        (0.5, "0.5"),
        ("work\n#### 72", "72"),
        (r"so \boxed{x^2}.", "x^2"),
        ("  ", None),
        (None, None),
        (True, None),
        (float("nan"), None),
        (float("inf"), "inf"),
        (["1"], None),
    ],
)
def test_gold_text(gold, text):
    assert gold_text(gold) == text


def test_a_gold_integer_of_any_size():
    """Python's str refuses integers of more than 4,300 digits."""
    assert gold_text(-(10**5000)) == "-1" + "0" * 5000
