"""Products and log-probabilities whose bits do not depend on what else is in the batch, however many rows it has.

cuBLAS picks kernels, and with them the order of sums, by the number of rows. Here a row's numbers are the same in a decode step,
in a piece of a prompt and in a trainer's packed forward: every tile adds along K in steps of the same size and order.
Gradients are the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.kernels.backend import on_device_of, takes_triton

__all__ = ["exact_linear", "few_row_products", "head_logprobs", "logprobs_of", "unsupported"]

# Rows whose logits exist at once: 1024 rows of a 152K vocabulary are 0.6 GB in fp32.
CHUNK_ROWS = 1024
# Products of one launch of `few_row_products`, and their rows, at most.
MOST, MOST_ROWS = 10, 256


def unsupported(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these operators cannot run on such tensors; None where they can."""
    try:
        takes_triton(torch.empty(0, dtype=dtype, device=device), "triton")
    except ValueError as error:
        return str(error)
    return None


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight^T + bias, sums in fp32, rounded once; differentiable in all three. Autocast does not change it.

    Args:
        x: [..., K]; weight: [N, K]; bias: [N], of one dtype.
        out_dtype: fp32 keeps the sums as they are; by default the dtype of x.

    Returns:
        [..., N]. A row depends on the row of x alone, an entry on its row of `weight` alone, bit for bit.

    Raises:
        ValueError: shapes or dtypes do not fit, or Triton cannot run here.
    """
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        given = None if bias is None else list(bias.shape)
        raise ValueError(f"x must be [..., K], weight [N, K] and bias [N], got {list(x.shape)}, {list(weight.shape)}, {given}")
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}, but they must be alike")
    takes_triton(x, "triton")
    from posttrain.kernels.batch_invariant.triton_linear import ExactLinear

    with on_device_of(x):
        y = ExactLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, out_dtype or x.dtype)
    return y.view(*x.shape[:-1], y.shape[-1])


def few_row_products(xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`exact_linear` of each x with its weight and bias, the same bits, in one launch; no gradients.

    Args:
        xs: up to 10 of [T, K], of one T up to 256 and one dtype; rows may lie apart. weights: [N, K]; biases: [N] or None.

    Returns:
        [T, N] each, in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit, there are too many, or Triton cannot run here.
    """
    takes_triton(xs[0], "triton")
    from posttrain.kernels.batch_invariant.triton_linears import launch_linears

    rows, dtype = xs[0].shape[0], xs[0].dtype
    if len(xs) > MOST or rows > MOST_ROWS or len(xs) != len(weights) or len(xs) != len(biases):
        raise ValueError(f"up to {MOST} products of up to {MOST_ROWS} rows go together, got {len(xs)} of {rows}")
    for x, weight, bias in zip(xs, weights, biases, strict=True):
        fits = x.ndim == 2 and x.shape[0] == rows and weight.ndim == 2 and weight.shape[1] == x.shape[1]
        fits = fits and x.dtype == weight.dtype == dtype and (bias is None or bias.shape == weight.shape[:1])
        if not fits:
            given = [(list(a.shape), a.dtype) for a in (x, weight, bias) if a is not None]
            raise ValueError(f"x must be [{rows}, K], weight [N, K] and bias [N], of {dtype}, got {given}")
    with on_device_of(xs[0]):
        return launch_linears(xs, weights, biases)


def logprobs_of(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) at the targets; no gradients.

    Args:
        logits: [T, V] contiguous; targets: int64 [T] in [0, V); temperature: fp32 [T].

    Returns:
        fp32 [T]; NaN where a row holds one. A row depends on itself alone, bit for bit.
    """
    takes_triton(logits, "triton")
    from posttrain.kernels.batch_invariant.triton_logprobs import launch_logprobs

    with on_device_of(logits):
        return launch_logprobs(logits, targets, temperature)[0]


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_rows: int = CHUNK_ROWS,
    exact: bool = True,
) -> tuple[Tensor, Tensor]:
    """`logprobs_of(exact_linear(hidden, weight, out_dtype=fp32), targets)` without [T, V] logits, and the entropies.

    Args:
        hidden: [T, D]; weight: [V, D], of one dtype; targets: int64 [T] in [0, V).
        chunk_rows: rows whose logits exist at once; they are computed again in the backward pass.
        exact: with False the logits, fp32 still, come from the fastest product, whose bits depend on the number of rows.

    Returns:
        log-probabilities and entropies of the distribution at `temperature`, fp32 [T] each, differentiable in hidden and weight.

    Raises:
        ValueError: shapes or dtypes do not fit, or Triton cannot run here.
    """
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1] or temperature <= 0:
        raise ValueError(
            f"hidden must be [T, D], targets [T] and the temperature above 0, got {list(hidden.shape)}, {list(targets.shape)}, "
            f"{temperature}"
        )
    takes_triton(hidden, "triton")
    from posttrain.kernels.batch_invariant.head import HeadLogprobs

    with on_device_of(hidden):
        return HeadLogprobs.apply(hidden, weight, targets, temperature, chunk_rows, exact)
