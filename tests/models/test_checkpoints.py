"""Saving, loading, and every way a checkpoint can be unusable."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from posttrain.errors import CheckpointError, ConfigError
from posttrain.models.loading import load_model, make_config, new_model, save_model
from posttrain.models.sizes import DEFAULTS
from posttrain.models.sse_h import SSEHConfig, SSEHForCausalLM


@pytest.fixture
def folder(make_model, tmp_path):
    save_model(make_model(), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["hybrid", "sse_gdn"])
def test_round_trip(make_model, make_ids, tmp_path, kind, tied):
    model = make_model(kind, tie_word_embeddings=tied, eos_token_id=3)
    save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    (ids,) = make_ids([30])
    for loaded in (load_model(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert isinstance(loaded, SSEHForCausalLM)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        with torch.no_grad():
            assert torch.equal(loaded(ids[None]).logits, model(ids[None]).logits)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, SSEHConfig)
    assert all(getattr(config, name) == getattr(model.config, name) for name in (*DEFAULTS, "eos_token_id"))


def test_sharded_round_trip(make_model, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = load_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(CheckpointError, match="incomplete, model-00002"):
        load_model(tmp_path)


def test_dtype(folder, make_ids):
    half = load_model(folder, dtype="bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    (ids,) = make_ids([30])
    with torch.no_grad():
        assert half(ids[None]).logits.dtype == torch.bfloat16
    save_model(half, folder)
    assert load_model(folder).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype='int8'"):
        load_model(folder, dtype="int8")


def test_new_model_is_seeded_and_leaves_the_global_random_state(make_model):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, three = make_model(seed=1), make_model(seed=1), make_model(seed=2)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, three.lm_head.weight)
    mixer = one.model.layers[0].mixer
    assert mixer.lora_q_proj[1].weight.abs().sum() == 0
    assert mixer.q_proj.weight.std().item() == pytest.approx(0.2, rel=0.1)
    assert (mixer.o_norm.weight == 1).all()
    gdn = one.model.layers[1].mixer
    assert gdn.lora_k_proj[1].weight.abs().sum() == 0
    assert (gdn.A_log.exp() >= 1).all() and (gdn.A_log.exp() <= 16).all()


def test_weights_missing_mismatched_or_unexpected(folder):
    path = folder / "model.safetensors"
    whole = load_file(path)
    name = "model.layers.0.mixer.q_proj.weight"
    without = {k: v for k, v in whole.items() if k != name}
    cases = [
        (without, "1 missing keys, e.g. model.layers.0.mixer.q_proj.weight"),
        ({**without, name: torch.zeros(3, 3)}, "weights cannot be read|mismatched"),
        ({**whole, "model.extra.weight": torch.zeros(3)}, "1 unexpected keys, e.g. model.extra.weight"),
    ]
    for tensors, message in cases:
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            load_model(folder)


def test_broken_folders(folder, tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load_model(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="is a file"):
        load_model(folder / "config.json")
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match="weights cannot be read"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete, model\.safetensors missing"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="configuration cannot be read"):
        load_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="configuration cannot be read"):
        load_model(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_model(folder)


def test_another_family(tmp_path):
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="family 'llama', but this command needs 'sse_h'"):
        load_model(tmp_path)


def test_a_bad_configuration_in_a_checkpoint(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_types": ["sse"]}))
    with pytest.raises(CheckpointError, match="layer_types has 1 entries"):
        load_model(folder)


def test_recipe_fields():
    with pytest.raises(ConfigError, match="unknown model field 'hiden_size'; did you mean 'hidden_size'"):
        make_config({"hiden_size": 3})
    with pytest.raises(ConfigError, match="num_selected=9 exceeds"):
        new_model({"num_selected": 9}, seed=0)
    with pytest.raises(ConfigError, match="model configuration"):
        make_config({"eos_token_id": "x"})


def test_new_model_seeds_no_gpu(make_model, monkeypatch):
    """The states of GPUs are not put back afterwards, so they must not be touched."""

    def refuse(*_):
        raise AssertionError("a GPU was seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    make_model(seed=3)
