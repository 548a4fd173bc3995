"""The one-token forward as CUDA graphs, one for each of a few batch sizes, captured when first needed.

A graph replays kernels with the addresses that they were captured with: inputs are copied into fixed tensors, rows beyond the
batch are padding (slot -1), logits come out in one buffer that all graphs write. Weights are read where they lay at the capture,
so updates in place are seen; where a parameter has moved since, the graphs are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posttrain.models.paged import OneToken

# tokens [B], where they go -> logits [B, vocab], partitions [layers, B, R] or None
Step = Callable[[Tensor, OneToken], tuple[Tensor, Tensor | None]]


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes with a graph: powers of two to 16, then steps of an eighth to a quarter, and the largest itself."""
    sizes, size = [], 1
    while size < largest:
        sizes.append(size)
        size += max(1, 1 << max(0, size.bit_length() - 3)) if size >= 16 else size
    return [*sizes, largest]


@dataclass(frozen=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    router: Tensor | None


class DecodeGraphs:
    """Graphs of one model's step for up to `largest` rows. It keeps no reference to whoever steps: caches are large, and one in a
    cycle would wait for the garbage collector."""

    def __init__(self, model: nn.Module, largest: int, device: torch.device) -> None:
        self._model, self._device = model, device
        self.sizes = graph_sizes(largest)
        self._tokens, self._positions = (torch.zeros(largest, dtype=torch.int64, device=device) for _ in range(2))
        self._slots = torch.full((largest,), -1, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None
        self._captured: dict[int, _Captured] = {}
        self._kept: list[object] = []
        self._addresses: tuple[int, ...] = ()
        self._pool = None

    def run(self, step: Step, tokens: Tensor, one_token: OneToken, *, keep: Callable[[], object]) -> tuple[Tensor, Tensor | None]:
        """Logits [B, vocab] and partitions [layers, B, R], both valid until the next call.

        Args:
            step: the forward, the same at every call; it must take padding rows without a trace, and read nothing back.
            keep: called after a capture; what it returns lives as long as the graphs (tensors that the model might replace).
        """
        batch = tokens.shape[0]
        size = next(size for size in self.sizes if size >= batch)
        captured = self._captured.get(size)
        if captured is None:
            with torch.cuda.device(self._device):
                captured = self._capture(step, size)
            self._kept.append(keep())
        self._tokens[:batch].copy_(tokens)
        self._positions[:batch].copy_(one_token.positions)
        self._slots[:batch].copy_(one_token.slots)
        if batch < size:
            self._positions[batch:size].zero_()
            self._slots[batch:size].fill_(-1)
        captured.graph.replay()
        assert self._logits is not None
        return self._logits[:batch], None if captured.router is None else captured.router[:, :batch]

    def drop_if_moved(self) -> None:
        """Forgets the graphs where a parameter lies elsewhere than when they were captured."""
        addresses = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        if addresses != self._addresses:
            self._captured.clear()
            self._kept.clear()
            self._pool = None
            self._addresses = addresses

    def _capture(self, step: Step, size: int) -> _Captured:
        one_token = OneToken(positions=self._positions[:size], slots=self._slots[:size])
        self._slots[:size].fill_(-1)
        self._positions[:size].zero_()
        self._tokens[:size].zero_()
        current, aside = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # compiles kernels and makes workspaces; padding leaves no trace
            logits, _ = step(self._tokens[:size], one_token)
        current.wait_stream(aside)
        if self._logits is None:
            self._logits = logits.new_empty(self.sizes[-1], logits.shape[-1])
        del logits
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of a server or a learner may go on using the device.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits, router = step(self._tokens[:size], one_token)
            self._logits[:size].copy_(logits)
        self._captured[size] = _Captured(graph=graph, router=router)
        return self._captured[size]
