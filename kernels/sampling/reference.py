"""The same by PyTorch's operators; where there is no GPU this is what runs.

Counted random numbers: the mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) in wrapping int64
arithmetic, which gives the same bits everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.kernels.elementwise import elementwise

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the step between counters in SplitMix64
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
FIXED_POINT = 2.0**42  # the sum of a block stays below 2^53: exact in int64 and in float64
BLOCK = 2048  # tokens that share a scale


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
    """Probabilities as int64 multiples of 2^-42.

    Scaling by a power of two is exact, so only the floor rounds; `elementwise` keeps the bits of exp from depending on the shape.
    """
    return (elementwise(torch.exp, logprobs) * FIXED_POINT).to(torch.int64)


def _finite(x: Tensor) -> Tensor:
    return (x - x) == 0


@dataclass(frozen=True)
class Masses:
    """A distribution [B, vocab] block by block: masses int64 [B, blocks, BLOCK] in the block's scale, `top` [B, blocks] its
    largest logit (0 where none is finite), and in the row's scale the blocks' sums `scaled`, int64 [B, blocks]; `highest` [B]."""

    masses: Tensor
    top: Tensor
    scaled: Tensor
    highest: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> Masses:
        vocab = logits.shape[1]
        width = min(BLOCK, 1 << (vocab - 1).bit_length())  # padding has no mass
        x = F.pad(logits, (0, -vocab % width), value=-torch.inf).view(logits.shape[0], -1, width)
        x = torch.where(_finite(x), x, -torch.inf)
        largest = x.amax(2)
        top = torch.where(_finite(largest), largest, 0.0)
        masses = fixed_point(x - top[..., None])
        highest = largest.amax(1)
        highest = torch.where(_finite(highest), highest, 0.0)
        # At most 1, also of a block without mass, whose top says nothing.
        scale = elementwise(torch.exp, (top.double() - highest.double()[:, None]).clamp_(max=0.0))
        return cls(masses, top, (masses.sum(2).double() * scale).to(torch.int64), highest)

    def token(self, number: Tensor) -> Tensor:
        """Where the numbers [B] in (0, 1) fall."""
        cumulative = self.scaled.cumsum(1)
        total = cumulative[:, -1:]
        target = torch.minimum((number[:, None] * total.double()).to(torch.int64), total - 1)
        block = (cumulative <= target).sum(1, keepdim=True).clamp_(max=cumulative.shape[1] - 1)
        mine = self.scaled.gather(1, block)
        masses = self.masses.gather(1, block[..., None].expand(-1, -1, self.masses.shape[2]))[:, 0].cumsum(1)
        own = masses[:, -1:]
        inside = target - (cumulative.gather(1, block) - mine)
        inside = torch.minimum((inside.double() * own.double() / mine.clamp(min=1).double()).to(torch.int64), own - 1)
        return (block * self.masses.shape[2] + (masses <= inside).sum(1, keepdim=True))[:, 0]

    def logprob(self, logit: Tensor) -> Tensor:
        """fp32 [B] of one logit a row."""
        total = self.scaled.sum(1).double() / FIXED_POINT
        return (logit.double() - self.highest.double() - elementwise(torch.log, total)).float()


def draw_reference(
    logits: Tensor, keys: Tensor, counters: Tensor, temperature: Tensor | None, truncated: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `posttrain.kernels.sampling`."""

    def at(x: Tensor, token: Tensor) -> Tensor:
        return x.gather(1, token[:, None])[:, 0]

    highest, likeliest = logits.max(1)
    number, last = uniform(keys, counters), logits.shape[1] - 1
    plain = Masses.of(logits)
    if temperature is None:
        token = plain.token(number).clamp_(0, last)  # only a broken row can fall outside
        logprob = plain_logprob = plain.logprob(at(logits, token))
    elif logits.device.type == "cpu" and not temperature.any():
        # What nobody draws from need not be made; a GPU would have to wait to know.
        token, logprob = likeliest, torch.zeros_like(temperature)
        plain_logprob = plain.logprob(at(logits, token))
    else:
        greedy = temperature == 0
        scaled = logits / temperature.masked_fill(greedy, 1.0)[:, None]
        if truncated is not None:
            scaled[: truncated.shape[0]] = truncated
        masses = Masses.of(scaled)
        token = torch.where(greedy, likeliest, masses.token(number).clamp_(0, last))
        logprob = masses.logprob(at(scaled, token)).masked_fill(greedy, 0.0)
        plain_logprob = plain.logprob(at(logits, token))
    return token, logprob, plain_logprob, ~_finite(highest)


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
