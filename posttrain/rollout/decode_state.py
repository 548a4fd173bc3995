"""What the next step of a sequence needs, one entry a slot, on the device: a step reads it there and writes it back, so that the
host only says which slots take part. Nothing here reads from the device, so that a CUDA graph can hold a step.

A sequence that has ended (an end token, its limit, logits that cannot be sampled) is marked on the device, and steps that were
launched before the host knew leave its entry, and where layers can skip a row its state, as they were.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Listed
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.kernels.sampling import advance
from posttrain.models.paged import upload
from posttrain.rollout.sampling import NO_TOP_K, Draw, Kind, SamplingParams
from posttrain.rollout.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Entries of B rows as a step found them, int64 [B] each.

    Attributes:
        rows: their places in the pool.
        token: the newest token, which is the next input; position: its place in the sequence, the prompt included.
        drawn: tokens sampled so far, the counter of the next random number.
        live: bool [B], False where the sequence has ended, and in padding.
    """

    rows: Tensor
    columns: Tensor
    live: Tensor

    @property
    def token(self) -> Tensor:
        return self.columns[0]

    @property
    def position(self) -> Tensor:
        return self.columns[1]

    @property
    def drawn(self) -> Tensor:
        return self.columns[2]


class DecodeState:
    """Entries of `num_slots` slots, and one more behind them that is padding's: it has ended.

    Args:
        ends: tokens that end a completion.
    """

    def __init__(self, num_slots: int, ends: Collection[int], device: torch.device) -> None:
        self.num_slots, self.device = num_slots, device
        places = num_slots + 1
        # token, position, drawn, limit, key, top_k
        self._integers = torch.zeros(6, places, dtype=torch.int64, device=device)
        self._integers[5] = NO_TOP_K
        self._temperature = torch.ones(places, dtype=torch.float32, device=device)
        self._top_p = torch.ones(places, dtype=torch.float64, device=device)
        self._log_min_p = torch.full((places,), -torch.inf, dtype=torch.float32, device=device)
        self.finished = torch.ones(places, dtype=torch.bool, device=device)
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64, device=device)

    def begin(self, sequences: Listed[Sequence]) -> None:
        """Fills the entries of sequences that got their slots: new ones, whose position is that of their prompt's last token
        until they have drawn, or ones that go on."""
        if not sequences:
            return
        limits = [sequence.group.limits for sequence in sequences]
        integers = [
            [sequence.slot for sequence in sequences],
            [sequence.token_ids[-1] if sequence.token_ids else 0 for sequence in sequences],
            [len(sequence.group.request.prompt_ids) + sequence.drawn - 1 for sequence in sequences],
            [sequence.drawn for sequence in sequences],
            [sequence.group.limit for sequence in sequences],
            [sequence.key for sequence in sequences],
            [row.top_k for row in limits],
        ]
        floats = [[row.temperature for row in limits], [row.top_p for row in limits], [row.min_p for row in limits]]
        new = upload(integers, torch.int64, self.device)
        temperature, top_p, min_p = upload(floats, torch.float64, self.device).unbind()
        rows = new[0]
        self._integers.index_copy_(1, rows, new[1:])
        self._temperature.index_copy_(0, rows, temperature.float())
        self._top_p.index_copy_(0, rows, top_p)
        self._log_min_p.index_copy_(0, rows, min_p.float().log())
        self.finished.index_fill_(0, rows, False)

    def read(self, slots: Tensor) -> Entries:
        """slots int64 [B], -1 for padding."""
        rows = slots % (self.num_slots + 1)
        return Entries(
            rows=rows, columns=self._integers.index_select(1, rows), live=~self.finished.index_select(0, rows)
        )  # fmt: skip

    def params(self, entries: Entries, kind: Kind) -> SamplingParams:
        """Of the rows; what `kind` does not look at is not fetched, and stands there for all slots."""
        top_p, log_min_p, temperature = self._top_p, self._log_min_p, self._temperature
        if kind.mode == "mixed":
            top_p, log_min_p, temperature = (a.index_select(0, entries.rows) for a in (top_p, log_min_p, temperature))
        return SamplingParams(
            kind=kind,
            keys=entries.columns[4],
            temperature=temperature,
            top_k=entries.columns[5],
            top_p=top_p,
            log_min_p=log_min_p,
        )

    def record(self, draw: Draw, entries: Entries) -> Tensor:
        """Writes what was drawn into the entries that live -> the table for the host, still on the device."""
        return advance(
            self._integers, self.finished, self._ends, entries.rows, draw.token, draw.logprob, draw.plain_logprob, draw.broken
        )
