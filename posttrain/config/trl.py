"""Validation of TRL's argument names and values, without importing TRL."""

from __future__ import annotations

import difflib
import math
from typing import Any

from posttrain.config.trl_arguments import GRPO_ARGUMENTS, SFT_ARGUMENTS

TABLES = {"trainer": ("SFTConfig", SFT_ARGUMENTS), "grpo": ("GRPOConfig", GRPO_ARGUMENTS)}

_WORKERS = "the Ray workers set it (sections `ray` and `deepspeed`)"
_MODEL = "the `model` section says how the model and tokenizer are loaded"
_GENERATOR = "posttrain's own generator draws the completions (section `rollout`)"
_PACKED = "samples are always packed without padding (`data.max_length` is the size of a row)"
_STAGES = "`stages` and the `eval` section say what runs"
_COLUMNS = "posttrain builds the token ids itself (sections `data` and `model`)"

# Arguments that TRL has and a recipe may not set, with the reason that the user reads.
OWNED = {
    "output_dir": "checkpoints go into the run folder (`run_dir`)",
    "run_name": "the recipe's `name` is used",
    "seed": "the recipe's `seed` is used",
    "data_seed": "the recipe's `seed` is used",
    "resume_from_checkpoint": "start again with --resume",
    "ignore_data_skip": "a resumed run continues at the exact sample",
    "hub_token": "a secret does not belong in a recipe: set HF_TOKEN in the environment",
    "disable_tqdm": "posttrain draws the progress bar",
    "enable_jit_checkpoint": "posttrain checkpoints and resumes itself",
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "eval_on_start", "eval_strategy"), _STAGES),
    **dict.fromkeys(
        ("use_cpu", "accelerator_config", "parallelism_config", "local_rank", "fsdp", "fsdp_config", "ddp_backend"), _WORKERS
    ),
    "deepspeed": "write a `deepspeed` section in the recipe",
    **dict.fromkeys(
        ("model_init_kwargs", "trust_remote_code", "chat_template_path", "eos_token", "pad_token", "use_cache"), _MODEL
    ),
    **dict.fromkeys(
        ("packing", "packing_strategy", "padding_free", "pad_to_multiple_of", "eval_packing", "max_length", "truncation_mode"),
        _PACKED,
    ),
    **dict.fromkeys(
        ("dataset_text_field", "dataset_kwargs", "completion_only_loss", "assistant_only_loss", "remove_unused_columns"), _COLUMNS
    ),
    **dict.fromkeys(("label_names", "length_column_name", "chat_template_kwargs"), _COLUMNS),
    **dict.fromkeys(
        ("use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged"), _GENERATOR
    ),
    **dict.fromkeys(
        ("generation_kwargs", "cache_implementation", "repetition_penalty", "ds3_gather_for_generation", "num_generations_eval"),
        _GENERATOR,
    ),
    **dict.fromkeys(
        # How samples of another policy are weighed concerns any generator, whatever TRL calls it.
        [
            name
            for name in GRPO_ARGUMENTS
            if name.endswith("vllm") or (name.startswith("vllm_") and not name.startswith("vllm_importance_sampling_"))
        ],
        _GENERATOR,
    ),
    "mask_truncated_completions": "use `grpo.truncated_completions: mask`",
    "reward_weights": "weights stand beside the functions (`reward.functions`)",
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        "a reference that moves is in no checkpoint, so the run could not be resumed",
    ),
    "max_tool_calling_iterations": "tools are not supported",
    "log_multimodal": "images are not supported",
    **dict.fromkeys(
        ("log_completions", "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo"),
        "completions are written to the run folder (rollouts/)",
    ),
    "auto_find_batch_size": "a batch that changes by itself cannot be resumed exactly; `posttrain check` estimates the memory",
}

# TRL checks these only when the trainer is built.
CHOICES = {
    ("trainer", "loss_type"): ("nll", "dft"),
    ("grpo", "loss_type"): ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
    ("grpo", "importance_sampling_level"): ("token", "sequence"),
    ("grpo", "vllm_importance_sampling_mode"): ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    ("grpo", "scale_rewards"): ("group", "batch", "none"),
    ("grpo", "multi_objective_aggregation"): ("sum_then_normalize", "normalize_then_sum"),
}

# Integers that make no sense below this.
AT_LEAST = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "num_iterations": 1,
    "steps_per_generation": 1,
    "generation_batch_size": 1,
    "max_completion_length": 1,
    "learning_rate": 0,
    "num_train_epochs": 0,
    "logging_steps": 0,
    "save_steps": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "temperature": 0,
    "beta": 0,
    "epsilon": 0,
    "epsilon_high": 0,
    "vllm_importance_sampling_clip_min": 0,
    "vllm_importance_sampling_clip_max": 0,
    "vllm_importance_sampling_cap": 0,
}


class ArgumentError(ValueError):
    """One bad argument: `key` is its name, the message says what is wrong."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def nearest(name: str, names: list[str] | tuple[str, ...]) -> str:
    """Return `; did you mean X?`, or the empty string where nothing is near."""
    close = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def coerce(value: Any, types: str) -> Any:
    """Return `value` as one of `types` ("int", "float | None", ...); a number may come as text, which YAML makes of 1e6.

    Raises:
        ValueError: the value is none of them.
    """
    kinds = types.split(" | ")
    if value is None or isinstance(value, bool):
        ok = ("None" if value is None else "bool") in kinds
    elif isinstance(value, int):
        if "int" not in kinds and "float" in kinds:
            return float(value)
        ok = "int" in kinds
    elif isinstance(value, str):
        if "str" not in kinds and ("float" in kinds or "int" in kinds):
            number = float(value)
            return coerce(int(number) if "int" in kinds and number.is_integer() else number, types)
        ok = "str" in kinds
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("not a finite number")
        if "float" not in kinds and "int" in kinds and value.is_integer():
            return int(value)
        ok = "float" in kinds
    else:
        ok = type(value).__name__ in kinds or "any" in kinds
    if not ok:
        raise ValueError("wrong type")
    return value


def check_argument(section: str, key: str, value: Any, own: tuple[str, ...] = ()) -> Any:
    """Return the value of one argument, coerced.

    Raises:
        ArgumentError: the name is unknown or owned by posttrain, or the value is of a wrong type or range.
    """
    config, table = TABLES[section]
    allowed = [name for name in table if name not in OWNED] + list(own)
    if key not in table:
        raise ArgumentError(key, f"unknown key ({config} of TRL has no such argument){nearest(key, allowed)}")
    if key in OWNED:
        raise ArgumentError(key, f"cannot be set in a recipe: {OWNED[key]}")
    types, _, choices = table[key]
    if (section, key) == ("grpo", "scale_rewards") and isinstance(value, bool):
        value = "group" if value else "none"
    if key.endswith("_strategy") and value is False:
        value = "no"  # which YAML takes for a truth value
    try:
        value = coerce(value, types)
    except ValueError:
        raise ArgumentError(key, f"got {value!r}, but {config} of TRL takes {types}") from None
    choices = CHOICES.get((section, key), choices)
    if choices and isinstance(value, str) and value not in choices:
        raise ArgumentError(key, f"got {value!r}, but it must be one of {', '.join(choices)}{nearest(value, choices)}")
    low = AT_LEAST.get(key)
    if low is not None and value is not None and not isinstance(value, str) and value < low:
        raise ArgumentError(key, f"got {value!r}, but it must be at least {low}")
    return value


def check_arguments(section: str, given: dict[str, Any], own: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the arguments of a section, coerced; keys in `own` are passed through for pydantic to check.

    Raises:
        ArgumentError: see `check_argument`; the first bad argument is reported.
    """
    return {key: value if key in own else check_argument(section, key, value, own) for key, value in given.items()}
