"""One token a sequence on the chunk grid, GLA, in Triton: two launches a layer, nothing read back, fit for a CUDA graph.

Who calls: `TritonChunkState.step` (through `sse_extend`), B tokens of B sequences, which it finds by their slots. Per row (token,
touched partition) and head a token's output is the last row of its unfinished chunk,

    o = (q exp(G)) S + sum_j ((q exp(G)) . (k_j exp(-G_j))) v_j,        G: log decay since the chunk's start

S the state at the chunk's start. The first launch (one warp a row, head and block of V) reads S and the pending rows, leaves
the row's output and appends the token. The second sums a token's rows, counts, and folds the chunks that have become full: its
programs find them by looking at the counts. Nothing later in a step of the model needs a fold, so the layers of one pool leave
theirs to a launch at its end (`folds_together`): a fold is a chain of loads, and few of them leave most of the device idle.

What a slot holds. *States* as two planes of 16 bits, [slots, 1+N, H, K, V] each: `high` is the state in bf16, ties rounded away
from zero, which the first launch reads (the trainer's product takes bf16 too), `low` the difference as an integer: both together
are the fp32 state exactly, in 4 bytes a number where a bf16 copy beside an fp32 master takes 6. *Pending rows*
[slots, 1+N, H, C, .]: k, g, v as the layer gave them, for the fold, and `ks` = k exp(-G) in k's dtype, so that a token reads
512 bytes a pending row and head of 128 instead of 1,024 (k, fp32 g, v). Pending rows stay where they are until their chunk is
folded; a partition's chunk may wait for any time with up to C - 1 rows, so a slot has C rows for each partition. SSE-H-2B (18
heads of 128, n4k1, C = 64, bf16, fp32 decays), a layer and sequence: states 5.9 MB, rows 7.4 MB. Pages of 8 rows from a pool that
all sequences share would hold 56% of the routed rows on average: 2.6 MB less, 39 MB of the 1.1 GB that such a sequence takes at
32K tokens, KV included, for a free list that can run dry in the middle of a step; that is not worth it.

Bytes a row and head on average, C = 64, K = V = 128, bf16: state 32.8 K, 31.5 pending rows 16.1 K, the token's own 4.6 K, 1/64 of
a fold 3.1 K: 56.6 K. Batch 256, n4k1, 18 heads: 0.52 GB, so 122 us at the 4.27 TB/s of an H200's copy, 144 us at 85% of it.
Copying the touched fp32 states in and out takes 283 us there.

The fold is the trainer's arithmetic, sum by sum and in the same blocks (`gla_edge_kernel`, `gla_scan_kernel`), so that states are
the prefill's bit for bit. A chunk's decay is summed token by token; the trainer's `gla_decay_kernel` sums in that order where a
thread has all rows of a channel, as with K = 128 (elsewhere the last bit may differ). Outputs are not the same: the trainer's
product rounds q exp(G) and the scores to bf16, sums in a tensor core's order, and measures decays from the chunk's middle, which
later tokens move. To make them equal, decoding would have to run that product on the chunk's rows, as `sse_extend(strict=True)`
does, or prefill and the trainer have to compute row by row what decoding does: `triton_exact`.

A chunk whose total decay falls below -MIDDLE_SPLIT_LIMIT reads k and g, newest first, until nothing is left to weigh.
Names: see `triton_gla`; LOW: states are read in fp32, as fp32 inputs need them; BT: pending rows a tile; XR, YR: routes that
q2, k2, g2, and v2 have; marks: a row's stream, (slot, partition) flat, times 2^32, plus its count after its token; -1 without a
sequence (slot < 0).
"""

from __future__ import annotations

import triton
import triton.language as tl

from posttrain.kernels.sse.triton_common import dot, exp, split, state_offsets, upper_bits
from posttrain.kernels.sse.triton_gla import MIDDLE_SPLIT_LIMIT

# exp of less is zero in fp32.
NOTHING_LEFT = tl.constexpr(-104.0)


@triton.jit
def join(high, low):
    """`split` undone, exactly; low = 0: the state in bf16."""
    return ((high.to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def load_state(high, low, where, mask, LOW: tl.constexpr):
    upper = tl.load(high + where, mask=mask, other=0)
    if LOW:
        return join(upper, tl.load(low + where, mask=mask, other=0).to(tl.int32))
    else:
        return join(upper, 0)


@triton.jit
def stream_of(slots, index, row, valid, SHARED: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Flat (slot, partition) of a row, int64; -1 where there is none."""
    routes: tl.constexpr = R + 1 if SHARED else R
    token, route = row // routes, row % routes
    if SHARED:
        route -= 1
    slot = tl.load(slots + token, mask=valid, other=-1).to(tl.int64)
    chosen = tl.load(index + token * R + route, mask=valid & (route >= 0), other=0).to(tl.int64)
    inside = valid & (slot >= 0) & (chosen >= 0) & (chosen < N)
    return tl.where(inside, slot * (1 + N) + tl.where(route >= 0, chosen + 1, 0), -1)


@triton.jit
def load_new(shared, routed, at_shared, at_routed, column, mask, is_shared, SHARED: tl.constexpr):
    """Columns of the row's own tensor, in fp32."""
    if SHARED:
        ours = tl.load(shared + at_shared + column, mask=mask & is_shared, other=0.0).to(tl.float32)
        theirs = tl.load(routed + at_routed + column, mask=mask & (is_shared == 0), other=0.0).to(tl.float32)
        return tl.where(is_shared, ours, theirs)
    else:
        return tl.load(routed + at_routed + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rows_at(matrix, t, column, C: tl.constexpr, D: tl.constexpr):
    return (matrix * C + t)[:, None] * D + column[None, :]


# What a row adds up, shared with `triton_exact`; sums that a compiler might round once or twice are written as `fma`.


@triton.jit
def read_state(state, q, sum_g):
    """A block of the state at the chunk's start [BK, BV], read by q [BK] behind a decay of sum_g [BK] -> [BV]."""
    return tl.sum(state * (q * exp(sum_g))[:, None], 0)


@triton.jit
def read_pending(
    faded, values, matrix, n, edge, v, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    WK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The n rows before a row, read by edge [WK] = q exp(G) -> columns v [BV]."""
    c = tl.arange(0, WK)
    mixed = tl.zeros([BT, BV], dtype=tl.float32)
    for t0 in tl.range(0, n, BT, num_stages=STAGES):
        t = t0 + tl.arange(0, BT)
        key = tl.load(faded + rows_at(matrix, t, c, C, K), mask=(t < n)[:, None] & (c < K)[None, :], other=0.0)
        value = tl.load(values + rows_at(matrix, t, v, C, V), mask=(t < n)[:, None] & (v < V)[None, :], other=0.0)
        score = tl.sum(key.to(tl.float32) * edge[None, :], 1)
        mixed = tl.fma(score[:, None], value.to(tl.float32), mixed)
    return tl.sum(mixed, 0)


@triton.jit
def read_row(result, q, key, fade, value):
    """One row before, where decays are strong: key [WK] with its factor, fade [WK] the decay since."""
    return tl.fma(tl.sum(q * key * exp(fade), 0), value, result)


@triton.jit
def read_own(result, q, k, write, own):
    return tl.fma(tl.sum(q * k * write, 0), own, result)


@triton.jit
def faded_key(k, write, sum_g):
    """ks; nobody reads it where the decay is strong."""
    return k * write * exp(tl.minimum(-sum_g, MIDDLE_SPLIT_LIMIT))


@triton.jit(do_not_specialize=["heads", "read_gate", "write_gate"])
def gla_decode_kernel(
    slots, index, weight, q1, k1, g1, q2, k2, g2, v1, v2, high, low, keys, decays, values, faded, factors, total, count,
    marks, part, heads, read_gate, write_gate, scale,
    SHARED: tl.constexpr, R: tl.constexpr, XR: tl.constexpr, YR: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr,
    WK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """part [rows, H, V] fp32, the rows' outputs; the token behind the pending rows. Grid (rows * H, V blocks).

    Programs of one row and head (V blocks) read nothing that one of them writes: totals alternate between two places."""
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    stream = stream_of(slots, index, row, row >= 0, SHARED, R, N)
    out = part + (row.to(tl.int64) * heads + head) * V + v
    if stream < 0:
        tl.store(out, tl.zeros([BV], dtype=tl.float32), mask=v < V)
        tl.store(marks + row, -1)
        return
    routes: tl.constexpr = R + 1 if SHARED else R
    token, route = (row // routes).to(tl.int64), row % routes
    is_shared = route == 0 if SHARED else route < 0
    route = route - 1 if SHARED else route
    x1 = (token * heads + head) * K
    x2 = ((token * XR + (route if XR > 1 else 0)) * heads + head) * K
    y1, y2 = (token * heads + head) * V, ((token * YR + (route if YR > 1 else 0)) * heads + head) * V
    e = tl.load(weight + token * R + route, mask=is_shared == 0, other=1.0)
    read, write = scale * tl.where(read_gate != 0, e, 1.0), tl.where(write_gate != 0, e, 1.0)
    matrix = stream * heads + head
    counted = tl.load(count + stream)
    n = counted % C
    before, after = total + (matrix * 2 + n % 2) * K, total + (matrix * 2 + (n + 1) % 2) * K

    result = tl.zeros([BV], dtype=tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        where, mask = state_offsets(stream, head, heads, K, V, k0, tl.program_id(1) * BV, BK, BV)
        state = load_state(high, low, where, mask, LOW)
        c = k0 + tl.arange(0, BK)
        tile_g = tl.load(before + c, mask=(c < K) & (n > 0), other=0.0)
        tile_g += load_new(g1, g2, x1, x2, c, c < K, is_shared, SHARED)
        tile_q = load_new(q1, q2, x1, x2, c, c < K, is_shared, SHARED) * read
        result += read_state(state, tile_q, tile_g)

    c = tl.arange(0, WK)
    q = load_new(q1, q2, x1, x2, c, c < K, is_shared, SHARED) * read
    k = load_new(k1, k2, x1, x2, c, c < K, is_shared, SHARED)
    g = load_new(g1, g2, x1, x2, c, c < K, is_shared, SHARED)
    own = load_new(v1, v2, y1, y2, v, v < V, is_shared, SHARED)
    sum_g = tl.load(before + c, mask=(c < K) & (n > 0), other=0.0) + g
    if tl.min(sum_g, 0) < -MIDDLE_SPLIT_LIMIT:
        fade, t = g, n - 1
        while (t >= 0) & (tl.max(tl.where(c < K, fade, NOTHING_LEFT), 0) > NOTHING_LEFT):
            at = (matrix * C + t) * K + c
            key = tl.load(keys + at, mask=c < K, other=0.0).to(tl.float32) * tl.load(factors + stream * C + t)
            value = tl.load(values + (matrix * C + t) * V + v, mask=v < V, other=0.0).to(tl.float32)
            result = read_row(result, q, key, fade, value)
            fade += tl.load(decays + at, mask=c < K, other=0.0).to(tl.float32)
            t -= 1
    else:
        result += read_pending(faded, values, matrix, n, q * exp(sum_g), v, C, K, V, WK, BV, BT, STAGES)
    result = read_own(result, q, k, write, own)
    tl.store(out, result, mask=v < V)

    tl.store(values + (matrix * C + n) * V + v, own.to(values.dtype.element_ty), mask=v < V)
    if tl.program_id(1) == 0:
        append_key(keys, decays, faded, matrix, n, k, g, write, sum_g, C, K, WK)
        tl.store(after + c, sum_g, mask=c < K)
        tl.store(factors + stream * C + n, write)
        tl.store(marks + row, (stream << 32) + counted + 1)


@triton.jit
def append_key(keys, decays, faded, matrix, n, k, g, write, sum_g, C: tl.constexpr, K: tl.constexpr, WK: tl.constexpr):
    """Row n of a chunk: k and g [WK] as given, and ks."""
    c = tl.arange(0, WK)
    at = (matrix * C + n) * K + c
    tl.store(keys + at, k.to(keys.dtype.element_ty), mask=c < K)
    tl.store(decays + at, g.to(decays.dtype.element_ty), mask=c < K)
    tl.store(faded + at, faded_key(k, write, sum_g).to(faded.dtype.element_ty), mask=c < K)


@triton.jit
def sums_after(g, HALF: tl.constexpr, GLOW: tl.constexpr, BC: tl.constexpr):
    """g [BC, BK] -> the decay of the rows after each: the trainer's `row_sums`."""
    after = (tl.arange(0, BC)[None, :] > tl.arange(0, BC)[:, None]).to(tl.float32)
    if HALF and GLOW:
        high = upper_bits(g)
        return dot(after, g - high, HALF) + dot(after, high, HALF)
    else:
        return dot(after, g, HALF)


@triton.jit
def fold(
    stream, head, heads, k0, v0, high, low, keys, decays, values, faded, factors, total,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GLOW: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Block (k0, v0) of a state moves to the end of its full chunk, with the roundings of `gla_edge_kernel` and
    `gla_scan_kernel`. The decayed keys go through the place of ks, which is free now; programs of one state that share a place
    write the same there."""
    position = tl.arange(0, BC)
    valid = position < C
    matrix = stream * heads + head
    k, v = k0 + tl.arange(0, BK), v0 + tl.arange(0, BV)
    at, inside = rows_at(matrix, position, k, C, K), valid[:, None] & (k < K)[None, :]
    g = tl.load(decays + at, mask=inside, other=0.0).to(tl.float32)
    written = tl.load(factors + stream * C + position, mask=valid, other=1.0)
    x = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32) * written[:, None]
    tl.store(faded + at, (x * exp(sums_after(g, HALF, GLOW, BC))).to(faded.dtype.element_ty), mask=inside)
    y = tl.load(values + rows_at(matrix, position, v, C, V), mask=valid[:, None] & (v < V)[None, :], other=0.0).to(tl.float32)
    where, mask = state_offsets(stream, head, heads, K, V, k0, v0, BK, BV)
    state = load_state(high, low, where, mask, True)
    tl.debug_barrier()
    kept = exp(tl.load(total + (matrix * 2 + C % 2) * K + k, mask=k < K, other=0.0))
    edge = tl.load(faded + at, mask=inside, other=0.0)
    state = state * kept[:, None] + dot(tl.trans(edge), y, HALF)
    upper, lower = split(state)
    tl.store(high + where, upper, mask=mask)
    tl.store(low + where, lower, mask=mask)


@triton.jit(do_not_specialize=["rows", "heads", "layers", "streams"])
def gla_fold_kernel(
    marks, part, out, count, high, low, keys, decays, values, faded, factors, total, rows, heads, layers, streams,
    ROUTES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, GLOW: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    SUM: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """SUM: out [rows / ROUTES, H, V], a token's ROUTES outputs summed, shared first. FOLD, with marks [layers, rows] and pools
    of `layers` times `streams` streams: the counts; full chunks folded. Any grid of one dimension.

    Items of a fold, (row, head, block), go around the programs, so that the heads of a row that is full are spread over them."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if SUM:
        width = heads * V
        for first in range(program * BLOCK, rows // ROUTES * width, programs * BLOCK):
            item = first + tl.arange(0, BLOCK)
            mask = item < rows // ROUTES * width
            at = (item // width).to(tl.int64) * (ROUTES * width) + item % width
            summed = tl.zeros([BLOCK], dtype=tl.float32)
            for r in tl.static_range(ROUTES):
                summed += tl.load(part + at + r * width, mask=mask, other=0.0)
            tl.store(out + item, summed.to(out.dtype.element_ty), mask=mask)
    if FOLD:
        all_rows, lane = layers * rows, tl.arange(0, LANES)
        for first in range(program * LANES, all_rows, programs * LANES):
            row = first + lane
            mark = tl.load(marks + row, mask=row < all_rows, other=-1)
            stream = (row // rows).to(tl.int64) * streams + (mark >> 32)
            tl.store(count + stream, (mark & 0x7FFFFFFF).to(tl.int32), mask=mark >= 0)
        v_blocks: tl.constexpr = (V + BV - 1) // BV
        blocks: tl.constexpr = (K + BK - 1) // BK * v_blocks
        items = all_rows.to(tl.int64) * heads * blocks
        for first in range(program, items, programs * LANES):
            item = first + lane.to(tl.int64) * programs
            found = tl.load(marks + item // (heads * blocks), mask=item < items, other=-1) & 0x7FFFFFFF
            full = (item < items) & (found != 0x7FFFFFFF) & (found % C == 0)
            next_lane = tl.min(tl.where(full, lane, LANES), 0)
            while next_lane < LANES:
                chosen = first + next_lane.to(tl.int64) * programs
                row, block = chosen // (heads * blocks), (chosen % blocks).to(tl.int32)
                stream = row // rows * streams + (tl.load(marks + row) >> 32)
                fold(
                    stream, (chosen // blocks % heads).to(tl.int32), heads, block // v_blocks * BK, block % v_blocks * BV,
                    high, low, keys, decays, values, faded, factors, total, K, V, C, HALF, GLOW, BC, BK, BV,
                )  # fmt: skip
                next_lane = tl.min(tl.where(full & (lane > next_lane), lane, LANES), 0)
