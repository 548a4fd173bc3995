"""Decontamination: what counts as a repeat, and that real training files hold none."""

import pytest

from posttrain.data.decontaminate import Decontaminator, normalise
from posttrain.data.load import read_files

LONG = "A farmer has three fields and in each field grow twelve rows of corn with nine plants in every single row"
PROBLEMS = {"suite": [LONG, "What is 7 times 8?"], "other": ["Nothing to see here"]}


def row(problem, name="r"):
    return {"id": name, "problem": problem}


def test_normalise():
    assert normalise("What's $x_{1}$, Été?\n\\frac12") == ["what", "s", "x", "1", "été", "frac12"]


def test_exact_and_reformatted_repeats_are_caught():
    check = Decontaminator(PROBLEMS).check
    match = check(row(LONG.upper().replace(" ", "  ") + "!!"))
    assert match is not None
    assert (match.suite, match.problem, match.overlap) == ("suite", 0, 1.0)
    assert check(row("what is $7$ times 8")).problem == 1  # fewer than 13 words: equal or not
    assert check(row("What is 7 times 9?")) is None
    assert check(row("")) is None


def test_signs_count_in_short_texts():
    check = Decontaminator({"suite": ["(3+5)*2-4=?"]}).check
    assert check(row("( 3 + 5 ) * 2 - 4 = ?")) is not None
    assert check(row("(3+5)*2+4=?")) is None
    assert check(row("3+5*2-4=?")) is None


def test_the_threshold_is_a_share_of_the_rows_own_grams():
    words = LONG.lower().split()
    assert len(words) == 21
    # 21 words of the problem and k words of its own: 9 of 9 + k grams are shared.
    nine = Decontaminator(PROBLEMS)
    assert nine.check(row(" ".join(words + [f"own{n}" for n in range(9)]))).overlap == pytest.approx(0.5)
    assert nine.check(row(" ".join(words + [f"own{n}" for n in range(10)]))) is None
    assert Decontaminator(PROBLEMS, threshold=0.3).check(row(" ".join(words + [f"own{n}" for n in range(10)]))) is not None


def test_grams_of_two_problems_do_not_add_up():
    one, two = (" ".join(f"{letter}{n}" for n in range(20)) for letter in "ab")
    own = " ".join(f"c{n}" for n in range(10))
    mixed = Decontaminator({"suite": [one, two]}, threshold=0.3)
    together = Decontaminator({"suite": [f"{one} {two}"]}, threshold=0.3)
    assert mixed.check(row(f"{one} {own} {two}")) is None
    assert together.check(row(f"{one} {own} {two}")) is not None


def test_filter_reports():
    kept, report = Decontaminator(PROBLEMS).filter([row(LONG, "a"), row("something else", "b"), row("nothing to see, here", "c")])
    assert [one["id"] for one in kept] == ["b"]
    assert (report["checked"], report["dropped"]) == (3, 2)
    assert report["by_suite"] == {"suite": 1, "other": 1}
    assert [match.id for match in report["matches"]] == ["a", "c"]


@pytest.mark.parametrize("setting", [{"n": 0}, {"threshold": 0.0}, {"threshold": 1.5}])
def test_bad_settings(setting):
    with pytest.raises(ValueError, match="decontaminate"):
        Decontaminator(PROBLEMS, **setting)


def test_real_training_rows_and_a_planted_one(shared):
    suites = {path.stem: [one for _, one in read_files(path)] for path in sorted((shared / "data/eval").glob("*.jsonl"))}
    decontaminator = Decontaminator(suites)
    for name in ("gsm8k_train", "math_train", "aime_1983_2023"):
        rows = [one for _, one in read_files(shared / f"data/train/{name}.jsonl.gz")]
        planted = {**suites["gsm8k"][100], "id": "planted"}
        kept, report = decontaminator.filter([*rows[:3000], planted, *rows[3000:]])
        assert [match.id for match in report["matches"]] == ["planted"], name
        assert report["by_suite"] == {"gsm8k": 1}
        assert len(kept) == len(rows)
