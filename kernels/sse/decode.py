"""Decoding on the chunk grid: a sequence keeps, per partition, the state at its last chunk boundary and the rows since then.

A new token is the next row of its partitions' unfinished chunks: it reads the boundary state and the pending rows. When a
chunk is full it is folded into the boundary with the arithmetic of `chunked`, so boundaries are the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from posttrain.kernels.sse.checks import Inputs, without_autocast
from posttrain.kernels.sse.chunked import chunk_products, rows_on_grid, scan
from posttrain.kernels.sse.chunked_gdn import GDNScan, gdn_products, gdn_rows_on_grid
from posttrain.kernels.sse.decode_one import one_token_gdn, one_token_gla
from posttrain.kernels.sse.grid import GridMap
from posttrain.kernels.sse.plan import ChunkPlan, build_plan

Transition = Literal["gla", "gdn"]

# Whether GLA layers on a GPU decode in Triton (`triton_decode_pool.py`): what `ChunkState.allocate` makes there.
TRITON_ON_GPU = True


class ChunkState:
    """One layer's decode state: pools indexed by slot, updated in place by `sse_extend`.

    Attributes:
        boundary: [slots, 1+N, H, K, V], the state at the last chunk boundary (row 0 the shared partition).
        pending: rows since then, [slots, 1+N, H, C, .], zero past `count`: k (write gate applied; GLA), v (write gate applied;
            gated delta rule), g, and b for the gated delta rule ([slots, 1+N, H, C]). Besides, what one-token steps reuse: GLA
            `ks` = k exp(-G) as [slots, 1+N, H, K, C], the gated delta rule the corrections `u`.
        total: float64 decay summed over the pending rows, [slots, 1+N, H, K] or [slots, 1+N, H].
        count: [slots, 1+N] int64, pending rows, below C.
    """

    def __init__(
        self, boundary: Tensor, pending: dict[str, Tensor], total: Tensor, count: Tensor, transition: Transition
    ) -> None:
        self.boundary, self.pending, self.total, self.count, self.transition = boundary, pending, total, count, transition

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        num_partitions: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        chunk_size: int,
        *,
        transition: Transition = "gla",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> ChunkState:
        """Zeroed pools, in fp32 whatever the model's `dtype` (float64 where that is float64). On a GPU it may be the
        `TritonChunkState` instead.

        Raises:
            ValueError: a size below 1, or an unknown transition.
        """
        cls._check_sizes(num_slots, num_partitions, heads, key_dim, value_dim, chunk_size)
        if transition not in ("gla", "gdn"):
            raise ValueError(f"transition={transition!r}, but it must be 'gla' or 'gdn'")
        kind = cls._kind(key_dim, value_dim, chunk_size, transition, device, dtype)
        if kind is not cls:
            return kind.allocate(num_slots, num_partitions, heads, key_dim, value_dim, chunk_size, device=device, dtype=dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        pool = (num_slots, 1 + num_partitions, heads)

        def zeros(*tail: int, as_type: torch.dtype = wide) -> Tensor:
            return torch.zeros(*pool, *tail, dtype=as_type, device=device)

        pending = {"k": zeros(chunk_size, key_dim), "v": zeros(chunk_size, value_dim)}
        if transition == "gla":
            pending |= {"g": zeros(chunk_size, key_dim), "ks": zeros(key_dim, chunk_size)}
            total = zeros(key_dim, as_type=torch.float64)
        else:
            pending |= {"g": zeros(chunk_size), "b": zeros(chunk_size), "u": zeros(chunk_size, value_dim)}
            total = zeros(as_type=torch.float64)
        count = torch.zeros(pool[:2], dtype=torch.int64, device=device)
        return cls(zeros(key_dim, value_dim), pending, total, count, transition)

    @classmethod
    def allocate_layers(
        cls,
        layers: int,
        num_slots: int,
        num_partitions: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        chunk_size: int,
        *,
        transition: Transition = "gla",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> list[ChunkState]:
        """`allocate` for several layers, in pools that they share where that makes their steps faster."""
        sizes = (num_slots, num_partitions, heads, key_dim, value_dim, chunk_size)
        kind = cls._kind(key_dim, value_dim, chunk_size, transition, device, dtype)
        if kind is not cls and layers:
            return kind.allocate_layers(layers, *sizes, device=device, dtype=dtype)
        return [cls.allocate(*sizes, transition=transition, device=device, dtype=dtype) for _ in range(layers)]

    @classmethod
    def _kind(
        cls, key_dim: int, value_dim: int, chunk_size: int, transition: Transition, device: torch.device | str, dtype: torch.dtype
    ) -> type[ChunkState]:
        """The class that keeps such states best."""
        if TRITON_ON_GPU and cls is ChunkState and torch.device(device).type == "cuda" and transition == "gla":
            from posttrain.kernels.sse.triton_decode_pool import TritonChunkState, serves

            if serves(dtype, key_dim, value_dim, chunk_size):
                return TritonChunkState
        return cls

    # What the kernels take, by the names of `allocate`.
    MOST: ClassVar[dict[str, int]] = {}

    @classmethod
    def _check_sizes(cls, *sizes: int) -> None:
        """Raises ValueError on a size of `allocate`, in its order, that is below 1 or above what the kernels take."""
        names = ("num_slots", "num_partitions", "heads", "key_dim", "value_dim", "chunk_size")
        for name, size in zip(names, sizes, strict=True):
            most = cls.MOST.get(name)
            if size < 1 or (most is not None and size > most):
                raise ValueError(f"{name}={size}, but it must be " + (f"1 to {most}" if most else "at least 1"))

    @property
    def chunk_size(self) -> int:
        return self.pending["k"].shape[3]

    @property
    def num_slots(self) -> int:
        return self.count.shape[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """(1+N, H, K, V)."""
        return tuple(self.boundary.shape[1:])

    @property
    def nbytes_per_slot(self) -> int:
        """Bytes of one sequence's state."""
        return sum(a.nbytes for a in self._tensors().values()) // self.num_slots

    def _tensors(self) -> dict[str, Tensor]:
        return {"boundary": self.boundary, "total": self.total, "count": self.count, **self.pending}

    def reset(self, slots: Sequence[int] | Tensor) -> None:
        """Empties slots for new sequences."""
        slots = self._checked(slots)
        for a in self._tensors().values():
            a[slots] = 0

    def fork(self, src: int, dst: Sequence[int] | Tensor) -> None:
        """Copies one slot into others, bit for bit."""
        self._check_range([src])
        dst = self._checked(dst)
        for a in self._tensors().values():
            a[dst] = a[src].clone()

    def export(self, slot: int) -> dict[str, Tensor]:
        """CPU copies of one slot, for `load`."""
        self._check_range([slot])
        return {name: a[slot].detach().cpu().clone() for name, a in self._tensors().items()}

    def load(self, slot: int, exported: dict[str, Tensor]) -> None:
        """Puts an exported slot back, here or in another state of the same sizes.

        Raises:
            ValueError: a tensor is missing, foreign or of another shape.
        """
        self._check_range([slot])
        own = self._tensors()
        if exported.keys() != own.keys():
            raise ValueError(f"an exported {self.transition} slot holds {sorted(own)}, got {sorted(exported)}")
        for name, a in own.items():
            if exported[name].shape != a.shape[1:]:
                raise ValueError(f"{name} has shape {list(exported[name].shape)}, but this state needs {list(a.shape[1:])}")
        for name, a in own.items():
            a[slot] = exported[name].to(a.device, a.dtype)

    def extend(self, x: Inputs, slots: Tensor, *, strict: bool, exact: bool = False, fresh: bool = False) -> Tensor:
        """`sse_extend` without gradients and autocast; x is checked but for the state."""
        if exact:
            raise ValueError("exact=True needs the Triton state (a GLA layer on a GPU), but this one computes in PyTorch")
        return _extend(x, self, self._check(x, slots), strict=strict)

    def _check(self, x: Inputs, slots: Tensor) -> Tensor:
        """The slots as `_checked` gives them, one a sequence, and the sizes of x."""
        transition = "gdn" if x.is_gdn else "gla"
        if self.transition != transition:
            raise ValueError(f"the state was allocated with transition={self.transition!r}, but this call needs {transition!r}")
        needed = (1 + x.num_partitions, x.v.shape[1], x.q2.shape[-1], x.v.shape[2])
        if self.sizes != needed:
            raise ValueError(f"the state holds [1+N, H, K, V] = {list(self.sizes)}, but the inputs need {list(needed)}")
        if self.count.device != x.v.device:
            raise ValueError(f"the state is on {self.count.device}, but v is on {x.v.device}")
        slots = self._checked(slots)
        if slots.shape[0] != x.cu_seqlens.shape[0] - 1:
            raise ValueError(
                f"slots must name one slot a sequence, got {slots.shape[0]} for {x.cu_seqlens.shape[0] - 1} sequences"
            )
        if slots.device.type == "cpu" and len(set(slots.tolist())) != slots.numel():
            raise ValueError(f"slots must differ, got {slots.tolist()}")
        return slots

    def _checked(self, slots: Sequence[int] | Tensor) -> Tensor:
        """Slots as int64 on the state's device; their range is checked unless they lie on a device already."""
        if not isinstance(slots, Tensor):
            self._check_range(slots)
        elif slots.device.type == "cpu":
            self._check_range(slots.reshape(-1).tolist())
        return torch.as_tensor(slots, dtype=torch.int64, device=self.count.device).reshape(-1)

    def _check_range(self, slots: Sequence[int]) -> None:
        if not all(0 <= slot < self.num_slots for slot in slots):
            raise ValueError(f"slots must lie in [0, {self.num_slots}), got {list(slots)}")


def extend(x: Inputs, state: ChunkState, slots: Tensor, *, strict: bool, exact: bool = False, fresh: bool = False) -> Tensor:
    """See `sse_extend`; x is checked but for the state."""
    with torch.no_grad(), without_autocast(x.v):
        return state.extend(x, slots, strict=strict, exact=exact, fresh=fresh)


def _extend(x: Inputs, state: ChunkState, slots: Tensor, *, strict: bool) -> Tensor:
    tokens = x.v.shape[0]
    if tokens == 0:
        return torch.zeros_like(x.v)
    one_each = x.longest == 1 if x.longest < tokens or tokens == 1 else bool((x.cu_seqlens.diff() == 1).all())
    if one_each and tokens == slots.shape[0] and not strict:
        o = one_token_gdn(x, state, slots) if x.is_gdn else one_token_gla(x, state, slots)
        return (o * x.scale).to(x.v.dtype)
    streams = (slots[:, None] * state.count.shape[1] + torch.arange(state.count.shape[1], device=slots.device)).reshape(-1)
    plan = build_plan(
        x.index, x.cu_seqlens, num_partitions=x.num_partitions, chunk_size=x.chunk_size, shared=x.q1 is not None,
        longest=x.longest, pending=state.count.view(-1)[streams],
    )  # fmt: skip
    m = GridMap(x, plan)
    run = _extend_gdn if x.is_gdn else _extend_gla
    o = run(x, state, streams, plan, m)
    return (m.gather(o) * x.scale).to(x.v.dtype)


def _prepend_pending(state: ChunkState, streams: Tensor, plan: ChunkPlan, rows: dict[str, Tensor]) -> None:
    """Puts pending rows before the new ones of their chunk. Both are zero where the other has rows, so adding is exact."""
    held = ((state.count.view(-1)[streams] > 0) & (plan.counts > 0)).nonzero()[:, 0]
    if held.numel():
        first = plan.chunk_of(held, torch.zeros_like(held))
        for name, grid in rows.items():
            grid[first] += state.pending[name].flatten(0, 1)[streams[held]]


def _keep_unfinished(
    state: ChunkState, streams: Tensor, plan: ChunkPlan, boundary: Tensor, final: Tensor, rows: dict[str, Tensor]
) -> None:
    """Stores the state at the last boundary and the rows after it, for the streams that received rows."""
    touched = (plan.counts > 0).nonzero()[:, 0]
    count = plan.counts[touched]
    last = plan.chunk_of(touched, (count - 1) // plan.chunk_size)
    rest = count % plan.chunk_size
    open_chunk = rest > 0
    target = streams[touched]

    def kept(a: Tensor) -> Tensor:
        return a[last] * open_chunk.view(-1, *[1] * (a.ndim - 1))

    for name, grid in rows.items():
        state.pending[name].flatten(0, 1)[target] = kept(grid)
    state.total.flatten(0, 1)[target] = torch.cumsum(kept(rows["g"]).double(), dim=2)[:, :, -1]
    state.boundary.flatten(0, 1)[target] = torch.where(open_chunk[:, None, None, None], boundary[last], final[touched])
    state.count.view(-1)[target] = rest


def _extend_gla(x: Inputs, state: ChunkState, streams: Tensor, plan: ChunkPlan, m: GridMap) -> Tensor:
    q, k, g, v = rows_on_grid(x, m)
    rows = {"k": k, "g": g, "v": v}
    _prepend_pending(state, streams, plan, rows)
    p = chunk_products(*(a.flatten(0, 1) for a in (q, k, g, v)))
    shape = (*q.shape[:2], q.shape[-1], v.shape[-1])
    initial = state.boundary.flatten(0, 1).index_select(0, streams)
    boundary, final = scan(p.decay[:, -1].view(shape[:3]), p.increment.view(shape), initial, plan)
    o = torch.bmm(p.scores, v.flatten(0, 1)).baddbmm_(p.qs, boundary.flatten(0, 1))
    _keep_unfinished(state, streams, plan, boundary, final, {**rows, "ks": p.ks.view(k.shape).transpose(2, 3)})
    return o.view(v.shape)


def _extend_gdn(x: Inputs, state: ChunkState, streams: Tensor, plan: ChunkPlan, m: GridMap) -> Tensor:
    q, k, g, b, v = gdn_rows_on_grid(x, m)
    rows = {"k": k, "g": g, "b": b, "v": v}
    _prepend_pending(state, streams, plan, rows)
    qd, attention, kd, d, u0, w = gdn_products(q, k, g, b, v)
    boundary, u, final = GDNScan.apply(d, kd, u0, w, state.boundary.flatten(0, 1).index_select(0, streams), plan)
    _keep_unfinished(state, streams, plan, boundary, final, {**rows, "u": u})
    return torch.matmul(qd, boundary) + torch.matmul(attention, u)
