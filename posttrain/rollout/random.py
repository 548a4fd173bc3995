"""Counter-based random numbers: a draw is a pure function of (request seed, sample index, position).

No generator state exists, so a draw cannot depend on what else is in the batch, on when a request arrived or on a restart. The
numbers themselves are made where tokens are drawn (`posttrain.kernels.sampling`).

    key = stream_key(seed=17, sample=3)                      # on the host, once a sample
    u = uniform(keys [B] int64, positions [B] int64)         # float64 [B], strictly inside (0, 1)
"""

from __future__ import annotations

from posttrain.kernels.sampling import random_bits, uniform
from posttrain.kernels.sampling.reference import GOLDEN, MIX_1, MIX_2, signed

__all__ = ["random_bits", "stream_key", "uniform"]

_MASK = (1 << 64) - 1


def _mix(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * MIX_1) & _MASK
    bits = ((bits ^ (bits >> 27)) * MIX_2) & _MASK
    return bits ^ (bits >> 31)


def stream_key(seed: int, sample: int) -> int:
    """Key of one sample's stream, as a signed 64-bit integer; neighbouring seeds and samples give unrelated streams."""
    first = _mix((seed + GOLDEN) & _MASK)
    return signed(_mix((first + (sample + 1) * GOLDEN) & _MASK))
