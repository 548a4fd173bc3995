"""Softmax attention whose rows have the same bits in a decode step, a piece of a prompt and a packed forward.

A query row goes through blocks of BLOCK keys in the order of their absolute positions, with the running maximum and sum of flash
attention (Dao et al., 2022). Every SPLIT keys it begins anew, and what the ranges gave is merged in their order. So a decode
step may compute the ranges in parallel, and a packed forward, which holds more rows of a sequence in a tile, one after another:
what a row adds up is the same, in the same order. Blocks and ranges that a row does not see leave it as it is, exactly.

A program has 64 rows or a multiple, and a warp for every 16: products then go to warp groups, and a row lies in one warp, whose
sums over the keys have one order. In a decode step one row of the 64 is a query; it waits for memory all the same. Sums that a
compiler might round once or twice are written as `fma`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.batch_invariant.triton_product import form_of, product, product_rows
from posttrain.kernels.triton_launch import Launch, aligned, cdiv, interpreted, power_of_two

BLOCK, SPLIT = 64, 1024
# Query rows of a program in a packed forward (64 or more, as in a decode step), and programs that share the ranges of a sequence
# and head in a decode step.
ROWS, PROGRAMS = 128, 8
# Blocks of keys on their way, in a packed forward and in a decode step, three of whose programs then share a multiprocessor.
STAGES, DECODE_STAGES = 3, 2
# Rows of a decode step; the interpreter pays for every one.
LEAST_ROWS = 16 if interpreted() else 64
LOG2_E = 1.4426950408889634


@triton.jit
def attend(q, k, v, seen, highest, total, mixed, factor, FORM: tl.constexpr):
    """One block of keys for all rows: q [BM, D], k and v [BLOCK, D], seen [BM, BLOCK]; factor: the scale, in powers of two."""
    scores = product(q, k, tl.zeros([q.shape[0], k.shape[0]], dtype=tl.float32), FORM)
    scores = tl.where(seen, scores * factor, -float("inf"))
    new = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(new == -float("inf"), 0.0, new)  # -inf less -inf would be NaN
    weight, kept = tl.exp2(scores - base[:, None]), tl.exp2(highest - base)
    total = tl.fma(total, kept, tl.sum(weight, 1))
    return new, total, product_rows(weight, v, mixed * kept[:, None], FORM)


@triton.jit
def merge_factors(before, after):
    """Maximum of two ranges, and what each is multiplied by."""
    new = tl.maximum(before, after)
    base = tl.where(new == -float("inf"), 0.0, new)
    return new, tl.exp2(before - base), tl.exp2(after - base)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    if WINDOW:
        return tl.maximum(position - WINDOW + 1, 0)
    else:
        return position * 0


@triton.jit(do_not_specialize=["width", "heads_kv", "splits"])
def exact_decode_kernel(
    Q, KEYS, VALUES, TABLE, SLOTS, POSITIONS, PART, STATS, width, heads_kv, splits, factor,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, WD: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """PART [B, H, splits, D] fp32 unnormalised, STATS [B, H, splits, 2] maximum and sum. Grid (B * H_kv, programs)."""
    b, head = tl.program_id(0) // heads_kv, tl.program_id(0) % heads_kv
    slot, last = tl.load(SLOTS + b).to(tl.int64), tl.load(POSITIONS + b).to(tl.int32)
    if slot < 0:
        return
    column, row, key = tl.arange(0, WD), tl.arange(0, BM), tl.arange(0, BLOCK)
    query = (b * heads_kv + head).to(tl.int64) * GROUP + row
    q_mask = (row < GROUP)[:, None] & (column < D)[None, :]
    q = tl.load(Q + query[:, None] * D + column[None, :], mask=q_mask, other=0.0)
    lowest = first_seen(last, WINDOW)
    first, ring = lowest // SPLIT, width * PAGE
    for split in range(first + tl.program_id(1), last // SPLIT + 1, tl.num_programs(1)):
        begin, end = tl.maximum(lowest, split * SPLIT) // BLOCK, tl.cdiv(tl.minimum(last + 1, (split + 1) * SPLIT), BLOCK)
        highest = tl.full([BM], -float("inf"), dtype=tl.float32)
        total = tl.zeros([BM], dtype=tl.float32)
        mixed = tl.zeros([BM, WD], dtype=tl.float32)
        # A block's page is looked up a step before its rows are loaded: addresses that are loaded in a step stop its loads.
        page = tl.load(TABLE + slot * width + begin * BLOCK % ring // PAGE).to(tl.int64)
        for at in tl.range(begin, end, num_stages=STAGES):
            following = tl.load(TABLE + slot * width + tl.minimum(at + 1, end - 1) * BLOCK % ring // PAGE).to(tl.int64)
            position = at * BLOCK + key
            inside = (position <= last) & (position >= lowest)
            where = ((page * heads_kv + head) * PAGE + at * BLOCK % PAGE + key)[:, None] * D + column[None, :]
            mask = inside[:, None] & (column < D)[None, :]
            k, v = tl.load(KEYS + where, mask=mask, other=0.0), tl.load(VALUES + where, mask=mask, other=0.0)
            highest, total, mixed = attend(q, k, v, inside[None, :], highest, total, mixed, factor, FORM)
            page = following
        out = query * splits + split - first
        tl.store(PART + out[:, None] * D + column[None, :], mixed, mask=q_mask)
        tl.store(STATS + out * 2, highest, mask=row < GROUP)
        tl.store(STATS + out * 2 + 1, total, mask=row < GROUP)


@triton.jit(do_not_specialize=["heads", "splits"])
def exact_merge_kernel(
    PART, STATS, SLOTS, POSITIONS, O, heads, splits, WINDOW: tl.constexpr, D: tl.constexpr, WD: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """The ranges of a token and head, merged in order; zeros for padding. Grid (B * H)."""
    program, column = tl.program_id(0).to(tl.int64), tl.arange(0, WD)
    slot, last = tl.load(SLOTS + program // heads), tl.load(POSITIONS + program // heads).to(tl.int32)
    out = O + program * D + column
    if slot < 0:
        tl.store(out, tl.zeros([WD], dtype=O.dtype.element_ty), mask=column < D)
        return
    at = program * splits
    highest, total = tl.load(STATS + at * 2), tl.load(STATS + at * 2 + 1)
    mixed = tl.load(PART + at * D + column, mask=column < D, other=0.0)
    for split in range(1, last // SPLIT - first_seen(last, WINDOW) // SPLIT + 1):
        highest, before, after = merge_factors(highest, tl.load(STATS + (at + split) * 2))
        total = tl.fma(total, before, tl.load(STATS + (at + split) * 2 + 1) * after)
        mixed = tl.fma(mixed, before, tl.load(PART + (at + split) * D + column, mask=column < D, other=0.0) * after)
    tl.store(out, (mixed / tl.where(total == 0.0, 1.0, total)).to(O.dtype.element_ty), mask=column < D)


@triton.jit(do_not_specialize=["heads_kv"])
def exact_packed_kernel(
    Q, KEYS, VALUES, CU, CU_KEYS, ENDS, SCRATCH, O, heads_kv, factor,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, WD: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """O [T, H, D]; SCRATCH the same in fp32, what the ranges so far add up to. Grid (tiles of a sequence, H_kv, S).

    A row is a query head of a token: the GROUP heads of a key head are the rows of a token."""
    tile, head, s = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token, end = tl.load(CU + s), tl.load(ENDS + s)
    tokens = tl.load(CU + s + 1) - first_token
    if tile * BM >= tokens * GROUP:
        return
    first_key = tl.load(CU_KEYS + s)
    held = end - (tl.load(CU_KEYS + s + 1) - first_key)  # position of the first key that is there
    column, key = tl.arange(0, WD), tl.arange(0, BLOCK)
    token = (tile * BM + tl.arange(0, BM)) // GROUP
    # Far offsets are scalars, and those of a tile 32 bits wide: registers are short here.
    far = (first_token.to(tl.int64) * heads_kv + head) * GROUP * D
    Q, O, SCRATCH = Q + far, O + far, SCRATCH + far
    position = end - tokens + token
    at = (token * heads_kv * GROUP + (tile * BM + tl.arange(0, BM)) % GROUP)[:, None] * D + column[None, :]
    q_mask = (token < tokens)[:, None] & (column < D)[None, :]
    q = tl.load(Q + at, mask=q_mask, other=0.0)
    near = key[:, None] * heads_kv * D + column[None, :]
    lowest = tl.maximum(first_seen(end - tokens + tile * BM // GROUP, WINDOW), held)
    behind = tl.minimum(end, end - tokens + (tile * BM + BM - 1) // GROUP + 1)
    first, last = lowest // SPLIT, (behind - 1) // SPLIT
    highest_before = tl.full([BM], -float("inf"), dtype=tl.float32)
    total_before, mixed = tl.zeros([BM], dtype=tl.float32), tl.zeros([BM, WD], dtype=tl.float32)
    for split in range(first, last + 1):
        begin, stop = tl.maximum(lowest, split * SPLIT) // BLOCK, tl.cdiv(tl.minimum(behind, (split + 1) * SPLIT), BLOCK)
        highest = tl.full([BM], -float("inf"), dtype=tl.float32)
        total = tl.zeros([BM], dtype=tl.float32)
        mixed = tl.zeros([BM, WD], dtype=tl.float32)
        for block in tl.range(begin, stop, num_stages=STAGES):
            place = block * BLOCK + key
            far = ((first_key - held + block * BLOCK).to(tl.int64) * heads_kv + head) * D
            mask = ((place >= lowest) & (place < behind))[:, None] & (column < D)[None, :]
            k, v = tl.load(KEYS + far + near, mask=mask, other=0.0), tl.load(VALUES + far + near, mask=mask, other=0.0)
            seen = (place[None, :] <= position[:, None]) & (place[None, :] >= first_seen(position, WINDOW)[:, None])
            highest, total, mixed = attend(q, k, v, seen, highest, total, mixed, factor, FORM)
        if split > first:
            highest, before, after = merge_factors(highest_before, highest)
            total = tl.fma(total_before, before, total * after)
            mixed = tl.fma(tl.load(SCRATCH + at, mask=q_mask, other=0.0), before[:, None], mixed * after[:, None])
        highest_before, total_before = highest, total
        if split < last:
            tl.store(SCRATCH + at, mixed, mask=q_mask)
            tl.debug_barrier()
    mixed = mixed / tl.where(total_before == 0.0, 1.0, total_before)[:, None]
    tl.store(O + at, mixed.to(O.dtype.element_ty), mask=q_mask)


_DECODE, _MERGE, _PACKED = Launch(exact_decode_kernel), Launch(exact_merge_kernel), Launch(exact_packed_kernel)


def launch_paged(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, slots: Tensor, positions: Tensor, *, window: int | None, scale: float
) -> Tensor:
    """See `exact_paged_attention`."""
    batch, heads, dim = q.shape
    kv_heads, page = keys.shape[1:3]
    splits = cdiv(table.shape[1] * page, SPLIT) if window is None else window // SPLIT + 2
    part = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=q.device)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    shared = dict(WINDOW=window or 0, D=dim, WD=power_of_two(dim), SPLIT=SPLIT)
    group = heads // kv_heads
    rows = max(LEAST_ROWS, power_of_two(group))
    constants = shared | dict(
        GROUP=group, BM=rows, PAGE=page, BLOCK=BLOCK, FORM=form_of(q.dtype, keys.dtype), STAGES=DECODE_STAGES,
        num_warps=max(4, rows // 16),
    )  # fmt: skip
    slots, positions = aligned(slots), aligned(positions)
    tensors = (aligned(q), keys, values, table, slots, positions, part, stats)
    _DECODE((batch * kv_heads, min(PROGRAMS, splits)), tensors, (table.shape[1], kv_heads, splits, scale * LOG2_E), constants)
    _MERGE((batch * heads,), (part, stats, slots, positions, o), (heads, splits), shared | dict(num_warps=1))
    return o


def launch_packed(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], key_lengths: Sequence[int], ends: Sequence[int],
    *, window: int | None, scale: float,
) -> Tensor:  # fmt: skip
    """See `exact_attention`."""
    heads, dim = q.shape[1:]
    kv_heads = k.shape[1]
    group, rows = heads // kv_heads, LEAST_ROWS if interpreted() else ROWS
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Ranges that begin at the same place are merged in the scratch; a sequence within one range needs none.
    needs_scratch = max(ends) > SPLIT
    scratch = torch.empty(q.shape if needs_scratch else (1,), dtype=torch.float32, device=q.device)
    bounds = torch.tensor([[0, *lengths], [0, *key_lengths], [0, *ends]], dtype=torch.int32)
    bounds[:2] = bounds[:2].cumsum(1)
    if q.is_cuda:
        bounds = bounds.pin_memory().to(q.device, non_blocking=True)
    tensors = (
        aligned(q), aligned(k), aligned(v), aligned(bounds[0]), aligned(bounds[1]), aligned(bounds[2, 1:]), scratch, o,
    )  # fmt: skip
    constants = dict(
        WINDOW=window or 0, GROUP=group, BM=rows, D=dim, WD=power_of_two(dim), SPLIT=SPLIT, BLOCK=BLOCK,
        FORM=form_of(q.dtype, k.dtype), STAGES=STAGES, num_warps=max(4, rows // 16),
    )  # fmt: skip
    _PACKED((cdiv(max(lengths) * group, rows), kv_heads, len(lengths)), tensors, (kv_heads, scale * LOG2_E), constants)
    return o
