"""Router choices of unfinished sequences, kept on the device in the narrowest integer that holds a partition."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.models.paged import upload


class RouterLog:
    """Buffer [slots + 1, max_length, layers, R], written where the model ran; one sequence's part leaves it as [layers, T, R].

    The last slot takes what padding rows write. Rows past what a slot's sequence has run are stale: only `take`, which is told
    the length, may read it.
    """

    def __init__(
        self, num_slots: int, max_length: int, *, layers: int, routed: int, num_partitions: int, device: torch.device
    ) -> None:
        dtype = torch.uint8 if num_partitions <= 256 else torch.int16
        self._log = torch.zeros(num_slots + 1, max_length, layers, routed, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._log.nbytes

    def write(self, indices: Tensor, slots: Tensor, positions: Tensor) -> None:
        """indices [layers, T, R] of T packed tokens, each at (slots[t], positions[t]); slot -1 is padding."""
        self._log[slots, positions] = indices.transpose(0, 1).to(self._log.dtype)

    def fork(self, source: int, copies: list[int], length: int) -> None:
        if copies:
            self._log[upload(copies, torch.int64, self._log.device), :length] = self._log[source, :length]

    def take(self, slot: int, length: int) -> Tensor:
        """[layers, length, R] on the host."""
        # A tensor made in inference mode could not be an index in the learner's backward; a copy made outside can.
        with torch.inference_mode(False):
            return self._log[slot, :length].transpose(0, 1).to("cpu", copy=True).contiguous()

    def load(self, slot: int, indices: Tensor) -> None:
        self._log[slot, : indices.shape[1]] = indices.transpose(0, 1).to(self._log)
