"""Sizes that the Triton kernels of the sparse-state operators take, and the blocks that fit them."""

from __future__ import annotations

import torch

from posttrain.kernels import triton_launch
from posttrain.kernels.sse.checks import Inputs
from posttrain.kernels.triton_launch import power_of_two

MAX_CHUNK, MAX_WIDTH = 128, 256


def block_of(size: int, largest: int, *, rows: int, half: bool) -> int:
    """The block of K or V that covers `size` columns, at most `largest`, beside chunks of `rows` rows.

    A product whose left operand has 64 rows or more goes to a warp group, and then needs right operands of 128 bytes a row at
    least: with 64, Triton 3.6 and 3.7 let it read past the end of shared memory (triton-lang/triton#11366), seen here as
    illegal accesses and results that did not repeat. Rows may be a chunk's or, in products for the state, key channels.
    """
    if rows < 64:
        return max(16, min(largest, 32, power_of_two(size)))
    return max(64 if half else 32, min(largest, power_of_two(size)))


def unsupported(x: Inputs) -> str | None:
    """Why the Triton backend cannot run these inputs; None where it can."""
    if not (x.v.is_cuda or triton_launch.interpreted()):
        return f"the inputs are on {x.v.device.type}; Triton kernels need a CUDA device (or TRITON_INTERPRET=1)"
    if x.v.dtype == torch.float64:
        return "the inputs are float64; the kernels compute in fp32"
    if x.chunk_size > MAX_CHUNK:
        return f"chunk_size={x.chunk_size}, but the kernels take at most {MAX_CHUNK}"
    for name, width in (("K", x.q2.shape[-1]), ("V", x.v.shape[-1])):
        if width > MAX_WIDTH:
            return f"{name}={width}, but the kernels take at most {MAX_WIDTH}"
    return None
