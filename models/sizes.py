"""Fields, checks and sizes of an SSE-H model, without torch: `posttrain check` prices a recipe before anything heavy is imported.

`DEFAULTS` are the architecture's defaults; `SSEHConfig` takes them from here. Every function takes a mapping of configuration
fields (missing ones fall back to the defaults), e.g. `parameter_counts({**PAPER_SIZES["sse-h-2b"], "vocab_size": 151936})`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

SSE_LAYER_TYPES = ("sse", "sse_gdn")
ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention")
LAYER_TYPES = SSE_LAYER_TYPES + ATTENTION_LAYER_TYPES
KEY_MAPS = ("softmax", "silu")
ROUTER_GATES = ("both", "write", "read", "none", "pre_norm")
PROJECTIONS = ("adapter", "shared", "partition")

# A cache's key/value rows: read in whole blocks, allocated in steps.
KV_BLOCK = 64
KV_STEP = 128
# What the decode kernels take (posttrain.kernels.sse.triton_limits).
TRITON_MAX_WIDTH, TRITON_MAX_CHUNK = 256, 128

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "head_dim": None,
    "layer_types": None,
    "num_partitions": 4,
    "num_selected": 1,
    "adapter_rank": 64,
    "gate_rank": 16,
    "output_gate_rank": None,
    "gate_logit_normalizer": 16.0,
    "key_map": "softmax",
    "router_gate": "both",
    "projections": "adapter",
    "shared_partition": True,
    "use_output_gate": False,
    "chunk_size": 64,
    "balance_loss_coef": 0.01,
    "qk_norm": False,
    "sliding_window": None,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
}

# Published: layers, hidden size, heads, and the totals outside the embeddings (300M and 1.3B). The MLP width is not; it follows
# from the totals. SSE-H puts softmax attention in every sixth layer; n4k1 is the published partition setting.
_600M = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 2816}
_2B = {"num_hidden_layers": 18, "hidden_size": 2304, "num_attention_heads": 18, "intermediate_size": 7424}


def hybrid_layer_types(layers: int, *, every: int = 6, mixer: str = "sse", attention: str = "full_attention") -> list[str]:
    """`every - 1` mixer layers, then one attention layer, repeated: the SSE-H layout."""
    return [attention if (i + 1) % every == 0 else mixer for i in range(layers)]


PAPER_SIZES: dict[str, dict[str, Any]] = {
    f"{family}-{size}": {**shape, "layer_types": make(shape["num_hidden_layers"])}
    for size, shape in (("600m", _600M), ("2b", _2B))
    for family, make in (
        ("sse", lambda n: ["sse"] * n),
        ("sse-h", hybrid_layer_types),
        ("transformer", lambda n: ["full_attention"] * n),
    )
}


def resolve(fields: Mapping[str, Any]) -> dict[str, Any]:
    """All size-bearing fields, with defaults and derived values filled in, checked. Unknown keys pass through."""
    out = {**DEFAULTS, **fields}
    layers, heads = out["num_hidden_layers"], out["num_attention_heads"]
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        _positive_int(name, out[name])
    if out["layer_types"] is None:
        out["layer_types"] = hybrid_layer_types(layers)
    if out["head_dim"] is None:
        if out["hidden_size"] % heads:
            raise ValueError(
                f"hidden_size={out['hidden_size']} is not a multiple of num_attention_heads={heads}; change one, or set head_dim"
            )
        out["head_dim"] = out["hidden_size"] // heads
    if out["num_key_value_heads"] is None:
        out["num_key_value_heads"] = heads
    if out["output_gate_rank"] is None:
        out["output_gate_rank"] = out["head_dim"]
    _check(out)
    return out


def _positive_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}, but it must be a whole number of at least 1")


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name}={value!r}, but it must be one of {', '.join(allowed)}{hint}")


def _check(f: dict[str, Any]) -> None:
    """Raises ValueError on the first field that cannot be used, naming what is allowed."""
    types = f["layer_types"]
    if not isinstance(types, (list, tuple)) or len(types) != f["num_hidden_layers"]:
        given = len(types) if isinstance(types, (list, tuple)) else repr(types)
        raise ValueError(f"layer_types has {given} entries, but num_hidden_layers={f['num_hidden_layers']}: give one a layer")
    for i, kind in enumerate(types):
        _one_of(f"layer_types[{i}]", kind, LAYER_TYPES)
    for name in ("head_dim", "num_key_value_heads", "num_partitions", "num_selected", "adapter_rank", "gate_rank",
                 "output_gate_rank", "chunk_size", "max_position_embeddings"):  # fmt: skip
        _positive_int(name, f[name])
    if f["num_attention_heads"] % f["num_key_value_heads"]:
        raise ValueError(
            f"num_attention_heads={f['num_attention_heads']} is not a multiple of num_key_value_heads={f['num_key_value_heads']}"
        )
    if f["num_selected"] > f["num_partitions"]:
        raise ValueError(f"num_selected={f['num_selected']} exceeds num_partitions={f['num_partitions']}")
    _one_of("key_map", f["key_map"], KEY_MAPS)
    _one_of("router_gate", f["router_gate"], ROUTER_GATES)
    _one_of("projections", f["projections"], PROJECTIONS)
    if f["router_gate"] == "pre_norm" and "sse" in types:
        raise ValueError("router_gate='pre_norm' is defined for sse_gdn layers only (an sse layer has no L2 norm)")
    if any(t in ATTENTION_LAYER_TYPES for t in types) and f["head_dim"] % 2:
        raise ValueError(f"head_dim={f['head_dim']} must be even in a model with attention layers: RoPE rotates pairs")
    if "sliding_attention" in types and (not isinstance(f["sliding_window"], int) or f["sliding_window"] < 1):
        raise ValueError(f"sliding_window={f['sliding_window']!r}, but sliding_attention layers need a window of 1 token or more")
    for name in ("shared_partition", "use_output_gate", "qk_norm", "tie_word_embeddings"):
        if not isinstance(f[name], bool):
            raise ValueError(f"{name}={f[name]!r}, but it must be true or false")
    for name in ("gate_logit_normalizer", "rope_theta", "rms_norm_eps", "initializer_range"):
        if not _is_number(f[name]) or f[name] <= 0:
            raise ValueError(f"{name}={f[name]!r}, but it must be a number above 0")
    if not _is_number(f["balance_loss_coef"]) or f["balance_loss_coef"] < 0:
        raise ValueError(f"balance_loss_coef={f['balance_loss_coef']!r}, but it must be 0 (off) or more")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mixer_parameters(f: dict[str, Any], kind: str) -> int:
    hidden, heads, d = f["hidden_size"], f["num_attention_heads"], f["head_dim"]
    width = heads * d
    if kind in ATTENTION_LAYER_TYPES:
        return 2 * hidden * width + 2 * hidden * f["num_key_value_heads"] * d + (2 * d if f["qk_norm"] else 0)
    n = f["num_partitions"]
    total = hidden * width * 4 + n * hidden + d  # q, k, v, o; router; output norm
    if f["projections"] == "adapter":
        total += 2 * f["adapter_rank"] * (hidden + width)
    elif f["projections"] == "partition":
        total += 3 * n * hidden * width
    if kind == "sse":
        total += 2 * (f["gate_rank"] * (hidden + width) + width)
    else:
        total += 2 * (2 * heads * hidden) + 2 * 2 * heads
    if f["use_output_gate"]:
        total += f["output_gate_rank"] * (hidden + width)
    return total


def parameter_counts(fields: Mapping[str, Any]) -> dict[str, int]:
    """`{"total", "embeddings", "body"}`: parameters in all, in the (un)tied embeddings, and outside them."""
    f = resolve(fields)
    embeddings = f["vocab_size"] * f["hidden_size"] * (1 if f["tie_word_embeddings"] else 2)
    block = 3 * f["hidden_size"] * f["intermediate_size"] + 2 * f["hidden_size"]
    body = sum(_mixer_parameters(f, kind) + block for kind in f["layer_types"]) + f["hidden_size"]
    return {"total": embeddings + body, "embeddings": embeddings, "body": body}


def state_bytes(
    fields: Mapping[str, Any], length: int, *, element_size: int = 2, triton: bool = True, paged: bool = True
) -> dict[str, int]:
    """Bytes that one decoding sequence of `length` tokens keeps, `{"state", "kv", "total"}`.

    State, constant in the length, per partition and head: the boundary state in four bytes a number, and C rows for the
    unfinished chunk (keys, values, decays and what one-token steps reuse).

    Args:
        element_size: bytes of a number of the model's.
        triton: GLA layers as `TritonChunkState` keeps them, on a GPU: rows in the model's type but for fp32 decays. Otherwise,
            and where its kernels do not take the sizes, as `ChunkState` does: all in fp32 (float64 where the model is that).
        paged: keys and values in pages of KV_BLOCK rows, a window's ring whole, as a generator keeps them; otherwise in steps of
            KV_STEP rows.
    """
    f = resolve(fields)
    heads, d, partitions, chunk = f["num_attention_heads"], f["head_dim"], 1 + f["num_partitions"], f["chunk_size"]
    state = kv = 0
    wide = max(4, element_size)
    in_triton = triton and element_size <= 4 and d <= TRITON_MAX_WIDTH and chunk <= TRITON_MAX_CHUNK
    for kind in f["layer_types"]:
        if kind == "sse" and in_triton:
            # k, v and ks, fp32 decays; two places of the total; the write gate's factors and the count.
            a_row = 3 * d * element_size + 4 * d
            state += partitions * (heads * (4 * d * d + chunk * a_row + 2 * 4 * d) + 4 * chunk + 4)
        elif kind in SSE_LAYER_TYPES:
            row, total = (4 * d, d) if kind == "sse" else (3 * d + 2, 1)
            state += partitions * (heads * (wide * (d * d + chunk * row) + 8 * total) + 8)
        else:
            sliding = kind == "sliding_attention"
            window = -(-f["sliding_window"] // KV_BLOCK) * KV_BLOCK if sliding else length
            rows = min(length, window)
            if paged:
                rows = window if sliding else -(-rows // KV_BLOCK) * KV_BLOCK
            else:
                rows = -(-rows // KV_STEP) * KV_STEP
            kv += 2 * f["num_key_value_heads"] * d * rows * element_size
    return {"state": state, "kv": kv, "total": state + kv}
