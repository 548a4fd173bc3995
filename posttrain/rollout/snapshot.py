"""An unfinished request as a plain dict that can be pickled, and back.

    {"format": 1, "request": {...}, "pending": [2, 3], "sequences": [{"sample": 0, "token_ids": [...], ..., "cache": {...}}]}

Samples in `pending` have no token yet; their prompt is prefilled again, which gives the same bits where
`max_prefill_tokens` is the same (it says where prompts are cut).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor

from posttrain.rollout.sequence import Group, Sequence
from posttrain.types import Request

FORMAT = 1
_LISTS = ("token_ids", "logprobs", "plain_logprobs", "versions")


def to_snapshot(
    group: Group, export: Callable[[Sequence], dict[str, Any]], router: Callable[[Sequence], Tensor | None]
) -> dict[str, Any]:
    """`export` and `router` fetch the cache and the router choices of a started sequence as CPU tensors."""
    sequences = [
        {
            "sample": sequence.sample,
            **{name: list(getattr(sequence, name)) for name in _LISTS},
            "cache": export(sequence),
            "router_indices": router(sequence),
        }
        for sequence in group.started.values()
    ]
    return {"format": FORMAT, "request": asdict(group.request), "pending": sorted(group.pending), "sequences": sequences}


def request_of(snapshot: dict[str, Any]) -> Request:
    """The request of a snapshot.

    Raises:
        ValueError: not a snapshot, or one of another format.
    """
    if not isinstance(snapshot, dict) or snapshot.get("format") != FORMAT:
        given = snapshot.get("format") if isinstance(snapshot, dict) else type(snapshot).__name__
        raise ValueError(f"not a snapshot that can be restored: format {given!r} given, {FORMAT} needed")
    return Request(**{**snapshot["request"], "stop": tuple(snapshot["request"]["stop"])})


def fill_group(group: Group, snapshot: dict[str, Any], *, needs_router: bool) -> None:
    """Gives a new group the samples of a snapshot.

    Raises:
        ValueError: a sample has run past what this generator's context allows, or lacks the router choices it must return.
    """
    request_id = group.request.id
    group.pending.clear()
    group.pending.extend(snapshot["pending"])
    for saved in snapshot["sequences"]:
        if len(saved["token_ids"]) >= group.limit:
            raise ValueError(
                f"request {request_id}: sample {saved['sample']} has {len(saved['token_ids'])} tokens, but this generator's "
                f"context leaves {group.limit}; restore it on one with a larger max_length"
            )
        if needs_router and saved["router_indices"] is None:
            raise ValueError(f"request {request_id}: the snapshot holds no router indices, but this generator returns them")
        sequence = Sequence.start(group, saved["sample"])
        for name in _LISTS:
            getattr(sequence, name).extend(saved[name])
        sequence.cached = {"cache": saved["cache"], "router_indices": saved["router_indices"]}
        group.started[sequence.sample] = sequence
