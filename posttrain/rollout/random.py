"""Counter-based random numbers: a draw is a pure function of (request seed, sample index, position).

No generator state exists, so a draw cannot depend on what else is in the batch, on when a request arrived or on a restart.
The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) in wrapping int64 arithmetic, which gives the same
bits on CPU and GPU.

    key = stream_key(seed=17, sample=3)                      # on the host, once a sample
    u = uniform(keys [B] int64, positions [B] int64)         # float64 [B], strictly inside (0, 1)
"""

from __future__ import annotations

from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the step between counters in SplitMix64
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(bits: int) -> int:
    """The int64 that has these 64 bits."""
    bits &= _MASK
    return bits - (1 << 64) if bits >> 63 else bits


def _mix(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * _MIX_1) & _MASK
    bits = ((bits ^ (bits >> 27)) * _MIX_2) & _MASK
    return bits ^ (bits >> 31)


def stream_key(seed: int, sample: int) -> int:
    """Key of one sample's stream, as a signed 64-bit integer; neighbouring seeds and samples give unrelated streams."""
    first = _mix((seed + _GOLDEN) & _MASK)
    return _signed(_mix((first + (sample + 1) * _GOLDEN) & _MASK))


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift: int64's own `>>` would copy the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def random_bits(keys: Tensor, positions: Tensor) -> Tensor:
    """64 random bits a row. keys, positions int64 of one shape -> int64 of that shape."""
    bits = keys + (positions + 1) * _signed(_GOLDEN)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_MIX_2)
    return bits ^ _shift_right(bits, 31)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform float64 strictly inside (0, 1): 52 random bits and a half, so that neither end can occur."""
    return (_shift_right(random_bits(keys, positions), 12).double() + 0.5) * 2.0**-52
