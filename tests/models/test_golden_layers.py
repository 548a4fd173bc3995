"""Whole layers against the ones that published code computed, from their published state dict."""

import pytest
import torch
from safetensors.torch import load_file

from posttrain.models.packing import Part
from posttrain.models.sse_h import SSEHConfig
from posttrain.models.sse_h.mixer_sse import make_sse_mixer

LAYERS = {
    "layer_sse_gla_hidden96_H3_D32_N4_R1_gated": {"layer_types": ["sse"], "num_selected": 1, "use_output_gate": True},
    "layer_sse_gdn_hidden96_H3_D32_N4_R2": {"layer_types": ["sse_gdn"], "num_selected": 2, "router_gate": "pre_norm"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_published(shared, name):
    data = load_file(shared / "golden" / f"{name}.safetensors")
    fields = {"hidden_size": 96, "num_attention_heads": 3, "adapter_rank": 32, "rms_norm_eps": 1e-5, "num_hidden_layers": 1}
    config = SSEHConfig(**fields, **LAYERS[name])
    mixer = make_sse_mixer(config, config.layer_types[0])
    mixer.load_state_dict({key.removeprefix("param."): t for key, t in data.items() if key.startswith("param.")})
    with torch.no_grad():
        out = mixer(data["in.x"], parts=[Part(cu_seqlens=data["in.cu_seqlens"].long())])
    for got, want in ((out.o, data["out.o"]), (out.y, data["out.y"])):
        assert (got - want).abs().max() / want.abs().max() < 4e-6
