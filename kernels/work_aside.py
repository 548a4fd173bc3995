"""Kernels that nothing later in a step waits for, on a second stream: in a CUDA graph a branch of its own.

A kernel with work for few multiprocessors, such as the folds of a decode step, then runs beside the layers that follow. Who may
let it open a block (`work_aside`); who has such work asks whether one is open (`goes_aside`), and launches it within `aside`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class _Block:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.kept: list[tuple[Tensor, ...]] = []


_open: ContextVar[_Block | None] = ContextVar("work_aside", default=None)


@contextmanager
def work_aside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Within the block such work goes to `stream`; the current stream waits for it at the end."""
    block = _Block(stream)
    mark = _open.set(block)
    try:
        yield
    finally:
        _open.reset(mark)
    if block.kept:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


def goes_aside() -> bool:
    return _open.get() is not None


@contextmanager
def aside(*tensors: Tensor) -> Iterator[None]:
    """What is launched here runs behind what the current stream holds by now, on the open block's stream. `tensors` are what it
    reads of the step's own: they live until the block ends, or the allocator would give their memory to the next layer."""
    block = _open.get()
    if block is None:
        raise RuntimeError("no block of work_aside is open")
    block.kept.append(tensors)
    block.stream.wait_stream(torch.cuda.current_stream(block.stream.device))
    with torch.cuda.stream(block.stream):
        yield
