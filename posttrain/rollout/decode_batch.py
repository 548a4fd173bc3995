"""The running sequences as tensors, rebuilt only when a sequence starts or ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.rollout.sampling import SamplingParams
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
    def build(cls, sequences: list[Sequence], *, device: torch.device) -> DecodeBatch:
        """A row without a token gets token 0 at the position of its prompt's last one, and is no input before `advance`."""
        requests = [sequence.group.request for sequence in sequences]
        slots = [sequence.slot for sequence in sequences]
        index = [len(sequence.token_ids) for sequence in sequences]
        columns = torch.tensor(
            [
                slots,
                [sequence.token_ids[-1] if sequence.token_ids else 0 for sequence in sequences],
                [len(request.prompt_ids) + count - 1 for request, count in zip(requests, index, strict=True)],
                index,
            ],
            dtype=torch.int64,
        ).to(device)
        params = SamplingParams.build(
            keys=[sequence.key for sequence in sequences],
            temperature=[request.temperature for request in requests],
            top_k=[request.top_k for request in requests],
            top_p=[request.top_p for request in requests],
            min_p=[request.min_p for request in requests],
            device=device,
        )
        return cls(
            sequences=list(sequences),
            slot_list=[slot for slot in slots if slot is not None],
            slots=columns[0],
            tokens=columns[1],
            positions=columns[2],
            index=columns[3],
            params=params,
        )

    def advance(self, tokens: Tensor) -> None:
        """The sampled tokens become the next input."""
        self.tokens = tokens
        self.positions = self.positions + 1
        self.index = self.index + 1
