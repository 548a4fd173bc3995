"""Tensors in buckets of bytes, their checksum, and whole tensors from those that ZeRO-3 shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import PosttrainError

Shapes = Mapping[str, tuple[int, ...]]
BUCKET_BYTES = 256 * 2**20
ALIGNMENT = 16
# Words of 8 bytes that are added up at once, and an odd number (2**64 over the golden ratio) that chains the sums.
PIECE = 2**23
CHAIN = 0x9E3779B97F4A7C15 - 2**64


class WeightError(PosttrainError):
    """Weights that did not arrive whole, unchanged and in time."""

    exit_code = 1


class WeightsGone(WeightError):
    """The version is no longer, or not yet, to be had: ask for the newest."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor lies: `nbytes` from `offset` of bucket `bucket`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all that a receiver for `model` must get."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


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


def plan_buckets(named_tensors: Mapping[str, Tensor], bucket_bytes: int) -> tuple[list[Entry], list[int]]:
    """Entries, and the size of each bucket. In the mapping's order; a tensor is never split, and may fill a bucket alone.

    Tensors that share memory (tied embeddings) travel once. A tensor that ZeRO-3 shards counts with its whole size.
    """
    entries: list[Entry] = []
    sizes: list[int] = []
    seen: dict[tuple[Any, ...], Entry] = {}
    for name, tensor in named_tensors.items():
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        dtype, nbytes = str(tensor.dtype).removeprefix("torch."), torch.Size(shape).numel() * tensor.itemsize
        # Shards of ZeRO-3 are empty here, and all of them at address 0.
        memory = (getattr(tensor, "ds_id", None), tensor.data_ptr(), dtype, shape, tensor.stride())
        twin = seen.get(memory) if nbytes else None
        if twin is not None:
            place = (twin.bucket, twin.offset)
        else:
            start = sizes[-1] if sizes else 0
            if not sizes or (start and start + nbytes > bucket_bytes):
                sizes.append(0)
                start = 0
            place = (len(sizes) - 1, start)
            sizes[-1] = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
        entry = Entry(name=name, dtype=dtype, shape=shape, bucket=place[0], offset=place[1], nbytes=nbytes)
        entries.append(entry)
        seen.setdefault(memory, entry)
    return entries, sizes


def fill(entries: Iterable[Entry], named_tensors: Mapping[str, Tensor], bucket: Tensor) -> None:
    """Copy the entries' tensors into the bytes of their bucket (uint8, of any device), tied ones once."""
    written: set[int] = set()
    with torch.no_grad():
        for entry, place in zip(entries := list(entries), _views(entries, bucket), strict=True):
            if entry.nbytes and entry.offset not in written:
                place.copy_(named_tensors[entry.name].detach())
                written.add(entry.offset)


def read_bucket(entries: Iterable[Entry], bucket: Tensor) -> dict[str, Tensor]:
    """The tensors of one bucket, views of its bytes (uint8)."""
    entries = list(entries)
    return {entry.name: view for entry, view in zip(entries, _views(entries, bucket), strict=True)}


def _views(entries: Iterable[Entry], bucket: Tensor) -> Iterable[Tensor]:
    for entry in entries:
        yield bucket[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)


def checksum(bucket: Tensor) -> Tensor:
    """A number of 64 bits [] of the bytes of a bucket, computed on its device; exact, in whatever order the device adds.

    The sum of (2 i + 1) word_i modulo 2**64: an odd factor times a difference is never 0, so that a single word that changed is
    always found, and so are words that changed places.
    """
    words = bucket.view(torch.int64)
    factors = torch.arange(1, 2 * min(PIECE, words.numel()) + 1, 2, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(PIECE):
        total = total * CHAIN + (piece * factors[: piece.numel()]).sum()
    return total


def is_sharded(named_tensors: Mapping[str, Tensor]) -> bool:
    """Whether DeepSpeed's ZeRO-3 holds them in shards."""
    return any(hasattr(tensor, "ds_id") for tensor in named_tensors.values())


def gather(
    named_tensors: Mapping[str, Tensor], into: MutableMapping[str, Tensor] | None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Bring the shards of ZeRO-3 together, a bucket at a time. Every rank calls it; the one that gives `into` keeps the tensors.

    On the host (pinned where there is a GPU): the whole model need not fit beside the shards, and what is kept can be sent again
    without the other ranks.
    """
    import deepspeed

    entries, sizes = plan_buckets(named_tensors, bucket_bytes)
    for number in range(len(sizes)):
        mine = [entry for entry in entries if entry.bucket == number]
        shards = {id(t): t for t in (named_tensors[entry.name] for entry in mine) if hasattr(t, "ds_id")}
        with deepspeed.zero.GatheredParameters(list(shards.values())) if shards else contextlib.nullcontext():
            if into is None:
                continue
            for entry in mine:
                tensor = named_tensors[entry.name].detach()
                if entry.name not in into:
                    twin = next((e for e in entries if (e.bucket, e.offset) == (number, entry.offset) and e.name in into), None)
                    if twin is not None and entry.nbytes:
                        into[entry.name] = into[twin.name]  # tied: stays one tensor
                        continue
                    into[entry.name] = torch.empty(entry.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                into[entry.name].copy_(tensor)
