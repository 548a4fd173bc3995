"""Fill the page with a run's data. The page fetches nothing and inserts every text as text: no completion can script it."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path

from posttrain.report.collect import collect
from posttrain.run_folder import write_text_atomically


def write_report(run_path: str | Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    Raises:
        RunFolderError: the folder's records are damaged, or the disk is full.
    """
    run_path = Path(run_path)
    data = collect(run_path)
    template = files("posttrain.report").joinpath("template.html").read_text(encoding="utf-8")
    # Inside a script element only "<" can end it; JSON allows it to be written as an escape.
    payload = json.dumps(data, ensure_ascii=False, allow_nan=False, default=str).replace("<", "\\u003c")
    page = template.replace("{{title}}", html.escape(data["name"])).replace("{{data}}", payload)
    path = run_path / "report.html"
    write_text_atomically(path, page)
    return path
