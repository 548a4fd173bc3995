"""SFT through Ray: ranks, errors in words, workers that die, Ctrl-C and resume."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from posttrain.config import RayConfig, dump_recipe
from posttrain.errors import PosttrainError
from posttrain.run_folder import RunFolder, last_checkpoint
from posttrain.runtime.session import ray_session
from posttrain.runtime.stages import run_stages
from tests.sft_runs import losses, recipe, weights


@pytest.fixture(scope="module")
def session():
    with ray_session(RayConfig(num_cpus=4)):
        yield


@pytest.fixture(scope="module")
def straight(session, tmp_path_factory):
    """6 steps of 2 rows each, by accumulation, on one worker, uninterrupted."""
    path = tmp_path_factory.mktemp("sft") / "run"
    assert run_stages(recipe(path, trainer={"gradient_accumulation_steps": 2}), ["sft"], resume=False) == 0
    return path


def test_the_stage_is_marked_done_and_skipped_afterwards(straight, capfd):
    assert RunFolder(straight).stage_info("sft")["steps"] == 6
    before = (straight / "sft" / "final" / "model.safetensors").stat().st_mtime_ns
    assert run_stages(recipe(straight, trainer={"gradient_accumulation_steps": 2}), ["sft"], resume=False) == 0
    assert "finished before" in capfd.readouterr().err
    assert (straight / "sft" / "final" / "model.safetensors").stat().st_mtime_ns == before
    assert "num_tokens" in (straight / "logs" / "sft.log").read_text()


def test_two_workers_equal_accumulation_on_one(straight, tmp_path):
    run_stages(recipe(tmp_path, ray={"num_workers": 2}), ["sft"], resume=False)
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=1e-4)
    for name, expected in weights(straight / "sft" / "final").items():
        torch.testing.assert_close(weights(tmp_path / "sft" / "final")[name], expected, rtol=1e-3, atol=1e-4, msg=name)
    states = {path.name for path in last_checkpoint(tmp_path / "sft").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= states


def test_an_error_in_the_worker_arrives_as_its_own_message(straight, tmp_path, capfd):
    made = recipe(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(dump_recipe(made))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / name).write_bytes((straight / "base" / name).read_bytes())
    with pytest.raises(PosttrainError, match=r"incomplete, model\.safetensors missing") as caught:
        run_stages(made, ["sft"], resume=False)
    assert caught.value.exit_code == 2
    assert "Traceback" not in str(caught.value)
    assert "Traceback" not in "".join(capfd.readouterr())
    assert "Traceback" in (tmp_path / "logs" / "sft.log").read_text()


class Killer(threading.Thread):
    """SIGKILLs the training process once checkpoint `after` exists; only processes below this one are looked at."""

    def __init__(self, path, after):
        super().__init__()
        self.path, self.after, self.killed, self.seen = path, after, [], []
        self.start()

    def run(self):
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and not (self.path / "sft" / self.after).is_dir():
            time.sleep(0.05)
        for process in psutil.Process().children(recursive=True):
            command = " ".join(process.cmdline())
            self.seen.append(command[:60])
            if command.startswith("ray::") and "TrainWorker" in command:
                process.kill()
                self.killed.append(process.pid)

    def join(self, timeout=None):
        super().join(timeout)
        assert self.killed, self.seen


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_continues(straight, tmp_path):
    changes = {"trainer": {"gradient_accumulation_steps": 2, "max_steps": 60, "save_steps": 2}}
    killer = Killer(tmp_path, "checkpoint-4")
    assert run_stages(recipe(tmp_path, ray={"max_failures": 1}, **changes), ["sft"], resume=False) == 0
    killer.join()
    assert [record["step"] for record in RunFolder(tmp_path).read_metrics("sft")] == list(range(1, 61))


@pytest.mark.slow
def test_a_worker_that_dies_without_replacement_is_reported_and_resumed(session, tmp_path):
    made = recipe(tmp_path, trainer={"max_steps": 400, "save_steps": 20})
    killer = Killer(tmp_path, "checkpoint-20")
    with pytest.raises(PosttrainError, match="worker died.*--resume"):
        run_stages(made, ["sft"], resume=False)
    killer.join()
    at = int(last_checkpoint(tmp_path / "sft").name.split("-")[1])
    assert 20 <= at < 400
    with pytest.raises(PosttrainError, match="--resume"):
        run_stages(made, ["sft"], resume=False)
    assert run_stages(made, ["sft"], resume=True) == 0
    assert [record["step"] for record in RunFolder(tmp_path).read_metrics("sft")] == list(range(1, 401))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_equals_plain_training_and_resumes(session, tmp_path, stage):
    pytest.importorskip("deepspeed")
    # Steps three times as large let rounding flip a router's choice by the sixth, and Adam then takes whole steps apart.
    constant = {"lr_scheduler_type": "constant", "learning_rate": 3e-3}
    plain, zero = tmp_path / "plain", tmp_path / "zero"
    run_stages(recipe(plain, trainer=constant | {"gradient_accumulation_steps": 2}), ["sft"], resume=False)
    changes = {"ray": {"num_workers": 2}, "deepspeed": {"stage": stage}}
    run_stages(recipe(zero, trainer=constant | {"max_steps": 3}, **changes), ["sft"], resume=False)
    (zero / "stages.json").unlink()
    run_stages(recipe(zero, trainer=constant, **changes), ["sft"], resume=True)
    assert losses(zero) == pytest.approx(losses(plain), rel=1e-3)
    for name, expected in weights(plain / "sft" / "final").items():
        torch.testing.assert_close(weights(zero / "sft" / "final")[name], expected, rtol=1e-2, atol=1e-3, msg=name)


def test_more_workers_than_the_cluster_holds_is_an_error(session, tmp_path):
    with pytest.raises(PosttrainError, match="9 workers ask for 9 CPUs, and the cluster has 4"):
        run_stages(recipe(tmp_path, ray={"num_workers": 9}), ["sft"], resume=False)


DRIVER = """
import sys
from posttrain.config import load_recipe
from posttrain.runtime.stages import run_stages
sys.exit(run_stages(load_recipe(sys.argv[1], []), ["sft"], resume="--resume" in sys.argv))
"""


def test_ctrl_c_saves_and_resume_continues(tmp_path, root):
    """As in a terminal: the signal goes to the whole foreground process group."""
    path = tmp_path / "run"
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe(path, trainer={"max_steps": 2000, "save_steps": 1000, "logging_steps": 10})))
    environment = os.environ | {"PYTHONPATH": str(root)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(file)], start_new_session=True, env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (path / "metrics.jsonl").exists():
        time.sleep(0.1)
    os.killpg(driver.pid, signal.SIGINT)
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 130, errors
    assert "--resume continues" in errors and "Traceback" not in errors
    step = json.loads((last_checkpoint(path / "sft") / "trainer_state.json").read_text())["global_step"]
    assert 10 <= step < 1000
    file.write_text(dump_recipe(recipe(path, trainer={"max_steps": step + 5, "save_steps": 1000, "logging_steps": 10})))
    finished = subprocess.run(
        [sys.executable, "-c", DRIVER, str(file), "--resume"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    assert f"{step + 5}/{step + 5}" in finished.stderr
