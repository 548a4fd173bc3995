"""Softmax attention of the hybrid's attention layers: grouped queries, RoPE, optional q/k norm, optional sliding window.

Packed training and prefill: one `scaled_dot_product_attention` a sequence, so a sequence's numbers cannot depend on its
neighbours. On CUDA in bf16 or fp16, PyTorch's variable-length kernel (2.11 and later) takes all sequences in one call, save long
ones: cuDNN's kernel, which wants one call each, is nearly twice as fast on Hopper.
One-token decode: one batched product over all sequences, with the key/value rows behind a sequence's end masked out; on a GPU,
from pages, `posttrain.kernels.paged_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from posttrain.kernels.backend import takes_triton
from posttrain.kernels.paged_attention import MAX_WIDTH, paged_attention
from posttrain.kernels.paged_attention.exact import exact_attention, exact_paged_attention
from posttrain.kernels.rotary import rotary as apply_rotary
from posttrain.models.cache import KVPool
from posttrain.models.linear import Linear, RMSNorm, few_rows
from posttrain.models.paged import NewTokens, OneToken, PagedKV, upload
from posttrain.models.sse_h.configuration import SSEHConfig

try:
    from torch.nn.attention.varlen import varlen_attn

    # Its first version (2.10) had `is_causal` instead.
    _HAS_VARLEN = "window_size" in inspect.signature(varlen_attn).parameters
except ImportError:
    varlen_attn, _HAS_VARLEN = None, False

# From LONG tokens on a sequence has an attention call of its own on a GPU, rounded up to whole steps of rows: cuDNN makes a plan
# for every length it has not seen. Rows behind the end are seen by no row before it.
LONG = 4096
LONG_STEP = 1024
_PREFERENCE = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class RotaryTable:
    """cos and sin of every position up to the longest one asked for, in fp32, kept by device and grown by doubling.

    Not a buffer: it is derived from the configuration, and a model built on the meta device has no storage to fill.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self._tables: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """cos, sin, each [T, 1, head_dim / 2], for int64 positions [T], all below `longest`."""
        cos, sin = self.table(positions.device, longest).index_select(0, positions).unbind(1)
        return cos[:, None], sin[:, None]

    def table(self, device: torch.device, longest: int) -> Tensor:
        """[positions >= longest, 2, head_dim / 2]. A longer one replaces it: who captures its address keeps the tensor."""
        table = self._tables.get(device)
        if table is None or table.shape[0] < longest:
            size = max(1024, 1 << (longest - 1).bit_length())
            exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
            # float64, then rounded: the table's bits do not depend on its size.
            angle = torch.arange(size, dtype=torch.float64)[:, None] * self.theta**-exponent
            table = torch.stack((angle.cos(), angle.sin()), dim=1).float().to(device)
            self._tables[device] = table
        return table


def _rows_of(ranges: Sequence[range], device: torch.device) -> slice | Tensor:
    """The packed rows of some sequences: a slice where they follow each other."""
    if all(a.stop == b.start for a, b in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return upload([row for r in ranges for row in r], torch.int64, device)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """`torch.bmm`. A batch of one is a matrix product like any other, whose sums several threads of a CPU may share out, so it is
    made two."""
    if a.shape[0] > 1 or a.device.type != "cpu":
        return torch.bmm(a, b)
    return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]


class AttentionMixer(nn.Module):
    """x [T, hidden] -> [T, hidden], causal within each packed sequence."""

    # Strict mode: one order of sums for decoding, prefill and training.
    exact = False

    def __init__(self, config: SSEHConfig, layer_idx: int) -> None:
        super().__init__()
        shape = config.shape
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, shape.kv_heads, shape.head_dim
        sliding = shape.layer_types[layer_idx] == "sliding_attention"
        self.window: int | None = config.sliding_window if sliding else None
        hidden = config.hidden_size
        self.q_proj = Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Sequence[int],
        rotary: tuple[Tensor, Tensor],
        pool: KVPool | PagedKV | None = None,
        slots: Sequence[int] = (),
        starts: Sequence[int] = (),
        where: OneToken | NewTokens | None = None,
    ) -> Tensor:
        """`lengths` of the packed sequences, none of them 0; with a `pool`, sequence s continues slot `slots[s]`, which holds
        `starts[s]` tokens. Of a pool in pages, `where` says where each token goes; a `OneToken` needs no slots and starts."""
        tokens = x.shape[0]
        q, k, v = (a.view(tokens, -1, self.head_dim) for a in few_rows((self.q_proj, self.k_proj, self.v_proj), (x, x, x)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if isinstance(pool, PagedKV):
            assert where is not None
            o = self._extend_pages(q, k, v, lengths, pool, slots, starts, where)
        elif pool is not None:
            if self.exact:
                raise ValueError("strict mode decodes from pages: make the SlotCache with paged=True")
            o = self._extend(q, k, v, lengths, pool, slots, starts)
        else:
            o = self._sequences(q, k, v, lengths)
        return self.o_proj(o.reshape(tokens, -1))

    @staticmethod
    def _use_varlen(q: Tensor) -> bool:
        # Flash attention's kernels: half precision, head widths in steps of 8 up to 256.
        return _HAS_VARLEN and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in range(8, 257, 8)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        """Long sequences by one call each, those between them by one call a run; a sequence's path depends on itself alone."""
        runs: list[list[int]] = []
        for n in lengths:
            if self._is_long(n) or not runs or self._is_long(runs[-1][0]):
                runs.append([n])
            else:
                runs[-1].append(n)
        sizes = [sum(run) for run in runs]
        outs = []
        for run, a, b, c in zip(runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
            outs.append(self._long(a, b, c) if self._is_long(run[0]) else self._varlen(a, b, c, run))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _is_long(self, length: int) -> bool:
        return length >= LONG and (self.window is None or length <= self.window)

    def _long(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of one sequence, by the fastest kernel that takes it."""
        n = q.shape[0]
        behind = -n % LONG_STEP
        if behind:
            q, k, v = (F.pad(a, (0, 0, 0, 0, 0, behind)) for a in (q, k, v))
        with sdpa_kernel(_PREFERENCE, set_priority=True):
            o = F.scaled_dot_product_attention(
                *(a.transpose(0, 1)[None] for a in (q, k, v)), is_causal=True, enable_gqa=self.kv_heads != self.heads
            )
        return o[0].transpose(0, 1)[:n]

    def _varlen(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], key_lengths: Sequence[int] | None = None
    ) -> Tensor:
        """Packed sequences; with longer `key_lengths`, queries are the last rows of theirs, as flash attention aligns them."""
        if self.kv_heads != self.heads:
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(q.device, non_blocking=True)
        cu_k = cu
        if key_lengths is not None:
            cu_k = torch.tensor([0, *key_lengths]).cumsum(0, dtype=torch.int32).to(q.device, non_blocking=True)
        window = (-1 if self.window is None else self.window - 1, 0)
        assert varlen_attn is not None
        o = varlen_attn(q, k, v, cu, cu_k, max(lengths), max(key_lengths or lengths), window_size=window)
        assert isinstance(o, Tensor)
        return o

    def _one_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of n new tokens q [n, H, D] over m >= n keys and values [m, H_kv, D], the last n of them their own."""
        n, m = q.shape[0], k.shape[0]
        full = n == m and (self.window is None or m <= self.window)
        mask = None if full else self._mask(n, m, q.device)
        o = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=full,
            enable_gqa=self.kv_heads != self.heads,
        )
        return o[0].transpose(0, 1)

    def _sequences(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        """Packed sequences from their beginnings, by the kernels of training."""
        if not self.exact:
            return self._ordinary(q, k, v, lengths)

        def ordinary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._ordinary(q, k, v, lengths)

        return exact_attention(q, k, v, lengths, window=self.window, ordinary=ordinary)

    def _ordinary(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        if self._use_varlen(q):
            return self._packed(q, k, v, lengths)
        pieces = zip(q.split(list(lengths)), k.split(list(lengths)), v.split(list(lengths)), strict=True)
        outs = [self._one_sequence(*piece) for piece in pieces]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _mask(self, n: int, m: int, device: torch.device) -> Tensor:
        behind = torch.arange(m - n, m, device=device)[:, None] - torch.arange(m, device=device)[None]
        return behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)

    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int],
        pool: KVPool,
        slots: Sequence[int],
        starts: Sequence[int],
    ) -> Tensor:
        """Writes the new keys and values, then attends. One-token sequences always take the batched path and longer ones always
        the loop, so the path that a sequence takes does not depend on its company."""
        if max(lengths) == 1:
            pool.append(k, v, slots, starts)
            return self._decode(q, pool, slots, [start + 1 for start in starts])
        o = torch.empty_like(q)
        singles: list[tuple[int, int, int]] = []
        row = 0
        for n, slot, start in zip(lengths, slots, starts, strict=True):
            if n == 1:
                singles.append((row, slot, start))
            else:
                keys, values = pool.extend(k[row : row + n], v[row : row + n], slot, start)
                o[row : row + n] = self._one_sequence(q[row : row + n], keys, values)
            row += n
        if singles:
            rows, some, begin = (list(part) for part in zip(*singles, strict=True))
            index = torch.tensor(rows, device=q.device)
            pool.append(k[index], v[index], some, begin)
            o[index] = self._decode(q[index], pool, some, [start + 1 for start in begin])
        return o

    def _extend_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int],
        pool: PagedKV,
        slots: Sequence[int],
        starts: Sequence[int],
        where: OneToken | NewTokens,
    ) -> Tensor:
        """As `_extend`, from pages: all new rows are written at once, and prompts from their beginnings attend together."""
        if len(lengths) == q.shape[0]:
            pool.write(k, v, where)
            return self._attend_pages(q, pool, where.positions, where.slots)
        ends = list(accumulate(lengths))
        ranges = [range(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        # A ring's older rows are gone once the new ones are written.
        before = {i: pool.before(slots[i], start) for i, start in enumerate(starts) if start and lengths[i] > 1}
        pool.write(k, v, where)
        o = torch.empty_like(q)
        for i, (keys, values) in before.items():
            rows = slice(ranges[i].start, ranges[i].stop)
            seen = [torch.cat((old.to(q.dtype), new[rows])) for old, new in ((keys, k), (values, v))]
            o[rows] = self._continue(q[rows], *seen, end=starts[i] + lengths[i])
        fresh = [r for r, start in zip(ranges, starts, strict=True) if len(r) > 1 and not start]
        if fresh:
            rows = _rows_of(fresh, q.device)
            o[rows] = self._sequences(q[rows], k[rows], v[rows], [len(r) for r in fresh])
        singles = [r for r in ranges if len(r) == 1]
        if singles:
            rows = _rows_of(singles, q.device)
            o[rows] = self._attend_pages(q[rows], pool, where.positions[rows], where.slots[rows])
        return o

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, *, end: int) -> Tensor:
        """`_one_sequence`, on a GPU by a kernel that needs no [n, m] mask; `end` is the position behind the last token."""
        if self.exact:
            return exact_attention(q, k, v, [q.shape[0]], key_lengths=[k.shape[0]], ends=[end], window=self.window)
        return self._varlen(q, k, v, [q.shape[0]], [k.shape[0]]) if self._use_varlen(q) else self._one_sequence(q, k, v)

    def _attend_pages(self, q: Tensor, pool: PagedKV, positions: Tensor, slots: Tensor) -> Tensor:
        """One token a sequence, its own key and value in place -> [B, H, D]; on a GPU nothing is read back."""
        if self.exact:
            return exact_paged_attention(q, pool.keys, pool.values, pool.table, slots, positions, window=pool.window)
        if takes_triton(q, None, max_width=MAX_WIDTH):
            return paged_attention(q, pool.keys, pool.values, pool.table, slots, positions, window=pool.window)
        return self._decode(q, pool, slots.tolist(), (positions + 1).tolist())

    def _decode(self, q: Tensor, pool: KVPool | PagedKV, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """One query a sequence, q [S, H, D], over the first `lengths[s]` rows of each slot -> [S, H, D].

        Bits do not depend on the batch or on the pool's capacity: rows are read in whole blocks of `KVPool.BLOCK`, those behind
        the end add exact zeros, and products of at most two query rows take a path whose sums run in order of the rows.
        """
        group = self.heads // self.kv_heads
        keys, values, mask = pool.view(slots, lengths)  # [S, H_kv, L, D] twice, [S, L]
        count, _, longest, dim = keys.shape
        flat_keys, flat_values = keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)
        scaled = (q * dim**-0.5).view(count * self.kv_heads, group, dim)
        outs = []
        for first in range(0, group, 2):
            scores = _products(scaled[:, first : first + 2], flat_keys).float()
            scores = scores.view(count, self.kv_heads, -1, longest).masked_fill(mask[:, None, None], float("-inf"))
            weights = torch.softmax(scores, dim=-1).to(q.dtype).flatten(0, 1)
            outs.append(_products(weights, flat_values))
        o = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return o.view(count, self.heads, dim)
