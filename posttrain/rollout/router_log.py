"""Router choices of unfinished sequences, kept on the device in the narrowest integer that holds a partition."""

from __future__ import annotations

import torch
from torch import Tensor


class RouterLog:
    """Buffer [slots, max_length, layers, R], written where the model ran; one sequence's part leaves it as [layers, T, R].

    Rows past what a slot's sequence has run are stale: only `take`, which is told the length, may read it.
    """

    def __init__(self, num_slots: int, max_length: int, num_partitions: int) -> None:
        self._shape = (num_slots, max_length)
        self.dtype = torch.uint8 if num_partitions <= 256 else torch.int16
        self._log: Tensor | None = None  # made at the first write, which knows layers and R

    def _buffer(self, layers: int, routed: int, device: torch.device) -> Tensor:
        if self._log is None:
            self._log = torch.zeros(*self._shape, layers, routed, dtype=self.dtype, device=device)
        return self._log

    def write(self, indices: Tensor, slots: Tensor, positions: Tensor) -> None:
        """indices [layers, T, R] of T packed tokens, each at (slots[t], positions[t])."""
        log = self._buffer(indices.shape[0], indices.shape[2], indices.device)
        log[slots, positions] = indices.transpose(0, 1).to(self.dtype)

    def fork(self, source: int, copies: list[int], length: int) -> None:
        if self._log is not None and copies:
            self._log[copies, :length] = self._log[source, :length]

    def take(self, slot: int, length: int) -> Tensor | None:
        """[layers, length, R] on the host, or None for a model without routers."""
        if self._log is None:
            return None
        # A tensor made in inference mode could not be an index in the learner's backward; a copy made outside can.
        with torch.inference_mode(False):
            return self._log[slot, :length].transpose(0, 1).to("cpu", copy=True).contiguous()

    def load(self, slot: int, indices: Tensor | None, device: torch.device) -> None:
        if indices is not None:
            log = self._buffer(indices.shape[0], indices.shape[2], device)
            log[slot, : indices.shape[1]] = indices.transpose(0, 1).to(device, self.dtype)
