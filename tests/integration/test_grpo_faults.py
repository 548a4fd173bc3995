"""Split GRPO when something breaks: real processes are killed, a node is lost, rewards hang, a disk is full."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from posttrain.config import RayConfig, dump_recipe
from posttrain.errors import PosttrainError, RunFolderError
from posttrain.grpo.split.experience import SplitExperience
from posttrain.grpo.split.pool import SplitSettings
from posttrain.run_folder import RunFolder
from posttrain.runtime.session import ray_session
from posttrain.runtime.stages import run_stages
from tests.integration.test_grpo_split import BATCHES, check, collect, essence, kill, rows, scripted, trained
from tests.integration.test_grpo_stage import GRPO, recipe
from tests.posttrain.scripted_engine import hanging_scorer, open_scripted_scorer, opener, scripted_plan

ACTORS = ("StageActor", "GeneratorActor", "ExperienceBuffer", "RewardActor", "WeightBoard")
SPLIT: dict[str, Any] = {**GRPO, "placement": "split", "max_staleness": 0, "batch_timeout_s": 120.0}


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(RayConfig(num_cpus=4)):
        yield


def test_a_generator_is_killed_and_then_the_learner_resumes(session, tmp_path: Path) -> None:
    first = scripted(tmp_path)
    try:
        collected = collect(first, 0)
        check(collected, 0)
        kill("GeneratorActor")
        first.ack(0)
        check(collect(first, 1), 1)
        seen = essence(collect(first, 1))
    finally:
        first.close()  # the learner dies: batch 1 was handed out and not acknowledged
    second = scripted(tmp_path)
    try:
        assert essence(collect(second, 1)) == seen, "the very groups that the dead learner had"
        second.ack(1)
        check(collect(second, 2), 2)
    finally:
        second.close()


def test_rewards_that_hang_are_named(session, tmp_path: Path) -> None:
    settings = SplitSettings(generators=1, max_staleness=0, limit_s=4.0)
    experience = SplitExperience(
        scripted_plan(BATCHES),
        folder=tmp_path / "buffer",
        open_workbench=opener(tmp_path),
        open_scorer=hanging_scorer,
        settings=settings,
    )
    try:
        # Whoever notices first says so: the generator, or the learner.
        with pytest.raises(PosttrainError, match=r"generator-0: the rewards have not scored slot 0 for 4 s|with generator-0"):
            collect(experience, 0)
    finally:
        experience.close()


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    path.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], capture_output=True, check=False
        )
    except FileNotFoundError:
        mounted = None
    if mounted is None or mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


def test_a_full_disk_ends_the_run_and_loses_nothing(session, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        experience = scripted(disk)
        try:
            seen = essence(collect(experience, 0))
            with open(disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError, match="No space left"):
                while True:
                    ballast.write(b"0" * 4096)
            with pytest.raises(RunFolderError, match="no space left on the disk while writing .*continue with --resume"):
                for batch in range(BATCHES):
                    check(collect(experience, batch), batch)
                    experience.ack(batch)
        finally:
            experience.close()
        (disk / "ballast").unlink()
        # No checkpoint was written meanwhile: the run goes on at batch 0, with the groups that it had.
        again = scripted(disk)
        try:
            assert essence(collect(again, 0)) == seen
            again.ack(0)
            check(collect(again, 1), 1)
        finally:
            again.close()


# -- whole runs -----------------------------------------------------------------------------------------------------------


def steps_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


class Killer:
    """Kills the process of an actor class, of this test's cluster, once the run has taken a step."""

    def __init__(self, folder: Path, actor: str) -> None:
        self.folder, self.actor, self.killed = folder, actor, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        deadline = time.monotonic() + 120
        while steps_of(self.folder) < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        kill(self.actor)
        self.killed = True


@pytest.fixture(scope="module")
def straight(session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert run_stages(recipe(folder, grpo={**SPLIT, "max_steps": 8}), ["grpo"], resume=False) == 0
    return folder


@pytest.mark.slow
def test_a_learner_that_is_killed_goes_on_from_its_checkpoint(straight: Path, tmp_path: Path) -> None:
    given = recipe(tmp_path / "run", grpo={**SPLIT, "max_steps": 8}, ray=RayConfig(max_failures=1).model_dump())
    killer = Killer(tmp_path / "run", "StageActor")
    assert run_stages(given, ["grpo"], resume=False) == 0
    assert killer.killed
    assert trained(RunFolder(tmp_path / "run")) == trained(RunFolder(straight)), "the same prompts and completions, once each"


@pytest.mark.long
@pytest.mark.slow
def test_a_learner_rank_of_two_that_is_killed_goes_on_from_the_checkpoint(session, tmp_path: Path) -> None:
    grpo = {**SPLIT, "max_steps": 8, "learners": 2, "per_device_train_batch_size": 4}
    given = recipe(tmp_path / "run", grpo=grpo, ray=RayConfig(max_failures=1).model_dump())
    killer = Killer(tmp_path / "run", "RayTrainWorker")
    assert run_stages(given, ["grpo"], resume=False) == 0
    assert killer.killed
    assert sorted({line["step"] for line in RunFolder(tmp_path / "run").read_metrics("grpo")}) == list(range(1, 9))
    by_step = [row[:3] for row in trained(RunFolder(tmp_path / "run"))]
    assert len(by_step) == 8 * 8 and len({tuple(row) for row in by_step}) == 8 * 8, "8 completions a step, none twice"


@pytest.mark.slow
def test_a_driver_that_is_killed_is_resumed_at_the_same_step(straight: Path, tmp_path: Path) -> None:
    given = recipe(tmp_path / "run", grpo={**SPLIT, "max_steps": 8})
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(given))
    command = [sys.executable, "-m", "posttrain", "grpo", str(file)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_ADDRESS")}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True, env=environment)
    deadline = time.monotonic() + 120
    while steps_of(tmp_path / "run") < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    actors = [child for child in children if any(name in " ".join(child.cmdline()) for name in ACTORS)]
    assert len(actors) >= 4
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert psutil.wait_procs(actors, timeout=60)[1] == [], "whoever worked for it ends by itself"
    done = subprocess.run([*command, "--resume"], stderr=subprocess.PIPE, text=True, timeout=150, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert trained(RunFolder(tmp_path / "run")) == trained(RunFolder(straight))


@pytest.mark.long
@pytest.mark.slow
def test_a_node_that_is_lost_takes_no_group_with_it(tmp_path: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    common = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **common})
    try:
        workers = [cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, namespace="posttrain")
        experience = SplitExperience(
            scripted_plan(BATCHES),
            folder=tmp_path / "buffer",
            open_workbench=opener(tmp_path),
            open_scorer=open_scripted_scorer,
            settings=SplitSettings(generators=2, max_staleness=1, num_cpus=1, max_failures=5, limit_s=60.0),
        )
        try:
            for batch in range(BATCHES):
                if batch == 3:
                    cluster.remove_node(workers[1], allow_graceful=False)
                collected = experience.collect(rows(batch), batch, {"w": torch.tensor(batch)})
                check(collected, batch)
                experience.ack(batch)
        finally:
            experience.close()
    finally:
        ray.shutdown()
        cluster.shutdown()
