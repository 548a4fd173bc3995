"""Decode state of an SSE-H model: one slot a sequence, in every layer.

`SlotCache` is what transformers calls a cache (`past_key_values`), and what the generator schedules: slots are reset, forked,
exported and loaded one by one. An SSE layer keeps a `ChunkState` (boundary states and the unfinished chunk), an attention layer
keeps keys and values: a row of them a slot (`KVPool`), or in pages that forks share (`posttrain.models.paged`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from posttrain.kernels.sse import ChunkState
from posttrain.models.paged import PagedKV, PageTable, upload
from posttrain.models.sizes import KV_BLOCK, KV_STEP, SSE_LAYER_TYPES, state_bytes

if TYPE_CHECKING:
    from posttrain.models.sse_h.configuration import SSEHConfig


class KVPool:
    """Keys and values of one attention layer, [slots, H_kv, capacity, D]. Rows behind a sequence's end get the weight 0, so they
    must be finite: they are zero, or left over from a sequence that was healthy (`reset` clears those of one that was not).

    The capacity grows in steps of `STEP` rows as sequences grow. With a sliding `window`, position p lies in row p mod `ring`,
    the window rounded up to whole blocks, and the capacity stops there.
    """

    STEP = KV_STEP
    BLOCK = KV_BLOCK

    def __init__(
        self, slots: int, heads: int, dim: int, *, window: int | None = None, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.window = window
        self.ring = None if window is None else -(-window // self.BLOCK) * self.BLOCK
        self.keys = torch.zeros(slots, heads, 0, dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def rows(self, length: int) -> int:
        """Rows that a sequence of `length` tokens occupies."""
        return length if self.ring is None else min(length, self.ring)

    def reserve(self, length: int) -> None:
        """Makes room for sequences of `length` tokens; new rows are zero, so that a masked weight of 0 times them is 0."""
        have, need = self.keys.shape[2], self.rows(length)
        if need > have:
            more = -(-need // self.STEP) * self.STEP - have
            shape = (*self.keys.shape[:2], more, self.keys.shape[3])
            self.keys = torch.cat((self.keys, self.keys.new_zeros(shape)), dim=2)
            self.values = torch.cat((self.values, self.values.new_zeros(shape)), dim=2)

    def append(self, k: Tensor, v: Tensor, slots: Sequence[int], starts: Sequence[int]) -> None:
        """Writes one token a sequence, k and v [S, H_kv, D], behind the `starts[s]` tokens of slot `slots[s]`."""
        self.reserve(max(starts) + 1)
        rows = starts if self.ring is None else [start % self.ring for start in starts]
        slot, row = torch.tensor((slots, rows), device=k.device)
        # Under autocast the projections are narrower than the pool, which assignment by index does not convert.
        self.keys[slot, :, row] = k.to(self.keys.dtype)
        self.values[slot, :, row] = v.to(self.values.dtype)

    def extend(self, k: Tensor, v: Tensor, slot: int, start: int) -> tuple[Tensor, Tensor]:
        """Writes n tokens [n, H_kv, D] behind the `start` tokens of `slot`; returns what they may see, themselves last: all, or
        with a window at most the window - 1 tokens before them, [m, H_kv, D] twice."""
        count, device = k.shape[0], k.device
        self.reserve(start + count)
        if self.ring is None or self.window is None:
            self.keys[slot, :, start : start + count] = k.transpose(0, 1)
            self.values[slot, :, start : start + count] = v.transpose(0, 1)
            if start == 0:
                return k, v
            return self.keys[slot, :, : start + count].transpose(0, 1), self.values[slot, :, : start + count].transpose(0, 1)
        before = torch.arange(max(0, start - self.window + 1), start, device=device) % self.ring
        seen = [torch.cat((pool[slot, :, before].transpose(0, 1), x)) for pool, x in ((self.keys, k), (self.values, v))]
        last = min(count, self.ring)
        where = torch.arange(start + count - last, start + count, device=device) % self.ring
        self.keys[slot, :, where] = k[-last:].transpose(0, 1).to(self.keys.dtype)
        self.values[slot, :, where] = v[-last:].transpose(0, 1).to(self.values.dtype)
        return seen[0], seen[1]

    def view(self, slots: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of some slots up to the longest of `lengths`, rounded up to whole blocks: keys and values [S, H_kv, L, D] and the
        mask [S, L], True where a row must not be seen. Consecutive slots are not copied."""
        longest = -(-self.rows(max(lengths)) // self.BLOCK) * self.BLOCK
        first = slots[0]
        if list(slots) == list(range(first, first + len(slots))):
            keys, values = (x[first : first + len(slots), :, :longest] for x in (self.keys, self.values))
        else:
            index = torch.tensor(slots, device=self.keys.device)
            keys, values = (x[:, :, :longest].index_select(0, index) for x in (self.keys, self.values))
        last = torch.tensor(lengths, device=self.keys.device)[:, None] - 1
        row = torch.arange(longest, device=self.keys.device)[None]
        if self.ring is None or self.window is None:
            return keys, values, row > last
        behind = (last - row) % self.ring
        return keys, values, (behind >= self.window) | (behind > last)

    def reset(self, slot: int, length: int) -> None:
        """Clears the rows of a sequence of `length` tokens."""
        rows = self.rows(length)
        self.keys[slot, :, :rows] = 0
        self.values[slot, :, :rows] = 0

    def fork(self, src: int, dst: Sequence[int], length: int) -> None:
        rows = self.rows(length)
        for x in (self.keys, self.values):
            x[list(dst), :, :rows] = x[src, :, :rows].clone()

    def export(self, slot: int, length: int) -> dict[str, Tensor]:
        rows = self.rows(length)
        pools = {"keys": self.keys, "values": self.values}
        return {name: x[slot, :, :rows].detach().to("cpu", copy=True).contiguous() for name, x in pools.items()}

    def load(self, slot: int, tensors: dict[str, Tensor], length: int) -> None:
        if tensors.keys() != {"keys", "values"}:
            raise ValueError(f"an exported attention layer holds keys and values, got {sorted(tensors)}")
        self.reserve(length)
        for x, name in ((self.keys, "keys"), (self.values, "values")):
            want = (x.shape[1], self.rows(length), x.shape[3])
            if tuple(tensors[name].shape) != want:
                raise ValueError(f"{name} has shape {list(tensors[name].shape)}, but this cache needs {list(want)}")
            x[slot, :, : want[1]] = tensors[name].to(x)


class SlotCache(Cache):
    """Decode state of `num_slots` sequences.

    Before a forward, `bind(slots)` says which slot each sequence of the input continues; the binding stays until the next one
    (at first: slot i for sequence i). `lengths[slot]` is the number of tokens that a slot holds, on the host.
    Beam search reorders bound slots; cropping is not supported (a state cannot forget a token).

    Args:
        max_length: longest sequence a slot may hold; None for no limit.
        paged: keys and values in pages.
        num_pages: of a paged cache, page 0 (nobody's) included; None: as many as are asked for.

    Attributes:
        pages: the books of a paged cache, else None.
    """

    def __init__(
        self,
        config: SSEHConfig,
        num_slots: int,
        *,
        max_length: int | None = None,
        paged: bool = False,
        num_pages: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(layers=[])
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}, but a cache needs at least one slot")
        self.config = config
        self.num_slots = num_slots
        self.max_length = max_length
        self.dtype = dtype
        self.lengths: list[int] = [0] * num_slots
        self.slots: list[int] = list(range(num_slots))
        self.slot_tensor = torch.arange(num_slots, device=device)
        # Columns of padded input that have passed, padding included: what transformers' generate() calls the length.
        self.columns = 0
        self.pages = PageTable(num_slots, num_pages, max_length=max_length, device=device) if paged else None
        self.states: list[ChunkState | KVPool | PagedKV] = []
        shape = config.shape
        chunked = {
            kind: iter(ChunkState.allocate_layers(
                shape.layer_types.count(kind), num_slots, config.num_partitions, config.num_attention_heads, shape.head_dim,
                shape.head_dim, config.chunk_size, transition="gla" if kind == "sse" else "gdn", device=device, dtype=dtype,
            ))
            for kind in SSE_LAYER_TYPES if kind in shape.layer_types
        }  # fmt: skip
        for kind in shape.layer_types:
            if kind in chunked:
                state = next(chunked[kind])
            else:
                window = config.sliding_window if kind == "sliding_attention" else None
                sizes = (shape.kv_heads, shape.head_dim)
                if self.pages is None:
                    state = KVPool(num_slots, *sizes, window=window, device=device, dtype=dtype)
                else:
                    state = PagedKV(self.pages, *sizes, window=window, device=device, dtype=dtype)
            self.states.append(state)
        # Without full attention no layer has pages to run short of.
        self.uses_pages = paged and any(isinstance(a, PagedKV) and a.window is None for a in self.states)

    def bind(self, slots: Sequence[int] | Tensor) -> None:
        """Sequence s of the next forwards continues slot `slots[s]`; raises ValueError on a repeated or unknown slot."""
        chosen = slots.tolist() if isinstance(slots, Tensor) else list(slots)
        if len(set(chosen)) != len(chosen) or any(not 0 <= s < self.num_slots for s in chosen):
            raise ValueError(f"slots must be distinct numbers in [0, {self.num_slots}), got {chosen}")
        if chosen != self.slots:
            self.slots = chosen
            self.slot_tensor = upload(chosen, torch.long, self.slot_tensor.device)

    def check_room(self, slots: Sequence[int], new: Sequence[int]) -> None:
        """Raises ValueError where a slot would grow past `max_length`."""
        for slot, count in zip(slots, new, strict=True):
            if self.max_length is not None and self.lengths[slot] + count > self.max_length:
                raise ValueError(
                    f"slot {slot} holds {self.lengths[slot]} tokens and {count} more exceed max_length={self.max_length}; "
                    "make the cache longer or the request shorter"
                )

    def reserve(self, slots: Sequence[int], new: Sequence[int]) -> None:
        """Pages for `new[s]` more tokens of each slot, shared ones copied. Nothing to do without pages.

        Raises:
            OutOfPages: too few are free; slots that came first have theirs.
        """
        if self.pages is None or not self.uses_pages:
            return
        copied = []
        try:
            for slot, count in zip(slots, new, strict=True):
                start = self.lengths[slot]
                copied.append(self.pages.reserve(slot, start, start + count))
        finally:
            self._follow_books([pair for pair in copied if pair is not None])

    def _follow_books(self, pairs: list[tuple[int, int]]) -> None:
        """Brings the device to what was booked: the table, pools that have grown, pages (from, to) that were copied."""
        assert self.pages is not None
        self.pages.publish()
        paged = [state for state in self.states if isinstance(state, PagedKV) and state.window is None]
        for state in paged:
            state.grow()
        if pairs:
            src, dst = upload([list(side) for side in zip(*pairs, strict=True)], torch.int64, self.slot_tensor.device)
            for state in paged:
                state.copy_pages(src, dst)

    def reserve_next(self, slots: Sequence[int]) -> None:
        """`reserve` for one token each, quick where no slot needs a page."""
        if self.pages is not None and self.uses_pages:
            due = self.pages.due(slots, self.lengths)
            self.reserve(due, [1] * len(due))

    def release(self, slot: int) -> None:
        """Gives a slot's pages back; what else it holds stays until it is reset."""
        if self.pages is not None:
            self.pages.release(slot)

    def advance(self, slots: Sequence[int], new: Sequence[int]) -> None:
        for slot, count in zip(slots, new, strict=True):
            self.lengths[slot] += count

    def reset(self, slots: Sequence[int] | Tensor | None = None, *, keep_pages: bool = False) -> None:
        """Empties some slots, or all of them; `keep_pages`: pages that are reserved for what comes stay so."""
        chosen = range(self.num_slots) if slots is None else slots.tolist() if isinstance(slots, Tensor) else slots
        chosen = list(chosen)
        if slots is None:
            self.columns = 0
        index = upload(chosen, torch.long, self.slot_tensor.device)
        freed: dict[int, list[int]] = {}
        if self.pages is not None:
            freed = {slot: [] if keep_pages else self.pages.release(slot) for slot in chosen}
        for state in self.states:
            if isinstance(state, ChunkState):
                state.reset(index)
            elif isinstance(state, KVPool):
                for slot in chosen:
                    state.reset(slot, self.lengths[slot])
            else:
                for slot in chosen:
                    state.reset(slot, freed[slot])
        for slot in chosen:
            self.lengths[slot] = 0

    def fork(self, src: int, dst_slots: Sequence[int]) -> None:
        """Copies the sequence in `src` to each of `dst_slots`."""
        dst = [slot for slot in dst_slots if slot != src]
        if not dst:
            return
        if self.pages is not None:
            self.pages.fork(src, dst)
        index = upload(dst, torch.long, self.slot_tensor.device)  # once: a layer's own copy would wait for the device
        for state in self.states:
            if isinstance(state, KVPool):
                state.fork(src, dst, self.lengths[src])
            else:
                state.fork(src, index if isinstance(state, ChunkState) else dst)
        for slot in dst:
            self.lengths[slot] = self.lengths[src]

    def export(self, slot: int) -> dict[str, Tensor]:
        """A CPU copy of one slot: {"length": int64 [], "<layer>.<field>": tensor}. `load` puts it back, here or elsewhere."""
        out = {"length": torch.tensor(self.lengths[slot])}
        for i, state in enumerate(self.states):
            part = state.export(slot) if isinstance(state, ChunkState) else state.export(slot, self.lengths[slot])
            out.update({f"{i}.{name}": tensor for name, tensor in part.items()})
        return out

    def load(self, slot: int, tensors: dict[str, Tensor]) -> None:
        """Fills a slot with what `export` of a cache of the same configuration gave."""
        length = int(tensors["length"])
        self.lengths[slot] = 0
        self.check_room([slot], [length])
        self.release(slot)
        self.reserve([slot], [length])
        for i, state in enumerate(self.states):
            prefix = f"{i}."
            part = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            if not part:
                raise ValueError(f"the exported sequence has nothing for layer {i}: it comes from a model of another shape")
            if isinstance(state, ChunkState):
                state.load(slot, part)
            else:
                state.load(slot, part, length)
        self.lengths[slot] = length

    @staticmethod
    def measure(config: SSEHConfig, *, device: torch.device | str, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of a paged cache: of a slot whatever its length, and of one page in every full-attention layer."""
        one = SlotCache(config, 1, max_length=1, paged=True, num_pages=2, device=device, dtype=dtype)
        slot = page = 0
        for state in one.states:
            if isinstance(state, PagedKV):
                each = (state.keys.nbytes + state.values.nbytes) // state.keys.shape[0]
                page += each if state.window is None else 0
                slot += 0 if state.window is None else each * state.table.shape[1]
            elif isinstance(state, ChunkState):
                slot += state.nbytes_per_slot
        return slot, page

    def nbytes_per_sequence(self, length: int) -> int:
        """Bytes that one sequence of `length` tokens needs, as in `posttrain.models.sizes.state_bytes`."""
        triton = any(isinstance(state, ChunkState) and type(state) is not ChunkState for state in self.states)
        return state_bytes(
            self.config.to_dict(), length, element_size=self.dtype.itemsize, triton=triton, paged=self.pages is not None
        )["total"]

    # What transformers' generate() asks of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns or max((self.lengths[slot] for slot in self.slots), default=0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1 if self.max_length is None else self.max_length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Bound sequence i becomes a copy of bound sequence `beam_idx[i]`."""
        order = beam_idx.tolist()
        moved = {self.slots[i]: self.slots[j] for i, j in enumerate(order) if i != j}
        saved = {src: self.export(src) for src in set(moved.values())}
        for dst, src in moved.items():
            self.load(dst, saved[src])

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("an SSE state cannot forget tokens: export() the slot beforehand and load() it instead")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("repeat the input rows before the prefill, or fork() slots")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("bind() the slots that go on instead of selecting rows")

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def batch_size(self) -> int:
        return len(self.slots)

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"SlotCache(num_slots={self.num_slots}, layers={len(self.states)}, max_length={self.max_length})"
