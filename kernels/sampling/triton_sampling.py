"""Two launches for a step's tokens and one for its entries, where PyTorch's operators take about forty; nothing is read back.

A draw reads its row once for the sums of blocks of it, and one block again; PyTorch's way moves 44 bytes a logit. Sums are of
integers, so neither blocks nor warps change a token. exp is CUDA's own, as PyTorch's; interpreted it is numpy's, whose last bit
may differ, and a probability with it by 2^-24 of itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from posttrain.kernels.sampling.reference import FIXED_POINT, GOLDEN, MIX_1, MIX_2, signed

# Logits of a program's block.
BLOCK = 2048
# Entries that a program brings forward.
ROWS = 128
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(signed(bits)) for bits in (GOLDEN, MIX_1, MIX_2))
_FIXED_POINT = tl.constexpr(FIXED_POINT)
_EXACT = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _shift_right(bits, BY: tl.constexpr):
    return (bits >> BY) & ((1 << (64 - BY)) - 1)


@triton.jit
def _uniform(keys, counters):
    """See `reference.uniform`."""
    bits = keys + (counters + 1) * _GOLDEN
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    bits = bits ^ _shift_right(bits, 31)
    return (_shift_right(bits, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _mass(logprobs):
    """See `reference.fixed_point`."""
    if _EXACT:
        p = libdevice.exp(logprobs)
    else:
        p = tl.exp(logprobs)
    return (p * _FIXED_POINT).to(tl.int64)


@triton.jit
def mass_kernel(LOGPROBS, MASS, vocab, blocks, BLOCK: tl.constexpr):
    """MASS int64 [B, blocks]: of each block of a row. Grid (B, blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGPROBS + row * vocab + at, mask=at < vocab, other=-float("inf"))
    tl.store(MASS + row * blocks + block, tl.sum(_mass(x), 0))


@triton.jit
def draw_kernel(
    LOGPROBS, MASS, KEYS, COUNTERS, TOKEN, LOGPROB, vocab, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """The block that a row's number falls into, then its place there. Grid (B)."""
    row = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, 1)
    number = _uniform(tl.load(KEYS + row + one), tl.load(COUNTERS + row + one))
    block = tl.arange(0, BLOCKS)
    mass = tl.load(MASS + row * blocks + block, mask=block < blocks, other=0)
    total = tl.sum(mass, 0)
    target = tl.minimum(tl.sum((number * total.to(tl.float64)).to(tl.int64), 0), total - 1)
    chosen = tl.sum(((tl.cumsum(mass, 0) <= target) & (block < blocks)).to(tl.int32), 0)
    before = tl.sum(tl.where(block < chosen, mass, 0), 0)
    at = chosen * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGPROBS + row * vocab + at, mask=at < vocab, other=-float("inf"))
    inside = tl.sum((tl.cumsum(_mass(x), 0) + before <= target).to(tl.int32), 0)
    token = tl.minimum(chosen * BLOCK + inside, vocab - 1)
    tl.store(TOKEN + row, token.to(tl.int64))
    tl.store(LOGPROB + row, tl.load(LOGPROBS + row * vocab + token))


def triton_draw(logprobs: Tensor, keys: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
    """See `posttrain.kernels.sampling`."""
    logprobs, (batch, vocab) = logprobs.contiguous(), logprobs.shape
    blocks = triton.cdiv(vocab, BLOCK)
    mass = torch.empty(batch, blocks, dtype=torch.int64, device=logprobs.device)
    token, logprob = torch.empty_like(mass[:, 0]), torch.empty_like(logprobs[:, 0])
    mass_kernel[(batch, blocks)](logprobs, mass, vocab, blocks, BLOCK=BLOCK)
    draw_kernel[(batch,)](
        logprobs, mass, keys.contiguous(), counters.contiguous(), token, logprob, vocab, blocks,
        BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return token, logprob


@triton.jit(do_not_specialize=["batch", "places", "ends"])
def advance_kernel(
    INTEGERS, FINISHED, ENDS, WHERE, TOKEN, LOGPROB, PLAIN, BROKEN, TABLE, batch, places, ends, ROWS: tl.constexpr
):  # fmt: skip
    """Grid (B / ROWS). What has finished is not written to."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < batch
    place = tl.load(WHERE + row, mask=mask, other=0)
    token = tl.load(TOKEN + row, mask=mask, other=0)
    broken = tl.load(BROKEN + row, mask=mask, other=0) != 0
    position = tl.load(INTEGERS + places + place, mask=mask, other=0)
    drawn = tl.load(INTEGERS + 2 * places + place, mask=mask, other=0)
    ended = broken | (drawn + 1 >= tl.load(INTEGERS + 3 * places + place, mask=mask, other=0))
    for end in range(ends):
        ended = ended | (token == tl.load(ENDS + end))
    live = mask & (tl.load(FINISHED + place, mask=mask, other=1) == 0)
    tl.store(INTEGERS + place, token, mask=live)
    tl.store(INTEGERS + places + place, position + 1, mask=live)
    tl.store(INTEGERS + 2 * places + place, drawn + 1, mask=live)
    tl.store(FINISHED + place, ended.to(tl.uint8), mask=live)
    out = TABLE + row * 5
    tl.store(out, token.to(tl.float64), mask=mask)
    tl.store(out + 1, tl.load(LOGPROB + row, mask=mask, other=0.0).to(tl.float64), mask=mask)
    tl.store(out + 2, tl.load(PLAIN + row, mask=mask, other=0.0).to(tl.float64), mask=mask)
    tl.store(out + 3, broken.to(tl.float64), mask=mask)
    tl.store(out + 4, ended.to(tl.float64), mask=mask)


def triton_advance(
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
    batch = rows.shape[0]
    table = torch.empty(batch, 5, dtype=torch.float64, device=rows.device)
    given = [column.contiguous() for column in (rows, token, logprob, plain_logprob, broken.view(torch.uint8))]
    advance_kernel[(triton.cdiv(batch, ROWS),)](
        integers, finished.view(torch.uint8), ends, *given, table, batch, integers.shape[1], ends.shape[0], ROWS=ROWS
    )
    return table
