"""What vLLM tells an SSE layer about a batch: which rows are whose, where states lie, and which of them have begun.

vLLM puts sequences with one new token first, whether they decode or prefill their last token; they take the recurrence. All of
it is computed on the device, in the same places every time, so that a batch of decodes alone can be replayed as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend, LinearAttentionMetadataBuilder


@dataclass
class SSEMetadata:
    """A batch of D one-token sequences, then P longer ones.

    Attributes:
        decodes, prefills: D and P.
        decode_tokens, prefill_tokens: their rows; rows behind them are padding.
        blocks: int64 [D + P], block of each sequence; padding of a CUDA graph points at block 0, which vLLM gives to nobody.
        begun: bool [D + P], whether the block holds a state of this sequence: vLLM does not clear blocks that it hands out again.
        prefill_cu_seqlens: int64 [P + 1] from 0 on.
    """

    decodes: int
    prefills: int
    decode_tokens: int
    prefill_tokens: int
    blocks: Tensor
    begun: Tensor
    prefill_cu_seqlens: Tensor


class SSEMetadataBuilder(LinearAttentionMetadataBuilder):
    """vLLM's own for linear attention, which finds the blocks, and what an SSE layer needs besides."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        most = max(vllm_config.scheduler_config.max_num_seqs, captured)
        # A CUDA graph reads the addresses that it was captured with, so what it reads is always written to the same place.
        self._blocks = torch.zeros(most, dtype=torch.int64, device=device)
        self._begun = torch.zeros(most, dtype=torch.bool, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SSEMetadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        starts, count = found.query_start_loc, found.state_indices_tensor.shape[0]
        blocks, begun = self._blocks[:count], self._begun[:count]
        blocks.copy_(found.state_indices_tensor)
        blocks.clamp_(min=0)
        torch.gt(found.seq_lens, starts.diff(), out=begun)
        prefill_starts = starts[found.num_decodes :]
        return SSEMetadata(
            decodes=found.num_decodes,
            prefills=found.num_prefills,
            decode_tokens=found.num_decode_tokens,
            prefill_tokens=found.num_prefill_tokens,
            blocks=blocks,
            begun=begun,
            prefill_cu_seqlens=(prefill_starts - prefill_starts[:1]).to(torch.int64),
        )


class SSEBackend(LinearAttentionBackend):
    """The name that vLLM's runner asks for metadata by."""

    @staticmethod
    def get_name() -> str:
        return "POSTTRAIN_SSE"

    @staticmethod
    def get_builder_cls() -> type[SSEMetadataBuilder]:
        return SSEMetadataBuilder
