"""Two launches for a step's tokens and one for its entries, where PyTorch's operators take about forty; nothing is read back.

A draw reads its logits once for the sums of blocks of them, and one block again: 4 bytes a logit, where PyTorch's softmax,
maximum and sums move 20 and more. Sums are of integers, so neither blocks nor warps change a token. exp is CUDA's own, as
PyTorch's; interpreted it is numpy's, whose last bit may differ, and a probability with it by 2^-24 of itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from posttrain.kernels.sampling.reference import BLOCK, FIXED_POINT, GOLDEN, MIX_1, MIX_2, signed

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
def _exp(x):
    if _EXACT:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def _log(x):
    if _EXACT:
        return libdevice.log(x)
    else:
        return tl.log(x)


@triton.jit
def _finite_or(x, other):
    return tl.where((x - x) == 0, x, other)


@triton.jit
def _masses(x, top):
    """See `reference.fixed_point`; top: the block's largest logit, or 0."""
    return (_exp(_finite_or(x, -float("inf")) - top) * _FIXED_POINT).to(tl.int64)


@triton.jit
def _scaled_logits(LOGITS, TEMPERATURE, TRUNCATED, row, at, vocab, truncated):
    """What a tempered row draws from."""
    is_cut = row < truncated
    kept = tl.load(TRUNCATED + row * vocab + at, mask=(at < vocab) & is_cut, other=-float("inf"))
    x = tl.load(LOGITS + row * vocab + at, mask=(at < vocab) & (is_cut == 0), other=-float("inf"))
    heat = tl.load(TEMPERATURE + row)
    return tl.where(is_cut, kept, tl.div_rn(x, tl.where(heat == 0, 1.0, heat) + tl.zeros_like(x)))


@triton.jit
def _store_masses(x, TOP, MASS, where):
    top = _finite_or(tl.max(_finite_or(x, -float("inf")), 0), 0.0)
    tl.store(TOP + where, top)
    tl.store(MASS + where, tl.sum(_masses(x, top), 0))


@triton.jit(do_not_specialize=["rows", "truncated"])
def mass_kernel(
    LOGITS, TEMPERATURE, TRUNCATED, TOP, MASS, HIGHEST, ARGMAX, vocab, blocks, rows, truncated,
    TEMPERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each block of a row: TOP its largest finite logit (0 where there is none), MASS its sum in that scale, both
    [1 or 2, B, blocks] (the second of what a tempered row draws from); HIGHEST [B, blocks] its largest logit, NaN where it holds
    one, and ARGMAX where that is first. Grid (B, blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, where = block * BLOCK + tl.arange(0, BLOCK), row * blocks + block
    x = tl.load(LOGITS + row * vocab + at, mask=at < vocab, other=-float("inf"))
    highest = tl.max(tl.where(x == x, x, -float("inf")), 0)
    tl.store(ARGMAX + where, tl.min(tl.where(x == highest, at, vocab), 0))
    tl.store(HIGHEST + where, tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), highest))
    _store_masses(x, TOP, MASS, where)
    if TEMPERED:
        y = _scaled_logits(LOGITS, TEMPERATURE, TRUNCATED, row, at, vocab, truncated)
        _store_masses(y, TOP, MASS, (rows + row) * blocks + block)


@triton.jit
def _scaled_masses(TOP, MASS, row, blocks, BLOCKS: tl.constexpr):
    """The blocks' tops and masses, those in the row's scale, and that scale's logit."""
    block = tl.arange(0, BLOCKS)
    mask = block < blocks
    mass = tl.load(MASS + row * blocks + block, mask=mask, other=0)
    top = tl.load(TOP + row * blocks + block, mask=mask, other=0.0)
    highest = _finite_or(tl.max(tl.where(mass > 0, top, -float("inf")), 0), 0.0)
    # At most 1, also of a block without mass, whose top says nothing.
    scale = _exp(tl.minimum(top.to(tl.float64) - highest.to(tl.float64), 0.0))
    return top, mass, (mass.to(tl.float64) * scale).to(tl.int64), highest


@triton.jit
def _logprob(logit, highest, scaled):
    total = tl.sum(scaled, 0).to(tl.float64) / _FIXED_POINT
    return (logit.to(tl.float64) - highest.to(tl.float64) - _log(total)).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "truncated"])
def draw_kernel(
    LOGITS, TEMPERATURE, TRUNCATED, TOP, MASS, HIGHEST, ARGMAX, KEYS, COUNTERS, TOKEN, LOGPROB, PLAIN, BROKEN, vocab, blocks,
    rows, truncated, TEMPERED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The block that a row's number falls into, then its place there. Grid (B)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    chosen_row = rows + row if TEMPERED else row
    top, mass, scaled, highest = _scaled_masses(TOP, MASS, chosen_row, blocks, BLOCKS)
    total, cumulative = tl.sum(scaled, 0), tl.cumsum(scaled, 0)
    number = _uniform(tl.load(KEYS + row), tl.load(COUNTERS + row))
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    chosen = tl.minimum(tl.sum(((cumulative <= target) & (block < blocks)).to(tl.int32), 0), blocks - 1)
    before = tl.sum(tl.where(block < chosen, scaled, 0), 0)
    mine, own = tl.sum(tl.where(block == chosen, scaled, 0), 0), tl.sum(tl.where(block == chosen, mass, 0), 0)
    inside = (target - before).to(tl.float64) * own.to(tl.float64) / tl.maximum(mine, 1).to(tl.float64)
    inside = tl.minimum(inside.to(tl.int64), own - 1)
    at = chosen * BLOCK + tl.arange(0, BLOCK)
    if TEMPERED:
        x = _scaled_logits(LOGITS, TEMPERATURE, TRUNCATED, row, at, vocab, truncated)
    else:
        x = tl.load(LOGITS + row * vocab + at, mask=at < vocab, other=-float("inf"))
    masses = _masses(x, tl.sum(tl.where(block == chosen, top, 0.0), 0))
    place = tl.sum((tl.cumsum(masses, 0) <= inside).to(tl.int32), 0)
    token = tl.minimum(chosen * BLOCK + place, vocab - 1)  # only a broken row can fall outside

    largest = tl.load(HIGHEST + row * blocks + block, mask=block < blocks, other=-float("inf"))
    most = tl.max(tl.where(largest == largest, largest, -float("inf")), 0)
    bad = (tl.max((largest != largest).to(tl.int32), 0) > 0) | ((most - most) != 0)
    if TEMPERED:
        first = tl.load(ARGMAX + row * blocks + block, mask=block < blocks, other=0)
        likeliest = tl.minimum(tl.min(tl.where((largest == most) & (block < blocks), first, vocab), 0), vocab - 1)
        greedy = tl.load(TEMPERATURE + row) == 0
        token = tl.where(greedy, likeliest, token)
        logit = tl.max(_scaled_logits(LOGITS, TEMPERATURE, TRUNCATED, row, token + tl.arange(0, 1), vocab, truncated), 0)
        tl.store(LOGPROB + row, tl.where(greedy, 0.0, _logprob(logit, highest, scaled)))
        _, _, scaled, highest = _scaled_masses(TOP, MASS, row, blocks, BLOCKS)
    plain = _logprob(tl.load(LOGITS + row * vocab + token), highest, scaled)
    tl.store(PLAIN + row, plain)
    if not TEMPERED:
        tl.store(LOGPROB + row, plain)
    tl.store(TOKEN + row, token.to(tl.int64))
    tl.store(BROKEN + row, bad.to(tl.uint8))


def triton_draw(
    logits: Tensor, keys: Tensor, counters: Tensor, temperature: Tensor | None, truncated: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `posttrain.kernels.sampling`."""
    logits, (batch, vocab) = logits.contiguous(), logits.shape
    blocks, tempered = triton.cdiv(vocab, BLOCK), temperature is not None
    temperature = logits if temperature is None else temperature.contiguous()
    cut = 0 if truncated is None else truncated.shape[0]
    truncated = logits if truncated is None else truncated.contiguous()
    mass = torch.empty(1 + tempered, batch, blocks, dtype=torch.int64, device=logits.device)
    top = torch.empty_like(mass, dtype=torch.float32)
    highest, argmax = (torch.empty_like(mass[0], dtype=dtype) for dtype in (torch.float32, torch.int32))
    token, broken = (torch.empty_like(keys, dtype=dtype) for dtype in (torch.int64, torch.bool))
    logprob, plain = (torch.empty_like(keys, dtype=torch.float32) for _ in range(2))
    given = (logits, temperature, truncated, top, mass, highest, argmax)
    mass_kernel[(batch, blocks)](*given, vocab, blocks, batch, cut, TEMPERED=tempered, BLOCK=BLOCK)
    draw_kernel[(batch,)](
        *given, keys.contiguous(), counters.contiguous(), token, logprob, plain, broken.view(torch.uint8), vocab, blocks, batch,
        cut, TEMPERED=tempered, BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return token, logprob, plain, broken


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
