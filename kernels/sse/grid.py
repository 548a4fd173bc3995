"""Moving rows between token order and the chunk grid, deterministic in both directions (no atomic adds)."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.kernels.sse.checks import Inputs
from posttrain.kernels.sse.plan import ChunkPlan


def writes_gated(x: Inputs) -> bool:
    return x.gate in ("both", "write")


def read_gated(x: Inputs, a: Tensor) -> Tensor:
    """a [T,1|R,H,D] of the routed rows, times the router's weight where the gate is on reading -> [T,1|R,H,D]."""
    return _gated(x, a) if x.gate in ("both", "read") else a


def write_gated(x: Inputs, a: Tensor) -> Tensor:
    """As `read_gated` for writing."""
    return _gated(x, a) if writes_gated(x) else a


def _gated(x: Inputs, a: Tensor) -> Tensor:
    return a.to(x.dtype) * x.weight.to(x.dtype)[..., None, None]


class GridMap:
    """Row indices of one call, expanded over heads once and used by every tensor.

    Chunk layout is [NC, H, C, D]: a chunk of a head is one contiguous matrix, as a batched product wants it.
    """

    def __init__(self, x: Inputs, plan: ChunkPlan) -> None:
        self.tokens, self.routes = x.index.shape
        self.heads = x.v.shape[1]
        self.shared = self.tokens if x.q1 is not None else 0
        self.plan = plan
        self.shape = (plan.rows.shape[0], self.heads, plan.chunk_size)
        self.head = torch.arange(self.heads, device=x.v.device)
        chunk, within = plan.place // plan.chunk_size, plan.place % plan.chunk_size
        place = (chunk[:, None] * self.heads + self.head) * plan.chunk_size + within[:, None]
        self.place_shared = place[: self.shared]
        self.place_routed = place[self.shared :].view(self.tokens, self.routes, self.heads)
        self._sources: dict[tuple[bool, bool], Tensor] = {}

    def source(self, *, per_route: bool, value_once: bool) -> Tensor:
        """Flat [NC*H*C] indices into the rows of cat([first, second, zero row]) x heads.

        per_route: `second` has a row a (token, route), else a row a token; value_once: without `first`, all rows read `second`.
        """
        key = (per_route, value_once)
        if key not in self._sources:
            row, first = self.plan.rows, self.shared
            routed = row - first if per_route else torch.div(row - first, self.routes, rounding_mode="floor")
            length = self.tokens * (self.routes if per_route else 1)
            if value_once:
                source = torch.where(row < first, row, routed)
            else:
                source, length = torch.where(row < first, row, first + routed), length + first
            source = torch.where(row < first + self.tokens * self.routes, source, length)
            self._sources[key] = (source[:, None, :] * self.heads + self.head[:, None]).reshape(-1)
        return self._sources[key]

    def scatter(self, first: Tensor | None, second: Tensor) -> Tensor:
        """first [T,H,D] feeds the shared rows, second [T,1|R,H,D] the routed ones -> [NC,H,C,D] in the wider dtype of the two,
        zero where there is no row."""
        if first is not None and first.dtype != second.dtype:
            dtype = torch.promote_types(first.dtype, second.dtype)
            first, second = first.to(dtype), second.to(dtype)
        return _ToGrid.apply(first, second, self, False)

    def scatter_values(self, x: Inputs) -> Tensor:
        """As `scatter` for v; one copy of the source is enough where both kinds of row read the same v."""
        if x.same_values:
            return _ToGrid.apply(None, x.v2, self, True)
        return self.scatter(x.v if self.shared else None, x.v2)

    def gather(self, grid: Tensor) -> Tensor:
        """[NC,H,C,D] -> [T,H,D], summing a token's rows: shared first, then its routes in order."""
        return _FromGrid.apply(grid, self)


def _sum_rows(grid: Tensor, m: GridMap, *, shared: bool) -> Tensor:
    """[NC,H,C,D] -> [T,H,D]: the sum over a token's routed rows, its shared row first where `shared`."""
    flat = grid.reshape(-1, grid.shape[-1])
    shape = (m.tokens, m.heads, grid.shape[-1])
    total = flat.index_select(0, m.place_shared.reshape(-1)).view(shape) if shared and m.shared else None
    for r in range(m.routes):
        part = flat.index_select(0, m.place_routed[:, r].reshape(-1)).view(shape)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _to_grid(first: Tensor | None, second: Tensor, m: GridMap, value_once: bool) -> Tensor:
    width = second.shape[-1]
    pieces = [] if first is None else [first.reshape(-1, width)]
    source = torch.cat([*pieces, second.reshape(-1, width), second.new_zeros(m.heads, width)])
    index = m.source(per_route=second.shape[1] > 1, value_once=value_once)
    return source.index_select(0, index).view(*m.shape, width)


class _ToGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, second, m, value_once):
        ctx.m, ctx.value_once, ctx.has_first, ctx.per_route = m, value_once, first is not None, second.shape[1] > 1
        return _to_grid(first, second, m, value_once)

    @staticmethod
    def backward(ctx, grad):
        m, width = ctx.m, grad.shape[-1]
        flat = grad.reshape(-1, width)
        if ctx.per_route:
            second = flat.index_select(0, m.place_routed.reshape(-1)).view(m.tokens, m.routes, m.heads, width)
        else:
            second = _sum_rows(grad, m, shared=ctx.value_once)[:, None]
        first = None
        if ctx.has_first:
            first = flat.index_select(0, m.place_shared.reshape(-1)).view(m.tokens, m.heads, width)
        return first, second, None, None


class _FromGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grid, m):
        ctx.m = m
        return _sum_rows(grid, m, shared=True)

    @staticmethod
    def backward(ctx, grad):
        return _to_grid(None, grad[:, None].contiguous(), ctx.m, True), None
