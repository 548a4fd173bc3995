"""Buckets, their checks, and every name: the parts of the weight transfer that need no Ray."""

from __future__ import annotations

import pytest
import torch

from posttrain.grpo.split.weights import (
    KEPT,
    Manifest,
    WeightBoard,
    WeightError,
    check_names,
    fill_bucket,
    plan_buckets,
    read_bucket,
)


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
    buckets = [fill_bucket([e for e in entries if e.bucket == number], given, size) for number, size in enumerate(sizes)]
    read = {}
    for number, bucket in enumerate(buckets):
        read |= read_bucket([e for e in entries if e.bucket == number], torch.from_numpy(bucket))
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def test_buckets_by_hand() -> None:
    """48 bytes, 6, 8, 0 and 48; `head` is `embed` again. Places are multiples of 16."""
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
