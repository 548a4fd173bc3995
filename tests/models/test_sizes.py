"""Sizes and checks, computed without torch."""

import subprocess
import sys

import pytest
import torch

from posttrain.kernels.sse import ChunkState
from posttrain.models.cache import KVPool, SlotCache
from posttrain.models.paged import PagedKV
from posttrain.models.sizes import (
    DEFAULTS,
    PAPER_SIZES,
    TRITON_MAX_CHUNK,
    TRITON_MAX_WIDTH,
    hybrid_layer_types,
    parameter_counts,
    resolve,
    state_bytes,
)  # fmt: skip
from posttrain.models.sse_h import SSEHConfig, SSEHForCausalLM

VOCABULARY = 151936


def test_no_torch_at_import(root):
    code = "import sys, posttrain.models.sizes; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


@pytest.mark.parametrize(("size", "published"), [("600m", 300e6), ("2b", 1.3e9)])
@pytest.mark.parametrize("family", ["sse", "sse-h", "transformer"])
def test_paper_sizes_match_the_published_totals(family, size, published):
    counts = parameter_counts({**PAPER_SIZES[f"{family}-{size}"], "vocab_size": VOCABULARY})
    assert counts["body"] == pytest.approx(published, rel=0.06)


def test_sse_h_has_three_softmax_layers_of_eighteen():
    types = PAPER_SIZES["sse-h-2b"]["layer_types"]
    assert [i for i, kind in enumerate(types) if kind == "full_attention"] == [5, 11, 17]


CASES = [
    {},
    {"projections": "shared", "tie_word_embeddings": True},
    {"projections": "partition", "use_output_gate": True},
    {"shared_partition": False, "qk_norm": True, "num_key_value_heads": 2, "head_dim": 24},
]


@pytest.mark.parametrize("changes", CASES)
def test_parameter_count_is_the_models(changes):
    types = ["sse", "sse_gdn", "full_attention", "sliding_attention"]
    fields = {
        "vocab_size": 60, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "layer_types": types,
        "num_attention_heads": 4, "sliding_window": 8, **changes,
    }  # fmt: skip
    model = SSEHForCausalLM(SSEHConfig(**fields))
    assert parameter_counts(fields)["total"] == sum(p.numel() for p in model.parameters())


def test_state_bytes_do_not_grow_with_length_but_kv_does():
    sse, hybrid = PAPER_SIZES["sse-2b"], PAPER_SIZES["sse-h-2b"]
    assert state_bytes(sse, 100)["total"] == state_bytes(sse, 100_000)["total"]
    assert state_bytes(hybrid, 2048)["kv"] == 2 * state_bytes(hybrid, 1024)["kv"] == 3 * 2 * 2 * 2048 * 18 * 128
    assert state_bytes(hybrid, 1025)["kv"] == state_bytes(hybrid, 1088)["kv"], "pages of 64"
    assert state_bytes(hybrid, 1025, paged=False)["kv"] == state_bytes(hybrid, 1152)["kv"], "steps of 128"
    window = {**hybrid, "layer_types": hybrid_layer_types(18, attention="sliding_attention"), "sliding_window": 128}
    assert state_bytes(window, 5000)["kv"] == state_bytes(window, 1)["kv"], "a ring is there as a whole"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["sse", "sse_gdn", "full_attention", "sliding_attention"])
@pytest.mark.parametrize("paged", [False, True])
def test_state_bytes_are_what_a_cache_holds(kind, dtype, paged):
    config = SSEHConfig(
        vocab_size=60, hidden_size=64, num_hidden_layers=1, layer_types=[kind], num_attention_heads=4, sliding_window=50
    )
    cache = SlotCache(config, 2, dtype=dtype, paged=paged)
    (state,) = cache.states
    for length in (1, 128, 200):
        cache.reset()
        cache.reserve([0], [length])
        if isinstance(state, KVPool):
            state.reserve(length)
            held = (state.keys.nbytes + state.values.nbytes) // 2
        elif isinstance(state, PagedKV):
            pages = 1 if kind == "sliding_attention" else len(cache.pages.pages[0])
            held = 2 * pages * state.keys[0].nbytes
        else:
            held = state.nbytes_per_slot
        assert cache.nbytes_per_sequence(length) == held
        found = state_bytes(config.to_dict(), length, element_size=dtype.itemsize, triton=False, paged=paged)["total"]
        assert held == found


@pytest.mark.parametrize(("partitions", "heads", "width", "chunk"), [(4, 2, 16, 64), (7, 3, 24, 5), (1, 1, 8, 1)])
def test_state_bytes_count_every_pool_of_a_chunk_state(partitions, heads, width, chunk):
    """Written out: boundary and pending rows in fp32, totals in float64, counts in int64."""
    p, h, k, v, c = 1 + partitions, heads, width, width, chunk
    written = {
        "sse": p * h * (4 * k * v + 4 * c * (3 * k + v) + 8 * k) + 8 * p,
        "sse_gdn": p * h * (4 * k * v + 4 * c * (k + 2 * v + 2) + 8) + 8 * p,
    }
    for kind, transition in (("sse", "gla"), ("sse_gdn", "gdn")):
        state = ChunkState.allocate(3, partitions, heads, width, width, chunk, transition=transition, dtype=torch.bfloat16)
        fields = _one_kind(kind, partitions, heads, width, chunk)
        found = state_bytes(fields, 1000, triton=False)
        assert found == {"state": 2 * written[kind], "kv": 0, "total": 2 * written[kind]}
        assert state.nbytes_per_slot == written[kind]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_bytes_are_what_a_gpus_state_takes(dtype):
    """Written out: two planes of 16 bits, keys, values and decayed keys in the model's type, decays and two totals in fp32, the
    write gate's factors in fp32 and counts in int32."""
    pytest.importorskip("triton")
    from posttrain.kernels.sse.triton_decode_pool import TritonChunkState
    from posttrain.kernels.sse.triton_limits import MAX_CHUNK, MAX_WIDTH

    assert (TRITON_MAX_WIDTH, TRITON_MAX_CHUNK) == (MAX_WIDTH, MAX_CHUNK)
    p, h, k, c, e = 5, 2, 16, 64, dtype.itemsize
    written = p * h * (2 * 2 * k * k + c * (3 * e * k + 4 * k) + 2 * 4 * k) + p * c * 4 + p * 4
    state = TritonChunkState.allocate(3, p - 1, h, k, k, c, dtype=dtype)
    found = state_bytes(_one_kind("sse", p - 1, h, k, c), 1000, element_size=e)
    assert state.nbytes_per_slot == written and found["state"] == 2 * written
    wide = _one_kind("sse", p - 1, 1, 512, c)
    assert state_bytes(wide, 1) == state_bytes(wide, 1, triton=False), "wider than the kernels take"


def test_what_a_sequence_of_the_2b_hybrid_takes():
    """15 SSE layers of 5 partitions of 18 heads of 128 in chunks of 64, 3 attention layers; bf16 on a GPU."""
    found = state_bytes(PAPER_SIZES["sse-h-2b"], 32768)
    a_layer = 5 * (18 * (4 * 128 * 128 + 64 * 10 * 128 + 8 * 128) + 64 * 4 + 4)
    assert a_layer == 13_364_500 and found["state"] == 15 * a_layer
    assert found["kv"] == 3 * 2 * 2 * 18 * 128 * 32768 == 905_969_664


def _one_kind(kind, partitions, heads, width, chunk):
    return {
        "num_hidden_layers": 2, "layer_types": [kind] * 2, "num_attention_heads": heads, "head_dim": width,
        "num_partitions": partitions, "chunk_size": chunk,
    }  # fmt: skip


def test_configuration_takes_its_defaults_from_here():
    config = SSEHConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == {name: resolve({})[name] for name in DEFAULTS}


BAD = [
    ({"layer_types": ["sse"]}, "layer_types has 1 entries"),
    ({"layer_types": ["sse"] * 5 + ["softmax"]}, r"layer_types\[5\]='softmax', but it must be one of"),
    ({"num_attention_heads": 7}, "not a multiple of num_attention_heads=7"),
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
    ({"num_selected": 5}, "num_selected=5 exceeds num_partitions=4"),
    ({"num_partitions": 0}, "num_partitions=0"),
    ({"key_map": "relu"}, "key_map='relu'"),
    ({"router_gate": "reed"}, "did you mean 'read'"),
    ({"router_gate": "pre_norm"}, "sse_gdn layers only"),
    ({"layer_types": ["sliding_attention"] * 6}, "sliding_window=None"),
    ({"chunk_size": 1.5}, "chunk_size=1.5"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
    ({"qk_norm": "yes"}, "qk_norm='yes'"),
    ({"balance_loss_coef": -1}, "balance_loss_coef=-1"),
    ({"head_dim": 33}, "must be even"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_fields_say_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        resolve(fields)
