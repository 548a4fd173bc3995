"""The loop over chunks of rows, as one autograd function whose gradients are ready after the forward pass."""

from __future__ import annotations

import torch
from torch import Tensor


def _loss_and_gradient(logits: Tensor, targets: Tensor, ignore_index: int, fused: bool) -> Tensor:
    """Overwrites logits [C, V] with the gradient of their summed cross-entropy -> the loss a row [C], fp32.

    Both are NaN in a row whose target is neither in [0, V) nor `ignore_index`.
    """
    if fused:
        from posttrain.kernels.linear_cross_entropy.triton_softmax import loss_and_gradient_

        return loss_and_gradient_(logits, targets, ignore_index)
    logp = torch.log_softmax(logits, dim=-1, dtype=logits.dtype if logits.dtype == torch.float64 else torch.float32)
    column = targets.clamp(min=0, max=logits.shape[1] - 1)[:, None]
    counts = (targets != ignore_index).to(logp.dtype)
    counts.masked_fill_((counts > 0) & (targets != column.squeeze(1)), float("nan"))
    loss = -logp.gather(1, column).squeeze(1) * counts
    gradient = logp.exp_()
    gradient.scatter_add_(1, column, gradient.new_full((1, 1), -1.0).expand_as(column))
    logits.copy_(gradient.mul_(counts[:, None]))
    return loss


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in fp32 also where a and b are half precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _scaled(a: Tensor, factor: Tensor, chunk_rows: int) -> Tensor:
    """a [T, D] * factor in a's dtype, with one rounding: a factor of 1 / items in bf16 would shift every gradient by up to 0.4%.
    Chunks, since the product in the factor's dtype is twice as large."""
    out = torch.empty_like(a)
    for rows, into in zip(a.split(chunk_rows), out.split(chunk_rows), strict=True):
        into.copy_(rows.to(factor.dtype) * factor)
    return out


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        chunk_rows: int,
        fused: bool,
        wanted: bool,
    ) -> Tensor:
        """`wanted`: whether gradients are; `fused`: by Triton."""
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden.device)
        to_hidden, to_weight = (wanted and needed for needed in ctx.needs_input_grad[:2])
        dhidden = torch.empty_like(hidden) if to_hidden else None
        dweight = torch.zeros_like(weight, dtype=wide) if to_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, hidden.shape[0], chunk_rows):
                rows = slice(first, first + chunk_rows)
                logits = hidden[rows] @ weight.t()
                total += _loss_and_gradient(logits, targets[rows], ignore_index, fused).sum()
                if dhidden is not None:
                    torch.mm(logits, weight, out=dhidden[rows])
                if dweight is not None:
                    add_product(dweight, logits.t(), hidden[rows])
                del logits  # before the next chunk's exist
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtype, ctx.chunk_rows = weight.dtype, chunk_rows
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = _scaled(dhidden, grad, ctx.chunk_rows)
        if dweight is not None:
            dweight = (dweight * grad).to(ctx.dtype)
        return dhidden, dweight, None, None, None, None, None
