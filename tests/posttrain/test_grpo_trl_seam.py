"""What the learner overrides in TRL still has the shape that it was written for."""

from __future__ import annotations

import inspect

import pytest
import trl
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer

from posttrain.grpo import learner
from posttrain.grpo.learner import Learner

# Parameters of every method of GRPOTrainer that Learner overrides, as of trl 1.16.
SIGNATURES = {
    "_get_train_sampler": ["self", "dataset"],
    "_generate_and_score_completions": ["self", "inputs"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "log": ["self", "logs", "start_time"],
    "floating_point_ops": ["self", "inputs"],
    "_get_per_token_logps_and_entropies": [
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
        "pixel_values",
        "image_grid_thw",
        "num_images",
        "pixel_attention_mask",
        "spatial_shapes",
        "num_tiles",
        "image_sizes",
        "token_type_ids",
        "mm_token_type_ids",
        "image_position_ids",
    ],
}


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signature_is_the_recorded_one(name: str) -> None:
    assert list(inspect.signature(getattr(GRPOTrainer, name)).parameters) == SIGNATURES[name], (
        f"trl {trl.__version__} changed GRPOTrainer.{name}: read it again before touching the recorded signature"
    )


def test_every_override_is_recorded() -> None:
    inherited = {name for base in GRPOTrainer.__mro__[:-1] for name in vars(base) if not name.startswith("__")}
    assert set(vars(Learner)) & inherited == set(SIGNATURES)


def test_the_loss_is_trls_own() -> None:
    assert Learner._compute_loss is GRPOTrainer._compute_loss
    assert Learner._prepare_inputs is GRPOTrainer._prepare_inputs


def test_fields_of_the_batch_that_the_loss_reads() -> None:
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"):
        assert f'inputs["{name}"]' in source, name
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
        assert f'"{name}"' in source, name
    for name in ("aux_loss_enabled", "router_aux_loss_coef", "aux_loss"):
        assert name in source, name


def test_trl_is_the_pinned_minor() -> None:
    assert Version(trl.__version__).release[:2] == learner.TRL_MINOR
    assert {"steps_per_generation", "generation_batch_size", "num_iterations"} <= set(GRPOConfig.__dataclass_fields__)
