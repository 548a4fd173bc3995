"""A generator's side of a broadcast of weights."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.grpo.split.transfer.buckets import Entry, Shapes, WeightError, check_names, checksum, read_bucket
from posttrain.grpo.split.transfer.group import (
    ANSWER_LIMIT_S,
    BUSY_S,
    HAVE,
    IDLE_S,
    TRANSFER_LIMIT_S,
    Broken,
    Group,
    as_broken,
    connect,
    device_id,
    finish,
    synchronize,
    wait_key,
)
from posttrain.grpo.split.transfer.sender import Member

logger = logging.getLogger(__name__)


class CollectiveReceiver:
    """Receives what a `CollectiveSender` publishes; see `WeightReceiver`.

    Args:
        address: of the sender's store.
        expected: every name with its shape.
        name: of the generator.
        host: address of this machine that the learner reaches.
        borrow: gives what the sender lent under a number; needed where both share a GPU.
        device_name: stands for `device_id(device)`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        expected: Shapes,
        *,
        name: str,
        host: str,
        device: torch.device | str = "cpu",
        transfer_limit_s: float = TRANSFER_LIMIT_S,
        borrow: Callable[[int], Any] | None = None,
        device_name: str | None = None,
    ) -> None:
        self._device, self._expected, self._limit_s, self._borrow = torch.device(device), dict(expected), transfer_limit_s, borrow
        self._store = connect(address)
        self._group = Group(self._store, host, self._device)
        self._next = self._store.add("published", 0)
        self._index = self._store.add("joined", 1) - 1
        member = Member(name=name, device=device_id(self._device) if device_name is None else device_name)
        self._store.set(f"member/{self._index}", json.dumps(asdict(member)))
        self._manifest: tuple[str, list[Entry], list[int]] = ("", [], [])
        self._content = -1
        self._buckets: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}
        cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if cuda else None
        self._swapped = torch.cuda.Event() if cuda else None
        self.staged: dict[str, Tensor] = {}
        self.seconds = 0.0

    def receive(self, wait_s: float) -> int | None:
        """Take part in the next publication; see `WeightReceiver`.

        Raises:
            WeightError: names, shapes or bytes are not right, or the learner does not send what it offered.
            ConnectionError: the learner is gone.
        """
        with _as_gone():
            if not self._wait(lambda: self._store.add("published", 0) > self._next, wait_s, IDLE_S):
                return None
            # Older ones that were missed are of no use.
            number = self._store.add("published", 0) - 1
            self._next = number + 1
            if not self._store.check([f"publish/{number}"]):
                return None
            offer = json.loads(self._store.get(f"publish/{number}"))
            version, (_, entries, sizes) = int(offer["version"]), self._known(offer["manifest"])
            wrong = _wrong_names(version, entries, self._expected)
            # It is offered again where somebody else has not got it.
            good = HAVE if offer["content"] == self._content else "ok"
            self._store.set(f"ready/{number}/{self._index}", wrong or good)
            go = self._go(number, version)
        if wrong:
            raise WeightError(wrong)
        if go is None or self._index not in go["members"] + go["mapped"]:
            return None
        begun = time.perf_counter()
        try:
            with self._on_stream(), as_broken("the learner"):
                wrong = self._transfer(number, go, version, entries, sizes)
        except Broken as broken:
            logger.warning("version %d: %s", version, broken)
            self._group.close()
            if self._device.type == "cpu":
                self._buckets = []  # gloo may write into the old ones until it gives up
            return None
        self.seconds = time.perf_counter() - begun
        with _as_gone():
            self._store.set(f"got/{number}/{self._index}", wrong or "ok")
        if wrong:
            raise WeightError(wrong)
        self._content = offer["content"]
        self.staged = {}
        for k, bucket in enumerate(self._buckets):
            self.staged |= read_bucket([entry for entry in entries if entry.bucket == k], bucket)
        return version

    def release(self) -> None:
        """The engine's stream has been told to copy all that was staged: after that it may be overwritten."""
        if self._swapped is not None:
            self._swapped.record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        self._group.close()

    def _wait(self, done: Callable[[], bool], limit_s: float, every_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(every_s)
        return True

    def _known(self, digest: str) -> tuple[str, list[Entry], list[int]]:
        if self._manifest[0] != digest:
            given = json.loads(self._store.get(f"manifest/{digest}"))
            entries = [Entry(**{**fields, "shape": tuple(fields["shape"])}) for fields in given["entries"]]
            self._manifest = (digest, entries, given["sizes"])
        return self._manifest

    def _go(self, number: int, version: int) -> dict[str, Any] | None:
        """Who takes part; None where the learner has gone on without us."""
        key = f"go/{number}"
        said = lambda: self._store.check([key]) or self._is_over(number)  # noqa: E731
        if not self._wait(said, ANSWER_LIMIT_S + self._limit_s, BUSY_S):
            raise WeightError(f"the learner offered version {version}, but has not sent it")
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _transfer(self, number: int, go: dict[str, Any], version: int, entries: list[Entry], sizes: list[int]) -> str:
        """Fill the staging buckets; returns what is wrong with them, or nothing."""
        deadline = time.monotonic() + self._limit_s
        if [bucket.numel() for bucket in self._buckets] != sizes:
            self._buckets = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]
        if self._index in go["mapped"]:
            sums = self._copy(number, deadline)
        else:
            sums = torch.zeros(len(sizes), dtype=torch.int64, device=self._device)
            rank = 1 + go["members"].index(self._index)
            self._group.open(go["group"], rank, len(go["members"]) + 1, self._limit_s)
            works = [self._group.broadcast(tensor) for tensor in [*self._buckets, sums]]
            finish(works, self._device, deadline, lost=lambda: self._is_over(number))
        arrived = torch.stack([checksum(bucket) for bucket in self._buckets]).tolist()
        changed = [k for k, (here, there) in enumerate(zip(arrived, sums.tolist(), strict=True)) if here != there]
        if not changed:
            return ""
        names = [entry.name for entry in entries if entry.bucket in changed]
        return f"version {version} arrived changed: another checksum of {len(changed)} of {len(sizes)} buckets, with {names[:8]}"

    def _copy(self, number: int, deadline: float) -> Tensor:
        """Copy the learner's own buckets, which lie on the same device, one after another."""
        assert self._borrow is not None, "a receiver on the learner's device is given `borrow`"
        over = partial(self._is_over, number)
        for k, bucket in enumerate(self._buckets):
            wait_key(self._store, f"full/{number}/{k}", deadline, f"the learner has not filled bucket {k}", over)
            slot = int(self._store.get(f"full/{number}/{k}"))
            if slot not in self._lent:
                function, arguments = self._borrow(slot)
                self._lent[slot] = function(*arguments)
            bucket.copy_(self._lent[slot][: bucket.numel()])
            synchronize(self._device)
            self._store.set(f"taken/{number}/{k}/{self._index}", "ok")
        wait_key(self._store, f"sums/{number}", deadline, "the learner has not sent its checksums", over)
        return torch.tensor(json.loads(self._store.get(f"sums/{number}")), dtype=torch.int64)

    def _is_over(self, number: int) -> bool:
        """Whether the learner is at the next publication already: this one broke."""
        return self._store.add("published", 0) > number + 1

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """A stream of our own, beside the engine's and behind its last swap."""
        if self._stream is None or self._swapped is None:
            yield
            return
        self._stream.wait_event(self._swapped)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


def _wrong_names(version: int, entries: list[Entry], expected: Shapes) -> str:
    try:
        check_names(version, entries, expected)
    except WeightError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _as_gone() -> Iterator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        raise ConnectionError(f"the learner's store does not answer: {str(error).splitlines()[0]}") from error
