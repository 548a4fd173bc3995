"""How kernels are launched: decode steps (and strict mode's rows with them), and the gated delta rule's training kernels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from posttrain.kernels.triton_launch import power_of_two


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How a step is launched: one set for every batch size, or a sequence's bits would depend on its company.

    First launch. BK, BV: state rows and columns of a tile; BT: pending rows of a tile; STAGES: tiles on their way at once;
    num_warps; maxnreg: registers a thread at most, None for no limit.
    Second launch. programs; fold: (BK, BV, num_warps, maxnreg), None for the trainer's blocks.
    """

    BK: int = 32
    BV: int = 128
    BT: int = 8
    STAGES: int = 3
    num_warps: int = 1
    maxnreg: int | None = None
    programs: int = 528
    fold: tuple[int, int, int, int] | None = None


def append_constants(options: DecodeOptions, value_dim: int) -> dict[str, Any]:
    """Constants and launch options of the first launch."""
    found = {n: a for n, a in asdict(options).items() if n not in ("programs", "fold")}
    found["BV"] = min(options.BV, max(16, power_of_two(value_dim)))
    return found


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """A gated-delta kernel over chunks, in bf16 with at most 64 rows a chunk. BK, BV: largest blocks of key and value columns;
    num_stages: loads on their way at once in its loops; maxnreg: registers a thread at most, None for no limit."""

    BK: int
    BV: int
    num_warps: int
    num_stages: int = 2
    maxnreg: int | None = None


@dataclass(kw_only=True)
class GDNOptions:
    """The gated delta rule's training kernels, measured on an H200 with K = V = 128 and chunks of 64. Results may differ between
    two sets of blocks or warps, so it is one set for all calls."""

    prepare: ChunkOptions = ChunkOptions(BK=64, BV=64, num_warps=4, maxnreg=168)
    output: ChunkOptions = ChunkOptions(BK=64, BV=128, num_warps=8, num_stages=3)
    adjoint: ChunkOptions = ChunkOptions(BK=64, BV=128, num_warps=8, num_stages=3)
    gradient: ChunkOptions = ChunkOptions(BK=128, BV=64, num_warps=8)


GDN = GDNOptions()
