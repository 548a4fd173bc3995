"""Run folders: one process, one recipe, and nothing half-written."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.config import Recipe, load_recipe
from posttrain.errors import CheckpointError, RunFolderError
from posttrain.run_folder import RunFolder, append_whole, atomic_directory, last_checkpoint, write_text_atomically

RECIPE = """\
name: tiny
model: {tokenizer: arithmetic, init: {hidden_size: 32, num_attention_heads: 2, vocab_size: 256}}
data: {train: {kind: arithmetic}}
stages: [sft]
"""


@pytest.fixture
def recipe(tmp_path: Path):
    def make(*overrides: str) -> Recipe:
        path = tmp_path / "tiny.yaml"
        path.write_text(RECIPE)
        return load_recipe(path, [f"run_dir={tmp_path / 'run'}", *overrides])

    return make


def test_open_writes_the_resolved_recipe(recipe) -> None:
    made = recipe()
    with RunFolder.open(made, resume=False) as run:
        assert load_recipe(run.path / "config.yaml") == made
    with RunFolder.open(made, resume=False):
        pass  # the lock was given back


def test_second_launch_names_the_holder(recipe) -> None:
    with RunFolder.open(recipe(), resume=False):
        for resume in (False, True):
            with pytest.raises(RunFolderError, match=rf"in use by process {os.getpid()} on .*run_dir="):
                RunFolder.open(recipe(), resume=resume)


def test_second_launch_from_another_process_and_after_its_death(recipe, root: Path) -> None:
    made = recipe()
    code = (
        "import sys, time; from posttrain.config import Recipe; from posttrain.run_folder import RunFolder\n"
        "run = RunFolder.open(Recipe.model_validate_json(sys.argv[1]), resume=False)\n"
        "print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, made.model_dump_json()], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"process {child.pid} "):
            RunFolder.open(made, resume=False)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    RunFolder.open(made, resume=False).close()


def test_folder_of_another_recipe(recipe) -> None:
    RunFolder.open(recipe(), resume=False).close()
    with pytest.raises(RunFolderError) as caught:
        RunFolder.open(recipe("seed=3", "trainer.learning_rate=1e-3"), resume=True)
    text = str(caught.value)
    assert "another recipe" in text
    assert "seed: 0 there, 3 now" in text
    assert "trainer.learning_rate: None there, 0.001 now" in text
    assert "run_dir=" in text
    assert load_recipe(Path(recipe().run_dir) / "config.yaml") == recipe(), "a refused launch changes nothing"


@pytest.mark.parametrize(
    "override",
    [
        "ray.num_cpus=3",
        "trainer.logging_steps=3",
        "trainer.max_steps=9",
        "stages=[sft, report]",
        "rollout.max_sequences=2",
        "reward.workers=3",
        "description=x",
    ],
)
def test_what_may_change(recipe, override: str) -> None:
    RunFolder.open(recipe(), resume=False).close()
    with RunFolder.open(recipe(override), resume=False) as run:
        assert load_recipe(run.path / "config.yaml") == recipe(override)


def test_a_folder_from_before_an_option_existed(recipe) -> None:
    with RunFolder.open(recipe(), resume=False) as run:
        file = run.path / "config.yaml"
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "prompt_suffix" not in line))
    RunFolder.open(recipe(), resume=False).close()


def test_a_finished_stage_is_not_made_longer(recipe) -> None:
    with RunFolder.open(recipe(), resume=False) as run:
        run.mark_done("sft")
    with pytest.raises(RunFolderError, match="trainer.max_steps: None there, 9 now"):
        RunFolder.open(recipe("trainer.max_steps=9"), resume=True)
    RunFolder.open(recipe("grpo.max_steps=9"), resume=False).close()


def test_a_changed_evaluation_runs_again(recipe) -> None:
    with RunFolder.open(recipe(), resume=False) as run:
        (run.stage_dir("eval") / "results.json").write_text("{}")
        for stage in ("sft", "eval", "report"):
            run.mark_done(stage)
    with RunFolder.open(recipe("ray.num_cpus=2"), resume=False) as run:
        assert run.stage_done("eval")
    with RunFolder.open(
        recipe("stages=[sft, eval]", "eval.samples=3", "eval.suites={a: {arithmetic: {}}}", "eval.max_tokens=9"), resume=False
    ) as run:
        assert [run.stage_done(stage) for stage in ("sft", "eval", "report")] == [True, False, False]


def test_unfinished_stage_needs_resume(recipe) -> None:
    with RunFolder.open(recipe(), resume=False) as run:
        (run.stage_dir("sft") / "checkpoint-5").mkdir()
    with pytest.raises(RunFolderError, match=r"unfinished stage \(sft\).*--resume"):
        RunFolder.open(recipe(), resume=False)
    RunFolder.open(recipe(), resume=False, stages=["eval"]).close()
    with RunFolder.open(recipe(), resume=True) as run:
        run.mark_done("sft", steps=10)
        assert run.stage_done("sft")
        assert not run.stage_done("grpo")
        assert run.stage_info("sft")["steps"] == 10
    RunFolder.open(recipe(), resume=False).close()


def test_a_folder_that_is_no_run(recipe) -> None:
    folder = Path(recipe().run_dir)
    folder.mkdir()
    (folder / "thesis.txt").write_text("x")
    with pytest.raises(RunFolderError, match=r"thesis.txt"):
        RunFolder.open(recipe(), resume=False)
    assert (folder / "thesis.txt").read_text() == "x"


def test_a_place_that_cannot_be_a_folder(recipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="run_dir="):
        RunFolder.open(recipe(f"run_dir={tmp_path}/file/run"), resume=False)
    with pytest.raises(RunFolderError, match="null"):
        RunFolder.open(recipe(f'run_dir="{tmp_path}/a\\0b"'), resume=False)


def test_damaged_files(recipe) -> None:
    with RunFolder.open(recipe(), resume=False) as run:
        (run.path / "stages.json").write_text("{")
        with pytest.raises(RunFolderError, match="damaged"):
            run.stage_done("sft")
        (run.path / "stages.json").write_text("null")
        with pytest.raises(RunFolderError, match="damaged"):
            run.stage_done("sft")
    for content in (b"a: [", b"", b"- a", b"\xff\xfe"):
        (run.path / "config.yaml").write_bytes(content)
        with pytest.raises(RunFolderError, match="damaged"):
            RunFolder.open(recipe(), resume=False)


def test_metrics_survive_a_torn_line(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.append_metrics("sft", 1, {"loss": 2.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"stage": "sft", "step": 2, "lo')
    assert [record["step"] for record in run.read_metrics()] == [1]
    run.append_metrics("sft", 2, {"loss": 1.5})
    run.append_metrics("grpo", 1, {"reward": 0.5})
    assert [(record["stage"], record["step"]) for record in run.read_metrics()] == [("sft", 1), ("sft", 2), ("grpo", 1)]
    assert [record["loss"] for record in run.read_metrics("sft")] == [2.0, 1.5]


def test_a_step_logged_again_counts_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (2, 2.5)):
        run.append_metrics("sft", step, {"loss": loss})
    assert [(record["step"], record["loss"]) for record in run.read_metrics()] == [(1, 3.0), (2, 2.5), (3, 1.0)]


def test_metrics_that_json_cannot_hold(tmp_path: Path) -> None:
    import numpy as np

    RunFolder(tmp_path).append_metrics(
        "sft", 1, {"loss": float("nan"), "norm": np.float32(0.5), "big": float("inf"), "note": "x"}
    )
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["loss"], record["norm"], record["big"], record["note"]) == (None, 0.5, None, "x")


def test_atomic_directory_appears_whole_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "final"
    for content in ("old", "new"):
        with atomic_directory(target) as folder:
            (folder / "weights").write_text(content)
            assert not (target / "weights").exists() or (target / "weights").read_text() == "old"
        assert (target / "weights").read_text() == content
    assert os.listdir(target.parent) == ["final"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_keeps_the_old_checkpoint(tmp_path: Path, error: Exception) -> None:
    target = tmp_path / "final"
    with atomic_directory(target) as folder:
        (folder / "weights").write_text("old")
    with pytest.raises(CheckpointError, match="no space left"), atomic_directory(target) as folder:
        (folder / "weights").write_text("half")
        raise error
    assert (target / "weights").read_text() == "old"
    assert os.listdir(tmp_path) == ["final"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bug")])
def test_other_errors_pass_through_and_leave_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), atomic_directory(tmp_path / "final") as folder:
        (folder / "weights").write_text("half")
        raise error
    assert os.listdir(tmp_path) == []


def test_a_really_full_disk(tmp_path: Path) -> None:
    """Writes to /dev/full fail as a full disk does."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with pytest.raises(CheckpointError, match="--resume"), atomic_directory(tmp_path / "final"), open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    assert os.listdir(tmp_path) == []


def test_text_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stages.json"
    write_text_atomically(path, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunFolderError, match="no space left"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["stages.json"]


def test_last_checkpoint(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "absent") is None
    assert last_checkpoint(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-100", ".partial-checkpoint-200", "checkpoint-x", "final"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-300").write_text("a file")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_paths(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.final_checkpoint("base") == tmp_path / "base"
    assert run.final_checkpoint("sft") == tmp_path / "sft" / "final"


class NearlyFull(io.FileIO):
    """A file on a disk that has room for `room` bytes more."""

    room = 7

    def write(self, data) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(bytes(data)[: self.room])
        self.room -= written
        return written


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("one\n")
    with NearlyFull(path, "ab") as file:
        append_whole(file, b"two\n")
        with pytest.raises(RunFolderError, match=r"no space left .*lines; free some space"):
            append_whole(file, b"three\n")
        file.room = 100
        append_whole(file, b"four\n")
    assert path.read_text() == "one\ntwo\nfour\n"
