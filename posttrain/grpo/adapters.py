"""LoRA through PEFT: which weights train, and what they amount to when they are merged.

PEFT tells its adapters by `lora_` in a parameter's name, and SSE has projections of its own that are called so
(`lora_q_proj`): names alone must not decide what is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

ADAPTER_PARTS = (".lora_A.", ".lora_B.")


def lora_config(given: dict[str, Any]) -> LoraConfig:
    """PEFT's configuration for a recipe's `grpo.lora` section."""
    return LoraConfig(
        r=given["r"],
        lora_alpha=given["alpha"],
        lora_dropout=given["dropout"],
        target_modules=list(given["target_modules"]),
        task_type="CAUSAL_LM",
    )


def train_adapters_alone(model: nn.Module) -> None:
    """Freeze everything but the adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ADAPTER_PARTS))


@torch.no_grad()
def merged_state(model: PeftModel) -> dict[str, Tensor]:
    """The state dict of the plain model that computes what `model` does, to rounding in its dtype. Untouched tensors are shared
    with `model`; nothing of it changes."""
    base = model.get_base_model()
    deltas: dict[str, Tensor] = {}
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer):
            for adapter in module.active_adapters:
                layer: Any = module
                delta: Tensor = layer.get_delta_weight(adapter)
                deltas[f"{name}.weight"] = deltas.get(f"{name}.weight", 0) + delta.float()
    state: dict[str, Tensor] = {}
    for name, tensor in base.state_dict().items():
        if any(part in name for part in ADAPTER_PARTS):
            continue
        plain = name.replace(".base_layer.", ".")
        change = deltas.pop(plain, None)
        state[plain] = tensor if change is None else (tensor.float() + change).to(tensor.dtype)
    assert not deltas, f"adapters on no weight of the model: {sorted(deltas)[:3]}"
    return state
