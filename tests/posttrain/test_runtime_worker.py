"""What a worker tells the driver, and how failures are put into words."""

import errno
import subprocess
import sys
from concurrent.futures import Future

import pytest

from posttrain.errors import DataError
from posttrain.runtime.progress import ProgressBoard
from posttrain.runtime.worker import StageStopped, WorkerContext, setup


class Method:
    def __init__(self, function):
        self.remote = lambda *given: done(function(*given))


def done(value):
    future = Future()
    future.set_result(value)
    return future


class Handle:
    """A Ray actor handle without Ray."""

    def __init__(self, board):
        for name in ("report", "begin", "finish", "stop_requested"):
            setattr(self, name, Method(getattr(board, name)))


@pytest.fixture
def board(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(ray, "get", lambda ref: ref.result())
    return ProgressBoard()


def context(board, tmp_path, **given):
    return WorkerContext(stage="sft", run_path=tmp_path, board=Handle(board), **given)


def test_reports_are_throttled_but_the_last_always_goes(board, tmp_path):
    worker = context(board, tmp_path)
    for step in range(1, 101):
        worker.report(step, 101, loss=1.0)
    assert board.read("sft").step < 100
    worker.report(101, 101, loss=0.5)
    assert board.read("sft").step == 101
    assert board.read("sft").metrics == {"loss": 0.5}


def test_only_rank_0_reports(board, tmp_path):
    context(board, tmp_path, rank=1, world_size=2).report(1, 2, force=True)
    assert board.read("sft").total == 0


def test_the_wish_to_stop_arrives_with_the_answer_to_a_report(board, tmp_path):
    worker = context(board, tmp_path)
    worker.report(1, 10, force=True)
    assert not worker.stop_requested()
    board.request_stop()
    worker.report(2, 10, force=True)
    assert worker.stop_requested()


def test_outcomes(board, tmp_path):
    worker = context(board, tmp_path)
    with worker.outcome():
        raise DataError("train.jsonl: no rows")
    outcome = board.outcome("sft")
    assert (outcome.kind, outcome.message, outcome.exit_code) == ("failed", "train.jsonl: no rows", 2)

    board._outcomes.clear()
    with worker.outcome():
        raise OSError(errno.ENOSPC, "No space left on device", "rollouts/step-000003.parquet")
    outcome = board.outcome("sft")
    assert "no space left" in outcome.message and "--resume" in outcome.message and outcome.exit_code == 2

    worker.begin()
    assert board.outcome("sft") is None
    with pytest.raises(ZeroDivisionError), worker.outcome(reraise=True):
        raise ZeroDivisionError("division by zero")
    outcome = board.outcome("sft")
    assert (outcome.message, outcome.exit_code) == ("ZeroDivisionError: division by zero", 1)

    board._outcomes.clear()
    with worker.outcome(reraise=True):
        raise StageStopped("after step 3")
    assert board.outcome("sft").kind == "stopped"

    board._outcomes.clear()
    with worker.outcome():
        pass
    assert board.outcome("sft").kind == "done"


def test_without_a_board_nothing_is_sent_and_errors_pass(tmp_path):
    worker = setup(stage="sft", run_path=tmp_path, threads=1, seed=3)
    worker.report(1, 2)
    assert not worker.stop_requested()
    with pytest.raises(DataError), worker.outcome():
        raise DataError("x")
    assert not (tmp_path / "logs").exists()


def test_setup_fixes_threads_and_seed_and_sends_output_to_the_log(tmp_path):
    code = f"""
import os
from posttrain.runtime.worker import setup
context = setup(stage="grpo", run_path={str(tmp_path)!r}, threads=2, seed=5, redirect=True,
                folder={str(tmp_path)!r})
import torch, logging
print("standing in", os.getcwd())
setup(stage="grpo", run_path={str(tmp_path)!r}, folder="/not/on/this/machine")
torch.set_num_threads(2)
torch.manual_seed(5)
print("printed", torch.get_num_threads(), torch.initial_seed(), os.environ["HF_HUB_DISABLE_TELEMETRY"])
os.system("echo from a child")
logging.getLogger("x").warning("logged")
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert finished.stdout == finished.stderr == ""
    log = (tmp_path / "logs" / "grpo.log").read_text()
    assert "printed 2 5 1" in log
    assert "from a child" in log
    assert f"standing in {tmp_path}" in log
    assert "WARNING x: logged" in log
