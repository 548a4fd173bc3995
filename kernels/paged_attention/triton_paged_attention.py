"""One-token attention over pages in two launches: ranges of pages in parallel, then their sums.

Why a kernel of ours: to gather the pages for `scaled_dot_product_attention` moves three times the bytes that a step must read,
PyTorch 2.11's variable-length kernel takes keys without gaps, and flex_attention's paged form is compiled code around a block
mask that has to be made anew as sequences grow, which a CUDA graph cannot hold.

A program takes one sequence, one key/value head and one range of its pages, with the running maximum and sum of flash attention
(Dao et al., 2022; ranges in parallel as in its "flash decoding"). A sequence of n pages has min(SPLITS, n / LEAST) ranges, so
that its bits depend on its length alone, and programs of ranges that it does not have return at once: the grid is the same at
every step, fit for a CUDA graph. Bytes a step and layer: every visible row of K and V once, 4 D H_kv a token in bf16.

The number of a page is loaded a step before its rows: what is loaded inside a step is not looked through, and the rows of the
next page would not be on their way while those of this one are summed (which took 2.6 times as long).

One query a key head (multi-head attention) is a vector product, and each row of a page keeps a softmax of its own, so that
nothing crosses the rows before the end; grouped queries, padded to 16 rows, are a matrix product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Ranges of a sequence at most: 18 heads of one sequence then fill an H200's 132 multiprocessors twice.
SPLITS = 16
# Pages that are worth a program of their own.
LEAST = 8
# Loads run STAGES - 1 pages ahead of their use, as far as BUFFERS bytes of shared memory hold them.
STAGES, WARPS = 3, 4
BUFFERS = 160 * 2**10
# Stands for minus infinity, less which is 0 and not NaN.
NOTHING = tl.constexpr(-1e30)


@triton.jit
def _range(SLOTS, POSITIONS, b, split, width, PAGE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """-> slot, the token's position, first page of the range and the one after its last (none: first is not below it)."""
    slot = tl.load(SLOTS + b).to(tl.int64)
    last = tl.load(POSITIONS + b)
    pages = (tl.minimum(last, width.to(tl.int64) * PAGE - 1) // PAGE + 1).to(tl.int32)
    each = tl.maximum(LEAST, (pages + SPLITS - 1) // SPLITS)
    return slot, last, split * each, tl.where(slot < 0, 0, tl.minimum(split * each + each, pages))


@triton.jit
def _seen(at, last, width, WINDOW: tl.constexpr, PAGE: tl.constexpr):
    """Which rows of page `at` of a slot the token at `last` sees: [PAGE]."""
    place = at * PAGE + tl.arange(0, PAGE)
    if WINDOW:
        rows = width.to(tl.int64) * PAGE
        behind = ((last - place) % rows + rows) % rows
        return (behind < WINDOW) & (behind <= last)
    return place <= last


# A width of 1 would be a constant, which has no type to widen.
@triton.jit(do_not_specialize=["width"])
def paged_attention_kernel(
    Q, KEYS, VALUES, TABLE, SLOTS, POSITIONS, PART, STATS, scale,
    width, heads, WINDOW: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, WD: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A query a key head. PART [B, H, SPLITS, D] fp32 unnormalised outputs, STATS [B, H, SPLITS, 2] maximum and sum, both in
    powers of two. Grid (B * H, SPLITS)."""
    b, head, split = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    slot, last, first, end = _range(SLOTS, POSITIONS, b, split, width, PAGE, SPLITS, LEAST)
    if first >= end:
        return
    column, row = tl.arange(0, WD), tl.arange(0, PAGE)
    query = tl.program_id(0).to(tl.int64)
    q = tl.load(Q + query * D + column, mask=column < D, other=0.0).to(tl.float32) * (scale * 1.4426950408889634)
    highest = tl.full([PAGE], NOTHING, tl.float32)
    total = tl.zeros([PAGE], dtype=tl.float32)
    mixed = tl.zeros([PAGE, WD], dtype=tl.float32)
    table = TABLE + slot * width
    page = tl.load(table + first)
    for at in tl.range(first, end, num_stages=STAGES):
        following = tl.load(table + tl.minimum(at + 1, end - 1))
        seen = _seen(at, last, width, WINDOW, PAGE)
        where = ((page.to(tl.int64) * heads + head) * PAGE + row)[:, None] * D + column[None, :]
        mask = seen[:, None] & (column < D)[None, :]
        k, v = tl.load(KEYS + where, mask=mask, other=0.0), tl.load(VALUES + where, mask=mask, other=0.0)
        scores = tl.where(seen, tl.sum(q[None, :] * k.to(tl.float32), 1), NOTHING)
        new = tl.maximum(highest, scores)
        weight, kept = tl.where(seen, tl.exp2(scores - new), 0.0), tl.exp2(highest - new)
        total = total * kept + weight
        mixed = mixed * kept[:, None] + weight[:, None] * v.to(tl.float32)
        highest, page = new, following
    top = tl.max(highest, 0)
    kept = tl.exp2(highest - top)
    out = query * SPLITS + split
    tl.store(PART + out * D + column, tl.sum(mixed * kept[:, None], 0), mask=column < D)
    tl.store(STATS + out * 2, top)
    tl.store(STATS + out * 2 + 1, tl.sum(total * kept, 0))


@triton.jit(do_not_specialize=["width"])
def grouped_paged_attention_kernel(
    Q, KEYS, VALUES, TABLE, SLOTS, POSITIONS, PART, STATS, scale,
    width, heads_kv, WINDOW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, WD: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP queries a key head, padded to ROWS; PART and STATS as above. Grid (B * H_kv, SPLITS)."""
    b, head, split = tl.program_id(0) // heads_kv, tl.program_id(0) % heads_kv, tl.program_id(1)
    slot, last, first, end = _range(SLOTS, POSITIONS, b, split, width, PAGE, SPLITS, LEAST)
    if first >= end:
        return
    column, group, row = tl.arange(0, WD), tl.arange(0, ROWS), tl.arange(0, PAGE)
    query = (tl.program_id(0) * GROUP + group).to(tl.int64)
    real = (group < GROUP)[:, None] & (column < D)[None, :]
    q = tl.load(Q + query[:, None] * D + column[None, :], mask=real, other=0.0).to(tl.float32)
    highest = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mixed = tl.zeros([ROWS, WD], dtype=tl.float32)
    table = TABLE + slot * width
    page = tl.load(table + first)
    for at in tl.range(first, end, num_stages=STAGES):
        following = tl.load(table + tl.minimum(at + 1, end - 1))
        seen = _seen(at, last, width, WINDOW, PAGE)
        where = ((page.to(tl.int64) * heads_kv + head) * PAGE + row)[:, None] * D + column[None, :]
        mask = seen[:, None] & (column < D)[None, :]
        k, v = tl.load(KEYS + where, mask=mask, other=0.0), tl.load(VALUES + where, mask=mask, other=0.0)
        if HALF:
            scores = tl.dot(q.to(tl.bfloat16), tl.trans(k.to(tl.bfloat16)))
        else:
            scores = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision="ieee")
        # In powers of two, and scaled in fp32: bf16 operands stay what they are.
        scores = tl.where(seen[None, :], scores * (scale * 1.4426950408889634), NOTHING)
        new = tl.maximum(highest, tl.max(scores, 1))
        # A ring's page may hold nothing that is seen.
        weight, kept = tl.where(seen[None, :], tl.exp2(scores - new[:, None]), 0.0), tl.exp2(highest - new)
        total = total * kept + tl.sum(weight, 1)
        if HALF:
            mixed = mixed * kept[:, None] + tl.dot(weight.to(tl.bfloat16), v.to(tl.bfloat16))
        else:
            mixed = mixed * kept[:, None] + tl.dot(weight, v.to(tl.float32), input_precision="ieee")
        highest, page = new, following
    out = query * SPLITS + split
    tl.store(PART + out[:, None] * D + column[None, :], mixed, mask=real)
    tl.store(STATS + out * 2, highest, mask=group < GROUP)
    tl.store(STATS + out * 2 + 1, total, mask=group < GROUP)


@triton.jit(do_not_specialize=["width"])
def paged_attention_sum_kernel(
    PART, STATS, SLOTS, POSITIONS, O, width, heads,
    PAGE: tl.constexpr, D: tl.constexpr, WD: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """The ranges of one sequence and head, summed in order. Grid (B * H)."""
    program, column = tl.program_id(0).to(tl.int64), tl.arange(0, WD)
    b = program // heads
    slot, last = tl.load(SLOTS + b), tl.load(POSITIONS + b)
    pages = tl.minimum(last, width.to(tl.int64) * PAGE - 1) // PAGE + 1
    each = tl.maximum(LEAST, (pages + SPLITS - 1) // SPLITS)
    used = tl.where(slot < 0, 0, (pages + each - 1) // each)
    split = tl.arange(0, SPLITS)
    at = program * SPLITS + split
    highest = tl.load(STATS + at * 2, mask=split < used, other=-float("inf"))
    total = tl.load(STATS + at * 2 + 1, mask=split < used, other=0.0)
    top = tl.max(highest, 0)
    kept = tl.where(split < used, tl.exp2(highest - tl.where(top == -float("inf"), 0.0, top)), 0.0)
    mask = (split < used)[:, None] & (column < D)[None, :]
    part = tl.load(PART + at[:, None] * D + column[None, :], mask=mask, other=0.0)
    sum_ = tl.sum(total * kept, 0)
    o = tl.sum(part * kept[:, None], 0) / tl.where(used == 0, 1.0, sum_)
    tl.store(O + program * D + column, o.to(O.dtype.element_ty), mask=column < D)


@triton.jit(do_not_specialize=["width"])
def paged_write_kernel(
    K, V, KEYS, VALUES, TABLE, SLOTS, POSITIONS, width, heads_kv,
    RING: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, WD: tl.constexpr,
):  # fmt: skip
    """One token's rows into its page; padding into page 0. Grid (B * H_kv)."""
    b, head, column = tl.program_id(0) // heads_kv, tl.program_id(0) % heads_kv, tl.arange(0, WD)
    slot, place = tl.load(SLOTS + b).to(tl.int64), tl.load(POSITIONS + b)
    if RING:
        place = place % (width.to(tl.int64) * PAGE)
    page = tl.load(TABLE + slot * width + place // PAGE, mask=slot >= 0, other=0).to(tl.int64)
    at = ((page * heads_kv + head) * PAGE + place % PAGE) * D + column
    given, mask = tl.program_id(0).to(tl.int64) * D + column, column < D
    tl.store(KEYS + at, tl.load(K + given, mask=mask).to(tl.float32).to(KEYS.dtype.element_ty), mask=mask)
    tl.store(VALUES + at, tl.load(V + given, mask=mask).to(tl.float32).to(VALUES.dtype.element_ty), mask=mask)


def triton_paged_write(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    ring: bool,
) -> None:
    """See `posttrain.kernels.paged_attention`."""
    _check_contiguous(keys, values, table)
    batch, heads, dim = k.shape
    paged_write_kernel[(batch * heads,)](
        k.contiguous(), v.contiguous(), keys, values, table, slots, positions, table.shape[1], heads,
        RING=ring, PAGE=keys.shape[2], D=dim, WD=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


def _check_contiguous(*pools: Tensor) -> None:
    if not all(pool.is_contiguous() for pool in pools):
        raise ValueError("keys, values and table must be contiguous: they are too large to be copied at every step")


def triton_paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    window: int | None,
    scale: float,
) -> Tensor:
    """See `posttrain.kernels.paged_attention`; no gradients."""
    batch, heads, dim = q.shape
    kv_heads, page = keys.shape[1:3]
    _check_contiguous(keys, values, table)
    group, wide = heads // kv_heads, triton.next_power_of_2(dim)
    part = torch.empty(batch, heads, SPLITS, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(batch, heads, SPLITS, 2, dtype=torch.float32, device=q.device)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    shared = dict(PAGE=page, D=dim, WD=wide, SPLITS=SPLITS, LEAST=LEAST)
    tensors = (q.contiguous(), keys, values, table, slots, positions, part, stats)
    buffer = 2 * page * wide * keys.element_size()
    if buffer > BUFFERS:
        raise ValueError(
            f"pages of {page} rows of {dim} in {keys.dtype} take {buffer} bytes of shared memory, but the kernel has {BUFFERS}; "
            "use shorter pages, or backend='torch'"
        )
    stages = min(STAGES, 1 + BUFFERS // buffer)
    # The rows' softmaxes take registers: 64 a thread at 64 rows of 128.
    options = dict(WINDOW=window or 0, STAGES=stages, num_warps=WARPS if page * wide <= 8192 else 2 * WARPS)
    if group == 1:
        paged_attention_kernel[(batch * heads, SPLITS)](*tensors, scale, table.shape[1], heads, **shared, **options)
    else:
        half = keys.dtype == torch.bfloat16 and q.dtype == torch.bfloat16
        grouped_paged_attention_kernel[(batch * kv_heads, SPLITS)](
            *tensors, scale, table.shape[1], kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), HALF=half,
            **shared, **options,
        )  # fmt: skip
    paged_attention_sum_kernel[(batch * heads,)](part, stats, slots, positions, o, table.shape[1], heads, num_warps=2, **shared)
    return o
