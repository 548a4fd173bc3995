"""The rows of a step, put together anew only when a sequence starts or ends, and a step whose tokens are on their way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.models.paged import upload
from posttrain.rollout.sampling import Kind, Reading, kind_of
from posttrain.rollout.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """B rows, those whose distribution is truncated first.

    Attributes:
        running: the same sequences in the order in which they were given.
        slots: int64 [B] on the device; slot_list: the same on the host.
        kind: what sampling has to compute.
    """

    running: list[Sequence]
    sequences: list[Sequence]
    slot_list: list[int]
    slots: Tensor
    kind: Kind

    @classmethod
    def build(cls, running: list[Sequence], device: torch.device) -> DecodeBatch:
        sequences = sorted(running, key=lambda sequence: not sequence.group.limits.cuts)
        slot_list = [sequence.slot for sequence in sequences if sequence.slot is not None]
        return cls(
            running=list(running),
            sequences=sequences,
            slot_list=slot_list,
            slots=upload(slot_list, torch.int64, device),
            kind=kind_of([sequence.group.limits for sequence in sequences]),
        )


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A step whose draws have not been read: its rows, their tokens on the way, and the policy version that made them."""

    sequences: list[Sequence]
    reading: Reading
    version: int
