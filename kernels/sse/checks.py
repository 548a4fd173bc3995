"""Checked, uniform inputs: every backend receives one `Inputs`, so all see the same shapes and refuse the same mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Gate = Literal["both", "write", "read", "none"]
GATES = ("both", "write", "read", "none")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of one call. Routed tensors carry a route dimension: 1 where the routes share a projection, R otherwise.

    Shapes: q1, k1 [T,H,K] or None (no shared partition); g1 [T,H,K] (GLA) or [T,H] (gated delta rule); b1 [T,H] or None;
    q2, k2, g2, b2 the same with [T, 1|R, ...]; v [T,H,V]; v2 [T, 1|R, H, V], which is v where same_values;
    weight [T,R]; index [T,R] int64;
    cu_seqlens [S+1] on the device of v; initial_state [S,1+N,H,K,V], expanded zeros
    unless has_initial_state; longest: the longest sequence's length where it is
    known without asking a device, else T.
    """

    q1: Tensor | None
    k1: Tensor | None
    g1: Tensor | None
    b1: Tensor | None
    q2: Tensor
    k2: Tensor
    g2: Tensor
    b2: Tensor | None
    v: Tensor
    v2: Tensor
    same_values: bool
    weight: Tensor
    index: Tensor
    cu_seqlens: Tensor
    initial_state: Tensor
    has_initial_state: bool
    num_partitions: int
    scale: float
    gate: Gate
    chunk_size: int
    is_gdn: bool
    longest: int

    @property
    def dtype(self) -> torch.dtype:
        """What the arithmetic runs in: float64 for float64 inputs, fp32 for everything else."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32


def without_autocast(a: Tensor) -> torch.autocast:
    """Mixed precision off on the device of a: autocast would round the operands of every product to half precision."""
    return torch.autocast(a.device.type, enabled=False)


def check_inputs(
    q1: Tensor | None,
    k1: Tensor | None,
    g1: Tensor | None,
    b1: Tensor | None,
    q2: Tensor,
    k2: Tensor,
    g2: Tensor,
    b2: Tensor | None,
    v: Tensor,
    weight: Tensor,
    index: Tensor,
    *,
    v2: Tensor | None,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    num_partitions: int,
    scale: float | None,
    gate: Gate,
    chunk_size: int,
    is_gdn: bool,
    has_state: bool = False,
) -> Inputs:
    """Shapes and options are checked always; values (cu_seqlens, index) only where they lie on the CPU, so a GPU never waits.

    has_state: a decode state takes the place of the initial one, which is an empty tensor then.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """
    _check_options(gate, num_partitions, chunk_size)
    tokens, heads, value_dim = _check_values(v)
    routes = _check_index(index, tokens, num_partitions)
    _expect("weight", weight, (tokens, routes))
    key_dim = _check_query(q2)
    shared: dict[str, Tensor | None] = {"q1": q1, "k1": k1, "g1": g1}
    routed: dict[str, Tensor | None] = {"q2": q2, "k2": k2, "g2": g2}
    keys, scalars = (heads, key_dim), (heads,)
    tails = {"q": keys, "k": keys, "g": keys}
    if is_gdn:
        shared["b1"], routed["b2"] = b1, b2
        tails |= {"g": scalars, "b": scalars}
    _check_shared(shared, tokens, tails)
    with_route = {name: _with_route(name, a, tokens, routes, tails[name[0]]) for name, a in routed.items()}
    sequences, longest = _check_cu_seqlens(cu_seqlens, tokens)
    if v.device.type == "cpu":
        _check_index_values(index, num_partitions)
    has_initial_state = initial_state is not None and not has_state
    if has_state:
        initial_state = v.new_empty(0)
    else:
        initial_state = _check_state(initial_state, (sequences, 1 + num_partitions, heads, key_dim, value_dim), v)
    _one_device(v, {**shared, **routed, "v2": v2, "weight": weight, "index": index, "initial_state": initial_state})
    return Inputs(
        q1=q1, k1=k1, g1=g1, b1=b1, b2=with_route.get("b2"),
        q2=with_route["q2"], k2=with_route["k2"], g2=with_route["g2"],
        v=v, same_values=v2 is None, v2=v[:, None] if v2 is None else _with_route("v2", v2, tokens, routes, (heads, value_dim)),
        weight=weight, index=index, cu_seqlens=cu_seqlens.to(v.device, non_blocking=True), initial_state=initial_state,
        has_initial_state=has_initial_state, num_partitions=num_partitions,
        scale=key_dim**-0.5 if scale is None else float(scale), gate=gate, chunk_size=chunk_size, is_gdn=is_gdn, longest=longest,
    )  # fmt: skip


def _check_options(gate: Gate, num_partitions: int, chunk_size: int) -> None:
    if gate not in GATES:
        raise ValueError(f"gate={gate!r}, but it must be one of {', '.join(GATES)}")
    if num_partitions < 1:
        raise ValueError(f"num_partitions={num_partitions}, but at least one routed partition is needed")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}, but it must be at least 1")


def _check_values(v: Tensor) -> tuple[int, int, int]:
    """Returns (T, H, V)."""
    if v.ndim != 3 or not v.is_floating_point():
        raise ValueError(f"v must be a floating-point [T, H, V], got {v.dtype} of shape {tuple(v.shape)}")
    tokens, heads, value_dim = v.shape
    if value_dim < 1:
        raise ValueError(f"v must be at least one channel wide, got shape {tuple(v.shape)}")
    return tokens, heads, value_dim


def _check_index(index: Tensor, tokens: int, partitions: int) -> int:
    """Type and shape only; returns R."""
    if index.ndim != 2 or index.shape[0] != tokens or not 1 <= index.shape[1] <= partitions or index.dtype != torch.int64:
        raise ValueError(
            f"index must be int64 [T, R] with T={tokens} and 1 <= R <= {partitions}, "
            f"got {index.dtype} of shape {tuple(index.shape)}"
        )
    return index.shape[1]


def _check_query(q2: Tensor) -> int:
    """The routed query tells the key width; returns K."""
    if q2.ndim not in (3, 4) or q2.shape[-1] < 1:
        raise ValueError(f"q2 must be [T, H, K] or [T, R, H, K] with K at least 1, got shape {tuple(q2.shape)}")
    return q2.shape[-1]


def _check_shared(shared: dict[str, Tensor | None], tokens: int, tails: dict[str, tuple[int, ...]]) -> None:
    """The shared partition's tensors, all or none; `tails` holds each one's shape after T, by its first letter."""
    given = [name for name, a in shared.items() if a is not None]
    if given and len(given) < len(shared):
        raise ValueError(f"without a shared partition {', '.join(shared)} are all None; only {', '.join(given)} was given")
    for name, a in shared.items():
        if a is not None:
            _expect(name, a, (tokens, *tails[name[0]]))


def _check_state(initial_state: Tensor | None, shape: tuple[int, ...], v: Tensor) -> Tensor:
    """The given state, or one zero seen as the whole shape: nobody writes to it."""
    if initial_state is None:
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        return torch.zeros((), dtype=dtype, device=v.device).expand(shape)
    _expect("initial_state", initial_state, shape)
    return initial_state


def _expect(name: str, a: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(a.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(a.shape)}")


def _with_route(name: str, a: Tensor | None, tokens: int, routes: int, tail: tuple[int, ...]) -> Tensor:
    if a is None:
        raise ValueError(f"{name} is None, but the routed partitions need it")
    if tuple(a.shape) == (tokens, *tail):
        return a[:, None]
    _expect(f"{name} (a projection a route)", a, (tokens, routes, *tail))
    return a


def _check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> tuple[int, int]:
    """Returns (number of sequences, longest length), the latter only bounded where the tensor lies on a device."""
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be integers [S+1], got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}")
    sequences = cu_seqlens.shape[0] - 1
    if cu_seqlens.device.type != "cpu":
        return sequences, tokens
    bounds = cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    if bounds[0] != 0 or bounds[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to T={tokens} without falling, got {bounds[:8]}{'...' if len(bounds) > 8 else ''}"
        )
    return sequences, max(lengths, default=0)


def _check_index_values(index: Tensor, partitions: int) -> None:
    if index.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(index))
    if low < 0 or high >= partitions:
        raise ValueError(f"index must lie in [0, {partitions}), got values from {low} to {high}")
    if index.shape[1] > 1 and bool((index.sort(1).values.diff(dim=1) == 0).any()):
        raise ValueError("index names one partition twice for a token; the R partitions of a token must differ")


def _one_device(v: Tensor, tensors: dict[str, Tensor | None]) -> None:
    for name, a in tensors.items():
        if a is not None and a.device != v.device:
            raise ValueError(f"{name} is on {a.device}, but v is on {v.device}")
