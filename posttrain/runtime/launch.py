"""Starting one stage on Ray: SFT, and GRPO of several learners, as a TorchTrainer of N ranks; the others as one actor each."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from posttrain.config import RayConfig, Recipe, recipe_from_dict
from posttrain.errors import PosttrainError
from posttrain.runtime.placement import RESERVE_LIMIT_S, check, grpo_bundles, nodes, reserve
from posttrain.runtime.session import gpus_per_worker

POLL_SECONDS = 0.2
# Of the ranks' own collectives, beyond what rank 0 may wait for batches.
GROUP_TIMEOUT_S = 1800


class StageHandle(Protocol):
    """A running stage, as the driver sees it."""

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; True when the stage has ended."""
        ...

    def error(self) -> BaseException | None:
        """What Ray says went wrong, after the end; the board's outcome says it better where the worker could still speak."""
        ...

    def kill(self) -> None:
        """End the stage at once."""
        ...


def launch(stage: str, recipe: Recipe, run_path: Path, board: Any) -> StageHandle:
    """Start `stage` and return its handle."""
    if stage == "grpo":
        # Before anything is loaded: Ray would wait without a word for what never comes.
        check(grpo_bundles(recipe, gpus_per_worker(RayConfig())), nodes())
    if stage == "sft" or (stage == "grpo" and recipe.grpo.learners > 1):
        return RanksHandle(stage, recipe, run_path, board)
    return ActorHandle(stage, recipe, run_path, board)


def worker_threads(recipe: Recipe) -> int:
    """Torch threads of a worker: the cores that it holds (Ray's own default would be 1 or all)."""
    return max(1, int(recipe.ray.cpus_per_worker))


class ActorHandle:
    """A stage in one actor."""

    def __init__(self, stage: str, recipe: Recipe, run_path: Path, board: Any) -> None:
        import ray

        elsewhere = _elsewhere(stage, recipe)
        options: dict[str, Any] = {
            # Engines of their own find these: a stage that only asks them must not hold what they need.
            "num_cpus": 0 if elsewhere else recipe.ray.cpus_per_worker,
            "num_gpus": 0 if elsewhere else gpus_per_worker(recipe.ray),
            # A worker that died starts again, and its stage continues from its last checkpoint.
            "max_restarts": recipe.ray.max_failures,
            # Each call to a process that is not back yet counts as one: the restarts are what is bounded.
            "max_task_retries": -1 if recipe.ray.max_failures else 0,
        }
        self._group: Any = None
        self._lost_since: float | None = None
        if stage == "grpo" and recipe.grpo.placement == "split":
            options["scheduling_strategy"] = self._reserved(recipe)
        self._actor: Any = ray.remote(**options)(StageActor).remote()
        self._result = self._actor.run.remote(
            stage, recipe.model_dump(mode="json"), str(run_path), board, worker_threads(recipe), os.getcwd()
        )

    def _reserved(self, recipe: Recipe) -> Any:
        """The learner's place in a group that its generators are placed in too."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = reserve(grpo_bundles(recipe, gpus_per_worker(RayConfig())))
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )

    def wait(self, seconds: float) -> bool:
        import ray

        ready, _ = ray.wait([self._result], timeout=seconds)
        return bool(ready) or self._homeless()

    def _homeless(self) -> bool:
        """Whether the learner's node was lost and no other has had room for it for long: Ray would wait without a word."""
        from ray.util.placement_group import placement_group_table

        if self._group is None or placement_group_table(self._group)["bundles_to_node_id"].get(0):
            self._lost_since = None
            return False
        self._lost_since = self._lost_since or time.monotonic()
        return time.monotonic() - self._lost_since > RESERVE_LIMIT_S

    def error(self) -> BaseException | None:
        import ray
        from ray.exceptions import RayError

        if self._lost_since is not None:
            self.kill()
            return PosttrainError(f"its node is lost, and no other has had room for it for {RESERVE_LIMIT_S:.0f} s")
        try:
            ray.get(self._result)
        except RayError as error:
            return error
        finally:
            self._give_back()
        return None

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
        self._give_back()

    def _give_back(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _elsewhere(stage: str, recipe: Recipe) -> bool:
    """Whether a server or other actors run the stage's model, rather than its own process."""
    backend = {"distill": recipe.distill.teacher, "eval": recipe.eval.backend}.get(stage)
    return backend is not None and (backend.kind == "openai" or backend.engines > 1)


class StageActor:
    """Runs one stage function in a process of its own (as a Ray actor)."""

    def run(self, stage: str, recipe: dict[str, Any], run_path: str, board: Any, threads: int, folder: str) -> None:
        from posttrain.runtime.worker import setup

        seed = int(recipe.get("seed", 0))
        context = setup(stage=stage, run_path=run_path, board=board, threads=threads, seed=seed, folder=folder)
        with context.outcome():
            context.report(0, 0, note="loading", force=True)
            stage_function(stage)(recipe_from_dict(recipe), Path(run_path), context)


def stage_function(stage: str) -> Any:
    """The function `(recipe, run_path, context)` of a stage; imported only where it runs.

    Raises:
        PosttrainError: the stage is unknown.
    """
    if stage == "sft":
        from posttrain.sft import train

        return train
    if stage == "grpo":
        from posttrain.grpo import train

        return train
    if stage == "distill":
        from posttrain.distill.stage import distill

        return distill
    if stage == "eval":
        from posttrain.evaluation import evaluate

        return evaluate
    raise PosttrainError(f"unknown stage {stage!r}; stages are distill, sft, grpo, eval, report")


class RanksHandle:
    """SFT, or GRPO of several learners, under Ray Train.

    `fit` blocks and would take Ctrl-C for itself, so it runs in a thread of the driver.
    """

    def __init__(self, stage: str, recipe: Recipe, run_path: Path, board: Any) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        gpus = gpus_per_worker(recipe.ray)
        ranks = recipe.ray.num_workers if stage == "sft" else recipe.grpo.learners
        resources: dict[str, float] = {"CPU": recipe.ray.cpus_per_worker}
        if gpus:
            resources["GPU"] = gpus
        self._trainer = TorchTrainer(
            rank_worker,
            # Rank 0 waits for the generators up to that long and says who is late, while the others wait for rank 0.
            torch_config=TorchConfig(timeout_s=int(recipe.grpo.batch_timeout_s) + GROUP_TIMEOUT_S),
            train_loop_config={
                "stage": stage,
                "recipe": recipe.model_dump(mode="json"),
                "run_path": str(run_path),
                "board": board,
                "threads": worker_threads(recipe),
                "folder": os.getcwd(),
            },
            scaling_config=ScalingConfig(num_workers=ranks, use_gpu=gpus > 0, resources_per_worker=resources),
            # No checkpoint is reported to Ray Train: those in the run folder are the truth, and every start looks there.
            run_config=RunConfig(
                name=stage,
                storage_path=str(run_path / "logs" / "ray_train"),
                failure_config=FailureConfig(max_failures=recipe.ray.max_failures),
            ),
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, name=stage, daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except Exception as error:  # noqa: BLE001 - handed to the driver's main thread by error()
            self._error = error

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def error(self) -> BaseException | None:
        return self._error

    def kill(self) -> None:
        """Nothing to do: the workers belong to this driver's job, and end when it disconnects from Ray."""


def rank_worker(config: dict[str, Any]) -> None:
    """What each rank of a stage under Ray Train runs."""
    import ray.train

    from posttrain.runtime.worker import setup

    stage = config["stage"]
    ranks = ray.train.get_context()
    rank, world_size = ranks.get_world_rank(), ranks.get_world_size()
    if world_size == 1 and config["recipe"].get("deepspeed") is None:
        # A group of one would be wrapped in DistributedDataParallel, which copies every gradient for nothing.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"):
            os.environ.pop(name, None)
    context = setup(
        stage=stage,
        run_path=config["run_path"],
        board=config["board"],
        threads=config["threads"],
        seed=int(config["recipe"].get("seed", 0)),
        rank=rank,
        world_size=world_size,
        folder=config["folder"],
    )
    context.begin()
    with context.outcome(reraise=True):
        context.report(0, 0, note="loading", force=True)
        stage_function(stage)(recipe_from_dict(config["recipe"]), Path(config["run_path"]), context)
