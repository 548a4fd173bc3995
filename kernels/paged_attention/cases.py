"""Inputs for tests of paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """`lengths` of the sequences, their newest token included; 0 is a padding row."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    page: int = 16
    window: int | None = None
    seed: int = 0

    @property
    def ring(self) -> int:
        """Pages of a slot."""
        longest = max(self.lengths) if self.window is None else self.window
        return max(1, -(-longest // self.page))


CASES = {
    "one token": Case(lengths=(1,), heads=2, kv_heads=2, dim=16),
    "pages": Case(lengths=(1, 15, 16, 17, 64, 65, 200), heads=3, kv_heads=3, dim=16),
    "padding": Case(lengths=(0, 30, 0, 7), heads=2, kv_heads=2, dim=16),
    "many ranges": Case(lengths=(1100, 130, 3), heads=2, kv_heads=2, dim=16),
    "grouped": Case(lengths=(33, 1, 150), heads=6, kv_heads=2, dim=32),
    "one key head": Case(lengths=(20, 90), heads=20, kv_heads=1, dim=16),
    "odd width": Case(lengths=(40, 5), heads=2, kv_heads=2, dim=24),
    "window": Case(lengths=(3, 40, 64, 65, 300), heads=2, kv_heads=2, dim=16, window=40),
    "window of one": Case(lengths=(1, 2, 50), heads=4, kv_heads=2, dim=16, window=1),
}


def make_case(case: Case, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Arguments of `paged_attention`: pages in random order, those that nobody holds and rows behind an end filled with NaN."""
    draw = torch.Generator().manual_seed(case.seed)
    slots, width, page = len(case.lengths) + 1, case.ring, case.page
    order = torch.randperm(slots * width, generator=draw).view(slots, width)
    keys, values = (torch.full((slots * width, case.kv_heads, page, case.dim), float("nan")) for _ in range(2))
    held = torch.randperm(slots, generator=draw)[: len(case.lengths)]
    for slot, length in zip(held.tolist(), case.lengths, strict=True):
        places = torch.arange(max(0, length - width * page), length) % (width * page)
        for pool in (keys, values):
            rows = torch.randn(len(places), case.kv_heads, case.dim, generator=draw)
            pool[order[slot, places // page], :, places % page] = rows
    q = torch.randn(len(case.lengths), case.heads, case.dim, generator=draw)
    lengths = torch.tensor(case.lengths)
    return {
        "q": q.to(device, dtype),
        "keys": keys.to(device, dtype),
        "values": values.to(device, dtype),
        "table": order.to(torch.int32).to(device),
        "slots": torch.where(lengths > 0, held, -1).to(device),
        "positions": (lengths - 1).clamp(min=0).to(device),
    }
