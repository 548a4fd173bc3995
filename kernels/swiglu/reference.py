"""silu(gate) * up in plain PyTorch."""

from torch import Tensor

from posttrain.kernels.elementwise import silu


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up
