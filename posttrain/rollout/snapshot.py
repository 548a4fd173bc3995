"""An unfinished request as a plain dict that can be pickled, and back.

    {"format": 2, "request": {...}, "layout": {...}, "pending": [2, 3],
     "sequences": [{"sample": 0, "token_ids": [...], ..., "cache": {...}, "router_indices": ...}]}

A sample whose `cache` is None is computed again from its tokens. Samples in `pending` have no token yet; their prompt is
prefilled again. Both give the same bits where `max_prefill_tokens` is the same (it says where prompts are cut).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.rollout.sequence import Group, Sequence
from posttrain.types import Request

FORMAT = 2
_LISTS = ("token_ids", "logprobs", "plain_logprobs", "versions")


def to_snapshot(
    group: Group,
    export: Callable[[Sequence], dict[str, Any] | None],
    router: Callable[[Sequence], Tensor | None],
    *,
    layout: dict[str, Any],
) -> dict[str, Any]:
    """`export` and `router` fetch the cache and the router choices of a started sequence as CPU tensors; `layout` says what the
    cache's tensors depend on."""
    sequences = [
        {
            "sample": sequence.sample,
            **{name: list(getattr(sequence, name)) for name in _LISTS},
            "cache": export(sequence),
            "router_indices": router(sequence),
        }
        for sequence in group.started.values()
    ]
    return {
        "format": FORMAT, "request": asdict(group.request), "layout": layout, "pending": sorted(group.pending),
        "sequences": sequences,
    }  # fmt: skip


def pending_snapshot(request: Request, samples: Iterable[int]) -> dict[str, Any]:
    """A request of which only `samples` are wanted, none of them begun."""
    return {"format": FORMAT, "request": asdict(request), "layout": {}, "pending": sorted(samples), "sequences": []}


def save_snapshot(snapshot: dict[str, Any], path: str | Path) -> None:
    """Writes a snapshot to a file, whole or not at all."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    torch.save(snapshot, part)
    part.replace(path)


def load_snapshot(path: str | Path) -> dict[str, Any]:
    """What `save_snapshot` wrote; nothing in the file is executed.

    Raises:
        ValueError: the file is no snapshot.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path}: not a snapshot: {why}") from None


def request_of(snapshot: dict[str, Any]) -> Request:
    """The request of a snapshot.

    Raises:
        ValueError: not a snapshot, or one of another format.
    """
    if not isinstance(snapshot, dict) or snapshot.get("format") != FORMAT:
        given = snapshot.get("format") if isinstance(snapshot, dict) else type(snapshot).__name__
        raise ValueError(f"not a snapshot that can be restored: format {given!r} given, {FORMAT} needed")
    return Request(**{**snapshot["request"], "stop": tuple(snapshot["request"]["stop"])})


def fill_group(
    group: Group,
    snapshot: dict[str, Any],
    *,
    layout: dict[str, Any],
    vocab_size: int,
    needs_router: bool,
    recompute: bool,
) -> None:
    """Gives a new group the samples of a snapshot; `recompute`: without their states.

    Raises:
        ValueError: samples that the request does not have, or none; a sample has run past what this generator's context allows or
            holds a token that this model lacks, its cache has another layout, or it lacks the router choices that it must return.
    """
    request_id = group.request.id
    _check_samples(group.request, snapshot)
    group.pending.clear()
    group.pending.extend(snapshot["pending"])
    for saved in snapshot["sequences"]:
        if len(saved["token_ids"]) >= group.limit:
            raise ValueError(
                f"request {request_id}: sample {saved['sample']} has {len(saved['token_ids'])} tokens, but this generator's "
                f"context leaves {group.limit}; restore it on one with a larger max_length"
            )
        highest = max(saved["token_ids"], default=0)
        if highest >= vocab_size:
            raise ValueError(
                f"request {request_id}: sample {saved['sample']} holds token id {highest}, which is outside the vocabulary, 0 to "
                f"{vocab_size - 1}; the snapshot is of another model"
            )
        sequence = Sequence.start(group, saved["sample"])
        for name in _LISTS:
            getattr(sequence, name).extend(saved[name])
        if saved["cache"] is not None and not recompute:
            _check_cache(request_id, saved, snapshot["layout"], layout, needs_router)
            sequence.cached = {"cache": saved["cache"], "router_indices": saved["router_indices"] if needs_router else None}
        group.started[sequence.sample] = sequence


def _check_samples(request: Request, snapshot: dict[str, Any]) -> None:
    """A request of which nothing is left would never end, and neither would one that has a sample twice."""
    samples = [*snapshot["pending"], *(saved["sample"] for saved in snapshot["sequences"])]
    if not samples or len(set(samples)) < len(samples) or not all(0 <= sample < request.n for sample in samples):
        raise ValueError(
            f"request {request.id}: the snapshot names samples {samples}, but they must be at least one, distinct, and in "
            f"[0, {request.n})"
        )
    for saved in snapshot["sequences"]:
        lengths = {name: len(saved[name]) for name in _LISTS}
        if len(set(lengths.values())) > 1 or 0 in lengths.values():
            raise ValueError(
                f"request {request.id}: sample {saved['sample']} has lists of lengths {lengths}, but each must have one entry a "
                "token, and at least one; name samples without a token under `pending`"
            )


def _check_cache(
    request_id: str, saved: dict[str, Any], given: dict[str, Any], layout: dict[str, Any], needs_router: bool
) -> None:
    differing = [name for name in layout if given.get(name) != layout[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"request {request_id}: the snapshot's state is of another model or device: {name} {given.get(name)!r} there, "
            f"{layout[name]!r} here; restore it with recompute=True where the model is the same"
        )
    if needs_router and saved["router_indices"] is None:
        raise ValueError(
            f"request {request_id}: the snapshot holds no router indices, but this generator returns them; restore it with "
            "recompute=True"
        )
