"""The samples on disk: torn lines, doubled lines, other settings, another verifier."""

import json

import pytest

from posttrain.errors import RunFolderError
from posttrain.evaluation.samples import SampleFile
from tests.posttrain.test_evaluation_scoring import sample

SETTINGS = {
    "protocol": {"temperature": 1.0, "samples": 2, "problems": {"count": 2}},
    "seed": 1,
    "verifier": "v1",
    "model": {"kind": "x"},
}
PROBLEMS = {"a": "?", "b": "?"}


def settings(**changes) -> dict:
    return {**SETTINGS, **changes}


def write(folder, *samples, given=SETTINGS) -> None:
    SampleFile(folder, given).append(samples)


def read(folder, samples_each=2, given=SETTINGS, problems=PROBLEMS) -> list[tuple[str, int]]:
    return sorted(SampleFile(folder, given).read(problems, samples_each))


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_one_line_a_sample_each_counted_once(tmp_path):
    write(tmp_path, sample("a", 0, True), sample("a", 1, False), sample("a", 0, False))
    assert read(tmp_path) == [("a", 0), ("a", 1)]
    assert [(s["sample"], s["correct"]) for s in lines(tmp_path)] == [(0, True), (1, False)], "the first of two is kept"


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_torn_last_line_is_cut_off(tmp_path, cut):
    write(tmp_path, sample("a", 0, True))
    whole = (tmp_path / "samples.jsonl").read_text()
    (tmp_path / "samples.jsonl").write_text(whole + whole.replace('"a"', '"b"')[:cut])
    assert read(tmp_path) == [("a", 0)]
    write(tmp_path, sample("b", 0, True))
    assert len(lines(tmp_path)) == 2, "what is written next begins on a line of its own"


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    write(tmp_path, sample("a", 0, True))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"problem_id": "b"}\n')
    with pytest.raises(RunFolderError, match=r"samples\.jsonl:2: not a sample"):
        read(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 2},
        {"model": {"kind": "y"}},
        {"protocol": {**SETTINGS["protocol"], "temperature": 0.6}},
    ],
    ids=["seed", "model", "temperature"],
)
def test_samples_of_another_configuration_are_set_aside(tmp_path, changed):
    write(tmp_path, sample("a", 0, True))
    assert read(tmp_path, given=settings(**changed)) == []
    assert (tmp_path / "samples.stale-1.jsonl").exists()


def test_samples_of_nobody_knows_what_are_set_aside(tmp_path):
    write(tmp_path, sample("a", 0, True))
    (tmp_path / "settings.json").unlink()
    assert read(tmp_path) == []
    assert (tmp_path / "samples.stale-1.jsonl").exists()


def test_damaged_settings_are_named(tmp_path):
    write(tmp_path, sample("a", 0, True))
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"settings\.json is damaged"):
        read(tmp_path)


def test_more_samples_and_more_problems_use_what_is_there(tmp_path):
    write(tmp_path, sample("a", 0, True), sample("a", 1, True), sample("b", 0, True), sample("b", 1, True))
    more = settings(protocol={**SETTINGS["protocol"], "samples": 4, "problems": {"count": 9}})
    assert read(tmp_path, 4, more, {**PROBLEMS, "c": "?"}) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert read(tmp_path, 1, SETTINGS, {"a": "?"}) == [("a", 0)], "fewer are fewer"
    assert len(lines(tmp_path)) == 4, "and those that are not asked for stay"


def test_a_problem_whose_text_changed_is_drawn_again(tmp_path):
    write(tmp_path, sample("a", 0, True), sample("b", 0, True))
    assert read(tmp_path, problems={"a": "? (mended)", "b": "?"}) == [("b", 0)]


def test_another_verifier_asks_for_other_verdicts_not_for_other_samples(tmp_path):
    write(tmp_path, sample("a", 0, True))
    file = SampleFile(tmp_path, settings(verifier="v2"))
    assert file.regrade
    assert list(file.read(PROBLEMS, 2)) == [("a", 0)]
    # Killed before all were graded again: the next start must still see it.
    assert SampleFile(tmp_path, settings(verifier="v2")).regrade
    file.confirm()
    assert not SampleFile(tmp_path, settings(verifier="v2")).regrade
