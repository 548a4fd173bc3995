"""The running sequences as tensors, rebuilt only when a sequence starts or ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.models.paged import upload
from posttrain.rollout.sampling import Reading, SamplingParams
from posttrain.rollout.sequence import Sequence


@dataclass(kw_only=True)
class DecodeBatch:
    """B rows in the order of the running list.

    Attributes:
        sequences: the rows; slots: int64 [B] on the device, slot_list the same on the host.
        tokens, positions: int64 [B], the newest token and its place in the sequence (prompt included): the model's next input.
        index: int64 [B], tokens sampled so far: the counter of the next random number.
    """

    sequences: list[Sequence]
    slot_list: list[int]
    slots: Tensor
    tokens: Tensor
    positions: Tensor
    index: Tensor
    params: SamplingParams

    @classmethod
    def build(cls, sequences: list[Sequence], newest: Tensor) -> DecodeBatch:
        """`newest` holds the last token of each slot on the device: it may not have been read yet. A row without a token gets the
        position of its prompt's last one, and is no input before `advance`."""
        requests = [sequence.group.request for sequence in sequences]
        slot_list = [sequence.slot for sequence in sequences if sequence.slot is not None]
        index = [sequence.drawn for sequence in sequences]
        columns = upload(
            [slot_list, [len(request.prompt_ids) + count - 1 for request, count in zip(requests, index, strict=True)], index],
            torch.int64,
            newest.device,
        )
        params = SamplingParams.build(
            keys=[sequence.key for sequence in sequences],
            temperature=[request.temperature for request in requests],
            top_k=[request.top_k for request in requests],
            top_p=[request.top_p for request in requests],
            min_p=[request.min_p for request in requests],
            device=newest.device,
        )
        return cls(
            sequences=list(sequences),
            slot_list=slot_list,
            slots=columns[0],
            tokens=newest.index_select(0, columns[0]),
            positions=columns[1],
            index=columns[2],
            params=params,
        )

    def advance(self, tokens: Tensor) -> None:
        """The sampled tokens become the next input."""
        self.tokens = tokens
        self.positions = self.positions + 1
        self.index = self.index + 1


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A step whose draws have not been read: its rows, their tokens on the way, and the policy version that made them."""

    sequences: list[Sequence]
    reading: Reading
    version: int
