"""Folds of a model's step in one launch at its end.

A fold of a full chunk is a chain of loads, and the few of one layer leave most of a GPU idle; nothing later in the step needs it.
Within `folds_together` the layers of one pool leave their folds here (`triton_decode_pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

Launcher = Callable[[Tensor], None]


@dataclass
class _Entry:
    """Folds of one pool: of steps alike in `sizes`, with marks [layers, rows], -1 in layers that have not stepped."""

    sizes: Hashable
    marks: Tensor
    launch: Launcher
    layers: set[int] = field(default_factory=set)


class WaitingFolds:
    """The folds of a block of `folds_together`."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def marks_of(
        self, pools: object, layer: int, shape: tuple[int, int], device: torch.device, sizes: Hashable, launch: Launcher
    ) -> Tensor:
        """int64 [rows], where a layer's step leaves its marks; `launch(marks)` of shape [layers, rows] will do the folds. A
        second step of the layer, or one of other sizes, comes after the folds of the first."""
        sizes = sizes, shape
        entry = self._entries.get(id(pools))
        if entry is not None and (layer in entry.layers or entry.sizes != sizes):
            self.launch(pools)
            entry = None
        if entry is None:
            marks = torch.full(shape, -1, dtype=torch.int64, device=device)
            entry = self._entries[id(pools)] = _Entry(sizes, marks, launch)
        entry.layers.add(layer)
        return entry.marks[layer]

    def launch(self, pools: object) -> None:
        """Those of one pool, before its states are read."""
        entry = self._entries.pop(id(pools), None)
        if entry is not None:
            entry.launch(entry.marks)

    def launch_all(self) -> None:
        for entry in self._entries.values():
            entry.launch(entry.marks)
        self._entries.clear()


_waiting: ContextVar[WaitingFolds | None] = ContextVar("waiting_folds", default=None)


def waiting_folds() -> WaitingFolds | None:
    """Of the innermost open block."""
    return _waiting.get()


@contextmanager
def folds_together() -> Iterator[None]:
    """Within the block one-token steps (`sse_extend`) leave counts and folds to its end, where layers that share pools
    (`ChunkState.allocate_layers`) fold in one launch; a call that is no such step has their folds done before it. Until then
    nobody else may look at their states; one-token steps of a block that an exception ends leave them as they were before."""
    waiting = WaitingFolds()
    mark = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(mark)
    waiting.launch_all()
