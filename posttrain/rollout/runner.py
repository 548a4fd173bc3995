"""The model with its cache, in terms of slots: prefill, decode steps, forks, snapshots. Knows no requests.

A decode step is one forward and the sampling of its tokens. On a GPU it reads nothing back: what goes in lies in `DecodeState`,
pages are booked on the host from the lengths that it knows anyway, and the step is a CUDA graph where every layer has kernels
that one can hold (the gated delta rule has none yet) and the weights are not cast by autocast; elsewhere it is called as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.kernels.backend import takes_triton
from posttrain.kernels.paged_attention import MAX_WIDTH
from posttrain.kernels.sse import ChunkState, folds_together
from posttrain.models.cache import SlotCache
from posttrain.models.exact import is_exact
from posttrain.models.paged import OneToken, PagedKV, upload
from posttrain.models.sse_h import SSEHConfig
from posttrain.models.sse_h.mixer_attention import RotaryTable
from posttrain.rollout.decode_batch import DecodeBatch
from posttrain.rollout.decode_state import DecodeState
from posttrain.rollout.exact import with_exact_logprobs
from posttrain.rollout.graphs import DecodeGraphs
from posttrain.rollout.memory import MemoryPlan, pages_of
from posttrain.rollout.router_log import RouterLog
from posttrain.rollout.sampling import Draw, Kind, SamplingParams, sample

# Fields of the configuration that shape a slot's tensors.
_LAYOUT = (
    "layer_types", "num_attention_heads", "num_key_value_heads", "head_dim", "num_partitions", "num_selected", "chunk_size",
    "sliding_window",
)  # fmt: skip


class Runner:
    """Args:
    ends: tokens that end a completion.
    graphs: whether decode steps may be CUDA graphs.
    """

    def __init__(
        self, model: nn.Module, config: SSEHConfig, plan: MemoryPlan, *, ends: Collection[int], router: bool, graphs: bool
    ) -> None:
        parameter = next(model.parameters())
        self.model, self.device = model, parameter.device
        self._exact = is_exact(model)
        self.cache = SlotCache(
            config, plan.slots, max_length=plan.max_length, paged=True, num_pages=plan.pages, device=parameter.device,
            dtype=parameter.dtype,
        )  # fmt: skip
        self.router: RouterLog | None = None
        if router:
            self.router = RouterLog(
                plan.slots, plan.max_length, layers=len(config.sse_layers), routed=config.num_selected,
                num_partitions=config.num_partitions, device=self.device,
            )  # fmt: skip
        self.state = DecodeState(plan.slots, ends, self.device)
        # Layers that take padding rows need not run a sequence that has ended.
        self._skips_ended = self.device.type == "cuda" and all(_takes_padding(state) for state in self.cache.states)
        self.graphs: DecodeGraphs | None = None
        if graphs and self._skips_ended:
            self.graphs = DecodeGraphs(model, plan.slots - 1, self.device)

    # -- forwards -----------------------------------------------------------------------------------------------------

    def prefill(self, slots: list[int], starts: list[int], pieces: list[list[int]], keep: list[int]) -> Tensor:
        """Prompt tokens `pieces[s]` continue slot `slots[s]` at `starts[s]` -> logits [len(keep), vocab] of the pieces whose
        numbers are in `keep` after their last tokens."""
        tokens = [token for piece in pieces for token in piece]
        positions = [p for start, piece in zip(starts, pieces, strict=True) for p in range(start, start + len(piece))]
        owners = [slot for slot, piece in zip(slots, pieces, strict=True) for _ in piece]
        bounds = [0]
        for piece in pieces:
            bounds.append(bounds[-1] + len(piece))
        packed = upload([tokens, positions, owners], torch.int64, self.device)
        self.cache.bind(slots)
        out = self.model(
            input_ids=packed[0][None],
            position_ids=packed[1][None],
            cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
            past_key_values=self.cache,
            use_cache=True,
            # A forward needs at least one row of logits, also when every prompt goes on.
            logits_to_keep=upload([bounds[s + 1] - 1 for s in keep] or [0], torch.int64, self.device),
            output_router_indices=self.router is not None,
        )
        if self.router is not None and out.router_indices is not None:
            self.router.write(out.router_indices, packed[2], packed[1])
        return out.logits[0][: len(keep)]

    def decode(self, batch: DecodeBatch) -> Tensor:
        """One token of every row -> the table of `DecodeState.record`, valid until the next step."""
        self.cache.reserve_next(batch.slot_list)
        if self.graphs is not None and not torch.is_autocast_enabled(self.device.type):
            table = self.graphs.run(self._step, batch.slots, batch.kind, keep=self._tables_of_positions)
        else:
            table = self._step(batch.slots, batch.kind)
        self.cache.advance(batch.slot_list, [1] * len(batch.slot_list))
        return table

    def first(self, logits: Tensor, slots: list[int], kind: Kind) -> Tensor:
        """The first tokens of samples that have begun, from the logits [B, vocab] after their prompts -> as `decode`."""
        entries = self.state.read(upload(slots, torch.int64, self.device))
        return self.state.record(self._sample(logits, self.state.params(entries, kind), entries.drawn), entries)

    def _step(self, slots: Tensor, kind: Kind) -> Tensor:
        entries = self.state.read(slots)
        # At an address of its own, which kernels are compiled for.
        positions = entries.position.clone()
        live = torch.where(entries.live, slots, -1)
        where = OneToken(positions=positions, slots=live if self._skips_ended else slots)
        with folds_together():
            out = self.model(input_ids=entries.token[None], past_key_values=self.cache, one_token=where)
        if self.router is not None and out.router_indices is not None:
            self.router.write(out.router_indices, live, positions)
        draw = self._sample(out.logits[0], self.state.params(entries, kind), entries.drawn)
        return self.state.record(draw, entries)

    def _sample(self, logits: Tensor, params: SamplingParams, drawn: Tensor) -> Draw:
        draw = sample(logits, params, drawn)
        return with_exact_logprobs(draw, logits, params) if self._exact else draw

    def _tables_of_positions(self) -> object:
        """A longer table may replace the one that a graph reads."""
        tables = [getattr(module, "rotary", None) for module in self.model.modules()]
        return [table.table(self.device, 1) for table in tables if isinstance(table, RotaryTable)]

    def weights_may_have_moved(self) -> None:
        if self.graphs is not None:
            self.graphs.drop_if_moved()

    # -- slots --------------------------------------------------------------------------------------------------------

    def fits(self, tokens: int, *, spare: int) -> bool:
        """Whether a sequence of `tokens` tokens finds pages, with `spare` more left for those that run."""
        books = self.cache.pages
        if books is None or not books.limited or not self.cache.uses_pages:
            return True
        return pages_of(tokens + 1) + spare <= len(books.free)

    def has_next_pages(self, slots: list[int]) -> bool:
        """Whether every one of these slots can take one more token."""
        books = self.cache.pages
        if books is None or not books.limited or not self.cache.uses_pages:
            return True
        return len(books.due(slots, self.cache.lengths)) <= len(books.free)

    def reserve(self, slot: int, tokens: int) -> None:
        """Pages of a fresh slot for a whole prompt: its later pieces then never run short."""
        self.cache.lengths[slot] = 0
        self.cache.reserve([slot], [tokens])

    def start(self, slots: list[int]) -> None:
        """Empties fresh slots; their pages are reserved already."""
        self.cache.reset(slots, keep_pages=True)

    def release(self, slot: int) -> None:
        self.cache.release(slot)

    def fork(self, source: int, copies: list[int], length: int) -> None:
        self.cache.fork(source, copies)
        if self.router is not None:
            self.router.fork(source, copies, length)

    def export(self, slot: int) -> dict[str, Any]:
        return self.cache.export(slot)

    def load(self, slot: int, cached: dict[str, Any]) -> None:
        self.cache.load(slot, cached["cache"])
        if self.router is not None:
            self.router.load(slot, cached["router_indices"])

    def layout(self) -> dict[str, Any]:
        """What an exported slot's tensors depend on: equal layouts exchange them."""
        config = self.cache.config
        return {
            "layers": [type(state).__name__ for state in self.cache.states],
            "dtype": str(self.cache.dtype).removeprefix("torch."),
            **{name: getattr(config, name) for name in _LAYOUT},
        }

    def router_indices(self, slot: int, length: int) -> Tensor | None:
        """Partitions of a slot's first `length` tokens, [layers, length, R], on the host."""
        return None if self.router is None else self.router.take(slot, length)


def _takes_padding(state: object) -> bool:
    """Whether a layer's one-token step takes negative slots, and reads nothing back, as `ChunkState`'s own does to find full
    chunks."""
    if isinstance(state, PagedKV):
        return takes_triton(state.keys, None, max_width=MAX_WIDTH)
    return isinstance(state, ChunkState) and type(state) is not ChunkState


def config_of(model: nn.Module) -> SSEHConfig:
    """Raises ValueError for a model of another family."""
    config = getattr(model, "config", None)
    if not isinstance(config, SSEHConfig):
        family = getattr(config, "model_type", type(model).__name__)
        raise ValueError(f"the generator runs models of the sse_h family (attention-only ones too), but {family!r} was given")
    return config
