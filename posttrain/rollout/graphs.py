"""Decode steps as CUDA graphs, forward and sampling together, captured when first needed: one for each of a few batch sizes and
each kind of sampling that occurs.

A graph replays kernels with the addresses that they were captured with: the slots are copied into a fixed tensor when the rows
change, rows beyond the batch are padding (slot -1), what was drawn comes out in one table that all graphs write. Weights are read
where they lay at the capture, so updates in place are seen; where a parameter has moved since, the graphs are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from posttrain.rollout.sampling import Kind

# slots [B] -> what was drawn [B, columns]
Step = Callable[[Tensor, Kind], Tensor]


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes with a graph: powers of two to 16, then steps of an eighth to a quarter, and the largest itself."""
    sizes, size = [], 1
    while size < largest:
        sizes.append(size)
        size += max(1, 1 << max(0, size.bit_length() - 3)) if size >= 16 else size
    return [*sizes, largest]


def graph_kind(kind: Kind, size: int) -> Kind:
    """The kind that a graph of `size` rows is captured for: truncated rows are rounded up to powers of four."""
    cut = 1
    while cut < kind.cut:
        cut *= 4
    return replace(kind, cut=min(cut, size) if kind.cut else 0)


class DecodeGraphs:
    """Graphs of one model's step for up to `largest` rows. It keeps no reference to whoever steps: caches are large, and one in a
    cycle would wait for the garbage collector."""

    def __init__(self, model: nn.Module, largest: int, device: torch.device) -> None:
        self._model, self._device = model, device
        self.sizes = graph_sizes(largest)
        self._slots = torch.full((largest,), -1, dtype=torch.int64, device=device)
        self._holds: Tensor | None = None  # the slots that were copied last
        self._table: Tensor | None = None
        self._captured: dict[tuple[int, Kind], torch.cuda.CUDAGraph] = {}
        self._kept: list[object] = []
        self._addresses: tuple[int, ...] = ()
        self._pool = None

    def run(self, step: Step, slots: Tensor, kind: Kind, *, keep: Callable[[], object]) -> Tensor:
        """The step's table of `slots` [B], valid until the next call. The same tensor of slots means the same slots.

        Args:
            step: the same function at every call; it must take padding rows without a trace, and read nothing back.
            keep: called after a capture; what it returns lives as long as the graphs (tensors that the model might replace).
        """
        batch = slots.shape[0]
        size = next(size for size in self.sizes if size >= batch)
        key = size, graph_kind(kind, size)
        if key not in self._captured:
            self._slots.fill_(-1)
            self._holds = None
            self._captured[key] = self._capture(step, *key)
            self._kept.append(keep())
        if slots is not self._holds:
            self._slots[:batch].copy_(slots)
            self._slots[batch:].fill_(-1)
            self._holds = slots
        self._captured[key].replay()
        assert self._table is not None
        return self._table[:batch]

    def drop_if_moved(self) -> None:
        """Forgets the graphs where a parameter lies elsewhere than when they were captured."""
        addresses = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        if addresses != self._addresses:
            self._captured.clear()
            self._kept.clear()
            self._pool = None
            self._addresses = addresses

    def _capture(self, step: Step, size: int, kind: Kind) -> torch.cuda.CUDAGraph:
        current, aside = torch.cuda.current_stream(self._device), _stream_aside(self._device)
        aside.wait_stream(current)
        # Compiles kernels and makes workspaces; padding leaves no trace.
        with torch.cuda.device(self._device), torch.cuda.stream(aside):
            table = step(self._slots[:size], kind)
        current.wait_stream(aside)
        if self._table is None:
            self._table = table.new_zeros(self.sizes[-1], table.shape[1])
        del table
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of a server or a learner may go on using the device.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._table[:size].copy_(step(self._slots[:size], kind))
        return graph


@cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps 32 MB of workspace for every stream that it has met."""
    return torch.cuda.Stream(device)
