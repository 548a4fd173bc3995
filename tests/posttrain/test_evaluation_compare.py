"""Comparing two runs: the paired difference by hand, what changed, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from posttrain import cli
from posttrain.evaluation.compare import CompareError, compare, find_models, pair_models
from posttrain.evaluation.scoring import score_problems
from tests.posttrain.test_evaluation_scoring import sample

PROTOCOL = {"temperature": 1.0, "samples": 2, "problems": {"count": 4, "digest": "d"}}


def evaluated(run: Path, rights: dict[str, int], *, model="base", suite="toy", protocol=PROTOCOL, each=2) -> Path:
    """A finished suite: problem -> right samples of `each`, the answer "1" for right and "2" for wrong ones."""
    folder = run / "eval" / model / suite
    folder.mkdir(parents=True)
    samples = [
        sample(name, j, j < right, "1" if j < right else "2", problem=f"problem {name}", text=f"{run.name}'s {name} sample {j}")
        for name, right in rights.items()
        for j in range(each)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(vars(s)) + "\n" for s in samples))
    (folder / "problems.jsonl").write_text("".join(json.dumps(p.as_dict()) + "\n" for p in score_problems(samples)))
    (folder / "settings.json").write_text(json.dumps({"protocol": protocol, "seed": 0, "model": {"path": run.name}}))
    return run


def both(tmp_path, a=None, b=None, **options):
    first = evaluated(tmp_path / "one", a or {"p": 0, "q": 1, "r": 2, "s": 2})
    second = evaluated(tmp_path / "two", b or {"p": 2, "q": 1, "r": 2, "s": 1}, **options)
    return find_models(str(first))[0], find_models(str(second))[0]


def test_the_difference_is_paired(tmp_path):
    [suite] = compare(*both(tmp_path))
    # B - A by problem: +1, 0, 0, -1/2.
    assert (suite.a, suite.b) == (0.625, 0.75)
    assert suite.difference.mean == pytest.approx(0.125)
    assert suite.difference.low < 0 < suite.difference.high
    assert (suite.better, suite.worse) == (1, 1)
    gain, loss = suite.changes
    assert (gain.id, gain.a, gain.b, gain.a_answer, gain.b_answer) == ("p", 0.0, 1.0, "2", "1")
    assert (loss.id, loss.a, loss.b) == ("s", 1.0, 0.5)
    assert (gain.a_text, gain.b_text) == ("one's p sample 0", "two's p sample 0"), "a wrong one of A, a right one of B"
    assert (loss.a_text, loss.b_text) == ("one's s sample 0", "two's s sample 1"), "a right one of A, a wrong one of B"


def test_pairing_narrows_the_interval(tmp_path):
    """Hard and easy problems for both, B better by the same half everywhere: nothing is uncertain about the difference."""
    a = {f"p{i}": i % 2 for i in range(40)}
    [suite] = compare(*both(tmp_path, a, {name: right + 1 for name, right in a.items()}))
    assert (suite.difference.mean, suite.difference.low, suite.difference.high) == (0.5, 0.5, 0.5)


def test_equal_runs_differ_by_nothing(tmp_path):
    [suite] = compare(*both(tmp_path, {"p": 1, "q": 2}, {"p": 1, "q": 2}))
    assert (suite.difference.mean, suite.difference.low, suite.difference.high, suite.changes) == (0, 0, 0, [])


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        ({**PROTOCOL, "temperature": 0.6}, r"temperature: 1.0 in .*one, 0.6 in .*two"),
        ({**PROTOCOL, "samples": 4}, r"samples: 2 in .*one, 4 in .*two"),
        ({**PROTOCOL, "problems": {"count": 5, "digest": "e"}}, r"number of problems: 4 in .*one, 5 in .*two"),
        ({**PROTOCOL, "problems": {"count": 4, "digest": "e"}}, r"problems: 'texts or answers d'"),
        ({**PROTOCOL, "prompt_suffix": "!"}, r"prompt_suffix: None in .*one, '!' in .*two"),
    ],
)
def test_another_protocol_is_refused_by_name(tmp_path, protocol, said):
    with pytest.raises(CompareError, match=f"suite toy: the protocols differ(.|\n)*{said}"):
        compare(*both(tmp_path, protocol=protocol))


def test_other_suites_are_refused_by_name(tmp_path):
    with pytest.raises(CompareError, match=r"only .*one: base has toy; only .*two: base has other"):
        compare(*both(tmp_path, suite="other"))


def test_an_unfinished_suite_is_refused(tmp_path):
    a, b = both(tmp_path)
    (b.suites["toy"] / "problems.jsonl").unlink()
    with pytest.raises(CompareError, match=r"two: base has not finished toy.*--resume"):
        compare(a, b)


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(CompareError, match="no such folder"):
        find_models(str(tmp_path / "nowhere"))
    with pytest.raises(CompareError, match="nothing is evaluated here"):
        find_models(str(tmp_path))


def test_which_model_is_compared_with_which(tmp_path):
    run = evaluated(tmp_path / "run", {"p": 1}, model="sft")
    evaluated(run, {"p": 2}, model="grpo")
    other = evaluated(tmp_path / "other", {"p": 2}, model="ours-1234")
    models = find_models(str(run))
    assert [(a.model, b.model) for a, b in pair_models(models, models)] == [("grpo", "grpo"), ("sft", "sft")]
    with pytest.raises(CompareError, match=r"has the models grpo, sft, and .*other has ours-1234.*RUN/eval/MODEL"):
        pair_models(models, find_models(str(other)))
    [(a, b)] = pair_models(find_models(str(run / "eval" / "sft")), find_models(str(other)))
    assert (a.model, b.model, a.run) == ("sft", "ours-1234", str(run))


def test_the_command_prints_a_table_and_fills_the_report(tmp_path, capsys):
    evaluated(tmp_path / "one", {"p": 0, "q": 1, "r": 2, "s": 2})
    evaluated(tmp_path / "two", {"p": 2, "q": 1, "r": 2, "s": 1})
    assert cli.main(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"toy +4 x 2 +62.5% +75.0% +\+12.5 \(", out)
    assert re.search(r"toy: B is better.*\n-.*\np +0% +100% +1 +2 +1", out)
    assert re.search(r"toy: B is worse.*\n-.*\ns +100% +50%", out)
    page = (tmp_path / "two" / "report.html").read_text()
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    [comparison] = json.loads(found[1])["comparisons"]
    assert comparison["suites"][0]["changes"][0]["b_text"] == "two's p sample 0"
    assert cli.main(["compare", str(tmp_path / "one"), str(tmp_path / "nowhere")]) == 2


def test_other_rules_about_answers_are_another_protocol(tmp_path):
    a, b = both(tmp_path)
    for one, units in ((a, "check"), (b, "ignore")):
        path = one.suites["toy"] / "settings.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "verifier": {"policy": {"units": units, "boxes": "last"}}}))
    with pytest.raises(CompareError, match=r"reward.answer.units: 'check' in .*one, 'ignore' in"):
        compare(a, b)


@pytest.mark.parametrize("damage", ['"correct": []', '"scored": null', '"answers": 1'])
def test_problems_that_say_nothing_are_damage(tmp_path, damage):
    a, b = both(tmp_path)
    path = b.suites["toy"] / "problems.jsonl"
    field = damage.split(":")[0]
    path.write_text(re.sub(rf'{field}: (\[.*?\]|true)(?=, ")', damage, path.read_text(), count=1))
    with pytest.raises(CompareError, match=r"problems.jsonl is damaged"):
        compare(a, b)


def test_texts_with_line_separators_of_their_own(tmp_path):
    a, b = both(tmp_path)
    for one in (a, b):
        path = one.suites["toy"] / "problems.jsonl"
        path.write_text(path.read_text().replace("problem p", "problem\u2028p\x85"), encoding="utf-8")
    [suite] = compare(a, b)
    assert suite.problems == 4
    assert suite.changes[0].problem == "problem\u2028p\x85"
