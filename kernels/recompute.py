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

import torch
from torch import Tensor


class _Keeper:
    """The results of one layer, in the order of the calls, each with its version when it was noted."""

    def __init__(self) -> None:
        self.results: list[list[tuple[Tensor, int]]] = []
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
        RuntimeError: the second run has more calls than the first, or somebody changed a result in place.
    """
    current = _current.get()
    if current is None:
        return run(*arguments)
    keeper = current.keeper
    if not current.takes:
        results = run(*arguments)
        keeper.results.append([(a.detach(), _version(a)) for a in results])
        return results
    if keeper.taken == len(keeper.results):
        raise RuntimeError(f"a checkpointed layer called an operator {len(keeper.results)} times at first, and now more often")
    keeper.taken += 1
    results = keeper.results[keeper.taken - 1]
    if any(_version(a) != version for a, version in results):
        raise RuntimeError(
            "a result that a checkpointed layer keeps for its second run was changed in place; change a copy of it, or "
            "checkpoint the layer without keep_results"
        )
    return tuple(a.detach() for a, _ in results)


def _version(a: Tensor) -> int:
    """How often a was changed in place; tensors of inference mode do not count, nor does a backward pass reach them."""
    return 0 if a.is_inference() else a._version


class _ValueOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        ctx.ordinary = ordinary
        ctx.save_for_backward(*tensors)
        return kept(lambda: (exact(*tensors),))[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        wanted = ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [a if a is None else a.detach().requires_grad_(w) for a, w in zip(saved, wanted, strict=True)]
            out = ctx.ordinary(*leaves)
            asked = [a for a, w in zip(leaves, wanted, strict=True) if a is not None and w]
            found = iter(torch.autograd.grad([out], asked, [grad], allow_unused=True))
        return None, None, *(next(found) if w else None for w in wanted)


def value_of(exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """exact(*tensors), with the gradients of ordinary(*tensors), which is called in the backward pass.

    For kernels that compute the same function in another order, without gradients of their own."""
    return _ValueOf.apply(exact, ordinary, *tensors)  # pyright: ignore[reportReturnType]
