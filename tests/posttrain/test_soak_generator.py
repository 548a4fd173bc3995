"""A short soak of the generator; `scripts/soak_generator.py` runs 10,000 requests."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.fixture
def script(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))
    yield importlib.import_module("soak_generator")
    sys.modules.pop("soak_generator", None)


@pytest.mark.slow
@pytest.mark.parametrize("read_late", [False, True])
def test_nothing_is_left_of_three_hundred_requests(script, read_late):
    did, left = script.soak(300, seed=int(read_late), read_late=read_late)
    assert left == []
    assert did["samples"] == did["abort"] + did["length"] + did["stop"]
    for name in ("abort", "snapshot", "snapshot on disk", "update, recompute", "update, restart", "update refused", "retracted"):
        assert did[name] > 0, name


def test_a_leak_is_seen(script, tmp_path):
    run = script.Soak(seed=0, device="cpu", graphs=False, read_late=True, folder=tmp_path)
    run.run(2)
    assert run.held() == []
    run.generators[1]._runner.reserve(3, 70)
    (tmp_path / "forgotten").touch()
    assert run.held() == ["generator 1: 2 pages", "generator 1: 4 holders of pages", "file forgotten"]
    run.submit()
    assert any("requests" in line for line in run.held())
