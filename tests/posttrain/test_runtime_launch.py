"""The entry points of the workers, called in this process."""

from __future__ import annotations

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
