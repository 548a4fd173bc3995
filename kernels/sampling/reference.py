"""The same by PyTorch's operators; where there is no GPU this is what runs.

Counted random numbers: the mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) in wrapping int64
arithmetic, which gives the same bits everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.kernels.elementwise import elementwise

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the step between counters in SplitMix64
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
FIXED_POINT = 2.0**46  # a row's sum stays below 2^47: exact in int64 and in float64


def signed(bits: int) -> int:
    """The int64 that has these 64 bits."""
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift: int64's own `>>` would copy the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def random_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """64 random bits a row. keys, counters int64 of one shape -> int64 of that shape."""
    bits = keys + (counters + 1) * signed(GOLDEN)
    bits = (bits ^ _shift_right(bits, 30)) * signed(MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * signed(MIX_2)
    return bits ^ _shift_right(bits, 31)


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Uniform float64 strictly inside (0, 1): 52 random bits and a half, so that neither end can occur."""
    return (_shift_right(random_bits(keys, counters), 12).double() + 0.5) * 2.0**-52


def fixed_point(logprobs: Tensor) -> Tensor:
    """Probabilities as int64 multiples of 2^-46.

    Scaling by a power of two is exact, so only the floor rounds; `elementwise` keeps the bits of exp from depending on the shape.
    """
    return (elementwise(torch.exp, logprobs) * FIXED_POINT).to(torch.int64)


def draw_reference(logprobs: Tensor, keys: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
    """See `posttrain.kernels.sampling`."""
    cumulative = fixed_point(logprobs).cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum((uniform(keys, counters) * total.double()).to(torch.int64), total - 1)
    token = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    token = token.clamp_(0, logprobs.shape[-1] - 1)  # only a broken row can fall outside
    return token, logprobs.gather(-1, token[:, None])[:, 0]


def advance_reference(
    integers: Tensor,
    finished: Tensor,
    ends: Tensor,
    rows: Tensor,
    token: Tensor,
    logprob: Tensor,
    plain_logprob: Tensor,
    broken: Tensor,
) -> Tensor:
    """See `posttrain.kernels.sampling`."""
    _, position, drawn, limit = old = integers[:4].index_select(1, rows)
    over = finished.index_select(0, rows)
    ended = (token[:, None] == ends).any(1) | (drawn + 1 >= limit) | broken
    new = torch.stack([token, position + 1, drawn + 1])
    integers[:3].index_copy_(1, rows, torch.where(over, old[:3], new))
    finished.index_copy_(0, rows, over | ended)
    return torch.stack([column.double() for column in (token, logprob, plain_logprob, broken, ended)], dim=1)
