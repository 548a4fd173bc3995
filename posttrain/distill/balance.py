"""Which of the accepted traces make up the set: so many of each difficulty, at most so many a problem.

Difficulty is measured: the share of a problem's traces that are right. The choice depends on (traces, config, seed) alone, never
on the order in which the traces came.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.config.distill import BalanceConfig
    from posttrain.distill.journal import Key

BEYOND = "beyond per_problem"
FULL = "its difficulty is full"
EASY = "the problem is too easy"


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Attributes:
    keys: of the traces that make up the set.
    dropped: {reason: traces}, of accepted ones that are not in it.
    bins: one a difficulty: upper end, problems, traces available, rows.
    """

    keys: set[Key]
    dropped: dict[str, int]
    bins: list[dict[str, float]]


def choose(accepted: Mapping[Key, int], pass_rate: Mapping[str, float], config: BalanceConfig, seed: int) -> Chosen:
    """The traces of the set.

    Args:
        accepted: (problem, sample) -> length of the trace, of every trace that passed the filters.
        pass_rate: of every problem, over all of its traces.
        seed: decides between traces and problems that are equally good.
    """
    dropped: Counter[str] = Counter()
    by_problem: dict[str, list[Key]] = {}
    for key in accepted:
        by_problem.setdefault(key[0], []).append(key)
    bins: list[list[list[Key]]] = [[] for _ in config.edges]
    for problem, own in by_problem.items():
        if pass_rate[problem] > config.max_pass_rate:
            dropped[EASY] += len(own)
            continue
        kept = _preferred(own, accepted, config, seed)
        dropped[BEYOND] += len(own) - len(kept)
        bins[bisect_left(config.edges, pass_rate[problem])].append(kept)
    available = [sum(map(len, problems)) for problems in bins]
    quotas = available if config.rows is None else fill(available, config.rows, config.shares or [1.0] * len(bins))
    keys: set[Key] = set()
    for problems, quota in zip(bins, quotas, strict=True):
        keys.update(_spread(problems, quota, seed))
    dropped[FULL] += sum(available) - len(keys)
    table = [
        {"up_to": edge, "problems": len(problems), "available": have, "rows": rows}
        for edge, problems, have, rows in zip(config.edges, bins, available, quotas, strict=True)
    ]
    return Chosen(keys=keys, dropped={reason: count for reason, count in dropped.items() if count}, bins=table)


def fill(available: Sequence[int], rows: int, shares: Sequence[float]) -> list[int]:
    """Rows of each bin: as near to the shares as the bins allow; what one cannot fill goes to those that can, in proportion.

    A bin with share 0 takes nothing unless all the others are full.
    """
    total = min(rows, sum(available))
    quotas = [0] * len(available)
    open_bins = [i for i, have in enumerate(available) if have and shares[i] > 0]
    while (left := total - sum(quotas)) > 0:
        if not open_bins:
            open_bins = [i for i, have in enumerate(available) if quotas[i] < have]
            shares = [1.0] * len(available)
        weight = sum(shares[i] for i in open_bins)
        # Largest remainders: the shares of whole rows differ from the exact ones by less than a row.
        exact = {i: left * shares[i] / weight for i in open_bins}
        whole = {i: int(part) for i, part in exact.items()}
        for i in sorted(open_bins, key=lambda i: (whole[i] - exact[i], i))[: left - sum(whole.values())]:
            whole[i] += 1
        for i in open_bins:
            quotas[i] += min(whole[i], available[i] - quotas[i])
        open_bins = [i for i in open_bins if quotas[i] < available[i]]
    return quotas


def _preferred(keys: list[Key], length: Mapping[Key, int], config: BalanceConfig, seed: int) -> list[Key]:
    sign = {"random": 0, "shortest": 1, "longest": -1}[config.prefer]
    return sorted(keys, key=lambda key: (sign * length[key], _draw(seed, *key)))[: config.per_problem]


def _spread(problems: list[list[Key]], quota: int, seed: int) -> list[Key]:
    """`quota` traces, a second one of a problem only where every problem has its first."""
    ranked = [(rank, _draw(seed, *key), key) for keys in problems for rank, key in enumerate(keys)]
    return [key for _, _, key in sorted(ranked)[:quota]]


def _draw(seed: int, problem: str, sample: int) -> bytes:
    return hashlib.blake2b(f"posttrain-balance/{seed}/{problem}/{sample}".encode(), digest_size=8).digest()
