"""The decode state of `triton_decode.py`, and its launches: same interface as `ChunkState`, other contents."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from posttrain.kernels.backend import on_device_of
from posttrain.kernels.sse.checks import Inputs
from posttrain.kernels.sse.decode import ChunkState, Transition
from posttrain.kernels.sse.folds import waiting_folds
from posttrain.kernels.sse.triton_decode import gla_decode_kernel, gla_fold_kernel
from posttrain.kernels.sse.triton_gla_launch import Sizes, constants_of
from posttrain.kernels.sse.triton_limits import MAX_CHUNK, MAX_WIDTH
from posttrain.kernels.sse.triton_options import DecodeOptions, append_constants
from posttrain.kernels.sse.triton_prefill import prefill
from posttrain.kernels.triton_launch import Launch, aligned, cdiv, power_of_two

_DECODE, _FOLD = Launch(gla_decode_kernel), Launch(gla_fold_kernel)


class TritonChunkState(ChunkState):
    """One GLA layer's decode state on a GPU (or interpreted): pools indexed by slot, updated in place by `sse_extend`.

    Attributes:
        high, low: int16 [slots, 1+N, H, K, V], the state at the last chunk boundary in two planes (`triton_decode.split`).
        pending: rows since then, [slots, 1+N, H, C, .]: k, v and ks = k exp(-G) in the model's dtype, g in its own, and the write
            gate's factors [slots, 1+N, C] fp32. What lies behind the pending rows is left over, and never read.
        total: fp32 [slots, 1+N, H, 2, K]; with n pending rows, place n % 2 holds their summed decay (none where n = 0).
        count: int32 [slots, 1+N], rows since the slot was reset; the pending ones are count % C.
    """

    MOST: ClassVar[dict[str, int]] = {"chunk_size": MAX_CHUNK, "key_dim": MAX_WIDTH, "value_dim": MAX_WIDTH}

    def __init__(self, high: Tensor, low: Tensor, pending: dict[str, Tensor], total: Tensor, count: Tensor) -> None:
        self.high, self.low, self.pending, self.total, self.count = high, low, pending, total, count
        self.transition = "gla"
        self.options = DecodeOptions()
        # The pools of several layers that this one is a part of, and its number there.
        self.pools: tuple[TritonChunkState, int] | None = None

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
        decay_dtype: torch.dtype = torch.float32,
    ) -> TritonChunkState:
        """Empty slots for rows of `dtype` (q, k, v) and `decay_dtype` (g).

        Raises:
            ValueError: sizes or dtypes that the kernels do not take.
        """
        cls._check_sizes(num_slots, num_partitions, heads, key_dim, value_dim, chunk_size)
        if transition != "gla":
            raise ValueError(f"transition={transition!r}, but this state is for 'gla' only; use ChunkState")
        if torch.float64 in (dtype, decay_dtype):
            raise ValueError("the kernels compute in fp32; use ChunkState for float64")
        pool = (num_slots, 1 + num_partitions, heads)

        def zeros(*shape: int, as_type: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=as_type, device=device)

        pending = {
            "k": zeros(*pool, chunk_size, key_dim),
            "g": zeros(*pool, chunk_size, key_dim, as_type=decay_dtype),
            "v": zeros(*pool, chunk_size, value_dim),
            "ks": zeros(*pool, chunk_size, key_dim),
            "factor": zeros(*pool[:2], chunk_size, as_type=torch.float32),
        }
        high, low = (zeros(*pool, key_dim, value_dim, as_type=torch.int16) for _ in range(2))
        total = zeros(*pool, 2, key_dim, as_type=torch.float32)
        return cls(high, low, pending, total, zeros(*pool[:2], as_type=torch.int32))

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
        decay_dtype: torch.dtype = torch.float32,
    ) -> list[ChunkState]:
        """`allocate` for several layers, in pools that they share: `folds_together`."""
        pools = cls.allocate(
            layers * num_slots, num_partitions, heads, key_dim, value_dim, chunk_size,
            transition=transition, device=device, dtype=dtype, decay_dtype=decay_dtype,
        )  # fmt: skip
        found: list[ChunkState] = []
        for layer in range(layers):
            own = slice(layer * num_slots, (layer + 1) * num_slots)
            state = cls(
                pools.high[own], pools.low[own], {n: a[own] for n, a in pools.pending.items()}, pools.total[own], pools.count[own]
            )
            state.pools = pools, layer
            found.append(state)
        return found

    @property
    def _pools_and_layer(self) -> tuple[TritonChunkState, int]:
        return self.pools or (self, 0)

    @property
    def boundary(self) -> Tensor:
        """fp32 [slots, 1+N, H, K, V], joined from the planes: a copy."""
        return join_planes(self.high, self.low)

    def boundary_of(self, slots: Tensor) -> Tensor:
        """fp32 [S, 1+N, H, K, V] of some slots."""
        return join_planes(self.high.index_select(0, slots), self.low.index_select(0, slots))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.high.shape[1:])

    def _tensors(self) -> dict[str, Tensor]:
        return {"high": self.high, "low": self.low, "total": self.total, "count": self.count, **self.pending}

    def reset(self, slots: Sequence[int] | Tensor) -> None:
        """Empties slots for new sequences; rows and totals without a count are never read."""
        slots = self._checked(slots)
        for a in (self.high, self.low, self.count):
            a.index_fill_(0, slots, 0)

    def _check(self, x: Inputs, slots: Tensor) -> Tensor:
        slots = super()._check(x, slots)
        for name, given in {"k": (x.k1, x.k2), "g": (x.g1, x.g2), "v": (x.v, x.v2)}.items():
            for a in given:
                kept = self.pending[name].dtype
                if a is not None and torch.promote_types(a.dtype, kept) != kept:
                    raise ValueError(
                        f"{name} is {a.dtype}, but the state was allocated for {kept} and would round it; "
                        "allocate it with the layer's dtype and decay_dtype"
                    )
        return slots

    def extend(self, x: Inputs, slots: Tensor, *, strict: bool, exact: bool = False, fresh: bool = False) -> Tensor:
        """strict: one-token calls too take the trainer's products, over whole chunks; exact: longer calls too compute every row
        as one-token calls do."""
        slots = self._check(x, slots)
        tokens = x.v.shape[0]
        if tokens == 0:
            return torch.zeros_like(x.v)
        with torch.cuda.device_of(x.v) if x.v.is_cuda else nullcontext():
            one_each = x.longest == 1 and tokens == slots.shape[0]
            if one_each and not strict:
                return self.step(x, slots)
            waiting = waiting_folds()
            if waiting is not None:
                waiting.launch(self._pools_and_layer[0])
            return prefill(x, self, slots, exact=exact, fresh=fresh)

    def step(self, x: Inputs, slots: Tensor) -> Tensor:
        """One token for each slot -> o [B, H, V]. x is checked, its cu_seqlens are not looked at; slots int64 [B] on the device,
        distinct but for negative ones, whose rows are no sequence's: they come out as zeros."""
        s = Sizes.choose(x.q2, x.k2, x.g2, x.v, x.chunk_size)
        rows = x.index.shape[0] * (x.index.shape[1] + (x.q1 is not None))
        part = torch.empty(rows, x.v.shape[1], s.V, dtype=torch.float32, device=x.v.device)
        out = torch.empty_like(x.v, memory_format=torch.contiguous_format)
        waiting = waiting_folds()
        if waiting is None:
            marks = torch.empty(rows, dtype=torch.int64, device=x.v.device)
        else:
            pools, layer = self._pools_and_layer
            layers = pools.num_slots // self.num_slots

            def launch(marks: Tensor) -> None:
                with on_device_of(marks):  # the block may end where another device is the current one
                    _fold(pools, s, marks, None, None, layers=layers, fold=True)

            marks = waiting.marks_of(pools, layer, (layers, rows), x.v.device, s, launch)
        self._append(x, s, (aligned(slots), aligned(x.index)), marks, part)
        _fold(self, s, marks, part, out, fold=waiting is None)
        return out

    def _append(self, x: Inputs, s: Sizes, where: tuple[Tensor, Tensor], marks: Tensor, part: Tensor) -> None:
        """First launch: outputs of the rows into `part`, what `gla_fold_kernel` needs of them into `marks`, the token
        appended."""
        routes = max(a.shape[1] for a in (x.q2, x.k2, x.g2))
        routed = tuple(aligned(a.expand(-1, routes, -1, -1)) for a in (x.q2, x.k2, x.g2))
        shared = routed if x.q1 is None or x.k1 is None or x.g1 is None else tuple(aligned(a) for a in (x.q1, x.k1, x.g1))
        options = append_constants(self.options, s.V)
        constants = dict(
            SHARED=x.q1 is not None, R=x.index.shape[1], XR=routes, YR=x.v2.shape[1], N=x.num_partitions, K=s.K, V=s.V, C=s.C,
            LOW=not s.HALF, WK=power_of_two(s.K), **options,
        )  # fmt: skip
        tensors = (
            *where, aligned(x.weight.float()), *shared, *routed, aligned(x.v), aligned(x.v2), self.high, self.low,
            *(self.pending[n] for n in ("k", "g", "v", "ks", "factor")), self.total, self.count, marks, part,
        )  # fmt: skip
        heads = x.v.shape[1]
        numbers = (heads, int(x.gate in ("both", "read")), int(x.gate in ("both", "write")), x.scale)
        _DECODE((marks.shape[0] * heads, cdiv(s.V, options["BV"])), tensors, numbers, constants)


def _fold(
    pools: TritonChunkState, s: Sizes, marks: Tensor, part: Tensor | None, out: Tensor | None, *, layers: int = 1, fold: bool
) -> None:
    """Second launch: with `part`, its rows' sums into `out`; with `fold`, counts and folds of the layers of `pools`, whose marks
    are [layers, rows]."""
    heads, options = pools.high.shape[2], pools.options
    rows, streams = marks.numel() // layers, pools.count.numel() // layers
    scan = constants_of("scan", s)
    # Two to four programs share a multiprocessor: a fold waits for memory most of the time.
    blocks = options.fold or (scan["BK"], scan["BV"], scan["num_warps"], 128 if s.HALF else None)
    constants = dict(
        ROUTES=1 if part is None or out is None else part.shape[0] // out.shape[0],
        K=s.K, V=s.V, C=s.C, HALF=s.HALF, GLOW=s.GLOW, BC=s.BC,
        BLOCK=1024, LANES=128, SUM=part is not None, FOLD=fold,
        **dict(zip(("BK", "BV", "num_warps", "maxnreg"), blocks, strict=True)),
    )  # fmt: skip
    tensors = (
        marks, marks if part is None else part, marks if out is None else out, pools.count, pools.high, pools.low,
        *(pools.pending[n] for n in ("k", "g", "v", "ks", "factor")), pools.total,
    )  # fmt: skip
    _FOLD((min(options.programs, marks.numel() * heads),), tensors, (rows, heads, layers, streams), constants)


def serves(dtype: torch.dtype, key_dim: int, value_dim: int, chunk_size: int) -> bool:
    """Whether the kernels take these sizes."""
    return dtype != torch.float64 and max(key_dim, value_dim) <= MAX_WIDTH and chunk_size <= MAX_CHUNK


def join_planes(high: Tensor, low: Tensor) -> Tensor:
    """fp32 from the planes of `triton_decode.split`."""
    return ((high.int() << 16) + low).view(torch.float32)
