"""A group of completions with its scores, as the buffer keeps it and as one line of its journal.

Arrays are written as base64 of zlib of their bytes: a completion of 32K tokens is a few hundred kilobytes, where JSON's numbers
would take megabytes. Nothing is pickled: a run folder may come from somebody else.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.types import Completion, Ratings

# Speed over size: the lines are deleted at the next checkpoint.
LEVEL = 1


@dataclass(frozen=True, kw_only=True)
class RatedGroup:
    """All G completions of a slot, scored.

    Attributes:
        slot: number of the group in the run's data order.
        prompt_index: of the prompt in the data set.
        totals: [G] weighted sums of the rewards, None where not judged; penalties and advantages are the learner's.
        parts: name of each reward function -> [G].
        flat: whether it teaches nothing (see `Ratings`).
        timeouts: verifications that were killed.
        generator: who made it.
    """

    slot: int
    prompt_index: int
    completions: tuple[Completion, ...]
    totals: tuple[float | None, ...]
    parts: dict[str, tuple[float | None, ...]]
    flat: bool = False
    timeouts: int = 0
    generator: str = ""

    def __post_init__(self) -> None:
        sizes = {len(self.completions), len(self.totals), *map(len, self.parts.values())}
        if len(sizes) != 1 or not self.completions:
            raise ValueError(f"slot {self.slot}: a group needs one score a completion, got sizes {sorted(sizes)}")

    @property
    def oldest(self) -> int:
        """The oldest policy version among its tokens."""
        return min(min(completion.versions) for completion in self.completions)


def ratings_of(groups: Sequence[RatedGroup]) -> Ratings:
    """What the rewards said of the groups of a batch."""
    return Ratings(
        totals=[list(group.totals) for group in groups],
        parts={name: [list(group.parts[name]) for group in groups] for name in groups[0].parts},
        flat=[group.flat for group in groups],
        timeouts=sum(group.timeouts for group in groups),
    )


def bare(group: RatedGroup) -> RatedGroup:
    """The group without the router's choices, which are most of its bytes."""
    return replace(group, completions=tuple(replace(completion, router_indices=None) for completion in group.completions))


def to_line(group: RatedGroup) -> bytes:
    """One line, its newline included."""
    fields = {
        "slot": group.slot,
        "prompt_index": group.prompt_index,
        "totals": group.totals,
        "parts": group.parts,
        "flat": group.flat,
        "timeouts": group.timeouts,
        "generator": group.generator,
        "prompt_ids": _pack(group.completions[0].prompt_ids, "<i4"),
        "completions": [_completion_fields(completion) for completion in group.completions],
    }
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def from_fields(fields: dict[str, Any]) -> RatedGroup:
    """The group of a parsed line.

    Raises:
        ValueError, KeyError, TypeError: it is no such line.
    """
    prompt_ids = _unpack(fields["prompt_ids"]).tolist()
    return RatedGroup(
        slot=fields["slot"],
        prompt_index=fields["prompt_index"],
        totals=tuple(fields["totals"]),
        parts={name: tuple(values) for name, values in fields["parts"].items()},
        flat=fields["flat"],
        timeouts=fields["timeouts"],
        generator=fields["generator"],
        completions=tuple(_completion(given, prompt_ids) for given in fields["completions"]),
    )


def _completion_fields(completion: Completion) -> dict[str, Any]:
    router = completion.router_indices
    return {
        "request_id": completion.request_id,
        "sample": completion.sample,
        "finish_reason": completion.finish_reason,
        "token_ids": _pack(completion.token_ids, "<i4"),
        "logprobs": _pack(completion.logprobs, "<f8"),
        "plain_logprobs": _pack(completion.plain_logprobs, "<f8"),
        "versions": _pack(completion.versions, "<i4"),
        "router": None if router is None else _pack(router, None),
    }


def _completion(fields: dict[str, Any], prompt_ids: list[int]) -> Completion:
    return Completion(
        request_id=fields["request_id"],
        sample=fields["sample"],
        prompt_ids=prompt_ids,
        token_ids=_unpack(fields["token_ids"]).tolist(),
        logprobs=_unpack(fields["logprobs"]).tolist(),
        plain_logprobs=_unpack(fields["plain_logprobs"]).tolist(),
        versions=_unpack(fields["versions"]).tolist(),
        finish_reason=fields["finish_reason"],
        router_indices=None if fields["router"] is None else _unpack(fields["router"]),
    )


def _pack(values: Any, dtype: str | None) -> list[Any]:
    """[dtype, shape, text]."""
    array = np.ascontiguousarray(values if dtype is None else np.asarray(values, dtype=dtype))
    return [array.dtype.str, list(array.shape), base64.b64encode(zlib.compress(array.tobytes(), LEVEL)).decode("ascii")]


def _unpack(packed: list[Any]) -> np.ndarray:
    dtype, shape, text = packed
    # A copy: an array over bytes cannot be written to, which torch warns about.
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.dtype(dtype)).reshape(shape).copy()
