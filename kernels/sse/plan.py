"""The chunk grid: which chunk, and which row of it, every (token, partition) pair falls into.

A *row* is one token in one partition: T shared rows first (where there is a shared partition), then T*R routed rows, route
fastest. A *stream* is one (sequence, partition), numbered s*(1+N)+p with p = 0 the shared partition. Chunk c of a stream
holds its rows [cC, (c+1)C) in token order, whatever else is in the batch.

On the CPU the grid has exactly the chunks that exist, ordered so that step c of the state scan is one slice of chunks and
the first n streams. On a GPU nothing may be read back, so the sizes are upper bounds known to the host: chunks lie stream
by stream, and a stream that has ended keeps visiting one all-padding chunk at the end, which changes no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Select = slice | Tensor


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """Attributes:
    rows: [NC, C] int64, the row in each chunk position, M (the number of rows) where there is none.
    place: [M] int64, where a row lies: chunk * C + position.
    steps: (chunks, streams) a step of the scan; the streams index the scan's own order.
    order: [streams] the stream at each place of the scan's order; rank is its inverse.
    counts: [streams] rows of each stream, the pending ones included.
    ordinal_chunk: the chunk ids of (stream, ordinal) by `chunk_of`.
    """

    chunk_size: int
    rows: Tensor
    place: Tensor
    steps: Sequence[tuple[Select, Select]]
    order: Tensor
    rank: Tensor
    counts: Tensor
    offsets: Tensor
    exact: bool

    def chunk_of(self, streams: Tensor, ordinal: Tensor) -> Tensor:
        """Chunk id of chunk `ordinal` of each stream (both [n])."""
        return self.offsets[ordinal] + self.rank[streams] if self.exact else self.offsets[streams] + ordinal


def build_plan(
    index: Tensor,
    cu_seqlens: Tensor,
    *,
    num_partitions: int,
    chunk_size: int,
    shared: bool,
    longest: int,
    pending: Tensor | None = None,
    exact: bool | None = None,
) -> ChunkPlan:
    """Sorts the rows of a call onto the grid.

    Args:
        index: [T, R] partitions of each token.
        cu_seqlens: [S+1] on the same device.
        longest: no sequence is longer than this; bounds the number of scan steps.
        pending: [S * (1+N)] rows that each stream already has in its unfinished chunk (decoding), all below C.
        exact: size the grid by what is there (reads values back); by default on the CPU only.
    """
    tokens = index.shape[0]
    sequences, streams_each = cu_seqlens.shape[0] - 1, 1 + num_partitions
    device, streams = index.device, sequences * streams_each
    token = torch.arange(tokens, device=device)
    sequence = torch.bucketize(token, cu_seqlens[1:], right=True, out_int32=False)
    base = sequence * streams_each
    stream = (base[:, None] + 1 + index).reshape(-1)
    if shared:
        stream = torch.cat([base, stream])
    rows = stream.shape[0]
    by_stream = torch.sort(stream, stable=True)
    bounds = torch.searchsorted(by_stream.values, torch.arange(streams + 1, device=device))
    starts, counts = bounds[:-1], bounds.diff()
    if pending is not None:
        starts = starts - pending
        counts = torch.where(counts > 0, counts + pending, 0)
    position = torch.empty_like(stream)
    position[by_stream.indices] = torch.arange(rows, device=device) - starts[by_stream.values]
    ordinal, within = position // chunk_size, position % chunk_size
    chunks = (counts + chunk_size - 1) // chunk_size
    held = 0 if pending is None else chunk_size - 1
    exact = device.type == "cpu" if exact is None else exact
    if exact:
        num_chunks, order, offsets, steps = _exact_steps(chunks)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(streams)
        chunk = offsets[ordinal] + rank[stream]
    else:
        num_chunks = min(rows, (rows + streams * held) // chunk_size + streams) + 1
        order = rank = torch.arange(streams, device=device)
        offsets = chunks.cumsum(0) - chunks
        ordinals = torch.arange((longest + held + chunk_size - 1) // chunk_size, device=device)[:, None]
        visited = torch.where(chunks > ordinals, offsets + ordinals, num_chunks - 1)
        steps = [(chunk, slice(None)) for chunk in visited]
        chunk = offsets[stream] + ordinal
    place = chunk * chunk_size + within
    grid = torch.full((num_chunks * chunk_size,), rows, dtype=torch.int64, device=device)
    grid[place] = torch.arange(rows, device=device)
    return ChunkPlan(
        chunk_size=chunk_size, rows=grid.view(num_chunks, chunk_size), place=place, steps=steps, order=order, rank=rank,
        counts=counts, offsets=offsets, exact=exact,
    )  # fmt: skip


def _exact_steps(chunks: Tensor) -> tuple[int, Tensor, Tensor, list[tuple[Select, Select]]]:
    """Chunks ordered by ordinal, then by the stream's rank (most chunks first): a step is a slice of both."""
    order = torch.argsort(chunks, descending=True, stable=True)
    longest = int(chunks.max()) if chunks.numel() else 0
    active = (chunks[:, None] > torch.arange(longest)).sum(0).tolist()
    offsets, steps, total = [], [], 0
    for n in active:
        offsets.append(total)
        steps.append((slice(total, total + n), slice(0, n)))
        total += n
    return total, order, torch.tensor(offsets or [0]), steps
