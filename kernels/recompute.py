"""Results of operators that gradient checkpointing need not compute a second time.

Checkpointing runs a layer again in the backward pass, to have what its operators saved. `keep_results` is a `context_fn` of
`torch.utils.checkpoint` (non-reentrant) under which an operator that goes through `kept` runs once: the first run notes its
results, the second takes them back. What an operator returns stays in memory instead, so it pays where computing takes long and
results are small. Without it `kept` only calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from torch import Tensor


class _Keeper:
    """The results of one layer, in the order of the calls."""

    def __init__(self) -> None:
        self.results: list[tuple[Tensor, ...]] = []
        self.taken = 0


class _Run:
    """A run of the layer: the first, which notes, or one that takes back, from the beginning each time."""

    def __init__(self, keeper: _Keeper, *, takes: bool) -> None:
        self.keeper, self.takes = keeper, takes
        self.mark: Token[_Run | None] | None = None

    def __enter__(self) -> None:
        self.keeper.taken = 0
        self.mark = _current.set(self)

    def __exit__(self, *_: object) -> None:
        assert self.mark is not None
        _current.reset(self.mark)


_current: ContextVar[_Run | None] = ContextVar("recompute", default=None)


def keep_results() -> tuple[_Run, _Run]:
    """The contexts of a checkpointed layer's first run and of those in the backward pass."""
    keeper = _Keeper()
    return _Run(keeper, takes=False), _Run(keeper, takes=True)


def kept(run: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
    """run(*arguments), or in a second run what it returned in the first. `run` does not record gradients, and nobody may change
    its results in place.

    Raises:
        RuntimeError: the second run has more calls than the first.
    """
    current = _current.get()
    if current is None:
        return run(*arguments)
    keeper = current.keeper
    if not current.takes:
        results = run(*arguments)
        keeper.results.append(tuple(a.detach() for a in results))
        return results
    if keeper.taken == len(keeper.results):
        raise RuntimeError(f"a checkpointed layer called an operator {len(keeper.results)} times at first, and now more often")
    keeper.taken += 1
    return tuple(a.detach() for a in keeper.results[keeper.taken - 1])
