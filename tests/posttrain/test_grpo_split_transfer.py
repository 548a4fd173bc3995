"""Broadcasts of weights between real processes (gloo): whole, to those who come late, past those who die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from posttrain.grpo.split.transfer.buckets import WeightError
from posttrain.grpo.split.transfer.sender import CollectiveSender
from tests.conftest import ROOT

SCRIPT = Path(__file__).with_name("transfer_process.py")
Join = Callable[..., subprocess.Popen]


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Sums: 105 + 15 n, 1000 n, n, and `a` again."""
    a = torch.arange(15.0).reshape(3, 5) + version
    return {"a": a, "b": torch.full((1000,), float(version), dtype=torch.bfloat16), "c": torch.tensor(version), "tied": a}


def sums(version: int) -> dict[str, float]:
    return {"a": 105.0 + 15 * version, "b": 1000.0 * version, "c": float(version), "tied": 105.0 + 15 * version}


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[CollectiveSender]:
    torch.multiprocessing.set_sharing_strategy("file_system")

    def lend(number: int, handle: object) -> None:
        # A CPU's shared memory stands for a GPU's: handles of either are all that travels.
        Path(f"{tmp_path / 'lent'}.{number}").write_bytes(bytes(ForkingPickler.dumps(handle)))

    made = CollectiveSender(
        "127.0.0.1", bucket_bytes=512, answer_limit_s=3.0, transfer_limit_s=3.0, lend=lend, same_device="gpu-0"
    )
    yield made
    made.close()


@pytest.fixture
def join(sender: CollectiveSender, tmp_path: Path) -> Iterator[Join]:
    started: list[subprocess.Popen] = []

    def start(name: str, *, device: str = "", dies_at: int = -1, extra: str = "") -> subprocess.Popen:
        given = [*map(str, sender.address), name, device, str(tmp_path / "lent"), str(dies_at), extra]
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *given],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)


def said(process: subprocess.Popen) -> dict:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.long  # hung once on a loaded machine: the lines of its processes are read without a deadline
@pytest.mark.slow
def test_every_generator_gets_every_version_whoever_dies_or_comes_late(sender: CollectiveSender, join: Join) -> None:
    sender.publish(0, tensors(0))  # nobody is there yet
    first, dying, mapped = join("first"), join("dying", dies_at=2), join("mapped", device="gpu-0")
    for process in (first, dying, mapped):
        assert said(process) == {"joined": True}
    sender.ensure()
    for process in (first, dying, mapped):
        assert said(process) == {"version": 0, "sums": sums(0)}, "who joins later gets the version that is there"
    sender.publish(1, tensors(1))
    for process in (first, dying, mapped):
        assert said(process) == {"version": 1, "sums": sums(1)}
    assert sender.last is not None and sender.last.receivers == 3
    # `a` fills one bucket of 64 bytes (60), with c in 16; `b` has 2000 bytes, and `tied` travels with `a`.
    assert sender.last.nbytes == 64 + 2000 + 16

    # One is killed in the middle of the broadcast: the others get that very version all the same.
    sender.publish(2, tensors(2))
    dying.wait(10)
    for process in (first, mapped):
        assert said(process) == {"version": 2, "sums": sums(2)}
    sender.forget("dying")
    late = join("late")
    assert said(late) == {"joined": True}
    sender.ensure()
    assert said(late) == {"version": 2, "sums": sums(2)}
    sender.ensure()  # all have it: nothing is sent
    sender.publish(3, tensors(3))
    for process in (first, mapped, late):
        assert said(process) == {"version": 3, "sums": sums(3)}


def test_a_name_that_is_not_sent_is_named_on_both_sides(sender: CollectiveSender, join: Join) -> None:
    process = join("more", extra="lm_head.weight")
    assert said(process) == {"joined": True}
    with pytest.raises(WeightError, match=r"version 4 do not fit.*1 missing \['lm_head.weight'\]"):
        sender.publish(4, tensors(4))
    assert "1 missing ['lm_head.weight']" in said(process)["error"]


def test_bytes_that_change_on_the_way_are_noticed(sender: CollectiveSender, join: Join, monkeypatch) -> None:
    from posttrain.grpo.split.transfer import sender as module

    process = join("one")
    assert said(process) == {"joined": True}
    original = module.checksum
    monkeypatch.setattr(module, "checksum", lambda bucket: original(bucket) + (bucket.numel() == 2000))
    with pytest.raises(WeightError, match=r"version 5 arrived changed: another checksum of 1 of 3 buckets, with \['b'\]"):
        sender.publish(5, tensors(5))
    assert "arrived changed" in said(process)["error"]


def test_the_store_listens_at_its_own_address_alone(sender: CollectiveSender) -> None:
    port = f"{sender.address[1]:04X}"
    listening = [
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    assert [place for place in listening if place.endswith(f":{port}")] == [f"0100007F:{port}"]
