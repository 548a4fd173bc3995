"""The stage `distill` that is interrupted: a server that dies or refuses, Ctrl-C, SIGKILL, and what a restart finds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from posttrain.config import dump_recipe
from posttrain.distill import stage
from posttrain.distill.problems import prepare
from posttrain.errors import RunFolderError
from posttrain.inference import BackendError
from posttrain.run_folder import RunFolder
from posttrain.runtime.worker import StageStopped, WorkerContext
from tests.posttrain.fake_teacher import asked, journal, make_recipe, right, rows, run, serving


def test_a_server_that_dies_half_way_costs_nothing(tmp_path):
    broken = {"on": False}
    served = Counter()

    def answer(problem, seed):
        if sum(served.values()) >= 7:
            broken["on"] = True
        if broken["on"]:
            return {"status": 500}
        served[problem, seed] += 1
        return {"text": f"{right(problem)} [{seed}]"}

    with serving(answer) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=10, teacher={"retries": 0, "concurrency": 1})
        with pytest.raises(BackendError, match="HTTP 500.*--resume"):
            run(recipe)
    before = journal(recipe)
    assert len(before) == 7
    # It comes back on another port, and is asked for what is missing, no more.
    with serving(lambda problem, seed: {"text": f"{right(problem)} [{seed}]"}) as teacher:
        moved = recipe.model_copy(deep=True)
        moved.distill.teacher.base_url = teacher.url
        account = run(moved)
        assert len(teacher.requests) == 13
    assert journal(recipe)[:7] == before
    assert account["traces"] == 20
    assert len({(t["problem"], t["sample"]) for t in journal(recipe)}) == 20
    assert len({t["seed"] for t in journal(recipe)}) == 20


def test_a_problem_that_the_server_refuses_is_counted_and_stops_nothing(tmp_path):
    def answer(problem, seed):
        return {"status": 400} if asked(problem) in (1, 4) else {"text": f"{right(problem)} [{seed}]"}

    with serving(answer) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=5, teacher={"concurrency": 1})
        account = run(recipe)
        assert len(teacher.requests) == 10, "a refusal is not tried again"
        assert run(recipe) == account
        assert len(teacher.requests) == 10, "nor by the next run"
    assert account["rejected"] == {"refused by the server": 4}
    assert (account["traces"], account["rows"], account["solved"]) == (10, 3, 3)
    assert [line["text"] for line in journal(recipe) if line["problem"] == "sum-4"] == ["HTTP 400: broken"] * 2


def test_a_server_that_refuses_everything_stops_and_is_asked_again_later(tmp_path):
    with serving(lambda problem, seed: {"status": 400}) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=40, teacher={"concurrency": 1})
        with pytest.raises(BackendError, match=r"refuses every request, 31 samples of 16 problems.*HTTP 400: broken"):
            run(recipe)
        assert len(teacher.requests) < 40
    assert journal(recipe) == []
    with serving(lambda problem, seed: {"text": f"{right(problem)} [{seed}]"}) as teacher:
        mended = recipe.model_copy(deep=True)
        mended.distill.teacher.base_url = teacher.url
        assert run(mended)["rows"] == 40


def test_the_last_problem_of_a_resumed_run_may_be_refused(tmp_path):
    """The server has answered before: that everything is refused since says nothing about the requests."""
    dying = {"on": True}

    def answer(problem, seed):
        if asked(problem) == 3:
            return {"status": 500 if dying["on"] else 413}
        return {"text": f"{right(problem)} [{seed}]"}

    with serving(answer) as teacher:
        rows = [{"id": f"sum-{n}", "problem": f"What is {n} plus {n} ?", "answer": str(2 * n)} for n in (1, 2, 3)]
        (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"problems": {"path": str(tmp_path / "few.jsonl"), "shuffle": False}}
        recipe = make_recipe(tmp_path, teacher.url, teacher={"concurrency": 1, "retries": 0}, **given)
        with pytest.raises(BackendError, match="HTTP 500"):
            run(recipe)
        assert len(journal(recipe)) == 4
        dying["on"] = False
        assert run(recipe)["rejected"] == {"refused by the server": 2}


def test_the_key_of_a_refusal_that_is_everybodys_stops_at_once(tmp_path):
    with serving(lambda problem, seed: {"status": 401}) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=9, teacher={"concurrency": 1})
        with pytest.raises(BackendError, match="HTTP 401.*api_key_env"):
            run(recipe)
        assert len(teacher.requests) == 1


def test_stopping_keeps_what_was_graded(tmp_path):
    class Stopping(WorkerContext):
        def stop_requested(self):
            return True

    with serving(lambda problem, seed: {"text": f"{right(problem)} [{seed}]"}) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=10)
        with pytest.raises(StageStopped):
            run(recipe, Stopping(stage="distill", run_path=Path(recipe.run_dir)))
        kept = len(journal(recipe))
        assert 1 <= kept < 20
        assert run(recipe)["traces"] == 20


def test_other_filters_cost_no_second_visit(tmp_path, monkeypatch):
    with serving(lambda problem, seed: {"text": f"{right(problem)} [{seed}]"}) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=4)
        assert run(recipe)["rows"] == 4
        asked_for = len(teacher.requests)
    stricter = recipe.model_copy(deep=True)
    stricter.distill.balance.per_problem = 2
    monkeypatch.setattr(stage, "open_teacher", None)
    assert run(stricter)["rows"] == 8, "the server is gone"
    assert asked_for == 8
    other = recipe.model_copy(deep=True)
    other.distill.temperature = 0.1
    with pytest.raises(RunFolderError, match="sampling"):
        run(other)


def test_run_folder_lets_the_selection_change_until_sft_has_begun(tmp_path):
    recipe = make_recipe(tmp_path, "http://127.0.0.1:9/v1", stages=("distill", "sft"))
    with RunFolder.open(recipe, resume=False) as folder:
        folder.stage_dir("distill").joinpath("traces.jsonl").touch()
        folder.mark_done("distill")
    changed = recipe.model_copy(deep=True)
    changed.distill.filters.max_repetition = 0.5
    changed.distill.teacher.base_url = "http://127.0.0.1:10/v1"
    with RunFolder.open(changed, resume=False) as folder:
        assert not folder.stage_done("distill"), "it is computed again"
        folder.mark_done("distill")
        (folder.stage_dir("sft") / "checkpoint-1").mkdir()
    with pytest.raises(RunFolderError, match=r"distill.filters.max_repetition: 0.5 there, 0.2 now"):
        RunFolder.open(recipe, resume=True)
    other = changed.model_copy(deep=True)
    other.distill.samples = 3
    with pytest.raises(RunFolderError, match=r"distill.samples"):
        RunFolder.open(other, resume=True)


WORKER = """
import sys
from pathlib import Path
from posttrain.config import load_recipe
from posttrain.distill.stage import distill
from posttrain.runtime.worker import WorkerContext
recipe = load_recipe(sys.argv[1])
path = Path(recipe.run_dir)
distill(recipe, path, WorkerContext(stage="distill", run_path=path))
"""


@pytest.mark.slow
def test_killed_at_any_moment_nothing_is_lost_or_doubled(tmp_path, root):
    """SIGKILL again and again, then a run to the end: the set is, byte for byte, that of a run that nobody disturbed."""

    def answer(problem, seed):
        time.sleep(0.02)
        return {"text": f"{right(problem) if seed % 3 else 'So 0.'} [{seed}]"}

    with serving(answer) as teacher:
        (tmp_path / "calm").mkdir()
        calm = make_recipe(tmp_path / "calm", teacher.url, count=60)
        run(calm)
        recipe = make_recipe(tmp_path, teacher.url, count=60)
        folder = RunFolder(recipe.run_dir)
        folder.path.mkdir()
        prepare(recipe, folder)
        (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        traces = folder.path / "distill" / "traces.jsonl"
        for wanted in (1, 20, 70):
            worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "recipe.yaml")], env=environment)
            deadline = time.monotonic() + 60
            while not (traces.exists() and traces.read_bytes().count(b"\n") >= wanted):
                assert worker.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
            worker.send_signal(signal.SIGKILL)
            worker.wait()
        with open(traces, "ab") as file:
            file.write(b'{"problem": "sum-1", "sample": 0, "text": "torn')
        assert run(recipe) == run(calm)
    lines = journal(recipe)
    assert len(lines) == len({(t["problem"], t["sample"]) for t in lines}) == 120

    def essence(recipe):
        return sorted((row["id"], row["solution"], row["pass_rate"]) for row in rows(recipe))

    assert essence(recipe) == essence(calm)
