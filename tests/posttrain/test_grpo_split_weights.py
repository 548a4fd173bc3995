"""Buckets, their checks, and every name: the parts of the weight transfer that need no Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posttrain.grpo.split.transfer.buckets import (
    CHAIN,
    PIECE,
    WeightError,
    check_names,
    checksum,
    fill,
    plan_buckets,
    read_bucket,
)
from posttrain.grpo.split.weights import KEPT, Manifest, WeightBoard


def some() -> dict[str, torch.Tensor]:
    shared = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {
        "embed": shared,
        "bias": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "turned": shared.T,
        "head": shared,
    }


@pytest.mark.parametrize("bucket_bytes", [1, 64, 10**6])
def test_what_is_read_is_what_was_written(bucket_bytes: int) -> None:
    given = some()
    entries, sizes = plan_buckets(given, bucket_bytes)
    read = {}
    for number, size in enumerate(sizes):
        bucket = torch.full((size,), 255, dtype=torch.uint8)
        mine = [entry for entry in entries if entry.bucket == number]
        fill(mine, given, bucket)
        read |= read_bucket(mine, bucket)
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def test_buckets_by_hand() -> None:
    """48 bytes, 6, 8, 0 and 48; `head` is `embed` again. Places and sizes are multiples of 16."""
    entries, sizes = plan_buckets(some(), 80)
    assert [(e.name, e.bucket, e.offset, e.nbytes) for e in entries] == [
        ("embed", 0, 0, 48),
        ("bias", 0, 48, 6),
        ("count", 0, 64, 8),
        ("none", 0, 80, 0),
        ("turned", 1, 0, 48),
        ("head", 0, 0, 48),
    ]
    assert sizes == [80, 48]


def shard(number: int, shape: tuple[int, ...]) -> Any:
    """As ZeRO-3 leaves a parameter: empty, its number and its whole shape beside it."""
    made: Any = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    made.ds_id, made.ds_shape = number, torch.Size(shape)
    return made


def test_shards_count_with_their_whole_size_and_are_not_taken_for_one_another() -> None:
    tied = shard(7, (4, 4))
    entries, sizes = plan_buckets({"a": shard(3, (4, 4)), "b": shard(4, (4, 4)), "c": tied, "d": tied}, 128)
    assert [(e.name, e.bucket, e.offset, e.nbytes) for e in entries] == [
        ("a", 0, 0, 64),
        ("b", 0, 64, 64),
        ("c", 1, 0, 64),
        ("d", 1, 0, 64),
    ]
    assert sizes == [128, 64]


def test_the_checksum_by_hand_and_what_it_notices() -> None:
    words = torch.tensor([5, -3, 2**62, 9])
    value = int(checksum(words.view(torch.uint8)))
    assert value % 2**64 == (1 * 5 + 3 * -3 + 5 * 2**62 + 7 * 9) % 2**64
    swapped = torch.tensor([-3, 5, 2**62, 9])
    bit = words.clone().view(torch.uint8)
    bit[20] ^= 128
    assert value != int(checksum(swapped.view(torch.uint8))) and value != int(checksum(bit))
    long = torch.ones(PIECE + 2, dtype=torch.int64)
    assert int(checksum(long.view(torch.uint8))) % 2**64 == (PIECE**2 * CHAIN + 1 + 3) % 2**64


def test_every_name_must_arrive_in_its_shape() -> None:
    entries, _ = plan_buckets({"a": torch.zeros(2), "b": torch.zeros(3), "x": torch.zeros(1)}, 100)
    check_names(4, entries, {"a": (2,), "b": (3,), "x": (1,)})
    message = (
        r"version 4 do not fit.*1 missing \['c'\], 1 unexpected \['x'\], 1 of another shape \['b is \[3\], \[3, 1\] is needed'\]"
    )
    with pytest.raises(WeightError, match=message):
        check_names(4, entries, {"a": (2,), "b": (3, 1), "c": (1,)})


def test_the_board_keeps_the_newest() -> None:
    board = WeightBoard()
    assert board.newest() == -1 and board.manifest(0) is None
    for version in (0, 1, 2, 1):  # a learner that went back to its checkpoint publishes a lower version again
        board.post(Manifest(version=version, entries=(), buckets=(), sizes=(), checksums=()))
    assert board.newest() == 1
    assert [version for version in range(3) if board.manifest(version)] == [1, 2] and KEPT == 2
