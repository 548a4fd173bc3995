"""How many sequences of which length fit: a slot's bytes, a page's bytes, and the memory that was measured at the start.

A slot is the recurrent state of one sequence, the same at every length; keys and values of full attention come in pages. Slots
are allocated for all sequences that may run at once. Pages are too where they fit; where they do not, the generator starts with
fewer and moves its youngest sequences to host memory when they run short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from posttrain.models.cache import SlotCache
from posttrain.models.paged import PAGE
from posttrain.models.sse_h import SSEHConfig

# Part of the free memory that caches may take: prefill, logits and sampling need theirs, a learner beside it its own.
MEMORY_FRACTION = 0.5


# What a row of logits takes while it is sampled, in bytes a logit at most: as the model gave it, in fp32, and where it is cut off
# under the temperature, sorted, and cut. What the sort needs besides is bounded by blocks of rows (posttrain.rollout.sampling).
SAMPLING_BYTES = 2 + 4 * 4


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Sizes of a generator's cache.

    slots: sequences at once and the spare one; pages: of PAGE tokens, one of them nobody's, or None: they are made as needed;
    slot_bytes, page_bytes: of one; free_bytes: what was free before, or None where it was not measured; workspace_bytes: what a
    step may need besides, estimated.
    """

    slots: int
    pages: int | None
    slot_bytes: int
    page_bytes: int
    max_length: int
    free_bytes: int | None = None
    workspace_bytes: int = 0

    def bytes_of(self, length: int) -> int:
        """Of one sequence that shares no page."""
        return self.slot_bytes + pages_of(length) * self.page_bytes

    def sequences_of(self, length: int) -> int:
        """Sequences of `length` tokens that run at once without any being moved to the host."""
        if self.pages is None or self.page_bytes == 0:
            return self.slots - 1
        return min(self.slots - 1, (self.pages - 1) // pages_of(length))

    def describe(self) -> str:
        gib = 2.0**30
        slots = f"{self.slots - 1} sequences, {self.slots * self.slot_bytes / gib:.2f} GiB of state"
        if self.page_bytes == 0:
            pages = "no keys and values to keep"
        elif self.pages is None:
            pages = f"keys and values as needed, {self.page_bytes / PAGE / 1024:.1f} KiB a token"
        else:
            held = (self.pages - 1) * PAGE
            pages = f"{self.pages * self.page_bytes / gib:.2f} GiB of keys and values for {held:,} tokens"
        lengths = sorted({max(1, self.max_length // 4), self.max_length})
        fit = ", ".join(f"{self.sequences_of(n)} of {n:,} tokens" for n in lengths)
        free = "" if self.free_bytes is None else f" of {self.free_bytes / gib:.1f} GiB that were free"
        return f"generator: {slots}; {pages}{free}; at once fit {fit}"


def plan_memory(
    config: SSEHConfig,
    *,
    max_sequences: int,
    max_length: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_tokens: int | None = None,
    memory_fraction: float = MEMORY_FRACTION,
    router: bool = False,
    max_prefill_tokens: int = 8192,
) -> MemoryPlan:
    """The plan for `max_sequences` sequences of up to `max_length` tokens.

    Args:
        kv_tokens: tokens of keys and values in all, instead of what memory allows.
        memory_fraction: part of the free memory of a CUDA device that caches may take, or less where the largest forward would
            not fit beside them; without effect elsewhere.
        router: whether the router's choices are kept with a sequence.
        max_prefill_tokens: of the largest forward.

    Raises:
        ValueError: the states, or two sequences of `max_length` (one that runs, one prompt), do not fit.
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction={memory_fraction}, but it must be above 0 and at most 1")
    slot_bytes, page_bytes = SlotCache.measure(config, device=device, dtype=dtype)
    if router:
        width = 1 if config.num_partitions <= 256 else 2
        slot_bytes += max_length * len(config.sse_layers) * config.num_selected * width
    slots, free = max_sequences + 1, _free(device)
    workspace = workspace_bytes(config, max_prefill_tokens, max_sequences, element_size=dtype.itemsize)
    least = 1 + 2 * pages_of(max_length)
    pages = None if kv_tokens is None else 1 + pages_of(kv_tokens)
    if free is not None:
        budget = max(0, min(int(free * memory_fraction), free - workspace))
        left = budget - slots * slot_bytes
        if left < 0 or (page_bytes and left < least * page_bytes):
            fitting = max(0, (budget - least * page_bytes) // max(1, slot_bytes) - 1)
            raise ValueError(
                f"max_sequences={max_sequences} take {slots * slot_bytes:,} bytes of state and two sequences of "
                f"max_length={max_length} {least * page_bytes:,} of keys and values, but of {free:,} free bytes "
                f"memory_fraction={memory_fraction} and {workspace:,} for the largest forward leave {budget:,}; "
                f"at most max_sequences={fitting} fit"
            )
        if pages is None and page_bytes:
            pages = min(left // page_bytes, 1 + slots * pages_of(max_length))
    if pages is not None and page_bytes and pages < least:
        raise ValueError(
            f"kv_tokens={kv_tokens}, but a running sequence and a prompt of max_length={max_length} need {(least - 1) * PAGE}"
        )
    return MemoryPlan(
        slots=slots, pages=pages if page_bytes else 2, slot_bytes=slot_bytes, page_bytes=page_bytes, max_length=max_length,
        free_bytes=free, workspace_bytes=workspace,
    )  # fmt: skip


def workspace_bytes(config: SSEHConfig, tokens: int, rows: int, *, element_size: int) -> int:
    """Bytes that a forward over `tokens` packed tokens, or the sampling of `rows` rows, takes at its peak, about: the residual
    stream and a norm, the MLP's gate, up and product or the mixer's projections with fp32 decays, and the states at the chunks'
    starts; of logits those of the rows that are sampled."""
    shape = config.shape
    width, wide = config.num_attention_heads * shape.head_dim, max(4, element_size)
    mixer = 8 * width * element_size
    if config.sse_layers:
        touched = 1 + config.num_selected
        mixer += 2 * width * wide + touched * width * shape.head_dim * wide // config.chunk_size
    a_token = 3 * config.hidden_size * element_size + max(3 * config.intermediate_size * element_size, mixer)
    return tokens * a_token + rows * config.vocab_size * SAMPLING_BYTES


def _free(device: torch.device) -> int | None:
    """Bytes that a CUDA device can still give, those that PyTorch holds unused included."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
