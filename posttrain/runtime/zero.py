"""DeepSpeed ZeRO under the Hugging Face trainers, on GPUs and (for tests and tiny models) on CPUs."""

from __future__ import annotations

import os
from typing import Any

from posttrain.config import DeepSpeedConfig
from posttrain.config.loading import merge
from posttrain.errors import ConfigError


def deepspeed_settings(config: DeepSpeedConfig, *, bf16: bool) -> dict[str, Any]:
    """Return DeepSpeed's own configuration for the `deepspeed` section of a recipe; "auto" is filled in by transformers."""
    zero: dict[str, Any] = {"stage": config.stage}
    if config.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # checkpoints are whole Hugging Face folders
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "zero_optimization": zero,
        # The optimizer is torch's AdamW, made by the trainer: DeepSpeed's own CPU one is compiled at first use (minutes).
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": bf16},
        "fp16": {"enabled": False},
    }
    return merge(settings, config.config)


def trainer_arguments(config: DeepSpeedConfig | None, *, bf16: bool, cuda: bool) -> dict[str, Any]:
    """Return the arguments that make a TRL config use DeepSpeed (none: plain, or DDP), and prepare this process for it.

    Raises:
        ConfigError: the recipe asks for DeepSpeed, and it is not installed.
    """
    if config is None:
        return {"use_cpu": not cuda}
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if cuda else "cpu")
    try:
        import deepspeed
    except ImportError:
        raise ConfigError(
            "the recipe has a `deepspeed` section, but DeepSpeed is not installed: "
            "pip install deepspeed (without a GPU: DS_BUILD_OPS=0 pip install deepspeed)"
        ) from None
    settings = deepspeed_settings(config, bf16=bf16)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if cuda:
        return {"deepspeed": settings}
    # `use_cpu=True` would make the trainer drop ZeRO silently; a state configured beforehand keeps both gloo and ZeRO.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    deepspeed.init_distributed(dist_backend="gloo")
    from accelerate import PartialState

    PartialState(backend="gloo")
    return {"use_cpu": False, "accelerator_config": {"use_configured_state": True}, "deepspeed": settings}
