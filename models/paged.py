"""Keys and values in pages: a sequence takes memory as it grows, and forks share the pages of their prompt.

`PageTable` keeps the books of one cache on the host (who holds which page, and how many hold it) and their copy on the device;
`PagedKV` is one attention layer's pool. All full-attention layers share one table: a page number stands for one page in each of
them. A page that several slots hold is copied when one of them is about to write into it. Page 0 is nobody's: padding rows of
a captured step write there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.kernels.paged_attention import paged_write, visible_rows
from posttrain.models.sizes import KV_BLOCK

PAGE = KV_BLOCK
# Pages that a pool without a limit grows by, at least.
GROWTH = 16


class OutOfPages(RuntimeError):
    """No page is free; nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class OneToken:
    """One new token a sequence, told on the device: fit for a CUDA graph.

    positions, slots: int64 [B], the token's place in its sequence, and where that lives; a negative slot is padding.
    """

    positions: Tensor
    slots: Tensor


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """Packed tokens of sequences that go on: int64 [T] each, as in `OneToken`; after: tokens that follow in the same sequence."""

    positions: Tensor
    slots: Tensor
    after: Tensor


class PageTable:
    """Pages of `num_slots` sequences.

    Args:
        num_pages: pages in all, page 0 included; None: as many as are asked for.
        max_length: longest sequence; None for no limit, and then a table that grows.

    Attributes:
        device_table: int32 [num_slots, W]; entries behind a slot's last page are left over and mean nothing.
    """

    def __init__(self, num_slots: int, num_pages: int | None, *, max_length: int | None, device: torch.device | str) -> None:
        if num_pages is not None and num_pages < 2:
            raise ValueError(f"num_pages={num_pages}, but at least 2 are needed: page 0 is nobody's")
        self.limited = num_pages is not None
        self.num_pages = num_pages or 1
        self.free = list(range(1, self.num_pages))[::-1]
        self.holders = [0] * self.num_pages
        self.pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._unpublished: list[tuple[int, int, int]] = []
        width = GROWTH if max_length is None else -(-max_length // PAGE)
        self.device_table = torch.zeros(num_slots, width, dtype=torch.int32, device=device)

    def due(self, slots: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Of slots that hold `lengths[slot]` tokens, those whose next token needs a page: a new one, or a shared one's copy."""
        pages, holders = self.pages, self.holders
        return [s for s in slots if lengths[s] % PAGE == 0 or holders[pages[s][-1]] > 1]

    def reserve(self, slot: int, start: int, stop: int) -> tuple[int, int] | None:
        """Makes rows [start, stop) of a slot its own -> (page to copy, its copy) where one was shared; `publish` follows.

        Raises:
            OutOfPages: too few are free.
        """
        held = self.pages[slot]
        more = max(0, -(-stop // PAGE) - len(held))
        first = start // PAGE
        shared = first < len(held) and self.holders[held[first]] > 1
        fresh = self._take(more + shared)
        copied = None
        if shared:
            copied = held[first], fresh.pop()
            self.holders[held[first]] -= 1
            held[first] = copied[1]
        begin = first if shared else len(held)
        held += fresh
        self._unpublished += [(slot, number, held[number]) for number in range(begin, len(held))]
        return copied

    def _take(self, count: int) -> list[int]:
        if count > len(self.free):
            if self.limited:
                raise OutOfPages(f"{count} pages of {PAGE} tokens are needed, but {len(self.free)} of {self.num_pages} are free")
            more = max(count - len(self.free), GROWTH, self.num_pages // 2)
            self.free = list(range(self.num_pages, self.num_pages + more))[::-1] + self.free
            self.holders += [0] * more
            self.num_pages += more
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.holders[page] = 1
        return taken

    def publish(self) -> None:
        """Brings what `reserve` booked to the device, in one copy."""
        new, self._unpublished = self._unpublished, []
        if not new:
            return
        table, width = self.device_table, 1 + max(number for _, number, _ in new)
        if width > table.shape[1]:
            with torch.inference_mode(False):
                table = torch.nn.functional.pad(table, (0, max(width, 2 * table.shape[1]) - table.shape[1]))
            self.device_table = table
        rows, columns, pages = upload([list(part) for part in zip(*new, strict=True)], torch.int64, table.device)
        table[rows, columns] = pages.int()

    def fork(self, src: int, dst: Sequence[int]) -> None:
        """Each of `dst` holds what `src` holds."""
        self.publish()
        for slot in dst:
            self.release(slot)
            self.pages[slot] = list(self.pages[src])
        for page in self.pages[src]:
            self.holders[page] += len(dst)
        if self.pages[src]:
            count = len(self.pages[src])
            targets = upload(list(dst), torch.int64, self.device_table.device)
            self.device_table[targets, :count] = self.device_table[src, :count].clone()

    def release(self, slot: int) -> list[int]:
        """Empties a slot; returns the pages that nobody holds any more."""
        freed = []
        for page in self.pages[slot]:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                freed.append(page)
        self.pages[slot] = []
        self.free += freed
        return freed


class PagedKV:
    """Keys and values of one attention layer, [pages, H_kv, PAGE, D].

    With a sliding `window` a slot has pages of its own, a ring of whole pages in which position p lies in row p mod its length.
    Rows behind a sequence's end may hold anything, what a sequence with NaN left in a page included: readers mask them.
    """

    def __init__(
        self,
        table: PageTable,
        heads: int,
        dim: int,
        *,
        window: int | None = None,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.shared_table = table
        self.window = window
        self.own_table: Tensor | None = None
        pages = table.num_pages
        if window is not None:
            slots, each = len(table.pages), -(-window // PAGE)
            pages = 1 + slots * each
            self.own_table = (1 + torch.arange(slots * each, dtype=torch.int32, device=device)).view(slots, each)
        self.keys = torch.zeros(pages, heads, PAGE, dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    @property
    def table(self) -> Tensor:
        """int32 [slots, W] on the device."""
        return self.shared_table.device_table if self.own_table is None else self.own_table

    @property
    def ring(self) -> int | None:
        """Rows of a slot's ring, or None without a window."""
        return None if self.own_table is None else self.own_table.shape[1] * PAGE

    def grow(self) -> None:
        """Follows a table that has grown; new pages are zero."""
        more = self.shared_table.num_pages - self.keys.shape[0]
        if self.own_table is None and more > 0:
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                empty = self.keys.new_zeros(more, *self.keys.shape[1:])
                self.keys, self.values = torch.cat((self.keys, empty)), torch.cat((self.values, empty))

    def copy_pages(self, src: Tensor, dst: Tensor) -> None:
        for pool in (self.keys, self.values):
            pool[dst] = pool[src]

    def write(self, k: Tensor, v: Tensor, where: OneToken | NewTokens) -> None:
        """k and v [T, H_kv, D] to the places of their tokens; padding goes to page 0, and so does what a ring has no room for."""
        slots = where.slots
        if self.ring is not None and isinstance(where, NewTokens):
            slots = slots.masked_fill(where.after >= self.ring, -1)
        paged_write(k, v, self.keys, self.values, self.table, slots, where.positions, ring=self.ring is not None)

    def before(self, slot: int, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a token behind the first `start` of a slot may see of those: all, or with a window the last
        window - 1, [m, H_kv, D] twice, copied."""
        first = 0 if self.window is None else max(0, start - self.window + 1)
        return self._gather(self.keys, slot, first, start), self._gather(self.values, slot, first, start)

    def _gather(self, pool: Tensor, slot: int, first: int, stop: int) -> Tensor:
        """Rows [first, stop) of a slot, [m, H_kv, D]."""
        if self.ring is None:
            pages = self.table[slot, first // PAGE : -(-stop // PAGE)].long()
            rows = pool.index_select(0, pages).transpose(1, 2).flatten(0, 1)
            return rows[first % PAGE : first % PAGE + stop - first]
        places = torch.arange(first, stop, device=pool.device) % self.ring
        return pool[self.table[slot].index_select(0, places // PAGE).long(), :, places % PAGE]

    def view(self, slots: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of some slots up to the longest of `lengths`, in whole pages: keys and values [S, H_kv, L, D], copied, and the
        mask [S, L], True where a row must not be seen; values are 0 there."""
        device = self.keys.device
        index, last = upload([list(slots), [n - 1 for n in lengths]], torch.int64, device)
        width = self.table.shape[1] if self.ring is not None else -(-max(lengths) // PAGE)
        table = self.table.index_select(0, index)[:, :width].long()
        if self.ring is None:
            # Behind a sequence's end the table may name anyone's page.
            table = table.masked_fill(torch.arange(width, device=device)[None] > last[:, None] // PAGE, 0)
        keys, values = (pool[table].transpose(1, 2).flatten(2, 3) for pool in (self.keys, self.values))
        hidden = ~visible_rows(last, width * PAGE, self.window)
        # Their weight is 0, and 0 times NaN is NaN.
        return keys, values.masked_fill_(hidden[:, None, :, None], 0), hidden

    def reset(self, slot: int, freed: Sequence[int]) -> None:
        """Zeroes what a slot held: its ring, or the pages that nobody holds any more."""
        if self.own_table is not None:
            pages = self.own_table[slot].long()
        elif freed:
            pages = upload(list(freed), torch.int64, self.keys.device)
        else:
            return
        self.keys[pages] = 0
        self.values[pages] = 0

    def fork(self, src: int, dst: Sequence[int]) -> None:
        """A ring is copied; without a window the table has shared the pages."""
        if self.own_table is not None:
            for slot in dst:
                self.copy_pages(self.own_table[src].long(), self.own_table[slot].long())

    def export(self, slot: int, length: int) -> dict[str, Tensor]:
        """Rows in the order of the pool, [H_kv, rows, D], as `KVPool.export` has them."""
        rows = length if self.ring is None else min(length, self.ring)
        pools = {"keys": self.keys, "values": self.values}
        return {
            name: self._gather(pool, slot, 0, rows).transpose(0, 1).detach().to("cpu", copy=True).contiguous()
            for name, pool in pools.items()
        }

    def load(self, slot: int, tensors: dict[str, Tensor], length: int) -> None:
        """Fills a slot whose pages are reserved.

        Raises:
            ValueError: tensors are missing, foreign or of another shape.
        """
        if tensors.keys() != {"keys", "values"}:
            raise ValueError(f"an exported attention layer holds keys and values, got {sorted(tensors)}")
        rows = length if self.ring is None else min(length, self.ring)
        want = (self.keys.shape[1], rows, self.keys.shape[3])
        for name in ("keys", "values"):
            if tuple(tensors[name].shape) != want:
                raise ValueError(f"{name} has shape {list(tensors[name].shape)}, but this cache needs {list(want)}")
        places = torch.arange(rows, device=self.keys.device)
        pages = self.table[slot].index_select(0, places // PAGE).long()
        for pool, name in ((self.keys, "keys"), (self.values, "values")):
            pool[pages, :, places % PAGE] = tensors[name].to(pool).transpose(0, 1)


def upload(values: list, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A small tensor on the device without a wait for it: its host copy is pinned, and kept by PyTorch until it was read."""
    host = torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
