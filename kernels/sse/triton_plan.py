"""The chunk grid made on the device: a counting sort of the routed rows by (sequence, partition), without asking the host.

Same grid as `plan.py`, laid out for kernels: chunk ids of the shared partition come first, then those of the routed ones, each
kind in a range whose size the host knows (an upper bound), so that a launch covers one kind and empty chunks return at once.
Within a kind the chunks of a stream (sequence, partition) lie one after another. A row's place depends on its own stream only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.triton_launch import Launch, aligned, cdiv, power_of_two

# Tokens a program of the sort looks at; its one-hot matrix is [BLOCK, N].
BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """Attributes:
    rows: [shared_chunks + routed_chunks, C] int32, the row in each chunk position, -1 where there is none. A shared row is a
        token, a routed row token * R + route. Unused chunks are all -1, and used positions come first.
    begin, chunks: [S, 1+N] int32, first chunk and number of chunks of each stream.
    shared_chunks, routed_chunks: sizes of the two ranges of chunk ids.
    """

    rows: Tensor
    begin: Tensor
    chunks: Tensor
    shared_chunks: int
    routed_chunks: int


def plan_sizes(
    tokens: int, routes: int, sequences: int, partitions: int, chunk_size: int, shared: bool, *, pending: bool = False
) -> tuple[int, int]:
    """Upper bounds (shared_chunks, routed_chunks): a stream of n rows has at most (n + C - 1) / C chunks, and at most n. With
    `pending`, up to C - 1 rows come before its own."""
    held = chunk_size - 1 if pending else 0

    def bound(rows: int, streams: int) -> int:
        return min(rows, (rows + streams * held) // chunk_size + streams)

    return bound(tokens, sequences) if shared else 0, bound(tokens * routes, sequences * partitions)


def build_device_plan(
    index: Tensor, cu_seqlens: Tensor, *, num_partitions: int, chunk_size: int, shared: bool, pending: Tensor | None = None
) -> DevicePlan:
    """index [T, R] integers and cu_seqlens [S+1], both on the device that runs the kernels.

    pending: int32 [S, 1+N], rows below C that a stream's unfinished chunk has already. They take the first positions of its
    first chunk, if it gets a row: row T + ((s * (1+N) + p) * C + position), times R where p is a routed partition.
    """
    index, cu_seqlens = aligned(index), aligned(cu_seqlens)
    tokens, routes = index.shape
    sequences, device = cu_seqlens.shape[0] - 1, index.device
    shared_chunks, routed_chunks = plan_sizes(
        tokens, routes, sequences, num_partitions, chunk_size, shared, pending=pending is not None
    )
    rows = torch.full((shared_chunks + routed_chunks, chunk_size), -1, dtype=torch.int32, device=device)
    begin = torch.empty(sequences, 1 + num_partitions, dtype=torch.int32, device=device)
    chunks = torch.empty_like(begin)
    tiles, width = cdiv(tokens, BLOCK), max(2, power_of_two(num_partitions))
    counts = torch.empty(tiles, num_partitions, dtype=torch.int32, device=device)
    before = torch.empty(sequences + 1, num_partitions, dtype=torch.int32, device=device)
    sizes = dict(R=routes, N=num_partitions, BLOCK=BLOCK, WIDTH=width)
    grid_of = dict(N=num_partitions, C=chunk_size, SHARED=shared, PENDING=pending is not None)
    held = begin if pending is None else aligned(pending)
    _count((tiles,), (index, counts), (tokens,), sizes)
    _before((sequences + 1,), (index, counts, cu_seqlens, before), (tokens,), sizes)
    _offset((1,), (cu_seqlens, before, held, begin, chunks), (sequences, shared_chunks), grid_of | dict(STREAMS=1024))
    steps = max(1, sequences.bit_length())
    tensors = (index, counts, cu_seqlens, before, held, begin, rows)
    _place((tiles,), tensors, (tokens, sequences), grid_of | sizes | dict(STEPS=steps))
    if pending is not None:
        constants = dict(N=num_partitions, C=chunk_size, R=routes, BLOCK=power_of_two(chunk_size))
        _hold((begin.numel(),), (held, begin, chunks, rows), (tokens,), constants)
    return DevicePlan(rows=rows, begin=begin, chunks=chunks, shared_chunks=shared_chunks, routed_chunks=routed_chunks)


@triton.jit
def _occupied(index, token, valid, R: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """[BLOCK, WIDTH] int32: 1 where the token is routed to the partition (a token's partitions differ)."""
    partition = tl.arange(0, WIDTH)
    found = tl.zeros([BLOCK, WIDTH], dtype=tl.int32)
    for r in tl.static_range(R):
        chosen = tl.load(index + token.to(tl.int64) * R + r, mask=valid, other=-1)
        found += (chosen[:, None] == partition[None, :]).to(tl.int32)
    return found


@triton.jit
def _counts_before(counts, tile, N: tl.constexpr, WIDTH: tl.constexpr):
    """[WIDTH] int32: rows of each partition in the tiles before this one."""
    partition = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], dtype=tl.int32)
    for first in range(0, tile, 32):
        which = first + tl.arange(0, 32)
        mask = (which[:, None] < tile) & (partition[None, :] < N)
        total += tl.sum(tl.load(counts + which[:, None] * N + partition[None, :], mask=mask, other=0), 0)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _count_kernel(index, counts, tokens, R: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    tile = tl.program_id(0)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    found = _occupied(index, token, token < tokens, R, N, BLOCK, WIDTH)
    partition = tl.arange(0, WIDTH)
    tl.store(counts + tile * N + partition, tl.sum(found, 0), mask=partition < N)


@triton.jit(do_not_specialize=["tokens"])
def _before_kernel(
    index, counts, cu_seqlens, before, tokens, R: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """before[s, p]: rows of partition p in front of sequence s, all sequences counted."""
    s = tl.program_id(0)
    start = tl.load(cu_seqlens + s).to(tl.int32)
    tile = start // BLOCK
    token = tile * BLOCK + tl.arange(0, BLOCK)
    found = _occupied(index, token, token < start, R, N, BLOCK, WIDTH)
    partition = tl.arange(0, WIDTH)
    total = _counts_before(counts, tile, N, WIDTH) + tl.sum(found, 0)
    tl.store(before + s * N + partition, total, mask=partition < N)


@triton.jit(do_not_specialize=["sequences", "shared_chunks"])
def _offset_kernel(
    cu_seqlens, before, held, begin, chunks, sequences, shared_chunks,
    N: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr, PENDING: tl.constexpr, STREAMS: tl.constexpr,
):  # fmt: skip
    """One program: where the chunks of every stream begin, by a running sum over the streams."""
    carry = tl.zeros([], dtype=tl.int32)
    for first in range(0, sequences, STREAMS):
        s = first + tl.arange(0, STREAMS)
        valid = s < sequences
        length = tl.load(cu_seqlens + s + 1, mask=valid, other=0) - tl.load(cu_seqlens + s, mask=valid, other=0)
        length = length.to(tl.int32)
        if PENDING:
            length = tl.where(length > 0, length + tl.load(held + s * (1 + N), mask=valid, other=0), 0)
        needed = (length + C - 1) // C
        if not SHARED:
            needed = needed * 0
        tl.store(begin + s * (1 + N), carry + tl.cumsum(needed, 0) - needed, mask=valid)
        tl.store(chunks + s * (1 + N), needed, mask=valid)
        carry += tl.sum(needed, 0)
    carry = shared_chunks
    for first in range(0, sequences * N, STREAMS):
        stream = first + tl.arange(0, STREAMS)
        valid = stream < sequences * N
        length = tl.load(before + stream + N, mask=valid, other=0) - tl.load(before + stream, mask=valid, other=0)
        where = (stream // N) * (1 + N) + 1 + stream % N
        if PENDING:
            length = tl.where(length > 0, length + tl.load(held + where, mask=valid, other=0), 0)
        needed = (length + C - 1) // C
        tl.store(begin + where, carry + tl.cumsum(needed, 0) - needed, mask=valid)
        tl.store(chunks + where, needed, mask=valid)
        carry += tl.sum(needed, 0)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _place_kernel(
    index, counts, cu_seqlens, before, held, begin, rows, tokens, sequences,
    C: tl.constexpr, SHARED: tl.constexpr, PENDING: tl.constexpr, STEPS: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    valid = token < tokens
    # The last sequence that starts at or before the token, by bisection; empty sequences lose to the one after them.
    low = tl.zeros([BLOCK], dtype=tl.int32)
    high = low + sequences
    for _ in range(STEPS):
        middle = (low + high) // 2
        after = tl.load(cu_seqlens + middle, mask=valid, other=0) <= token
        low = tl.where(after & (high - low > 1), middle, low)
        high = tl.where(after, high, tl.maximum(middle, low + 1))
    if SHARED:
        position = token - tl.load(cu_seqlens + low, mask=valid, other=0).to(tl.int32)
        if PENDING:
            position += tl.load(held + low * (1 + N), mask=valid, other=0)
        chunk = tl.load(begin + low * (1 + N), mask=valid, other=0) + position // C
        tl.store(rows + chunk.to(tl.int64) * C + position % C, token, mask=valid)
    partition = tl.arange(0, WIDTH)
    found = _occupied(index, token, valid, R, N, BLOCK, WIDTH)
    rank = tl.cumsum(found, 0) - found + _counts_before(counts, tile, N, WIDTH)[None, :]
    for r in tl.static_range(R):
        chosen = tl.load(index + token.to(tl.int64) * R + r, mask=valid, other=-1).to(tl.int32)
        inside = valid & (chosen >= 0) & (chosen < N)
        own = tl.sum(tl.where(partition[None, :] == chosen[:, None], rank, 0), 1)
        position = own - tl.load(before + low * N + chosen, mask=inside, other=0)
        if PENDING:
            position += tl.load(held + low * (1 + N) + 1 + chosen, mask=inside, other=0)
        chunk = tl.load(begin + low * (1 + N) + 1 + chosen, mask=inside, other=0) + position // C
        tl.store(rows + chunk.to(tl.int64) * C + position % C, token * R + r, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _hold_kernel(held, begin, chunks, rows, tokens, N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """The pending rows of a stream that gets new ones. Grid (streams)."""
    stream = tl.program_id(0)
    position = tl.arange(0, BLOCK)
    present = (position < tl.load(held + stream)) & (tl.load(chunks + stream) > 0)
    row = (tokens + stream * C + position) * (1 if stream % (1 + N) == 0 else R)
    tl.store(rows + tl.load(begin + stream).to(tl.int64) * C + position, row, mask=present)


_count, _before, _offset, _place, _hold = (
    Launch(k) for k in (_count_kernel, _before_kernel, _offset_kernel, _place_kernel, _hold_kernel)
)
