"""The output projection and its cross-entropy together: [T, vocabulary] logits never exist, gradients are made on the way.

A chunk of rows at a time: logits, then their gradient in place, then its two products, for which the logits need not be computed
again in the backward pass. Weight gradients are summed in fp32 over the chunks: rounding every chunk's product to half precision
biases training (Hugging Face TRL found it so for its own head).
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.kernels.backend import FusedBackend, on_device_of, takes_triton
from posttrain.kernels.linear_cross_entropy.chunked import ChunkedLinearCrossEntropy
from posttrain.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]

# Rows whose logits exist at once: 4096 rows of a 152K vocabulary are 1.2 GB in bf16. Every chunk passes once over the fp32
# gradient of the weight.
CHUNK_ROWS = 4096


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    chunk_rows: int = CHUNK_ROWS,
    backend: FusedBackend | None = None,
) -> Tensor:
    """Sum of the cross-entropy of hidden @ weight^T against targets, differentiable (once) in hidden and weight.

    Args:
        hidden: [T, D]; weight: [V, D], of one dtype. targets: int64 [T] in [0, V); rows with `ignore_index` give nothing.
        chunk_rows: rows a chunk.
        backend: of the softmax: "torch", "triton", or None for the best one here.

    Returns:
        an fp32 scalar (float64 for float64). Logits have the dtype of `hidden`, all arithmetic on them is fp32.
        NaN, also in the gradients of such a row, where a target is out of range: on a GPU, looking would make the host wait.

    Raises:
        ValueError: shapes, dtypes or chunk_rows do not fit, the backend cannot take them, or PyTorch finds a target out of range
            on the CPU.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "hidden must be [T, D], weight [V, D] and targets [T], got "
            f"{list(hidden.shape)}, {list(weight.shape)}, {list(targets.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}, but they must be alike")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64, got {targets.dtype}")
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows}, but a chunk has at least one row")
    fused = takes_triton(hidden, backend)
    if not fused and targets.device.type == "cpu":
        _check_targets(targets, weight.shape[0], ignore_index)
    wanted = torch.is_grad_enabled()  # autograd functions cannot tell
    with on_device_of(hidden):
        return ChunkedLinearCrossEntropy.apply(hidden, weight, targets, ignore_index, chunk_rows, fused, wanted)


def _check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    wrong = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
    if wrong.any():
        first = targets[wrong][0].item()
        raise ValueError(f"targets must be in [0, {vocabulary}) or ignore_index={ignore_index}, got {first}")
