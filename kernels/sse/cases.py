"""Inputs shared by tests and benchmarks: `make_case` draws what a layer would feed the operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.kernels.sse.routing import route


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of a call; `lengths` are those of the packed sequences.

    decay: mean log decay a token (negative; the drawn ones spread from 0 to about three times it).
    lonely: a partition that no token is routed to. per_route: q2, k2, g2 (b2) and v2 of their own for every route.
    """

    lengths: tuple[int, ...]
    heads: int = 2
    key_dim: int = 16
    value_dim: int = 24
    partitions: int = 4
    routed: int = 1
    transition: str = "gla"
    chunk_size: int = 16
    decay: float = -0.05
    gate: str = "both"
    shared: bool = True
    per_route: bool = False
    initial: bool = True
    lonely: int | None = None
    scale: float | None = None
    seed: int = 0

    @property
    def names(self) -> list[str]:
        """Positional arguments of the operator, in order, up to v."""
        gla = ["q1", "k1", "g1", "q2", "k2", "g2", "v"]
        return gla if self.transition == "gla" else ["q1", "k1", "g1", "b1", "q2", "k2", "g2", "b2", "v"]


# Odd lengths, empty and one-token sequences, chunk boundaries hit exactly, and every option of the interface.
CASES: dict[str, Case] = {
    "one sequence": Case(lengths=(70,)),
    "one token": Case(lengths=(1,)),
    "empty ones": Case(lengths=(0, 37, 0, 0, 1, 16, 0), routed=2),
    "nothing": Case(lengths=(0, 0)),
    "many": Case(lengths=tuple(1 + (7 * i) % 23 for i in range(19)), routed=2),
    "exact chunks": Case(lengths=(32, 16, 64)),
    "every partition": Case(lengths=(29, 40), partitions=3, routed=3),
    "one partition": Case(lengths=(41, 5), partitions=1, routed=1),
    "lonely partition": Case(lengths=(50, 20), lonely=2),
    "no shared": Case(lengths=(33, 18), shared=False, routed=2),
    "per route": Case(lengths=(33, 18), per_route=True, routed=2),
    "per route, no shared": Case(lengths=(21, 30), per_route=True, routed=3, shared=False),
    "write gate": Case(lengths=(35, 12), gate="write"),
    "read gate": Case(lengths=(35, 12), gate="read", routed=2),
    "no gate": Case(lengths=(35, 12), gate="none"),
    "no initial state": Case(lengths=(35, 12), initial=False, scale=0.3),
    "odd chunk": Case(lengths=(61, 10), chunk_size=13),
    "chunk of one": Case(lengths=(11, 3), chunk_size=1),
    "long chunk": Case(lengths=(150, 61), chunk_size=64),
    "decay at the limit": Case(lengths=(90, 33), decay=-1.3, chunk_size=32),
    "strong decay": Case(lengths=(90, 33), decay=-5.0, chunk_size=32),
    "violent decay": Case(lengths=(70, 33), decay=-60.0, chunk_size=64),
}


def make_case(
    case: Case, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Draws in float64 and rounds, so that every dtype sees the same numbers.

    Returns:
        the tensors by name (those of `case.names`, then v2, weight, index, initial_state; None where absent), and the options.
    """
    draw = torch.Generator().manual_seed(case.seed)
    tokens, keys = sum(case.lengths), (case.heads, case.key_dim)
    is_gdn = case.transition == "gdn"

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def projections(*lead: int) -> dict[str, Tensor]:
        q, k = normal(*lead, *keys), normal(*lead, *keys)
        if is_gdn:
            q, k = (torch.nn.functional.normalize(a, dim=-1) for a in (q, k))
        else:
            k = torch.softmax(k, dim=-1)
        g = case.decay * torch.nn.functional.softplus(normal(*lead, case.heads) if is_gdn else normal(*lead, *keys)) / 0.8
        return {"q": q, "k": k, "g": g, "v": normal(*lead, case.heads, case.value_dim)} | (
            {"b": torch.sigmoid(normal(*lead, case.heads))} if is_gdn else {}
        )

    first = projections(tokens)
    second = projections(tokens, case.routed) if case.per_route else projections(tokens)
    tensors: dict[str, Tensor | None] = {}
    for name in case.names[:-1]:
        tensors[name] = (first if name[1] == "1" else second)[name[0]]
        if name[1] == "1" and not case.shared:
            tensors[name] = None
    logits = normal(tokens, case.partitions)
    if case.lonely is not None:
        logits[:, case.lonely] = -50.0
    _, weight, index = route(logits, case.routed)
    tensors |= {"v": first["v"], "v2": second["v"] if case.per_route else None, "weight": weight, "index": index}
    state_shape = (len(case.lengths), 1 + case.partitions, case.heads, case.key_dim, case.value_dim)
    tensors["initial_state"] = normal(*state_shape) if case.initial else None
    for name, a in tensors.items():
        if a is not None and name != "index":
            tensors[name] = a.to(device, dtype)
    tensors["index"] = index.to(device)
    cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0)
    options = dict(
        cu_seqlens=cu_seqlens, num_partitions=case.partitions, scale=case.scale, gate=case.gate, chunk_size=case.chunk_size
    )
    return tensors, options
