"""A whole evaluation through a server that stumbles, and suites that are wrong."""

import json
import time

import pytest

from posttrain.config import Recipe
from posttrain.errors import ConfigError, DataError
from posttrain.evaluation import evaluate, grading
from posttrain.evaluation.suites import prepare
from posttrain.inference import BackendError
from posttrain.runtime.worker import StageStopped, WorkerContext
from tests.posttrain.openai_server import DIE, chat, serving

ROWS = [
    {"id": "add", "problem": "2+2?", "answer": "4", "subject": "sums"},
    {"id": "half", "problem": "1/2?", "answer": r"\frac{1}{2}", "subject": "fractions"},
    {"id": "broken", "problem": "?", "answer": r"\frac{", "subject": "sums"},
    {"id": "mul", "problem": "3*3?", "answer": "9", "subject": "sums"},
]
RIGHT = {"2+2?": "4", "1/2?": "0.5", "3*3?": "9"}


def recipe(tmp_path, url="http://localhost:1/v1", rows=ROWS, **backend) -> Recipe:
    suite = tmp_path / "suite.jsonl"
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Recipe.model_validate(
        {
            "name": "served",
            "model": {"path": "org/served"},
            "stages": ["eval"],
            "reward": {"workers": 1},
            "eval": {
                "suites": {"toy": {"path": str(suite)}},
                "samples": 3,
                "max_tokens": 20,
                "backend": {"kind": "openai", "base_url": url, "retries": 0, "concurrency": 1, **backend},
            },
        }
    )


def run(given: Recipe, path):
    return evaluate(given, path, WorkerContext(stage="eval", run_path=path))


def answer(body, _):
    """Right in every third seed, so that the table says whether the same samples were drawn."""
    right = RIGHT[body["messages"][-1]["content"]]
    return chat(rf"So \boxed{{{right if body['seed'] % 3 else 7}}}.", tokens=4)


def test_a_server_that_dies_half_way_is_resumed_to_the_same_table(tmp_path):
    with serving(answer) as served:
        [whole] = run(recipe(tmp_path, served.url), tmp_path / "whole")
    assert len(served.bodies) == 9, "none for the problem whose gold answer cannot be read"
    half_way = pytest.raises(BackendError, match="--resume")
    with serving(lambda body, number: answer(body, number) if number < 4 else DIE) as dying, half_way:
        run(recipe(tmp_path, dying.url), tmp_path / "torn")
    with serving(lambda *_: (500, {})) as down, pytest.raises(BackendError):
        run(recipe(tmp_path, down.url), tmp_path / "torn")
    with serving(answer) as again:
        [row] = run(recipe(tmp_path, again.url), tmp_path / "torn")
    assert len(again.bodies) == 9 - 4, "only what was missing, though the address changed"
    assert row == whole
    lines = (tmp_path / "torn/eval" / _model(tmp_path / "torn") / "toy/samples.jsonl").read_text().splitlines()
    assert len({(s["problem_id"], s["sample"]) for s in map(json.loads, lines)}) == len(lines) == 9


def _model(path) -> str:
    [folder] = (path / "eval").glob("served-*")
    return folder.name


def test_a_server_that_is_gone_is_told_of_and_the_wish_to_stop_is_heard(tmp_path, monkeypatch):
    """Nothing arrives, and attempts are far from over: the bar says why, and Ctrl-C does not wait for them."""
    notes: list[str] = []

    class Context(WorkerContext):
        def report(self, step, total, *, note="", force=False, **metrics):
            notes.append(note)

        def stop_requested(self):
            return any("attempt" in note for note in notes)

    monkeypatch.setattr("posttrain.inference.server.IDLE_S", 0.05)
    with serving(answer) as gone:
        pass
    begun = time.monotonic()
    with pytest.raises(StageStopped, match="after 0 of 9 samples"):
        evaluate(recipe(tmp_path, gone.url, retries=30), tmp_path / "run", Context(stage="eval", run_path=tmp_path / "run"))
    assert "attempt 1 of 31 failed: ConnectError" in notes[-1] and time.monotonic() - begun < 30


def test_a_table_of_what_the_server_said(tmp_path):
    with serving(answer) as served:
        [row] = run(recipe(tmp_path, served.url), tmp_path)
    seeds = {body["messages"][-1]["content"]: [] for body in served.bodies}
    for body in served.bodies:
        seeds[body["messages"][-1]["content"]].append(bool(body["seed"] % 3))
    assert row.accuracy is not None
    assert row.accuracy.mean == pytest.approx(sum(sum(right) / 3 for right in seeds.values()) / 3)
    assert (row.problems, row.unscored, row.mean_length) == (3, 1, 4.0)
    assert row.unreadable == [{"id": "broken", "gold": r"\frac{"}]
    assert {part["name"]: part["problems"] for part in row.splits["subject"]} == {"sums": 2, "fractions": 1}


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(tmp_path, monkeypatch):
    given = recipe(tmp_path, api_key_env="TOY_KEY")
    monkeypatch.delenv("TOY_KEY", raising=False)
    with pytest.raises(ConfigError, match="TOY_KEY is not set"):
        prepare(given, from_stages=False)
    monkeypatch.setenv("TOY_KEY", "sk-secret")
    with serving(answer) as served:
        run(recipe(tmp_path, served.url, api_key_env="TOY_KEY"), tmp_path / "run")
    assert set(served.keys) == {"Bearer sk-secret"}
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if b"sk-secret" in path.read_bytes()]


def test_a_changed_gold_answer_is_graded_again_and_not_drawn_again(tmp_path):
    with serving(answer) as served:
        [before] = run(recipe(tmp_path, served.url), tmp_path / "run")
    mended = [{**row, "answer": "7"} if row["id"] == "add" else row for row in ROWS]
    with serving(answer) as again:
        [after] = run(recipe(tmp_path, again.url, rows=mended), tmp_path / "run")
    assert again.bodies == []
    assert before.accuracy is not None and after.accuracy is not None
    wrong_before = sum(not body["seed"] % 3 for body in served.bodies if body["messages"][-1]["content"] == "2+2?")
    assert after.accuracy.mean == pytest.approx(before.accuracy.mean + (2 * wrong_before - 3) / 9)


def test_other_rules_about_answers_grade_what_is_there_again(tmp_path):
    def unboxed(body, number):
        return chat("The answer is " + answer(body, number)["choices"][0]["message"]["content"][10:-2] + ".")

    with serving(unboxed) as served:
        [lenient] = run(recipe(tmp_path, served.url), tmp_path / "run")
        strict_recipe = recipe(tmp_path, served.url)
        strict_recipe.reward.answer.unboxed_fallback = False
        [strict] = run(strict_recipe, tmp_path / "run")
    assert len(served.bodies) == 9
    assert lenient.accuracy is not None and strict.accuracy is not None
    assert lenient.accuracy.mean > 0.3
    assert strict.accuracy.mean == 0


def test_another_version_of_the_verifier_grades_what_is_there_again(tmp_path, monkeypatch):
    with serving(answer) as served:
        [before] = run(recipe(tmp_path, served.url), tmp_path / "run")
        file = tmp_path / "run/eval" / _model(tmp_path / "run") / "toy/samples.jsonl"
        file.write_text(file.read_text().replace('"correct": true', '"correct": false'))
        [kept] = run(recipe(tmp_path, served.url), tmp_path / "run")
        monkeypatch.setattr(grading, "code_digest", lambda: "of another version")
        [after] = run(recipe(tmp_path, served.url), tmp_path / "run")
    assert len(served.bodies) == 9, "nothing is drawn again"
    assert kept.accuracy is not None
    assert kept.accuracy.mean == 0, "the same version believes what it wrote"
    assert after.accuracy == before.accuracy


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "suite toy: .*no rows"),
        ([{"id": "a", "problem": "?"}], "suite toy: .*no column 'answer'"),
        ([{"id": "a", "problem": "?", "answer": " "}], "suite toy: .*its answer is empty"),
        ([{"id": "a", "problem": "?", "answer": "1"}, {"id": "a", "problem": "!", "answer": "2"}], "two rows have the id 'a'"),
    ],
    ids=["empty", "without answers", "an empty answer", "duplicate ids"],
)
def test_a_suite_that_cannot_be_used_is_refused_before_anything_starts(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        prepare(recipe(tmp_path, rows=rows), from_stages=False)


def test_a_suite_of_unreadable_answers_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none of its 1 gold answers can be read"):
        run(recipe(tmp_path, rows=[ROWS[2]]), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval": {"models": ["sft"]}}, "eval.models: sft: a server"),
        ({"model": {"path": None, "init": {}, "tokenizer": "arithmetic"}}, "eval.models: name the model that the server"),
        ({"eval": {"backend": {"kind": "openai"}}}, "needs the server's address"),
        ({"eval": {"backend": {"kind": "openai", "base_url": "http://me:secret@host/v1"}}}, "holds a password"),
        ({"eval": {"backend": {"kind": "openai", "base_url": "http://host/v1", "engines": 2}}}, "one connection serves them all"),
    ],
)
def test_a_server_is_asked_for_what_it_can_have(tmp_path, changes, message):
    given = recipe(tmp_path).model_dump(mode="json")
    for section, values in changes.items():
        given[section].update(values)
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate(given)


def test_vllm_that_is_not_installed_is_said(tmp_path, monkeypatch):
    import sys

    from posttrain.config.data import ModelConfig
    from posttrain.inference.vllm_engine import VllmBackend

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"cannot be imported here.*posttrain\[vllm\].*kind: openai"):
        VllmBackend(ModelConfig(path="org/name"))


def test_a_path_that_is_missing_is_found_before_anything_starts(tmp_path):
    from posttrain.errors import CheckpointError

    given = recipe(tmp_path)
    given.eval.backend = type(given.eval.backend)()
    given.eval.models = ["runs/x/grpo/checkpoint-3"]
    with pytest.raises(CheckpointError, match="no such folder"):
        prepare(given, from_stages=False)
