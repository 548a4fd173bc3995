"""A small SFT run, in one process or through Ray: its recipe, and what it leaves in its folder."""

from safetensors.torch import load_file

from posttrain.config import recipe_from_dict
from posttrain.run_folder import RunFolder

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "layer_types": ["sse", "full_attention"],
    "num_partitions": 2,
    "chunk_size": 16,
    "adapter_rank": 4,
    "gate_rank": 4,
    "max_position_embeddings": 256,
}
TRAINER = {
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "max_steps": 6,
    "save_steps": 3,
    "report_to": [],
}


def recipe(folder, *, init=None, trainer=None, **sections):
    """6 steps of one row each; `init` and `trainer` change single fields, a section given by name replaces the whole one."""
    return recipe_from_dict(
        {
            "name": "test",
            "run_dir": str(folder),
            "seed": 11,
            "stages": ["sft"],
            "model": {"init": MODEL | (init or {}), "tokenizer": "arithmetic"},
            "data": {"train": {"kind": "arithmetic", "limit": 60}, "max_length": 128},
            "trainer": TRAINER | (trainer or {}),
        }
        | sections
    )


def weights(folder):
    """The tensors of a checkpoint, by name."""
    return load_file(folder / "model.safetensors")


def losses(path):
    """The loss of every logged step of the run folder `path`."""
    return [record["loss"] for record in RunFolder(path).read_metrics("sft")]
