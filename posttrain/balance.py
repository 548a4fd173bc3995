"""The balance loss of the last training forward, wherever trainers hid the model.

Trainers ask TRL's fused head for log-probabilities, and its output has no place for the balance loss: the backbone keeps it
(`SSEHModel.balance_loss`, already multiplied by its coefficient), and trainers read it here and add it to their loss.
"""

from __future__ import annotations

from typing import Any


def last_balance_loss(model: Any) -> Any | None:
    """The coefficient-weighted balance loss (a differentiable scalar tensor) of the last training forward of `model`.

    `model` may be wrapped (DistributedDataParallel, DeepSpeed, PEFT). None where the model has no routed layer.
    """
    while hasattr(model, "module"):
        model = model.module
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return getattr(model.base_model, "balance_loss", None)
