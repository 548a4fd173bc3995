"""Configuration of the SSE-H family: pure SSE, hybrids, and the Transformer baseline, by `layer_types`."""

# No `from __future__ import annotations` here: transformers' validation reads the fields' types and skips types that are strings.
from dataclasses import dataclass
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from posttrain.models.sizes import ATTENTION_LAYER_TYPES, DEFAULTS, SSE_LAYER_TYPES, resolve


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What follows from optional fields once they are filled in."""

    layer_types: list[str]
    kv_heads: int
    head_dim: int
    output_gate_rank: int


@strict
class SSEHConfig(PreTrainedConfig):
    """Shape and choices of an SSE-H model. Bad values raise ValueError naming what is allowed.

    Args:
        layer_types: one of "sse", "sse_gdn", "full_attention", "sliding_attention" a layer. Default: five "sse", one
            "full_attention", repeated.
        num_attention_heads, head_dim: heads and their width, in every mixer; an SSE head has K = V = head_dim.
        num_key_value_heads: KV heads of the attention layers (SSE layers have one key head a query head).
        num_partitions, num_selected: N routed partitions and the R touched by a token (n4k1 is N=4, R=1).
        adapter_rank: rank of the query/key adapters of the routed partitions.
        gate_rank, gate_logit_normalizer: log decay of an "sse" layer is logsigmoid(low-rank gate) / normalizer.
        output_gate_rank, use_output_gate: low-rank output gate; the rank defaults to head_dim.
        key_map: "softmax" or "silu" keys in "sse" layers. "sse_gdn" layers always use silu keys, L2-normalised.
        router_gate: where the router's weight enters: "both" (write and read), "write", "read", "none"; "pre_norm" is the form of
            published "sse_gdn" checkpoints, which multiply it into q and k before their L2 norm.
        projections: routed queries and keys come from a low-rank "adapter" on the shared ones, are the "shared" ones, or every
            "partition" has its own q, k and v projection.
        shared_partition: False drops the partition that every token touches.
        chunk_size: length of the chunk grid, the same in training and decoding.
        balance_loss_coef: weight of the summed balance loss in training.
        qk_norm, sliding_window, rope_theta: of the attention layers; SSE layers have no positions.
    """

    model_type = "sse_h"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "router_indices", "balance_loss"]

    vocab_size: int = DEFAULTS["vocab_size"]
    hidden_size: int = DEFAULTS["hidden_size"]
    intermediate_size: int = DEFAULTS["intermediate_size"]
    num_hidden_layers: int = DEFAULTS["num_hidden_layers"]
    num_attention_heads: int = DEFAULTS["num_attention_heads"]
    num_key_value_heads: int | None = DEFAULTS["num_key_value_heads"]
    head_dim: int | None = DEFAULTS["head_dim"]
    layer_types: list[str] | None = DEFAULTS["layer_types"]
    num_partitions: int = DEFAULTS["num_partitions"]
    num_selected: int = DEFAULTS["num_selected"]
    adapter_rank: int = DEFAULTS["adapter_rank"]
    gate_rank: int = DEFAULTS["gate_rank"]
    output_gate_rank: int | None = DEFAULTS["output_gate_rank"]
    gate_logit_normalizer: float | int = DEFAULTS["gate_logit_normalizer"]
    key_map: str = DEFAULTS["key_map"]
    router_gate: str = DEFAULTS["router_gate"]
    projections: str = DEFAULTS["projections"]
    shared_partition: bool = DEFAULTS["shared_partition"]
    use_output_gate: bool = DEFAULTS["use_output_gate"]
    chunk_size: int = DEFAULTS["chunk_size"]
    balance_loss_coef: float | int = DEFAULTS["balance_loss_coef"]
    qk_norm: bool = DEFAULTS["qk_norm"]
    sliding_window: int | None = DEFAULTS["sliding_window"]
    rope_theta: float | int = DEFAULTS["rope_theta"]
    rms_norm_eps: float | int = DEFAULTS["rms_norm_eps"]
    tie_word_embeddings: bool = DEFAULTS["tie_word_embeddings"]
    max_position_embeddings: int = DEFAULTS["max_position_embeddings"]
    initializer_range: float | int = DEFAULTS["initializer_range"]
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        derived = resolve({name: getattr(self, name) for name in DEFAULTS})
        self.layer_types = list(derived["layer_types"])
        self.head_dim = derived["head_dim"]
        self.num_key_value_heads = derived["num_key_value_heads"]
        self.output_gate_rank = derived["output_gate_rank"]
        super().__post_init__(**kwargs)

    def validate_layer_type(self) -> None:
        """Replaces the base check, which allows only its own names; runs every check again after later assignments."""
        resolve({name: getattr(self, name) for name in DEFAULTS})

    @property
    def shape(self) -> Shape:
        """The derived fields, none of them None."""
        f = resolve({name: getattr(self, name) for name in DEFAULTS})
        return Shape(
            layer_types=f["layer_types"],
            kv_heads=f["num_key_value_heads"],
            head_dim=f["head_dim"],
            output_gate_rank=f["output_gate_rank"],
        )

    @property
    def sse_layers(self) -> list[int]:
        """Indices of the layers with a router, in the order of `router_indices`."""
        return [i for i, kind in enumerate(self.layer_types or []) if kind in SSE_LAYER_TYPES]

    @property
    def attention_layers(self) -> list[int]:
        return [i for i, kind in enumerate(self.layer_types or []) if kind in ATTENTION_LAYER_TYPES]
