"""The model as the engine needs it for a moment: in evaluation mode, and with new weights copied in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and inference mode inside; every module's own training flag comes back after, also after an error."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def copy_weights(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Copies a whole state dict into the model's own tensors (converted to their type and device); nothing changes on an error.

    A tied tensor may come under any one of its names.

    Raises:
        ValueError: names missing or unexpected, or another shape.
    """
    own = dict(model.state_dict(keep_vars=True))
    arrived = {tensor.data_ptr() for name, tensor in own.items() if name in state_dict}
    missing = [name for name, tensor in own.items() if name not in state_dict and tensor.data_ptr() not in arrived]
    unexpected = [name for name in state_dict if name not in own]
    if missing or unexpected:
        raise ValueError(
            f"new weights do not fit the model: {len(missing)} missing {missing[:8]}, {len(unexpected)} unexpected "
            f"{unexpected[:8]}; every tensor must arrive under its own name"
        )
    wrong = [
        f"{name}: {tuple(tensor.shape)} given, {tuple(own[name].shape)} needed"
        for name, tensor in state_dict.items()
        if tensor.shape != own[name].shape
    ]
    if wrong:
        raise ValueError(f"new weights have another shape than the model's: {'; '.join(wrong[:8])}")
    with torch.no_grad():
        for name, tensor in state_dict.items():
            own[name].copy_(tensor)
