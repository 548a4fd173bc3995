"""SSE-H as vLLM runs it: packed tokens [T, hidden] of a batch, this project's layers, vLLM's paged attention.

Parameter names are those of the checkpoint, so that loading is a copy. Weights are whole on every GPU: tensor and pipeline
parallelism are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

from posttrain.kernels.rotary import rotary as apply_rotary
from posttrain.models.linear import Linear, RMSNorm, SwiGLU
from posttrain.models.sizes import SSE_LAYER_TYPES
from posttrain.models.sse_h.configuration import SSEHConfig
from posttrain.models.sse_h.mixer_attention import AttentionMixer, RotaryTable
from posttrain.vllm_plugin.mixer import STATE_DTYPES, make_paged_mixer, state_shapes


class PagedAttention(AttentionMixer):
    """The attention mixer with its keys and values in vLLM's pages."""

    def __init__(self, config: SSEHConfig, layer_idx: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(config, layer_idx)
        self.paged = Attention(
            self.heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=self.window,
            prefix=f"{prefix}.paged",
        )

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """x [T, hidden] -> [T, hidden]; `rotary` holds cos and sin of each token's position."""
        tokens = x.shape[0]
        q = self.q_proj(x).view(tokens, self.heads, self.head_dim)
        k = self.k_proj(x).view(tokens, self.kv_heads, self.head_dim)
        v = self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        return self.o_proj(self.paged(q.reshape(tokens, -1), k.reshape(tokens, -1), v))


class VllmDecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: SSEHConfig, layer_idx: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        kind = config.shape.layer_types[layer_idx]
        self.routed = kind in SSE_LAYER_TYPES
        name = f"{prefix}.mixer"
        self.mixer: nn.Module = (
            make_paged_mixer(config, kind, vllm_config, name)
            if self.routed
            else PagedAttention(config, layer_idx, vllm_config, name)
        )
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        h = self.input_layernorm(x)
        x = x + (self.mixer(h, parts=()).y if self.routed else self.mixer(h, rotary))
        return x + self.mlp(self.post_attention_layernorm(x))


class VllmBackbone(nn.Module):
    """Token ids [T] and positions [T] -> hidden states [T, hidden]."""

    def __init__(self, config: SSEHConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            VllmDecoderLayer(config, i, vllm_config, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._rotary = RotaryTable(config.shape.head_dim, config.rope_theta)
        # Of the longest sequence that can come, so that the table is made once, before any CUDA graph is captured.
        self._longest = vllm_config.model_config.max_model_len

    def forward(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        x = inputs_embeds if input_ids is None else self.embed_tokens(input_ids)
        rotary = self._rotary(positions, self._longest)
        for layer in self.layers:
            x = layer(x, rotary)
        return self.norm(x)


class VllmSSEH(nn.Module, HasInnerState, IsHybrid):
    """The language model, under the interfaces that vLLM asks of hybrids.

    Raises:
        ValueError: the engine was started with tensor or pipeline parallelism, or with speculative decoding.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        _refuse_what_is_missing(vllm_config)
        config: Any = vllm_config.model_config.hf_config
        self.config = config
        self.model = VllmBackbone(config, vllm_config, f"{prefix}.model" if prefix else "model")
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        return state_shapes(vllm_config.model_config.hf_config)  # pyright: ignore[reportArgumentType]

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return STATE_DTYPES

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """How prefix caching copies a block: states and flags alike, whole."""
        return get_temporal_copy_spec, get_temporal_copy_spec

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor, *unused: Any) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies the checkpoint's tensors into the parameters of the same names; returns those names.

        Raises:
            ValueError: a tensor that the model does not have, of another shape, or missing.
        """
        own = dict(self.named_parameters())
        loaded: set[str] = set()
        for name, tensor in weights:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if name not in own or own[name].shape != tensor.shape:
                have = list(own[name].shape) if name in own else "nothing of that name"
                raise ValueError(f"checkpoint tensor {name} {list(tensor.shape)}: the model has {have}")
            own[name].data.copy_(tensor)
            loaded.add(name)
        missing = sorted(own.keys() - loaded)
        if missing:
            raise ValueError(f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:5])}")
        return loaded


def _refuse_what_is_missing(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ValueError(f"SSE-H in vLLM: {name} is {getattr(parallel, name)}, but its weights are not split; use 1")
    if vllm_config.speculative_config is not None:
        raise ValueError("SSE-H in vLLM: speculative decoding would need a state a draft token; leave it off")
