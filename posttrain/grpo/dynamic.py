"""Dynamic sampling: groups that teach nothing are replaced by others (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2).

A batch has P places and up to P + E candidates, in a fixed order: first its own P prompts, then extra ones. The batch becomes the
first P candidates that teach something, in that order; where all E extra ones did not suffice, flat ones fill the places left.
What is sampled and what is trained on thus depends on rewards alone, never on which group was finished first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def extras_due(flat: int, extra: int, ahead: int) -> int:
    """How many extra candidates to sample where `flat` are known to be flat: one for each, `ahead` of them in any case."""
    return min(extra, max(flat, ahead))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Attributes:
    take: the P candidates to train on, in order; empty while it is not known.
    missing: candidates whose verdict is waited for.
    short: places that flat candidates fill, for want of better ones.
    """

    take: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    short: int = 0


def choose(verdicts: Sequence[bool | None], places: int) -> Choice:
    """Fill `places` from candidates, of which True teach, False are flat, and None are not known yet.

    Example: 2 places of [False, True, True, None] are 1 and 2; of [False, None, True, None] the verdict on 1 is missing.
    """
    teaching, flat, missing = [], [], []
    for candidate, verdict in enumerate(verdicts):
        if len(teaching) + len(missing) == places:
            break
        (missing if verdict is None else teaching if verdict else flat).append(candidate)
    if missing:
        return Choice(missing=tuple(missing))
    short = places - len(teaching)
    return Choice(take=tuple(sorted(teaching + flat[:short])), short=short)
