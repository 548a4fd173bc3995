"""The SSE mixers with their states in vLLM's pages.

Only what continues a sequence is new here: projections, router, gates, norms and prefill are those of `posttrain.models.sse_h`
and `posttrain.kernels.sse`. A block holds [1+N, H, K, V] states, row 0 the shared partition, and a flag a partition, all fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from posttrain.kernels.sse import sse, sse_gdn
from posttrain.models.packing import Part
from posttrain.models.sse_h.configuration import SSEHConfig
from posttrain.models.sse_h.mixer_sse import SSEGDNMixer, SSEMixer, SSEMixerBase, l2_normalize
from posttrain.vllm_plugin.backend import SSEBackend, SSEMetadata
from posttrain.vllm_plugin.recurrent import Pages, advance, stack, touched

STATE_DTYPES = (torch.float32, torch.float32)


def state_shapes(config: SSEHConfig) -> tuple[tuple[int, ...], ...]:
    """Of one sequence in one layer: the states and the flags."""
    dim = config.shape.head_dim
    return (1 + config.num_partitions, config.num_attention_heads, dim, dim), (1 + config.num_partitions,)


@dataclass(frozen=True)
class Rows:
    """Inputs of the operator, T tokens: shapes as in `posttrain.kernels.sse.sse`; `gates` are g1, g2 (GLA) or g1, g2, b1, b2."""

    q1: Tensor
    k1: Tensor
    q2: Tensor
    k2: Tensor
    v: Tensor
    weight: Tensor
    index: Tensor
    gates: tuple[Tensor, ...]
    v2: Tensor | None

    def cut(self, begin: int, count: int) -> Rows:
        """`count` tokens from `begin` on."""
        rows = slice(begin, begin + count)
        return Rows(
            q1=self.q1[rows],
            k1=self.k1[rows],
            q2=self.q2[rows],
            k2=self.k2[rows],
            v=self.v[rows],
            weight=self.weight[rows],
            index=self.index[rows],
            gates=tuple(gate[rows] for gate in self.gates),
            v2=None if self.v2 is None else self.v2[rows],
        )


class PagedStates(MambaBase):
    """Mixed into an SSE mixer: its states by block, and the operator over a batch as vLLM lays it out."""

    def bind(self: Any, config: SSEHConfig, vllm_config: VllmConfig, prefix: str) -> None:
        """Registers the layer under its name, by which vLLM finds its state's size and gives it its pages."""
        self.prefix, self._config = prefix, config
        known = vllm_config.compilation_config.static_forward_context
        if prefix in known:
            raise ValueError(f"two layers are named {prefix}")
        known[prefix] = self
        self.kv_cache = (torch.tensor([]), torch.tensor([]))

    def get_state_shape(self: Any) -> tuple[tuple[int, ...], ...]:
        return state_shapes(self._config)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return STATE_DTYPES

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[SSEBackend]:
        return SSEBackend

    def _mix_parts(
        self: Any,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        gates: tuple[Tensor, ...],
        v2: Tensor | None,
        parts: Sequence[Part],
        state: Any,
    ) -> Tensor:
        """The operator over a batch -> o [T, H, V]; decoding sequences come first, padding last."""
        rows = Rows(*tensors, gates, v2)
        metadata: Any = get_forward_context().attn_metadata
        batch: SSEMetadata | None = metadata.get(self.prefix) if metadata else None
        if batch is None:
            # Profiling: one sequence, so that the memory of a prefill is measured; nothing is kept.
            bounds = torch.tensor([0, rows.v.shape[0]], device=rows.v.device)
            return self._prefill(rows, cu_seqlens=bounds, output_final_state=False)[0]
        pool, written = self.kv_cache
        o = torch.zeros_like(rows.v)
        n, split = batch.decode_tokens, batch.decodes
        if n:
            pages = Pages(pool, written, batch.blocks[:split], batch.begun[:split])
            o[:n] = self._decode(rows.cut(0, n), pages)
        if batch.prefill_tokens:
            pages = Pages(pool, written, batch.blocks[split:], batch.begun[split:])
            part = rows.cut(n, batch.prefill_tokens)
            done, final = self._prefill(part, cu_seqlens=batch.prefill_cu_seqlens, initial_state=pages.load())
            pages.store(final)
            o[n : n + batch.prefill_tokens] = done
        return o

    def _decode(self: Any, rows: Rows, pages: Pages) -> Tensor:
        """One token a sequence, in the pages."""
        rows, gate = self._prepared(rows)
        routes = rows.index.shape[1]
        partitions, e = touched(rows.index, rows.weight, self.shared_partition)

        def both(first: Tensor, second: Tensor, dims: int) -> Tensor:
            return stack(first if self.shared_partition else None, second, routes, a_row_a_route=second.dim() > dims)

        q, k = both(rows.q1, rows.q2, 3), both(rows.k1, rows.k2, 3)
        v = both(rows.v, rows.v if rows.v2 is None else rows.v2, 3)
        g1, g2, *strengths = rows.gates
        g = both(g1, g2, g1.dim())
        b = both(strengths[0], strengths[1], 2) if strengths else None
        q = q * e if gate in ("both", "read") else q
        if gate in ("both", "write"):
            # The weight of what is written: on the key (GLA), on the value (gated delta rule).
            k, v = (k * e, v) if b is None else (k, v * e)
        return (advance(pages, partitions, q, k, g, v, b) * self.head_dim**-0.5).to(rows.v.dtype)

    def _common(self: Any, rows: Rows, gate: str) -> dict[str, Any]:
        return {"num_partitions": self.partitions, "gate": gate, "chunk_size": self.chunk_size, "v2": rows.v2}


class PagedSSEMixer(PagedStates, SSEMixer):
    """GLA transition."""

    def __init__(self, config: SSEHConfig, vllm_config: VllmConfig, prefix: str) -> None:
        SSEMixer.__init__(self, config)
        self.bind(config, vllm_config, prefix)

    def _prepared(self, rows: Rows) -> tuple[Rows, str]:
        return rows, self.router_gate

    def _prefill(self, rows: Rows, **options: Any) -> tuple[Tensor, Tensor | None]:
        g1, g2 = rows.gates
        shared = (rows.q1, rows.k1, g1) if self.shared_partition else (None, None, None)
        common = self._common(rows, self.router_gate)
        return sse(*shared, rows.q2, rows.k2, g2, rows.v, rows.weight, rows.index, **common, **options)


class PagedSSEGDNMixer(PagedStates, SSEGDNMixer):
    """Gated delta rule."""

    def __init__(self, config: SSEHConfig, vllm_config: VllmConfig, prefix: str) -> None:
        SSEGDNMixer.__init__(self, config)
        self.bind(config, vllm_config, prefix)

    def _prepared(self, rows: Rows) -> tuple[Rows, str]:
        """Queries and keys L2-normalised, and where the router's weight is still to enter; see `SSEGDNMixer._mix`."""
        q2, k2, gate = rows.q2, rows.k2, self.router_gate
        if gate == "pre_norm":
            e = rows.weight.to(q2.dtype)[..., None, None]
            q2, k2 = ((x if x.dim() == 4 else x[:, None]) * e for x in (q2, k2))
            gate = "none"
        q1, k1, q2, k2 = (l2_normalize(x) for x in (rows.q1, rows.k1, q2, k2))
        return replace(rows, q1=q1, k1=k1, q2=q2, k2=k2), gate

    def _prefill(self, rows: Rows, **options: Any) -> tuple[Tensor, Tensor | None]:
        rows, gate = self._prepared(rows)
        g1, g2, b1, b2 = rows.gates
        shared = (rows.q1, rows.k1, g1, b1) if self.shared_partition else (None, None, None, None)
        common = self._common(rows, gate)
        return sse_gdn(*shared, rows.q2, rows.k2, g2, b2, rows.v, rows.weight, rows.index, **common, **options)


def make_paged_mixer(config: SSEHConfig, kind: str, vllm_config: VllmConfig, prefix: str) -> SSEMixerBase:
    """The mixer of a layer of kind "sse" or "sse_gdn"."""
    return (PagedSSEMixer if kind == "sse" else PagedSSEGDNMixer)(config, vllm_config, prefix)
