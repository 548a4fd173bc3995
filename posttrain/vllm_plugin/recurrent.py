"""One token a sequence: the SSE recurrence on the touched partitions of states that lie in vLLM's pages.

Shapes: B sequences, J = (shared) + R touched partitions, H heads, K key width, V value width, N routed partitions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Pages:
    """Where the states of a batch of B sequences lie.

    Attributes:
        pool: [blocks, 1+N, H, K, V] fp32, row 0 the shared partition; blocks lie a page apart, the rest is contiguous.
        written: [blocks, 1+N] fp32, above 0 where a sequence has written the partition. vLLM hands blocks out again without
            clearing them; clearing these few flags spares clearing states, which are large.
        blocks: int64 [B], of each sequence.
        begun: bool [B], whether the sequence has been here before.
    """

    pool: Tensor
    written: Tensor
    blocks: Tensor
    begun: Tensor

    def flags(self) -> Tensor:
        """`written` of the batch, [B, 1+N]; cleared, here and in the pages, for sequences that begin."""
        # Not a product: a page that was never used may hold NaN.
        flags = torch.where(self.begun[:, None], self.written[self.blocks], 0.0)
        self.written[self.blocks] = flags
        return flags

    def load(self) -> Tensor:
        """All states of the batch, [B, 1+N, H, K, V], zero where nothing was written."""
        return torch.where(self.flags()[..., None, None, None] > 0, self.pool[self.blocks], 0.0)

    def store(self, states: Tensor) -> None:
        """The opposite of `load`."""
        self.pool[self.blocks] = states
        self.written[self.blocks] = 1.0


def touched(index: Tensor, weight: Tensor, shared: bool) -> tuple[Tensor, Tensor]:
    """index, weight [B, R] -> rows of a state [B, J] (the shared one first), and their weights [B, J, 1, 1] in fp32."""
    partitions, weights = index + 1, weight.float()
    if shared:
        partitions, weights = pad(partitions, (1, 0)), pad(weights, (1, 0), value=1.0)
    return partitions, weights[..., None, None]


def stack(first: Tensor | None, second: Tensor, routes: int, *, a_row_a_route: bool) -> Tensor:
    """first [B, ...] of the shared partition (or None) and second of the routed ones, [B, R, ...] with a row a route, else
    [B, ...] -> [B, J, ...] in fp32."""
    rows = second if a_row_a_route else second[:, None].expand(-1, routes, *second.shape[1:])
    return (rows if first is None else torch.cat([first[:, None], rows], dim=1)).float()


def advance(pages: Pages, partitions: Tensor, q: Tensor, k: Tensor, g: Tensor, v: Tensor, b: Tensor | None = None) -> Tensor:
    """Reads, advances and writes the touched states -> o [B, H, V] in fp32, before the scale. Router weights are in already.

    Args:
        partitions: int64 [B, J], different ones for a sequence.
        q, k: [B, J, H, K]; v: [B, J, H, V].
        g: log decay, [B, J, H, K] for GLA; with `b` (write strength [B, J, H]) the gated delta rule's [B, J, H].
    """
    live = pages.flags().gather(1, partitions) > 0
    pages.written[pages.blocks[:, None], partitions] = torch.ones_like(partitions, dtype=pages.written.dtype)
    if pages.pool.is_cuda:
        from posttrain.vllm_plugin.triton_recurrent import advance_triton

        return advance_triton(pages, partitions, live, q, k, g, v, b)
    states = torch.where(live[..., None, None, None], pages.pool[pages.blocks[:, None], partitions], 0.0)
    if b is None:
        states = states * g.exp()[..., None] + k[..., None] * v[..., None, :]
    else:
        states = states * g.exp()[..., None, None]
        change = b[..., None] * (v - torch.einsum("bjhk,bjhkv->bjhv", k, states))
        states = states + k[..., None] * change[..., None, :]
    pages.pool[pages.blocks[:, None], partitions] = states
    return torch.einsum("bjhk,bjhkv->bhv", q, states)
