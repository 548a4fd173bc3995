"""The entry points of the workers, called in this process."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.errors import ConfigError
from posttrain.runtime import launch

RECIPE: dict[str, Any] = {
    "name": "toy",
    "stages": ["grpo"],
    "model": {"tokenizer": "arithmetic", "init": {"hidden_size": 32, "num_attention_heads": 2}},
    "data": {"prompts": {"kind": "arithmetic"}, "max_prompt_length": 64},
    "grpo": {"max_completion_length": 32},
    "reward": {"functions": [{"path": "mine.py:reward"}]},  # relative to the folder in which the user stood
}


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    """(recipe's name, working folder) of every stage function that was called; this process stands elsewhere than the driver."""
    calls: list = []
    monkeypatch.setattr(launch, "stage_function", lambda _: lambda recipe, run, context: calls.append((recipe.name, os.getcwd())))
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "mine.py").write_text("def reward(prompts, completions, **columns): ...\n")
    monkeypatch.chdir(tmp_path)
    return calls


def test_an_actor_reads_relative_paths_as_the_driver_does(tmp_path: Path, seen: list) -> None:
    folder = str(tmp_path / "driver")
    launch.StageActor().run("grpo", RECIPE, str(tmp_path), None, 1, folder)
    assert seen == [("toy", folder)]


def test_a_training_rank_reads_relative_paths_as_the_driver_does(
    tmp_path: Path, seen: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.train

    ranks = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(ray.train, "get_context", lambda: ranks)
    folder = str(tmp_path / "driver")
    given = {"stage": "grpo", "recipe": RECIPE, "run_path": str(tmp_path), "board": None, "threads": 1, "folder": folder}
    launch.rank_worker(given)
    assert seen == [("toy", folder)]


def test_a_recipe_that_is_wrong_on_the_worker_is_an_error_in_words(tmp_path: Path, seen: list) -> None:
    with pytest.raises(ConfigError, match="no such file 'mine.py'"):
        launch.StageActor().run("grpo", RECIPE, str(tmp_path), None, 1, "/not/on/this/machine")
    assert seen == []


def test_a_learner_whose_node_was_lost_does_not_wait_for_ever_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: Any = importlib.import_module("ray.util.placement_group")  # `ray.util` has a function of that name

    places, now, removed = {0: "node-a", 1: "node-b"}, [100.0], []
    monkeypatch.setattr(groups, "placement_group_table", lambda group: {"bundles_to_node_id": dict(places)})
    monkeypatch.setattr(groups, "remove_placement_group", removed.append)
    monkeypatch.setattr("ray.wait", lambda references, timeout: ([], references))
    monkeypatch.setattr("ray.kill", removed.append)
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    handle = launch.ActorHandle.__new__(launch.ActorHandle)
    handle._actor, handle._result, handle._group, handle._lost_since = "actor", "result", "group", None

    def after(seconds: float) -> bool:
        now[0] += seconds
        return handle.wait(0.0)

    assert not after(1000), "it runs"
    places[1] = ""
    assert not after(1000), "a generator's place is the pool's business"
    places[0] = ""
    assert not after(0) and not after(299)
    places[0] = "node-c"
    assert not after(1)
    places[0] = ""
    assert not after(0) and not after(299) and after(2)
    assert "its node is lost, and no other has had room for it for 300 s" in str(handle.error())
    assert removed == ["actor", "group"]
