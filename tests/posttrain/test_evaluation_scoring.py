"""Scores, votes and tables against numbers worked out by hand."""

import re

import pytest

from posttrain.evaluation import grading
from posttrain.evaluation.grading import same_answers
from posttrain.evaluation.samples import Sample
from posttrain.evaluation.scoring import score_problems, score_row
from posttrain.evaluation.table import format_paper_table, format_results
from posttrain.evaluation.votes import vote_classes
from posttrain.rewards.pool import VerifierPool


def sample(name: str, number: int, correct: bool | None, answer: str | None = "1", **changes) -> Sample:
    given = {
        "problem_id": name, "sample": number, "correct": correct, "reason": "match", "gold": "1", "answer": answer, "length": 10,
        "finish_reason": "stop", "mean_logprob": -0.1, "problem": "?", "text": "",
    }  # fmt: skip
    return Sample(**{**given, **changes})


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(1, 10.0, 1024) as pool:
        yield pool


def test_a_majority_of_equal_answers_in_different_words(pool):
    r"""Three ways to write 1/2 are one candidate with three votes, against two for 3; by text each would have one."""
    samples = [
        sample("p", 0, False, r"\frac{1}{2}"),
        sample("p", 1, True, "3"),
        sample("p", 2, False, "0.5"),
        sample("p", 3, True, "3.0"),
        sample("p", 4, False, r"\dfrac12"),
        sample("p", 5, False, None),
    ]

    def equal(pairs):
        return same_answers(pool, pairs)

    assert vote_classes(samples, equal) == [1, 0, 1, 0, 1, None]
    [problem] = score_problems(samples, votes=lambda group: vote_classes(group, equal))
    assert problem.majority == 0.0
    assert [(vote["votes"], vote["right"]) for vote in problem.answers] == [(3, False), (2, True)]
    [by_text] = score_problems(samples)
    assert by_text.majority == 1.0, "by text the right answer would have had the most votes"


def test_right_answers_are_one_candidate_without_asking():
    samples = [sample("p", 0, True, "0.5"), sample("p", 1, True, r"\frac12"), sample("p", 2, False, "7")]
    assert vote_classes(samples, lambda pairs: pytest.fail(f"asked about {pairs}")) == [0, 0, 1]


def test_answers_are_compared_with_the_most_frequent_first():
    asked = []

    def equal(pairs):
        asked.extend(pairs)
        return [first.lower() == second.lower() for first, second in pairs]

    samples = [sample("p", i, False, answer) for i, answer in enumerate(["b", "A", "A", "a", "B"])]
    assert vote_classes(samples, equal) == [2, 1, 1, 1, 2]
    assert asked == [("A", "b"), ("A", "a"), ("b", "a"), ("A", "B"), ("b", "B")]


def four_problems() -> list[Sample]:
    """Right samples of 4: 4, 2, 1 and 0."""
    return [sample(f"p{i}", j, j < right, str(j >= right)) for i, right in enumerate([4, 2, 1, 0]) for j in range(4)]


def test_every_score_by_hand():
    row = score_row("m", "s", score_problems(four_problems()))
    assert row.accuracy is not None and row.pass_k is not None and row.maj_k is not None
    assert row.accuracy.mean == pytest.approx((1 + 0.5 + 0.25 + 0) / 4)
    # pass@2 from 4 samples: 1 - C(4 - c, 2) / 6 for c = 4, 2, 1, 0 is 1, 5/6, 1/2, 0
    assert row.pass_at == pytest.approx({"1": 1.75 / 4, "2": (1 + 5 / 6 + 1 / 2) / 4, "4": 3 / 4})
    assert row.pass_k.mean == pytest.approx(3 / 4)
    # The majority is right in the first, tied in the second, wrong in the others.
    assert row.maj_k.mean == pytest.approx(1.5 / 4)


def test_pass_at_is_given_for_powers_of_two_and_all():
    samples = [sample("p", j, j == 0) for j in range(6)]
    row = score_row("m", "s", score_problems(samples))
    assert row.pass_at == pytest.approx({"1": 1 / 6, "2": 2 / 6, "4": 4 / 6, "6": 1.0})


def test_lengths_that_a_server_does_not_tell_are_not_counted_as_zero():
    row = score_row("m", "s", score_problems([sample("a", 0, True, length=30), sample("b", 0, True, length=None)]))
    assert row.mean_length == 30
    unknown = score_row("m", "s", score_problems([sample("a", 0, True, length=None)]))
    assert unknown.mean_length is None
    assert " -  " in format_results([unknown])


def test_subjects_and_levels_have_tables_of_their_own():
    rows = {
        "p0": {"subject": "Algebra", "level": 2},
        "p1": {"subject": "Geometry", "level": 1},
        "p2": {"subject": "Geometry"},
        "p3": {},
    }
    row = score_row("m", "math", score_problems(four_problems(), rows))
    split = {part["name"]: (part["problems"], part["accuracy"]["mean"]) for part in row.splits["subject"]}
    assert split == {"Geometry": (2, 0.375), "Algebra": (1, 1.0)}
    assert [part["name"] for part in row.splits["level"]] == ["1", "2"]
    text = format_results([row])
    assert "math by subject" in text
    assert "by level" not in text, "levels are in the report"
    assert "by subject" not in format_results([score_row("m", "math", score_problems(four_problems()))])


def test_what_cannot_be_read_is_listed():
    problems = score_problems([sample("a", 0, True), sample("b", 0, None, gold="\\frac{")])
    row = score_row("m", "s", problems, unreadable=[{"id": "c", "answer": "{{"}])
    assert (row.problems, row.unscored) == (1, 2)
    text = format_results([row])
    assert "s b: '\\\\frac{'" in text
    assert "s c: '{{'" in text
    assert "1 (+2 unscored)" in text


def test_published_rows_stand_beside_ours_and_say_so():
    protocol = {"temperature": 1.0, "top_p": 0.7, "max_tokens": 32768}
    samples = [sample(f"p{i}", j, i < 15) for i in range(30) for j in range(2)]
    row = score_row("runs/x", "aime24", score_problems(samples), protocol=protocol).as_dict()
    other = score_row("runs/x", "mine", score_problems(samples), protocol=protocol).as_dict()
    lines = format_paper_table([row, other]).splitlines()
    assert lines[0].split() == ["model", "AIME24", "mine"]
    [paper] = [line for line in lines if line.startswith("SSE-H 2B, RL (preprint)")]
    assert paper.split()[-2:] == ["published", "64.7"]
    [ours] = [line for line in lines if line.startswith("runs/x")]
    assert "measured" in ours and "50.0 ±" in ours
    assert any("arXiv 2507.16577" in line for line in lines), "every published row names its source"
    assert "avg@2, temperature 1, top-p 0.7, at most 32,768 tokens" in lines[-1]


def test_nothing_published_no_table():
    assert format_paper_table([score_row("m", "mine", score_problems(four_problems())).as_dict()]) == ""


def test_the_digest_of_the_verifier_covers_every_rule(root):
    """A module that one of them imports decides verdicts too."""
    sources = [(root / "rewards" / f"{name}.py").read_text() for name in grading.RULES]
    lines = [line for text in sources for line in re.findall(r"from posttrain\.rewards(?:\.\w+)? import .*", text)]
    imported = {name for line in lines for pair in re.findall(r"rewards\.(\w+)|(?:import |, )(\w+)", line) for name in pair}
    modules = {path.stem for path in (root / "rewards").glob("*.py")}
    assert (imported & modules) - {"errors"} <= set(grading.RULES)
