"""A state dict from the learner to the generators, in buckets.

    sender = ObjectStoreSender(board)            receiver = ObjectStoreReceiver(board, shapes_of(model))
    sender.publish(12, model.state_dict())       generator.update_weights(12, receiver.fetch(12))

What every implementation promises: all names arrive or `fetch` raises, naming those that are missing, unexpected or of another
shape; the bytes are those that were sent (a CRC-32 a bucket); nothing waits without a deadline. This one copies through Ray's
object store, for machines without a GPU; tensors that share memory (tied embeddings) travel once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.errors import PosttrainError

Shapes = Mapping[str, tuple[int, ...]]
BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 16
# Versions on the board: a receiver that asks for the last but one while a new one arrives still gets it.
KEPT = 2
FETCH_LIMIT_S = 300.0


class WeightError(PosttrainError):
    """Weights that did not arrive whole, unchanged and in time."""

    exit_code = 1


class WeightsGone(WeightError):
    """The version is no longer, or not yet, to be had: ask for the newest."""


class WeightSender(Protocol):
    """The learner's side."""

    def publish(self, version: int, named_tensors: Mapping[str, Tensor]) -> None:
        """Make the tensors available as `version`. They may change as soon as this returns."""
        ...


class WeightReceiver(Protocol):
    """A generator's side."""

    def newest(self) -> int:
        """The newest version there is; -1 where there is none."""
        ...

    def fetch(self, version: int) -> dict[str, Tensor]:
        """Every tensor of `version`, on the host or on the device, to be copied from before the next fetch.

        Raises:
            WeightsGone: no such version (any more).
            WeightError: names, shapes or bytes are not right, or a bucket is late.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor lies: `nbytes` from `offset` of bucket `bucket`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of a version: its entries, and each bucket's Ray reference, size and CRC-32."""

    version: int
    entries: tuple[Entry, ...]
    buckets: tuple[Any, ...]
    sizes: tuple[int, ...]
    checksums: tuple[int, ...]


class WeightBoard:
    """The manifests of the newest versions (wrapped as a Ray actor)."""

    def __init__(self) -> None:
        self._manifests: dict[int, Manifest] = {}
        self._newest = -1

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


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all that a receiver for `model` must get."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def plan_buckets(named_tensors: Mapping[str, Tensor], bucket_bytes: int) -> tuple[list[Entry], list[int]]:
    """Entries, and the size of each bucket. In the mapping's order; a tensor is never split, and may fill a bucket alone."""
    entries: list[Entry] = []
    sizes: list[int] = []
    seen: dict[tuple[Any, ...], Entry] = {}
    for name, tensor in named_tensors.items():
        dtype, shape, nbytes = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numel() * tensor.itemsize
        memory = (tensor.data_ptr(), dtype, shape, tensor.stride())
        twin = seen.get(memory) if nbytes else None
        if twin is not None:
            place = (twin.bucket, twin.offset)
        else:
            start = -(-sizes[-1] // ALIGNMENT) * ALIGNMENT if sizes else 0
            if not sizes or (start and start + nbytes > bucket_bytes):
                sizes.append(0)
                start = 0
            place = (len(sizes) - 1, start)
            sizes[-1] = start + nbytes
        entry = Entry(name=name, dtype=dtype, shape=shape, bucket=place[0], offset=place[1], nbytes=nbytes)
        entries.append(entry)
        seen.setdefault(memory, entry)
    return entries, sizes


def fill_bucket(entries: Iterable[Entry], named_tensors: Mapping[str, Tensor], size: int) -> np.ndarray:
    """The bytes [size] of the entries of one bucket."""
    bucket = np.zeros(size, dtype=np.uint8)
    for entry in entries:
        flat = named_tensors[entry.name].detach().to("cpu").contiguous().reshape(-1)
        bucket[entry.offset : entry.offset + entry.nbytes] = flat.view(torch.uint8).numpy() if entry.nbytes else 0
    return bucket


def read_bucket(entries: Iterable[Entry], bucket: Tensor) -> dict[str, Tensor]:
    """The tensors of one bucket, views of its bytes (uint8)."""
    return {
        entry.name: bucket[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)
        for entry in entries
    }


def check_names(version: int, entries: Iterable[Entry], expected: Shapes) -> None:
    """Raise WeightError unless the entries are exactly what is expected."""
    given = {entry.name: entry.shape for entry in entries}
    missing = sorted(expected.keys() - given.keys())
    unexpected = sorted(given.keys() - expected.keys())
    wrong = [
        f"{name} is {list(given[name])}, {list(shape)} is needed"
        for name, shape in expected.items()
        if name in given and tuple(given[name]) != tuple(shape)
    ]
    if missing or unexpected or wrong:
        raise WeightError(
            f"weights of version {version} do not fit the generator's model: {len(missing)} missing {missing[:8]}, "
            f"{len(unexpected)} unexpected {unexpected[:8]}, {len(wrong)} of another shape {wrong[:8]}; "
            "learner and generator must load the same checkpoint"
        )


class ObjectStoreSender:
    """Publishes through Ray's object store; see `WeightSender`. `board`: handle of a WeightBoard."""

    def __init__(self, board: Any, *, bucket_bytes: int = BUCKET_BYTES, limit_s: float = FETCH_LIMIT_S) -> None:
        self._board, self._bucket_bytes, self._limit_s = board, bucket_bytes, limit_s
        self._manifest: Manifest | None = None

    def publish(self, version: int, named_tensors: Mapping[str, Tensor]) -> None:
        import ray

        entries, sizes = plan_buckets(named_tensors, self._bucket_bytes)
        references, checksums = [], []
        for number, size in enumerate(sizes):
            bucket = fill_bucket([entry for entry in entries if entry.bucket == number], named_tensors, size)
            checksums.append(zlib.crc32(bucket.data))
            references.append(ray.put(bucket))
        self._manifest = Manifest(
            version=version, entries=tuple(entries), buckets=tuple(references), sizes=tuple(sizes), checksums=tuple(checksums)
        )
        self._post(self._manifest)

    def ensure(self) -> None:
        """Post the last version again where the board has lost it: its process died and was started anew."""
        newest = _answer(self._board.newest.remote(), self._limit_s, "the weight board has not said which version is the newest")
        if self._manifest is not None and newest != self._manifest.version:
            self._post(self._manifest)

    def _post(self, manifest: Manifest) -> None:
        _answer(self._board.post.remote(manifest), self._limit_s, f"the weight board has not taken version {manifest.version}")


class ObjectStoreReceiver:
    """Fetches what an `ObjectStoreSender` published; see `WeightReceiver`. `expected`: every name with its shape."""

    def __init__(self, board: Any, expected: Shapes, *, limit_s: float = FETCH_LIMIT_S) -> None:
        self._board, self._expected, self._limit_s = board, dict(expected), limit_s

    def newest(self) -> int:
        return _answer(self._board.newest.remote(), self._limit_s, "the weight board has not said which version is the newest")

    def fetch(self, version: int) -> dict[str, Tensor]:
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
