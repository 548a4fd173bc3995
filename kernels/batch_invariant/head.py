"""Log-probabilities and entropies of one token a row, straight from the hidden states: a chunk of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.kernels.batch_invariant.triton_linear import launch_linear
from posttrain.kernels.batch_invariant.triton_logprobs import launch_entropies, launch_gradient, launch_logprobs
from posttrain.kernels.linear_cross_entropy.chunked import add_product
from posttrain.kernels.wide_product import wide_product


def _logits(hidden: Tensor, weight: Tensor, exact: bool) -> Tensor:
    return launch_linear(hidden, weight, None, torch.float32) if exact else wide_product(hidden, weight)


class HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_rows: int, exact: bool):
        heat = torch.full(targets.shape, temperature, dtype=torch.float32, device=hidden.device)
        logprob, log_total, entropy = (torch.empty_like(heat) for _ in range(3))
        for first in range(0, hidden.shape[0], chunk_rows):
            rows = slice(first, first + chunk_rows)
            logits = _logits(hidden[rows], weight, exact)
            logprob[rows], log_total[rows] = launch_logprobs(logits, targets[rows], heat[rows])
            entropy[rows] = launch_entropies(logits, heat[rows], log_total[rows])
            del logits  # before the next chunk's exist
        ctx.save_for_backward(hidden, weight, targets, heat, log_total, entropy)
        ctx.chunk_rows, ctx.exact = chunk_rows, exact
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dlogprob: Tensor, dentropy: Tensor):
        hidden, weight, *saved = ctx.saved_tensors
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed in fp32 over the chunks: rounding every chunk's product to half precision would bias training.
        dweight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, hidden.shape[0], ctx.chunk_rows):
                rows = slice(first, first + ctx.chunk_rows)
                logits = _logits(hidden[rows], weight, ctx.exact)
                parts = (a[rows] for a in (*saved, dlogprob, dentropy))
                gradient = launch_gradient(logits, *parts, dtype=hidden.dtype)
                del logits
                if dhidden is not None:
                    torch.mm(gradient, weight, out=dhidden[rows])
                if dweight is not None:
                    add_product(dweight, gradient.t(), hidden[rows])
                del gradient
        return dhidden, None if dweight is None else dweight.to(weight.dtype), None, None, None, None
