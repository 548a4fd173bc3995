"""The SSE token mixers: sparse state expansion with a GLA transition (`sse`) or the gated delta rule (`sse_gdn`).

Parameter names are those of published SSE checkpoints (q_proj k_proj v_proj lora_{q,k}_proj.{0,1} gk_proj.{0,1}.{0,1} e_proj
g_proj.{0,1} o_norm o_proj; gated delta rule: b_proj a_proj A_log dt_bias), so that they map one to one.
Pair index 0 (and the first half of the gated delta rule's gates) drives the shared partition, 1 the routed ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.kernels.decode_inputs import DecodeInputs, decode_inputs
from posttrain.kernels.pair_map import Map, log_decay, pair_map
from posttrain.kernels.pair_map.reference import map_reference
from posttrain.kernels.sse import ChunkState, balance_loss, route, sse, sse_extend, sse_gdn, sse_gdn_extend
from posttrain.models.linear import Linear, RMSNorm, elementwise, few_rows, has_hooks, is_plain, joint_linear, silu, take_few
from posttrain.models.packing import Part
from posttrain.models.sse_h.configuration import SSEHConfig

# Under the root of the L2 norm of queries and keys, as in the published gated-delta layers.
_L2_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MixerOutput:
    """o [T, H, V] before the output norm (for tests), y [T, hidden], the balance loss (training) and the partitions [T, R]."""

    o: Tensor
    y: Tensor
    balance_loss: Tensor | None
    index: Tensor


def low_rank(inputs: int, rank: int, outputs: int, *, bias: bool = False, zero_init: bool = False) -> nn.Sequential:
    return nn.Sequential(Linear(inputs, rank, bias=False), Linear(rank, outputs, bias=bias, zero_init=zero_init))


class Products:
    """Calls projections, router, gates and adapters (a `Linear` or a `low_rank` pair each) on one x [T, hidden].

    On a GPU the first products of the `narrow` ones are made together: each would be bound by reading x. Of few rows all are,
    and then the pairs' second products: each would leave most of the device idle."""

    def __init__(self, x: Tensor, wide: Sequence[nn.Module], narrow: Sequence[nn.Module]) -> None:
        self._x = x
        self._firsts: dict[nn.Module, Tensor] = {}
        self._done: dict[nn.Module, Tensor] = {}
        self.few = self._make_all([*wide, *narrow])
        if self.few or not x.is_cuda:
            return
        plain = [m for m in narrow if is_plain(_first(m))]
        if plain:
            self._firsts = dict(zip(plain, joint_linear(x, [_first(m) for m in plain]), strict=True))

    def _make_all(self, modules: list[nn.Module]) -> bool:
        pairs = [m for m in modules if _is_pair(m)]
        if not take_few([_first(m) for m in modules], self._x) or not take_few([m[1] for m in pairs], self._x):
            return False
        firsts = few_rows([_first(m) for m in modules], [self._x] * len(modules))
        self._done = dict(zip(modules, firsts, strict=True))
        if pairs:
            self._done |= dict(zip(pairs, few_rows([m[1] for m in pairs], [self._done[m] for m in pairs]), strict=True))
        return True

    def __call__(self, module: nn.Module) -> Tensor:
        if module in self._done:
            return self._done[module]
        part = self._firsts.get(module)
        if part is None:
            return module(self._x)
        return module[1](part) if isinstance(module, nn.Sequential) else part


def _is_pair(module: nn.Module) -> TypeGuard[nn.Sequential]:
    return type(module) is nn.Sequential and not has_hooks(module)


def _first(module: nn.Module) -> nn.Module:
    return module[0] if _is_pair(module) else module


def l2_normalize(x: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + _L2_EPS)).to(x.dtype)


class SSEMixerBase(nn.Module):
    """What both transitions share: projections, router, output norm and gate. x [T, hidden] -> [T, hidden]."""

    # Keys of an "sse_gdn" layer are always silu.
    key_map: Map = "silu"
    # Strict mode: every row is computed as decoding computes it.
    exact = False

    def __init__(self, config: SSEHConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.num_attention_heads, config.shape.head_dim
        self.partitions, self.selected = config.num_partitions, config.num_selected
        self.chunk_size = config.chunk_size
        self.router_gate = config.router_gate
        self.projections = config.projections
        self.shared_partition = config.shared_partition
        hidden, width = config.hidden_size, self.heads * self.head_dim
        self.q_proj = Linear(hidden, width, bias=False)
        self.k_proj = Linear(hidden, width, bias=False)
        self.v_proj = Linear(hidden, width, bias=False)
        if self.projections == "adapter":
            self.lora_q_proj = low_rank(hidden, config.adapter_rank, width, zero_init=True)
            self.lora_k_proj = low_rank(hidden, config.adapter_rank, width, zero_init=True)
        elif self.projections == "partition":
            self.partition_q_proj = Linear(hidden, self.partitions * width, bias=False)
            self.partition_k_proj = Linear(hidden, self.partitions * width, bias=False)
            self.partition_v_proj = Linear(hidden, self.partitions * width, bias=False)
        self.e_proj = Linear(hidden, self.partitions, bias=False)
        self.g_proj = low_rank(hidden, config.shape.output_gate_rank, width) if config.use_output_gate else None
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = Linear(width, hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        parts: Sequence[Part],
        state: ChunkState | None = None,
        router_index: Tensor | None = None,
        with_balance_loss: bool = False,
    ) -> MixerOutput:
        """`parts` cover the packed tokens; with a `state`, they say which slots their sequences continue (no gradients then).
        `router_index` [T, R] replaces the router's choice; the weights still come from the live router."""
        products = Products(x, self._wide_modules(), self._narrow_modules())
        inputs = None if router_index is not None or with_balance_loss else self._few_inputs(products)
        if inputs is not None:
            q1, k1, q2, k2, v, g1, g2, weight, index = inputs
            probs, gates, v2 = None, (g1, g2), None
        else:
            probs, weight, index = self._route(products(self.e_proj), router_index)
            q1, k1, q2, k2, v, v2 = self._project(x, index, products)
            gates = self._gates(products)
        o = self._mix_parts((q1, k1, q2, k2, v, weight, index), gates, v2, parts, state)
        y = self.o_norm(o, None if self.g_proj is None else self._heads(products(self.g_proj)))
        balance = balance_loss(probs, index) if with_balance_loss and probs is not None else None
        return MixerOutput(o=o, y=self.o_proj(y.reshape(x.shape[0], -1)), balance_loss=balance, index=index)

    def _few_inputs(self, products: Products) -> DecodeInputs | None:
        """What the operator takes, of few rows in one launch; None where that does not pay or is not possible."""
        return None

    def _wide_modules(self) -> list[nn.Module]:
        return [self.q_proj, self.k_proj, self.v_proj, *([] if self.g_proj is None else [self.g_proj])]

    def _narrow_modules(self) -> list[nn.Module]:
        adapters = [self.lora_q_proj, self.lora_k_proj] if self.projections == "adapter" else []
        return [self.e_proj, *adapters, *self._gate_modules()]

    def _mix_parts(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        gates: tuple[Tensor, ...],
        v2: Tensor | None,
        parts: Sequence[Part],
        state: ChunkState | None,
    ) -> Tensor:
        """The operator over each part -> o [T, H, V]."""
        o = None
        for part in parts:
            common: dict[str, Any] = {"num_partitions": self.partitions, "cu_seqlens": part.cu_seqlens, "gate": self.router_gate}
            if state is not None:
                common.update(state=state, slots=part.slots, fresh=part.fresh)
            rows = part.rows
            if v2 is not None:
                common["v2"] = v2 if rows is None else v2[rows]
            if rows is None:
                return self._mix(*tensors, gates, common)
            q1, k1, q2, k2, v, weight, index = (a[rows] for a in tensors)
            done = self._mix(q1, k1, q2, k2, v, weight, index, tuple(a[rows] for a in gates), common)
            o = done.new_empty(tensors[0].shape[0], *done.shape[1:]) if o is None else o
            o[rows] = done
        assert o is not None, "a forward has at least one part"
        return o

    def _route(self, logits: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        probs, weight, index = route(logits, self.selected)
        if given is None:
            return probs, weight, index
        index = given.to(device=logits.device, dtype=torch.long)
        return probs, probs.gather(-1, index), index

    def _project(
        self, x: Tensor, index: Tensor, products: Products
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q1, k1 [T, H, K], q2, k2 ([T, R, H, K] with a projection a partition), v [T, H, V] and v2 [T, R, H, V] or None."""
        q, k, v = (self._heads(a) for a in (products(self.q_proj), products(self.k_proj), silu(products(self.v_proj))))
        if self.projections == "adapter":
            q1, q2 = pair_map(q, self._heads(products(self.lora_q_proj)).to(q.dtype), "silu")
            k1, k2 = pair_map(k, self._heads(products(self.lora_k_proj)).to(k.dtype), self.key_map)
            return q1, k1, q2, k2, v, None
        q1, k1 = silu(q), self._map_key(k)
        if self.projections == "shared":
            return q1, k1, q1, k1, v, None
        q2, k2, v2 = (self._chosen(p(x), index) for p in (self.partition_q_proj, self.partition_k_proj, self.partition_v_proj))
        return q1, k1, self._heads(silu(q2)), self._map_key(self._heads(k2)), v, self._heads(silu(v2))

    def _chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """[T, N * width] -> [T, R, width], the rows of the selected partitions."""
        x = x.view(x.shape[0], self.partitions, -1)
        return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, self.head_dim)

    def _map_key(self, k: Tensor) -> Tensor:
        return map_reference(k, self.key_map)

    def _gate_modules(self) -> list[nn.Module]:
        raise NotImplementedError

    def _gates(self, products: Products) -> tuple[Tensor, ...]:
        """What `_mix` takes as `gates`: tensors of T rows."""
        raise NotImplementedError

    def _mix(
        self,
        q1: Tensor,
        k1: Tensor,
        q2: Tensor,
        k2: Tensor,
        v: Tensor,
        weight: Tensor,
        index: Tensor,
        gates: tuple[Tensor, ...],
        common: dict[str, Any],
    ) -> Tensor:
        """The operator with the keyword arguments `common`; tensors as in `posttrain.kernels.sse.sse`."""
        raise NotImplementedError


class SSEMixer(SSEMixerBase):
    """GLA transition: a log decay a key channel, from a low-rank gate a partition kind."""

    def __init__(self, config: SSEHConfig) -> None:
        super().__init__(config)
        self.key_map = "softmax" if config.key_map == "softmax" else "silu"
        self.normalizer = config.gate_logit_normalizer
        width = self.heads * self.head_dim
        self.gk_proj = nn.ModuleList(low_rank(config.hidden_size, config.gate_rank, width, bias=True) for _ in range(2))

    def _gate_modules(self) -> list[nn.Module]:
        return list(self.gk_proj)

    def _gates(self, products: Products) -> tuple[Tensor, ...]:
        return tuple(self._heads(log_decay(products(gate), self.normalizer)) for gate in self.gk_proj)

    def _few_inputs(self, products: Products) -> DecodeInputs | None:
        if not products.few or self.exact or self.projections != "adapter":
            return None
        names = (self.q_proj, self.lora_q_proj, self.k_proj, self.lora_k_proj, self.v_proj, *self.gk_proj)
        return decode_inputs(
            *(self._heads(products(module)) for module in names), products(self.e_proj), selected=self.selected,
            key_map=self.key_map, normalizer=self.normalizer,
        )  # fmt: skip

    def _mix(self, q1, k1, q2, k2, v, weight, index, gates, common):
        g1, g2 = gates
        shared = (q1, k1, g1) if self.shared_partition else (None, None, None)
        common = {**common, "exact": self.exact}
        if "state" in common:
            return sse_extend(*shared, q2, k2, g2, v, weight, index, **common)
        return sse(*shared, q2, k2, g2, v, weight, index, chunk_size=self.chunk_size, output_final_state=False, **common)[0]


class SSEGDNMixer(SSEMixerBase):
    """Gated delta rule: a log decay and a write strength, scalars a head; keys are silu, q and k are L2-normalised."""

    def __init__(self, config: SSEHConfig) -> None:
        super().__init__(config)
        self.b_proj = Linear(config.hidden_size, 2 * self.heads, bias=False)
        self.a_proj = Linear(config.hidden_size, 2 * self.heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(2 * self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(2 * self.heads))

    def _gate_modules(self) -> list[nn.Module]:
        return [self.a_proj, self.b_proj]

    def _gates(self, products: Products) -> tuple[Tensor, ...]:
        """g1, g2, b1, b2, each [T, H]."""
        g = -self.A_log.float().exp() * elementwise(F.softplus, products(self.a_proj).float() + self.dt_bias.float())
        b = elementwise(torch.sigmoid, products(self.b_proj).float())
        return *g.chunk(2, dim=-1), *b.chunk(2, dim=-1)

    def _mix(self, q1, k1, q2, k2, v, weight, index, gates, common):
        g1, g2, b1, b2 = gates
        q1, k1 = l2_normalize(q1), l2_normalize(k1)
        if self.router_gate == "pre_norm":
            # The published layers' order: the norm cancels the weight again, except where it is tiny beside the norm's epsilon.
            scale = weight.to(q2.dtype)[..., None, None]
            q2, k2 = ((x2 if x2.dim() == 4 else x2[:, None]) * scale for x2 in (q2, k2))
            common = {**common, "gate": "none"}
        q2, k2 = l2_normalize(q2), l2_normalize(k2)
        shared = (q1, k1, g1, b1) if self.shared_partition else (None, None, None, None)
        if "state" in common:
            return sse_gdn_extend(*shared, q2, k2, g2, b2, v, weight, index, **common)
        return sse_gdn(*shared, q2, k2, g2, b2, v, weight, index, chunk_size=self.chunk_size, output_final_state=False, **common)[
            0
        ]

    def init_gates(self, init: Any) -> None:
        """Mamba-2's ranges: A in [1, 16], softplus(dt_bias) log-uniform in [0.001, 0.1]. `init` is transformers' module, which
        spares loaded parameters."""
        init.copy_(self.A_log, torch.empty_like(self.A_log).uniform_(1, 16).log())
        dt = torch.exp(torch.rand_like(self.dt_bias) * math.log(100) + math.log(0.001))
        init.copy_(self.dt_bias, dt + torch.log(-torch.expm1(-dt)))


def make_sse_mixer(config: SSEHConfig, kind: str) -> SSEMixerBase:
    return SSEMixer(config) if kind == "sse" else SSEGDNMixer(config)
