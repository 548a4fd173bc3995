"""A batch that rank 0 has collected, dealt to all ranks of the learner: each gets the groups of a contiguous part of the batch.

Rank 0 alone talks to the buffer. What it raises is raised on every rank, so that none is left waiting in a collective; and the
wait of the others has a deadline of its own, after the one that rank 0 gives the generators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from posttrain.errors import PosttrainError
from posttrain.grpo.scoring import picked
from posttrain.grpo.source import Collected

# Beyond the wait of rank 0: it publishes weights and pickles the batch besides.
GRACE_S = 300.0


def shares(collected: Collected, ranks: int) -> list[Collected]:
    """One part a rank; what concerns the batch as a whole (groups passed over, metrics, seconds) stays with rank 0's.

    Raises:
        ValueError: the groups are no multiple of the ranks.
    """
    if len(collected.rows) % ranks:
        raise ValueError(f"{len(collected.rows)} groups cannot be dealt evenly to {ranks} ranks")
    size = len(collected.rows) // ranks
    parts = []
    for rank in range(ranks):
        own = range(rank * size, (rank + 1) * size)
        parts.append(
            replace(
                collected,
                rows=[collected.rows[p] for p in own],
                completions=[collected.completions[p] for p in own],
                ratings=replace(picked(collected.ratings, own), timeouts=collected.ratings.timeouts if rank == 0 else 0),
                passed_over=collected.passed_over if rank == 0 else None,
                short=collected.short if rank == 0 else 0,
                metrics=collected.metrics if rank == 0 else {},
                seconds=collected.seconds,
            )
        )
    return parts


@dataclass(frozen=True, kw_only=True)
class _Failed:
    error: BaseException


class Dealer:
    """Args:
    limit_s: longest time that rank 0 may take for a batch.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._group: Any = None

    def deal(self, collect: Callable[[], Collected]) -> Collected:
        """This rank's share of what `collect` returns on rank 0. Every rank calls it.

        Raises:
            PosttrainError: the other ranks did not answer, or rank 0 did not, in time; or what `collect` raised.
        """
        if self._group is None:
            # Of gloo, whatever the gradients go through: the pieces are objects of the host.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._limit_s + GRACE_S))
        parts: list[Any] | None = None
        if dist.get_rank() == 0:
            try:
                parts = list(shares(collect(), dist.get_world_size()))
            except BaseException as error:  # noqa: BLE001 - raised below, on every rank
                parts = [_Failed(error=error)] * dist.get_world_size()
        got: list[Any] = [None]
        try:
            dist.scatter_object_list(got, parts, src=0, group=self._group)
        except RuntimeError as error:
            raise PosttrainError(
                f"rank {dist.get_rank()} of the learner: the batch was not dealt within {self._limit_s + GRACE_S:.0f} s "
                f"({str(error).splitlines()[0]}); look at logs/grpo*.log of the other ranks, then continue with --resume"
            ) from error
        if isinstance(got[0], _Failed):
            raise got[0].error
        return got[0]
