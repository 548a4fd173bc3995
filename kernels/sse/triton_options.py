"""How decode steps are launched, and strict mode's rows with them."""

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
