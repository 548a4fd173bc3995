"""SSE-H: one decoder family whose token mixer is chosen a layer by `SSEHConfig.layer_types`.

    packed   forward(input_ids [1, T], cu_seq_lens_q [S+1])         sequences one after the other, no padding
    padded   forward(input_ids [B, T], attention_mask [B, T])       left or right padding; unpadded first, put back afterwards
    decode   forward(..., past_key_values=SlotCache)                sequence s continues slot `cache.slots[s]`
             forward(input_ids [1, B], ..., one_token=OneToken)     a token each of B slots, told on the device: nothing is read
                                                                    back or copied from the host, so that a CUDA graph can hold it

Between embedding and final norm everything is packed, [T, hidden]: padding never reaches a state, a router or the balance loss,
positions restart at each sequence, and on CPU a sequence gets bitwise the numbers it gets alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput, can_return_tuple

from posttrain.kernels.recompute import keep_results
from posttrain.models.cache import KVPool, SlotCache
from posttrain.models.linear import AddRMSNorm, Linear, RMSNorm, SwiGLU, has_hooks
from posttrain.models.packing import Packing, Part, make_packing, make_parts
from posttrain.models.paged import NewTokens, OneToken, PagedKV, upload
from posttrain.models.sizes import SSE_LAYER_TYPES
from posttrain.models.sse_h.configuration import SSEHConfig
from posttrain.models.sse_h.mixer_attention import AttentionMixer, RotaryTable
from posttrain.models.sse_h.mixer_sse import SSEGDNMixer, make_sse_mixer


@dataclass
class SSEHModelOutput(ModelOutput):
    """Output of the backbone.

    last_hidden_state: [B, columns, hidden], zeros at padding.
    balance_loss: sum over the SSE layers, without its coefficient; None outside training.
    router_indices: int64 [SSE layers, T, R] over the packed real tokens, where asked for.
    hidden_states: input of every layer and the output, each [B, columns, hidden], where asked for.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: SlotCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    balance_loss: Tensor | None = None
    router_indices: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """What every layer needs to know about the packed tokens of one forward. `lengths` has no empty sequence."""

    lengths: list[int]
    parts: tuple[Part, ...]
    rotary: tuple[Tensor, Tensor] | None
    with_balance_loss: bool
    cache: SlotCache | None = None
    slots: list[int] | None = None
    starts: list[int] | None = None
    where: OneToken | NewTokens | None = None


class SSEHDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm block: x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: SSEHConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        kind = config.shape.layer_types[layer_idx]
        self.routed = kind in SSE_LAYER_TYPES
        self.mixer: nn.Module = make_sse_mixer(config, kind) if self.routed else AttentionMixer(config, layer_idx)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = AddRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AddRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, step: Step, router_index: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x [T, hidden] -> (x [T, hidden], balance loss or None, partitions [T, R] or None)."""
        x, mixed, balance, index = self._mixed(x, None, step, router_index)
        x, h = self.post_attention_layernorm(x, mixed)
        return x + self.mlp(h), balance, index

    def decode(self, x: Tensor, delta: Tensor | None, step: Step) -> tuple[Tensor, Tensor, Tensor | None]:
        """One layer of a decode step on x + delta -> (x, what is to be added to it, partitions or None): the next layer's norm
        adds it on its way."""
        x, mixed, _, index = self._mixed(x, delta, step, None)
        x, h = self.post_attention_layernorm(x, mixed)
        return x, self.mlp(h), index

    def _mixed(
        self, x: Tensor, delta: Tensor | None, step: Step, router_index: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """-> x + delta, the mixer's result on its norm, balance loss, partitions."""
        x, h = self.input_layernorm(x, delta)
        state = step.cache.states[self.layer_idx] if step.cache is not None else None
        balance = index = None
        if self.routed:
            out = self.mixer(
                h,
                parts=step.parts,
                state=state,
                router_index=router_index,
                with_balance_loss=step.with_balance_loss,
            )
            mixed, balance, index = out.y, out.balance_loss, out.index
        else:
            pool = {}
            if isinstance(state, KVPool | PagedKV):
                pool = {"pool": state, "slots": step.slots or (), "starts": step.starts or (), "where": step.where}
            mixed = self.mixer(h, lengths=step.lengths, rotary=step.rotary, **pool)
        return x, mixed, balance, index


class SSEHPreTrainedModel(PreTrainedModel):
    config: SSEHConfig
    config_class = SSEHConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["SSEHDecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = True
    # Recurrent state cannot be cropped, which assisted generation would need.
    _is_stateful = True

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """transformers' own, non-reentrant unless told otherwise, and with one more key: `keep_mixers` (True by default). The
        results of the sparse-state operators' kernels, outputs and states at the chunks' starts, stay in memory and are not
        computed again: 24 KB a token and layer at 2B, for a fifth
        of the operators' time."""
        arguments = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        if arguments.pop("keep_mixers", True) and not arguments["use_reentrant"]:
            arguments.setdefault("context_fn", keep_results)
        super().gradient_checkpointing_enable(arguments, every_n_layers=every_n_layers, offload=offload)

    def _init_weights(self, module: nn.Module) -> None:
        # transformers visits no module outside its own package that has no parameter of its own, so a Linear cannot be left to
        # the module around it.
        super()._init_weights(module)
        if isinstance(module, Linear) and module.zero_init:
            init.zeros_(module.weight)
        elif isinstance(module, SSEGDNMixer):
            module.init_gates(init)


class SSEHModel(SSEHPreTrainedModel):
    """The backbone. After a forward in training mode, `balance_loss` holds the weighted, differentiable balance loss (or None):
    a trainer that computes its own loss from the hidden states adds it."""

    def __init__(self, config: SSEHConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(SSEHDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTable(config.shape.head_dim, config.rope_theta)
        self.balance_loss: Tensor | None = None
        self.gradient_checkpointing = False
        self.post_init()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the last balance loss behind: it hangs on a graph."""
        return {**self.__dict__, "balance_loss": None}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        past_key_values: SlotCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        router_indices: Tensor | None = None,
        output_router_indices: bool = False,
        output_hidden_states: bool | None = None,
        packing: Packing | None = None,
        one_token: OneToken | None = None,
        **unused: Any,
    ) -> SSEHModelOutput:
        """See the module's text. Arguments of flash attention (cu_seq_lens_k, max_length_q, ...) are accepted and ignored.

        Args:
            position_ids: used only for [1, T] input without `cu_seq_lens_q`, mask and cache: they restart where a sequence
                starts.
            use_cache: True makes a SlotCache with a slot a row where none is given. Off by default, unlike in transformers: the
                decode path has no gradients.
            router_indices: [SSE layers, T, R] over the packed real tokens: replayed instead of the router's choice.
            packing: of this input, where the caller has made it already.
            one_token: input_ids are [1, B], and these their places in a paged cache, whose pages are reserved and whose lengths
                the caller advances.
        """
        if one_token is not None:
            assert input_ids is not None and past_key_values is not None
            return self._decode(input_ids, past_key_values, one_token)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        source = input_ids if inputs_embeds is None else inputs_embeds
        assert source is not None
        if packing is None:
            packing = self.make_packing(source, attention_mask, cu_seq_lens_q, position_ids, past_key_values)
        if use_cache and past_key_values is None:
            past_key_values = SlotCache(
                self.config, len(packing.lengths), device=source.device, dtype=self.embed_tokens.weight.dtype
            )
        step = self._make_step(packing, past_key_values, source.device)
        x = packing.pack(source)
        x = self.embed_tokens(x) if inputs_embeds is None else x
        self._check_router_indices(router_indices, x.shape[0])
        hidden, balances, indices = [], [], []
        routed = 0
        for layer in self.layers:
            assert isinstance(layer, SSEHDecoderLayer)
            if output_hidden_states:
                hidden.append(packing.unpack(x))
            given = None
            if layer.routed and router_indices is not None:
                given = router_indices[routed]
            x, balance, index = layer(x, step, given)
            routed += layer.routed
            if balance is not None:
                balances.append(balance)
            if index is not None and output_router_indices:
                indices.append(index)
        x = self.norm(x)
        if past_key_values is not None:
            past_key_values.advance(step.slots or [], step.lengths)
            past_key_values.columns += packing.shape[1] if cu_seq_lens_q is None else 0
        last = packing.unpack(x)
        if past_key_values is not None and packing.tokens is not None:
            # generate() samples from the last column: in a right-padded row that is the row's last real token.
            last[:, -1] = packing.last_rows(x)
        total = torch.stack(balances).sum() if balances else None
        self.balance_loss = None if total is None else self.config.balance_loss_coef * total
        return SSEHModelOutput(
            last_hidden_state=last,
            past_key_values=past_key_values,
            hidden_states=(*hidden, last) if output_hidden_states else None,
            balance_loss=total,
            router_indices=torch.stack(indices) if indices else None,
        )

    def _decode(self, input_ids: Tensor, cache: SlotCache, one_token: OneToken) -> SSEHModelOutput:
        """One token a sequence: no host tensor, no number read from the device, shapes that depend on B alone."""
        assert not (self.training and torch.is_grad_enabled()), "a cache has no gradients"
        positions = one_token.positions
        rotary = None
        if self.config.attention_layers:
            longest = cache.max_length or max(cache.lengths) + 1
            rotary = self.rotary(positions, longest)
        step = Step(
            lengths=[1] * positions.shape[0],
            parts=(Part(cu_seqlens=None, slots=one_token.slots),),
            rotary=rotary,
            with_balance_loss=False,
            cache=cache,
            where=one_token,
        )
        x, delta, indices = self.embed_tokens(input_ids[0]), None, []
        for layer in self.layers:
            assert isinstance(layer, SSEHDecoderLayer)
            if has_hooks(layer):
                x, _, index = layer(x if delta is None else x + delta, step)
                delta = None
            else:
                x, delta, index = layer.decode(x, delta, step)
            if index is not None:
                indices.append(index)
        return SSEHModelOutput(
            last_hidden_state=self.norm(x if delta is None else x + delta)[None],
            past_key_values=cache,
            router_indices=torch.stack(indices) if indices else None,
        )

    @staticmethod
    def make_packing(
        source: Tensor,
        attention_mask: Tensor | None,
        cu_seq_lens_q: Tensor | None,
        position_ids: Tensor | None,
        cache: SlotCache | None,
    ) -> Packing:
        """Boundaries of an input whose first two dimensions are [B, columns]; raises ValueError on an empty one."""
        shape = (source.shape[0], source.shape[1])
        if 0 in shape:
            raise ValueError(f"the input is empty: its shape is {list(source.shape)}")
        return make_packing(
            shape,
            attention_mask=attention_mask,
            cu_seq_lens_q=cu_seq_lens_q,
            position_ids=position_ids if cache is None else None,
        )

    def _make_step(self, packing: Packing, cache: SlotCache | None, device: torch.device) -> Step:
        lengths = [n for n in packing.lengths if n]
        if not lengths:
            raise ValueError("the input has no real token: every position is padding")
        slots = slot_tensor = None
        starts = [0] * len(lengths)
        if cache is not None:
            if self.training and torch.is_grad_enabled():
                raise ValueError("a cache has no gradients: call the model under torch.no_grad(), in eval mode, or without it")
            if len(cache.slots) != len(packing.lengths):
                raise ValueError(
                    f"the cache is bound to {len(cache.slots)} slots, but the input has {len(packing.lengths)} sequences; "
                    "bind() one slot a sequence"
                )
            slots, slot_tensor = cache.slots, cache.slot_tensor
            if len(lengths) != len(packing.lengths):
                kept = [i for i, n in enumerate(packing.lengths) if n]
                slots, slot_tensor = [slots[i] for i in kept], slot_tensor[kept]
            cache.check_room(slots, lengths)
            cache.reserve(slots, lengths)
            starts = [cache.lengths[slot] for slot in slots]
        rotary = where = None
        if self.config.attention_layers:
            if max(lengths) == 1:
                positions = torch.tensor(starts)
            else:
                positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])
            longest = max(a + n for a, n in zip(starts, lengths, strict=True))
            positions = positions.to(device, non_blocking=True)
            rotary = self.rotary(positions, longest)
            if cache is not None and cache.pages is not None and slots is not None:
                where = _places(positions, slots, lengths)
        return Step(
            lengths=lengths,
            parts=make_parts(lengths, slot_tensor, device, starts),
            rotary=rotary,
            with_balance_loss=self.training,
            cache=cache,
            slots=slots,
            starts=starts,
            where=where,
        )

    def _check_router_indices(self, given: Tensor | None, tokens: int) -> None:
        want = (len(self.config.sse_layers), tokens, self.config.num_selected)
        if given is not None and tuple(given.shape) != want:
            raise ValueError(
                f"router_indices must be [SSE layers, packed tokens, selected] = {list(want)}, got {list(given.shape)}"
            )


def _places(positions: Tensor, slots: list[int], lengths: list[int]) -> NewTokens:
    """Where the packed tokens of a paged cache's sequences go; `positions` [T] on the device."""
    owners = [slot for slot, n in zip(slots, lengths, strict=True) for _ in range(n)]
    after = [n - 1 - i for n in lengths for i in range(n)]
    columns = upload([owners, after], torch.int64, positions.device)
    return NewTokens(positions=positions, slots=columns[0], after=columns[1])
