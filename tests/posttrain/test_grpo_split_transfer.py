"""Broadcasts of weights between real processes (gloo): whole, to those who come late, past those who die or stand still."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from posttrain.grpo.split.transfer.buckets import WeightError
from posttrain.grpo.split.transfer.sender import CollectiveSender
from posttrain.grpo.split.weights import Inbox
from tests.conftest import ROOT

SCRIPT = Path(__file__).with_name("transfer_process.py")
# A process imports torch first, on a machine that may be busy.
LIMIT_S = 60.0


class Receiver:
    """A generator's process, whose lines are read by a thread: nothing here waits for ever."""

    def __init__(self, name: str, given: list[str]) -> None:
        self.name = name
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *given], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def said(self, meanwhile: Callable[[], None] = lambda: None) -> dict:
        """Its next line. `meanwhile`: done again and again until it is there, as a learner that waits calls `ensure`."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                return json.loads(self._lines.get(timeout=0.1))
            except queue.Empty:
                meanwhile()
        raise AssertionError(f"{self.name} has said nothing for {LIMIT_S:.0f} s; its process: {self.process.poll()}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


Join = Callable[..., Receiver]


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
        part = tmp_path / f"part.{number}"
        part.write_bytes(bytes(ForkingPickler.dumps(handle)))
        part.rename(f"{tmp_path / 'lent'}.{number}")

    made = CollectiveSender(
        "127.0.0.1", bucket_bytes=512, answer_limit_s=3.0, transfer_limit_s=6.0, lend=lend, same_device="gpu-0"
    )
    yield made
    made.close()


@pytest.fixture
def join(sender: CollectiveSender, tmp_path: Path) -> Iterator[Join]:
    started: list[Receiver] = []

    def start(name: str, *, device: str = "", dies_at: int = -1, stops_at: int = -1, extra: str = "") -> Receiver:
        given = [*map(str, sender.address), name, device, str(tmp_path / "lent"), str(dies_at), str(stops_at), extra]
        started.append(Receiver(name, given))
        return started[-1]

    yield start
    for receiver in started:
        receiver.end()


@pytest.mark.slow
def test_every_generator_gets_every_version_whoever_dies_or_comes_late(sender: CollectiveSender, join: Join) -> None:
    sender.publish(0, tensors(0))  # nobody is there yet
    first, dying, mapped = join("first"), join("dying", dies_at=2), join("mapped", device="gpu-0")
    for receiver in (first, dying, mapped):
        assert receiver.said() == {"joined": True}
    for receiver in (first, dying, mapped):
        assert receiver.said(sender.ensure) == {"version": 0, "sums": sums(0)}, "who joins later gets the version that is there"
    sender.publish(1, tensors(1))
    for receiver in (first, dying, mapped):
        assert receiver.said(sender.ensure) == {"version": 1, "sums": sums(1)}
    assert sender.last is not None
    # `a` fills one bucket of 64 bytes (60), with c in 16; `b` has 2000 bytes, and `tied` travels with `a`.
    assert sender.last.nbytes == 64 + 2000 + 16

    # One is killed in the middle of the broadcast: the others get that very version all the same, and once.
    sender.publish(2, tensors(2))
    dying.process.wait(LIMIT_S)
    for receiver in (first, mapped):
        assert receiver.said(sender.ensure) == {"version": 2, "sums": sums(2)}
    sender.forget("dying")
    late = join("late")
    assert late.said() == {"joined": True}
    assert late.said(sender.ensure) == {"version": 2, "sums": sums(2)}
    sender.ensure()  # all have it: nothing is sent
    sender.publish(3, tensors(3))
    for receiver in (first, mapped, late):
        assert receiver.said(sender.ensure) == {"version": 3, "sums": sums(3)}


@pytest.mark.slow
def test_whoever_stands_still_in_a_broadcast_is_named_and_holds_up_nobody(sender: CollectiveSender, join: Join, caplog) -> None:
    first, still = join("first"), join("still", stops_at=1)
    for receiver in (first, still):
        assert receiver.said() == {"joined": True}
    sender.publish(0, tensors(0))
    for receiver in (first, still):
        assert receiver.said(sender.ensure) == {"version": 0, "sums": sums(0)}
    caplog.clear()
    sender.publish(1, tensors(1))
    assert first.said(sender.ensure) == {"version": 1, "sums": sums(1)}
    assert "version 1 goes out without still: no answer in time" in caplog.text
    # In time it goes on, finds its broadcast over, and gets the weights once more.
    os.kill(still.process.pid, signal.SIGCONT)
    assert still.said(sender.ensure) == {"version": 1, "sums": sums(1)}
    sender.publish(2, tensors(2))
    for receiver in (first, still):
        assert receiver.said(sender.ensure) == {"version": 2, "sums": sums(2)}, "nobody was sent a version twice"


def test_one_that_dies_while_it_joins_keeps_nobody_from_joining(sender: CollectiveSender, join: Join) -> None:
    sender._store.add("joined", 1)  # the first of its two words
    sender.publish(0, tensors(0))
    later = join("later")
    assert later.said() == {"joined": True}
    assert later.said(sender.ensure) == {"version": 0, "sums": sums(0)}


def test_a_name_that_is_not_sent_is_named_on_both_sides(sender: CollectiveSender, join: Join) -> None:
    receiver = join("more", extra="lm_head.weight")
    assert receiver.said() == {"joined": True}
    with pytest.raises(WeightError, match=r"version 4 do not fit.*1 missing \['lm_head.weight'\]"):
        sender.publish(4, tensors(4))
    assert "1 missing ['lm_head.weight']" in receiver.said()["error"]


def test_bytes_that_change_on_the_way_are_noticed(sender: CollectiveSender, join: Join, monkeypatch) -> None:
    from posttrain.grpo.split.transfer import sender as module

    receiver = join("one")
    assert receiver.said() == {"joined": True}
    original = module.checksum
    monkeypatch.setattr(module, "checksum", lambda bucket: original(bucket) + (bucket.numel() == 2000))
    with pytest.raises(WeightError, match=r"version 5 arrived changed: another checksum of 1 of 3 buckets, with \['b'\]"):
        sender.publish(5, tensors(5))
    assert "arrived changed" in receiver.said()["error"]


def test_the_store_listens_at_its_own_address_alone(sender: CollectiveSender) -> None:
    port = f"{sender.address[1]:04X}"
    listening = [
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    assert [place for place in listening if place.endswith(f":{port}")] == [f"0100007F:{port}"]


class Silent:
    """A receiver whose learner is stopped: its store's connection never answers."""

    def __init__(self) -> None:
        self.staged, self.seconds, self.ended = {}, 0.0, threading.Event()

    def receive(self, wait_s: float) -> int | None:
        self.ended.wait(LIMIT_S)
        return None

    def release(self) -> None: ...

    def close(self) -> None: ...


def test_a_learner_that_is_stopped_is_noticed_by_its_generators() -> None:
    receiver = Silent()
    inbox = Inbox(receiver, wait_s=0.05, limit_s=0.2)
    deadline = time.monotonic() + LIMIT_S
    with pytest.raises(WeightError, match=r"the learner has not answered about weights for 0 s: its process is stopped"):
        while time.monotonic() < deadline:
            assert inbox.poll() is None
            time.sleep(0.01)
    receiver.ended.set()
    inbox.close()
