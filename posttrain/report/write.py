"""Fill the page with a run's data. The page fetches nothing and inserts every text as text: no completion can script it."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.errors import RunFolderError
from posttrain.report.collect import collect
from posttrain.run_folder import RunFolder, write_text_atomically

if TYPE_CHECKING:
    from posttrain.config import Recipe


def write_report(run_path: str | Path, *, refresh_s: float | None = None) -> Path:
    """Write `report.html` into a run folder and return its path.

    Args:
        refresh_s: the page loads itself again after so many seconds, until one is written without.

    Raises:
        RunFolderError: the folder's records are damaged, or the disk is full.
    """
    run_path = Path(run_path)
    data = {**collect(run_path), "refresh_s": refresh_s}
    template = files("posttrain.report").joinpath("template.html").read_text(encoding="utf-8")
    # Inside a script element only "<" can end it; JSON allows it to be written as an escape.
    payload = json.dumps(data, ensure_ascii=False, allow_nan=False, default=str).replace("<", "\\u003c")
    page = template.replace("{{title}}", html.escape(data["name"])).replace("{{data}}", payload)
    path = run_path / "report.html"
    write_text_atomically(path, page)
    return path


def watch_report(recipe: Recipe, every_s: float, *, sleep: Callable[[float], None] = time.sleep) -> Path:
    """Write the report of a recipe's run again and again while the run goes on: until its stages are finished, or Ctrl-C.

    Raises:
        RunFolderError: there is no such run.
    """
    run = RunFolder(recipe.run_dir)
    if not (run.path / "config.yaml").is_file():
        raise RunFolderError(f"{run.path} is no run folder (it has no config.yaml): there is nothing to report yet")
    print(f"report: {run.path / 'report.html'}, written anew every {every_s:g} s; Ctrl-C ends it")
    try:
        while not all(run.stage_done(stage) for stage in recipe.stages if stage != "report"):
            write_report(run.path, refresh_s=every_s)
            sleep(every_s)
    finally:
        # Nobody writes it any more, so that the page need not look.
        path = write_report(run.path)
    return path
