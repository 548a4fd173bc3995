"""Decode state of an SSE-H model: one slot a sequence, in every layer.

`SlotCache` is what transformers calls a cache (`past_key_values`), and what the generator schedules: slots are reset, forked,
exported and loaded one by one. An SSE layer keeps a `ChunkState` (boundary states and the unfinished chunk), an attention layer
keeps keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from posttrain.kernels.sse import ChunkState
from posttrain.models.sizes import SSE_LAYER_TYPES, state_bytes

if TYPE_CHECKING:
    from posttrain.models.sse_h.configuration import SSEHConfig


class KVPool:
    """Keys and values of one attention layer, [slots, H_kv, capacity, D]; rows behind a slot's length hold stale finite numbers.

    The capacity grows in steps of `STEP` rows as sequences grow.
    """

    STEP = 128
    BLOCK = 64

    def __init__(self, slots: int, heads: int, dim: int, *, device: torch.device | str, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(slots, heads, 0, dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def reserve(self, length: int) -> None:
        """Makes room for `length` rows in every slot; new rows are zero, so that a masked weight of 0 times them is 0."""
        have = self.keys.shape[2]
        if length > have:
            more = -(-length // self.STEP) * self.STEP - have
            shape = (*self.keys.shape[:2], more, self.keys.shape[3])
            self.keys = torch.cat((self.keys, self.keys.new_zeros(shape)), dim=2)
            self.values = torch.cat((self.values, self.values.new_zeros(shape)), dim=2)

    def append(self, k: Tensor, v: Tensor, slots: Sequence[int], starts: Sequence[int]) -> None:
        """Writes one row a sequence, k and v [S, H_kv, D], behind the `starts[s]` rows of slot `slots[s]`."""
        self.reserve(max(starts) + 1)
        where = torch.tensor((slots, starts), device=k.device)
        self.keys[where[0], :, where[1]] = k
        self.values[where[0], :, where[1]] = v

    def extend(self, k: Tensor, v: Tensor, slot: int, start: int) -> tuple[Tensor, Tensor]:
        """Writes n rows [n, H_kv, D] behind the `start` rows of `slot`; all of its rows, [start + n, H_kv, D] twice."""
        end = start + k.shape[0]
        self.reserve(end)
        self.keys[slot, :, start:end] = k.transpose(0, 1)
        self.values[slot, :, start:end] = v.transpose(0, 1)
        if start == 0:
            return k, v
        return self.keys[slot, :, :end].transpose(0, 1), self.values[slot, :, :end].transpose(0, 1)

    def view(self, slots: Sequence[int], lengths: Sequence[int], window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of some slots up to the longest of `lengths`, rounded up to whole blocks: keys and values [S, H_kv, L, D] and the
        mask [S, L], True where a row must not be seen. Consecutive slots are not copied."""
        longest = -(-max(lengths) // self.BLOCK) * self.BLOCK
        first = slots[0]
        if list(slots) == list(range(first, first + len(slots))):
            keys, values = (x[first : first + len(slots), :, :longest] for x in (self.keys, self.values))
        else:
            index = torch.tensor(slots, device=self.keys.device)
            keys, values = (x[:, :, :longest].index_select(0, index) for x in (self.keys, self.values))
        ends = torch.tensor(lengths, device=self.keys.device)[:, None]
        row = torch.arange(longest, device=self.keys.device)[None]
        mask = row >= ends
        if window is not None:
            mask |= row < ends - window
        return keys, values, mask

    def fork(self, src: int, dst: Sequence[int], length: int) -> None:
        for x in (self.keys, self.values):
            x[list(dst), :, :length] = x[src, :, :length]

    def export(self, slot: int, length: int) -> dict[str, Tensor]:
        return {
            "keys": self.keys[slot, :, :length].to("cpu", copy=True).contiguous(),
            "values": self.values[slot, :, :length].to("cpu", copy=True).contiguous(),
        }

    def load(self, slot: int, tensors: dict[str, Tensor], length: int) -> None:
        self.reserve(length)
        self.keys[slot, :, :length] = tensors["keys"].to(self.keys)
        self.values[slot, :, :length] = tensors["values"].to(self.values)


class SlotCache(Cache):
    """Decode state of `num_slots` sequences.

    Before a forward, `bind(slots)` says which slot each sequence of the input continues; the binding stays until the next one
    (at first: slot i for sequence i). `lengths[slot]` is the number of tokens that a slot holds, on the host.
    Beam search reorders bound slots; cropping is not supported (a state cannot forget a token).

    Args:
        max_length: longest sequence a slot may hold; None for no limit.
    """

    def __init__(
        self,
        config: SSEHConfig,
        num_slots: int,
        *,
        max_length: int | None = None,
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
        self.states: list[ChunkState | KVPool] = []
        for kind in config.layer_types:
            if kind in SSE_LAYER_TYPES:
                state = ChunkState.allocate(
                    num_slots, config.num_partitions, config.num_attention_heads, config.head_dim, config.head_dim,
                    config.chunk_size, transition="gla" if kind == "sse" else "gdn", device=device, dtype=dtype,
                )  # fmt: skip
            else:
                state = KVPool(num_slots, config.num_key_value_heads, config.head_dim, device=device, dtype=dtype)
            self.states.append(state)

    def bind(self, slots: Sequence[int] | Tensor) -> None:
        """Sequence s of the next forwards continues slot `slots[s]`; raises ValueError on a repeated or unknown slot."""
        chosen = slots.tolist() if isinstance(slots, Tensor) else list(slots)
        if len(set(chosen)) != len(chosen) or any(not 0 <= s < self.num_slots for s in chosen):
            raise ValueError(f"slots must be distinct numbers in [0, {self.num_slots}), got {chosen}")
        if chosen != self.slots:
            self.slots = chosen
            self.slot_tensor = torch.tensor(chosen, dtype=torch.long, device=self.slot_tensor.device)

    def check_room(self, slots: Sequence[int], new: Sequence[int]) -> None:
        """Raises ValueError where a slot would grow past `max_length`."""
        for slot, count in zip(slots, new, strict=True):
            if self.max_length is not None and self.lengths[slot] + count > self.max_length:
                raise ValueError(
                    f"slot {slot} holds {self.lengths[slot]} tokens and {count} more exceed max_length={self.max_length}; "
                    "make the cache longer or the request shorter"
                )

    def advance(self, slots: Sequence[int], new: Sequence[int]) -> None:
        for slot, count in zip(slots, new, strict=True):
            self.lengths[slot] += count

    def reset(self, slots: Sequence[int] | Tensor | None = None) -> None:
        """Empties some slots, or all of them."""
        chosen = range(self.num_slots) if slots is None else slots.tolist() if isinstance(slots, Tensor) else slots
        chosen = list(chosen)
        if slots is None:
            self.columns = 0
        for slot in chosen:
            self.lengths[slot] = 0
        for state in self.states:
            if isinstance(state, ChunkState):
                state.reset(torch.tensor(chosen, dtype=torch.long, device=self.slot_tensor.device))

    def fork(self, src: int, dst_slots: Sequence[int]) -> None:
        """Copies the sequence in `src` to each of `dst_slots`."""
        dst = [slot for slot in dst_slots if slot != src]
        if not dst:
            return
        for state in self.states:
            if isinstance(state, ChunkState):
                state.fork(src, dst)
            else:
                state.fork(src, dst, self.lengths[src])
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

    def nbytes_per_sequence(self, length: int) -> int:
        """Bytes that one sequence of `length` tokens needs, as in `posttrain.models.sizes.state_bytes`."""
        fields = self.config.to_dict()
        return state_bytes(fields, length, element_size=self.dtype.itemsize)["total"]

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
