"""Weights from the learner to the generators, whatever they travel by.

    sender = open_sender(board, device)          inbox = Inbox(open_receiver(board, shapes, ...))    # receives in a thread
    sender.publish(12, model.state_dict())       version = inbox.poll()                              # never waits
                                                 engine.update_weights(version, inbox.staged); inbox.release()

What every way promises: all names arrive, or an error names those that are missing, unexpected or of another shape; the bytes are
those that were sent (a checksum a bucket); nothing waits without a deadline; the engine stands still only for the swap.

`broadcast` (transfer/): NCCL between GPUs, CUDA IPC within one, gloo between CPUs. `object_store`: copies through Ray's object
store, where the machines cannot open connections to each other.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from posttrain.grpo.split.transfer.buckets import (
    Entry,
    Shapes,
    WeightError,
    WeightsGone,
    check_names,
    fill,
    gather,
    is_sharded,
    plan_buckets,
    read_bucket,
)
from posttrain.grpo.split.transfer.buckets import shapes_of as shapes_of
from posttrain.grpo.split.transfer.receiver import CollectiveReceiver
from posttrain.grpo.split.transfer.sender import CollectiveSender

Way = Literal["broadcast", "object_store"]
STORE_BUCKET_BYTES = 64 * 2**20
# Versions on the board: a receiver that asks for the last but one while a new one arrives still gets it.
KEPT = 2
FETCH_LIMIT_S = 300.0
POLL_S = 0.05
# Longer than all that a receiver itself waits for: what takes longer waits in the store's own connection, which has no deadline.
RECEIVE_LIMIT_S = 600.0


class WeightSender(Protocol):
    """The learner's side."""

    def publish(self, version: int, named_tensors: Mapping[str, Tensor]) -> None:
        """Make the tensors available as `version`. They may change once this has returned and `ensure` is called no more."""
        ...

    def ensure(self) -> None:
        """Serve those that came, or came back, since the last version was published."""
        ...

    def forget(self, name: str) -> None:
        """A generator is dead."""
        ...

    def metrics(self) -> dict[str, float]:
        """Of the last publication: seconds, gigabytes a second, and what the swaps cost the generators."""
        ...


class WeightReceiver(Protocol):
    """A generator's side."""

    staged: dict[str, Tensor]
    seconds: float

    def receive(self, wait_s: float) -> int | None:
        """Wait for a newer version; its tensors are in `staged` then, until the next call. None where none came.

        Raises:
            WeightError: names, shapes or bytes are not right, or a part is late.
        """
        ...

    def release(self) -> None:
        """What was staged has been copied."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of a version in the object store: its entries, and each bucket's Ray reference, size and CRC-32."""

    version: int
    entries: tuple[Entry, ...]
    buckets: tuple[Any, ...]
    sizes: tuple[int, ...]
    checksums: tuple[int, ...]


class WeightBoard:
    """Where the learner and the generators find each other's weights (wrapped as a Ray actor)."""

    def __init__(self) -> None:
        self._manifests: dict[int, Manifest] = {}
        self._newest = -1
        self._meeting: tuple[str, int] | str | None = None
        self._lent: dict[int, Any] = {}
        self._swaps: dict[str, tuple[int, float, float]] = {}

    def meet(self, where: tuple[str, int] | str, lent: Mapping[int, Any] | None = None) -> None:
        """The learner's store for broadcasts (host, port), or "object_store"; `lent`: its buckets, for processes on its GPU."""
        self._meeting, self._lent = where, dict(lent or {})

    def meeting(self) -> tuple[str, int] | str | None:
        return self._meeting

    def borrow(self, number: int) -> Any:
        return self._lent.get(number)

    def swapped(self, name: str, version: int, receive_s: float, pause_s: float) -> None:
        """A generator goes on with `version`: how long it took to arrive, and how long the engine stood still."""
        self._swaps[name] = (version, receive_s, pause_s)

    def swaps(self) -> dict[str, tuple[int, float, float]]:
        return dict(self._swaps)

    def post(self, manifest: Manifest) -> None:
        self._manifests.pop(manifest.version, None)
        self._manifests[manifest.version] = manifest
        self._newest = manifest.version
        while len(self._manifests) > KEPT:
            del self._manifests[next(iter(self._manifests))]

    def newest(self) -> int:
        return self._newest

    def manifest(self, version: int) -> Manifest | None:
        return self._manifests.get(version)


def open_sender(board: Any, device: torch.device | str = "cpu", *, way: Way = "broadcast") -> WeightSender:
    """The learner's side of `way`, for weights on `device`; `board`: handle of a WeightBoard."""
    if way == "object_store":
        return ObjectStoreSender(board)
    return BroadcastSender(board, torch.device(device))


def open_receiver(
    board: Any, expected: Shapes, *, name: str, device: torch.device | str = "cpu", limit_s: float = FETCH_LIMIT_S
) -> WeightReceiver:
    """The generator's side of whatever way the learner has chosen.

    Raises:
        WeightError: the learner has not opened its own side in time.
    """
    import ray

    deadline = time.monotonic() + limit_s
    late = "the weight board has not said where the weights come from"
    while (where := _answer(board.meeting.remote(), limit_s, late)) is None:
        if time.monotonic() > deadline:
            raise WeightError(f"{late} for {limit_s:.0f} s")
        time.sleep(POLL_S)
    if isinstance(where, str):
        return ObjectStoreReceiver(board, expected, limit_s=limit_s)
    return CollectiveReceiver(
        (where[0], where[1]),
        expected,
        name=name,
        host=ray.util.get_node_ip_address(),
        device=device,
        borrow=lambda number: _answer(board.borrow.remote(number), limit_s, f"the weight board has not lent bucket {number}"),
    )


class BroadcastSender:
    """A `CollectiveSender` whose address the board tells."""

    def __init__(self, board: Any, device: torch.device, *, limit_s: float = FETCH_LIMIT_S) -> None:
        import ray

        self._board, self._limit_s = board, limit_s
        self._lent: dict[int, Any] = {}
        # The node's address as Ray uses it: loopback in a cluster that does not leave its machine.
        self._sender = CollectiveSender(ray.util.get_node_ip_address(), device, lend=self._lend)
        self._meet()

    def publish(self, version: int, named_tensors: Mapping[str, Tensor]) -> None:
        self._sender.publish(version, named_tensors)

    def ensure(self) -> None:
        late = "the weight board has not said where the weights come from"
        if _answer(self._board.meeting.remote(), self._limit_s, late) is None:
            self._meet()  # its process died and was started anew
        self._sender.ensure()

    def forget(self, name: str) -> None:
        self._sender.forget(name)

    def metrics(self) -> dict[str, float]:
        last = self._sender.last
        if last is None:
            return {}
        figures = {"sync/transfer_s": last.transfer_s, "sync/handshake_s": last.wait_s, "sync/gb_per_s": last.gb_per_s}
        return figures | _pauses(self._board, self._limit_s)

    def _lend(self, number: int, handle: Any) -> None:
        self._lent[number] = handle
        self._meet()

    def _meet(self) -> None:
        answer = self._board.meet.remote(self._sender.address, self._lent)
        _answer(answer, self._limit_s, "the weight board has not taken note of the learner's address")


class ObjectStoreSender:
    """Publishes through Ray's object store; see `WeightSender`."""

    def __init__(self, board: Any, *, bucket_bytes: int = STORE_BUCKET_BYTES, limit_s: float = FETCH_LIMIT_S) -> None:
        self._board, self._bucket_bytes, self._limit_s = board, bucket_bytes, limit_s
        self._manifest: Manifest | None = None
        self._seconds = 0.0
        self._whole: dict[str, Tensor] = {}
        self._meet()

    def publish(self, version: int, named_tensors: Mapping[str, Tensor]) -> None:
        import ray

        begun = time.perf_counter()
        if is_sharded(named_tensors):
            gather(named_tensors, self._whole, self._bucket_bytes)
            named_tensors = self._whole
        entries, sizes = plan_buckets(named_tensors, self._bucket_bytes)
        references, checksums = [], []
        for number, size in enumerate(sizes):
            bucket = torch.zeros(size, dtype=torch.uint8)
            fill([entry for entry in entries if entry.bucket == number], named_tensors, bucket)
            checksums.append(zlib.crc32(bucket.numpy().data))
            references.append(ray.put(bucket.numpy()))
        self._manifest = Manifest(
            version=version, entries=tuple(entries), buckets=tuple(references), sizes=tuple(sizes), checksums=tuple(checksums)
        )
        self._post(self._manifest)
        self._seconds = time.perf_counter() - begun

    def ensure(self) -> None:
        """Post the last version again where the board has lost it: its process died and was started anew."""
        newest = _answer(self._board.newest.remote(), self._limit_s, "the weight board has not said which version is the newest")
        if self._manifest is not None and newest != self._manifest.version:
            self._meet()
            self._post(self._manifest)

    def forget(self, name: str) -> None:
        """Nobody is waited for here."""

    def metrics(self) -> dict[str, float]:
        if self._manifest is None:
            return {}
        rate = sum(self._manifest.sizes) / max(self._seconds, 1e-9) / 1e9
        return {"sync/transfer_s": self._seconds, "sync/gb_per_s": rate} | _pauses(self._board, self._limit_s)

    def _meet(self) -> None:
        _answer(self._board.meet.remote("object_store"), self._limit_s, "the weight board has not come up")

    def _post(self, manifest: Manifest) -> None:
        _answer(self._board.post.remote(manifest), self._limit_s, f"the weight board has not taken version {manifest.version}")


class ObjectStoreReceiver:
    """Fetches what an `ObjectStoreSender` published; see `WeightReceiver`. `expected`: every name with its shape."""

    def __init__(self, board: Any, expected: Shapes, *, limit_s: float = FETCH_LIMIT_S) -> None:
        self._board, self._expected, self._limit_s = board, dict(expected), limit_s
        self._version = -1
        self.staged: dict[str, Tensor] = {}
        self.seconds = 0.0

    def newest(self) -> int:
        return _answer(self._board.newest.remote(), self._limit_s, "the weight board has not said which version is the newest")

    def receive(self, wait_s: float) -> int | None:
        deadline = time.monotonic() + wait_s
        while (version := self.newest()) in (-1, self._version):
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        begun = time.perf_counter()
        try:
            self.staged = self.fetch(version)
        except WeightsGone:
            return None  # newer ones came meanwhile
        self._version, self.seconds = version, time.perf_counter() - begun
        return version

    def release(self) -> None:
        self.staged = {}

    def close(self) -> None:
        self.staged = {}

    def fetch(self, version: int) -> dict[str, Tensor]:
        """Every tensor of `version`.

        Raises:
            WeightsGone: no such version (any more).
            WeightError: names, shapes or bytes are not right, or a bucket is late.
        """
        asked = self._board.manifest.remote(version)
        manifest = _answer(asked, self._limit_s, f"the weight board has not answered about version {version}")
        if manifest is None:
            raise WeightsGone(f"weights of version {version} are not on the board; the newest are {self.newest()}")
        check_names(version, manifest.entries, self._expected)
        tensors: dict[str, Tensor] = {}
        for number, reference in enumerate(manifest.buckets):
            of_many = f"bucket {number + 1} of {len(manifest.buckets)} of version {version}"
            data = _answer(reference, self._limit_s, f"{of_many} has not arrived")
            if len(data) != manifest.sizes[number] or zlib.crc32(data.data) != manifest.checksums[number]:
                raise WeightError(
                    f"{of_many} arrived changed: {len(data)} bytes of {manifest.sizes[number]}, or another checksum"
                )
            # torch warns of arrays that cannot be written to, as those of the object store.
            bucket = torch.from_numpy(data if data.flags.writeable else data.copy())
            tensors |= read_bucket((entry for entry in manifest.entries if entry.bucket == number), bucket)
        return tensors


class Inbox:
    """A receiver in a thread of its own: the engine goes on until a version is there whole."""

    def __init__(self, receiver: WeightReceiver, *, wait_s: float = 1.0, limit_s: float = RECEIVE_LIMIT_S) -> None:
        self._receiver, self._wait_s, self._limit_s = receiver, wait_s, limit_s
        self._asked: float | None = None
        self._version: int | None = None
        self._error: BaseException | None = None
        self._free, self._closed = threading.Event(), threading.Event()
        self._free.set()
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
        self._thread.start()

    @property
    def staged(self) -> dict[str, Tensor]:
        """The tensors of the version that `poll` gave."""
        return self._receiver.staged

    @property
    def seconds(self) -> float:
        """What receiving it took."""
        return self._receiver.seconds

    def poll(self) -> int | None:
        """A version that has arrived, once; the next one is received after `release`.

        Raises:
            WeightError, ConnectionError: what the receiver met, or it has not come back in time.
        """
        if self._error is not None:
            raise self._error
        asked = self._asked
        if asked is not None and time.monotonic() - asked > self._limit_s:
            raise WeightError(
                f"the learner has not answered about weights for {self._limit_s:.0f} s: its process is stopped, or its machine "
                "cannot be reached"
            )
        version, self._version = self._version, None
        return version

    def release(self) -> None:
        """The engine has copied what was staged."""
        self._receiver.release()
        self._free.set()

    def close(self) -> None:
        """End the thread, which notices within its receiver's wait."""
        self._closed.set()
        self._free.set()
        self._thread.join(2 * self._wait_s)
        self._receiver.close()

    def _work(self) -> None:
        try:
            while not self._closed.is_set():
                self._asked = time.monotonic()
                version = self._receiver.receive(self._wait_s)
                self._asked = None
                if version is not None:
                    self._free.clear()
                    self._version = version
                    self._free.wait()
        except BaseException as error:  # noqa: BLE001 - handed to the engine's thread by poll()
            self._error = error


def _pauses(board: Any, limit_s: float) -> dict[str, float]:
    swaps = _answer(board.swaps.remote(), limit_s, "the weight board has not said how long the swaps took").values()
    if not swaps:
        return {}
    return {"sync/receive_s": max(swap[1] for swap in swaps), "sync/pause_s": max(swap[2] for swap in swaps)}


def _answer(reference: Any, limit_s: float, what: str) -> Any:
    """The value of a Ray reference.

    Raises:
        WeightError: it took longer than `limit_s`; `what` begins the message.
    """
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        return ray.get(reference, timeout=limit_s)
    except GetTimeoutError:
        raise WeightError(f"{what} for {limit_s:.0f} s") from None
