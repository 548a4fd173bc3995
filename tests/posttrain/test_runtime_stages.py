"""Bad input ends a run before Ray starts and before a model is loaded; the driver's own reactions, without Ray."""

import json
import signal

import pytest

from posttrain.config import recipe_from_dict
from posttrain.errors import PosttrainError
from posttrain.models import loading
from posttrain.run_folder import RunFolder
from posttrain.runtime import stages
from posttrain.runtime.progress import Outcome
from posttrain.runtime.stages import run_stages

INIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "layer_types": ["sse"]}
ROW = {"problem": "1 + 1", "answer": "2", "solution": "1 + 1 = 2, so \\boxed{2}"}


@pytest.fixture
def nothing_heavy(monkeypatch):
    """Fails the test when a model is made or Ray is started."""

    def forbidden(*_, **__):
        raise AssertionError("too late: the input should have been refused before this")

    monkeypatch.setattr(loading, "new_model", forbidden)
    monkeypatch.setattr(loading, "load_model", forbidden)
    monkeypatch.setattr(stages, "ray_session", forbidden)


def recipe(tmp_path, rows=(ROW,), *, filters=None, max_length=64, tokenizer="arithmetic"):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(file), "filters": filters or {}}
    return recipe_from_dict(
        {
            "name": "bad",
            "run_dir": str(tmp_path / "run"),
            "stages": ["sft"],
            "model": {"init": INIT, "tokenizer": tokenizer},
            "data": {"train": source, "max_length": max_length},
        }
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ()}, "no rows"),
        ({"filters": {"min_tokens": 10_000}}, "filters left none of 1 rows"),
        ({"max_length": 4}, "no rows are left to use.*max_length 4"),
        ({"rows": ({"problem": "1 + 1", "answer": "2"},)}, "solution"),
        ({"tokenizer": "/nowhere/at/all"}, "tokenizer /nowhere/at/all"),
    ],
)
def test_bad_data_is_refused_before_the_model_is_made(tmp_path, nothing_heavy, changes, message):
    with pytest.raises(PosttrainError, match=message):
        run_stages(recipe(tmp_path, **changes), ["sft"], resume=False)


def test_a_tokenizer_without_an_end_is_refused(tmp_path, nothing_heavy):
    from posttrain.data.tokenizer import arithmetic_tokenizer

    tokenizer = arithmetic_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(PosttrainError, match="no end-of-sequence token"):
        run_stages(recipe(tmp_path, tokenizer=str(tmp_path / "tokenizer")), ["sft"], resume=False)


def test_a_refused_run_can_be_started_again_without_resume(tmp_path, nothing_heavy):
    for _ in range(2):
        with pytest.raises(PosttrainError, match="no rows are left"):
            run_stages(recipe(tmp_path, max_length=4), ["sft"], resume=False)


def test_a_report_of_a_run_that_is_going_on_or_was_interrupted(tmp_path, nothing_heavy, capsys):
    made = recipe(tmp_path)
    with pytest.raises(PosttrainError, match="nothing to report yet"):
        run_stages(made, ["report"], resume=False)
    with RunFolder.open(made, resume=False) as run:
        run.append_metrics("sft", 1, {"loss": 2.0})
        (run.stage_dir("sft") / "checkpoint-1").mkdir()
        assert run_stages(made, ["report"], resume=False) == 0
    assert "report.html" in capsys.readouterr().out
    assert (run.path / "report.html").is_file() and not run.stage_done("report")


class Handle:
    """A stage that ends after some polls, or when killed."""

    def __init__(self, polls, on_poll=None):
        self.polls, self.on_poll, self.killed = polls, on_poll, False

    def wait(self, seconds):
        self.polls -= 1
        if self.on_poll:
            self.on_poll(self)
        return self.polls < 0

    def error(self):
        return None if self.polls < 0 and not self.killed else RuntimeError("gone")

    def kill(self):
        self.killed = True


class Board:
    """A ProgressBoard behind calls like those of a Ray handle."""

    def __init__(self):
        from posttrain.runtime.progress import ProgressBoard

        self.board = ProgressBoard()

    def __getattr__(self, name):
        method = getattr(self.board, name)
        return type("Method", (), {"remote": staticmethod(method)})


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """`run_stage` with a handle and a board of ours; returns (run, start)."""
    import ray

    made = recipe(tmp_path)
    board = Board()
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
    with RunFolder.open(made, resume=False) as run:

        def start(handle):
            monkeypatch.setattr(stages, "launch", lambda *_: handle)
            return stages.run_stage("sft", made, run, board)

        yield run, board.board, start


def test_a_finished_stage_is_marked(driver):
    run, board, start = driver
    board.report("sft", 7, 7, {})
    board.finish("sft", Outcome(kind="done"))
    assert start(Handle(2)) is None
    assert run.stage_info("sft")["steps"] == 7


def test_one_ctrl_c_asks_the_stage_to_stop_and_waits_for_it(driver):
    run, board, start = driver

    def on_poll(handle):
        if handle.polls == 5:
            signal.raise_signal(signal.SIGINT)
        if board.stop_requested() and handle.polls == 2:
            board.finish("sft", Outcome(kind="stopped"))

    handle, before = Handle(8, on_poll), signal.getsignal(signal.SIGINT)
    assert start(handle) == signal.SIGINT
    assert not handle.killed and not run.stage_done("sft")
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_ctrl_c_ends_it(driver):
    run, _, start = driver
    handle = Handle(1000, lambda handle: signal.raise_signal(signal.SIGINT) if handle.polls in (990, 980) else None)
    assert start(handle) == signal.SIGINT
    assert handle.killed and handle.polls > 970 and not run.stage_done("sft")


def test_sigterm_is_told_apart(driver):
    _, board, start = driver
    board.finish("sft", Outcome(kind="stopped"))
    assert start(Handle(3, lambda handle: signal.raise_signal(signal.SIGTERM) if handle.polls == 1 else None)) == signal.SIGTERM
    assert stages.EXIT_CODES[signal.SIGTERM] == 143


def test_failures_in_words(driver):
    run, board, start = driver
    board.finish("sft", Outcome(kind="failed", message="train.jsonl: no rows", exit_code=2))
    with pytest.raises(PosttrainError, match=r"^train\.jsonl: no rows$") as caught:
        start(Handle(1))
    assert caught.value.exit_code == 2
    board._outcomes["sft"] = Outcome(kind="failed", message="TypeError: x", exit_code=1)
    with pytest.raises(PosttrainError, match=r"sft: TypeError: x\nthe traceback is in .*sft\.log") as caught:
        start(Handle(1))
    assert caught.value.exit_code == 1
    board._outcomes.clear()
    with pytest.raises(PosttrainError, match="its worker died.*--resume"):
        start(Handle(1))
    assert not run.stage_done("sft")
