"""Weights come back from a checkpoint whole, or with an error."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.errors import CheckpointError
from posttrain.models.loading import new_model
from posttrain.runtime.checkpoints import load_weights

FIELDS = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "layer_types": ["sse"],
    "num_partitions": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "4KB"])
def test_one_file_or_many_tied_or_not(tmp_path, tied, shard):
    fields = FIELDS | {"tie_word_embeddings": tied}
    saved, other = new_model(fields, seed=1), new_model(fields, seed=2)
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "4KB")
    load_weights(other, tmp_path)
    for name, expected in saved.state_dict().items():
        assert torch.equal(other.state_dict()[name], expected), name


def test_missing_unknown_and_misshapen_weights_are_errors(tmp_path):
    model = new_model(FIELDS, seed=1)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({name: value for name, value in whole.items() if name != "lm_head.weight"}, file)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load_weights(model, tmp_path)
    save_file(whole | {"extra": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match="unknown: extra"):
        load_weights(model, tmp_path)
    save_file(whole | {"lm_head.weight": torch.zeros(3, 16)}, file)
    with pytest.raises(CheckpointError, match="size mismatch"):
        load_weights(model, tmp_path)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_weights(model, tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load_weights(model, tmp_path)
