"""log softmax of a row of logits at one entry, entropy, and their gradients. A program takes a row, whose sums have one order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.kernels.triton_launch import Launch, aligned

BLOCK = 4096


@triton.jit
def logprob_kernel(X, TARGET, TEMPERATURE, LOGPROB, LOG_TOTAL, V: tl.constexpr, BLOCK: tl.constexpr):
    """A running maximum and sum for each lane, joined once at the end, as in `linear_cross_entropy`."""
    row = tl.program_id(0).to(tl.int64)
    X += row * V
    heat = tl.load(TEMPERATURE + row)
    lane = tl.arange(0, BLOCK)
    # Finite where nothing was seen: -inf - -inf is NaN.
    top = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, V, BLOCK):
        at = first + lane
        x = tl.load(X + at, mask=at < V, other=-1e30).to(tl.float32) / heat
        new = tl.maximum(top, x)
        # `fma`, or the compiler would be free to round in one place and not in another.
        total = tl.fma(total, tl.exp(top - new), tl.exp(x - new))
        top = new
    highest = tl.max(top, axis=0)
    log_total = highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0))
    chosen = tl.load(X + tl.load(TARGET + row)).to(tl.float32) / heat
    tl.store(LOGPROB + row, chosen - log_total)
    tl.store(LOG_TOTAL + row, log_total)


@triton.jit
def entropy_kernel(X, TEMPERATURE, LOG_TOTAL, ENTROPY, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * V
    heat, log_total = tl.load(TEMPERATURE + row), tl.load(LOG_TOTAL + row)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, V, BLOCK):
        at = first + lane
        logp = tl.load(X + at, mask=at < V, other=0.0).to(tl.float32) / heat - log_total
        # A logit of -inf has no share.
        total -= tl.where((at < V) & (logp > -1e30), tl.exp(logp) * logp, 0.0)
    tl.store(ENTROPY + row, tl.sum(total, axis=0))


@triton.jit
def logprob_gradient_kernel(
    X, TARGET, TEMPERATURE, LOG_TOTAL, ENTROPY, DLOGPROB, DENTROPY, DX, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """DX [rows, V]: d logprob = 1(target) - p and d entropy = -p (log p + entropy), each over the temperature."""
    row = tl.program_id(0).to(tl.int64)
    X += row * V
    DX += row * V
    heat, log_total = tl.load(TEMPERATURE + row), tl.load(LOG_TOTAL + row)
    target, entropy = tl.load(TARGET + row), tl.load(ENTROPY + row)
    dlogprob, dentropy = tl.load(DLOGPROB + row) / heat, tl.load(DENTROPY + row) / heat
    lane = tl.arange(0, BLOCK)
    for first in range(0, V, BLOCK):
        at = first + lane
        logp = tl.load(X + at, mask=at < V, other=0.0).to(tl.float32) / heat - log_total
        p = tl.exp(logp)
        gradient = dlogprob * (tl.where(at == target, 1.0, 0.0) - p)
        gradient -= dentropy * tl.where(logp > -1e30, p * (logp + entropy), 0.0)
        tl.store(DX + at, gradient.to(DX.dtype.element_ty), mask=at < V)


_LOGPROB, _ENTROPY, _GRADIENT = Launch(logprob_kernel), Launch(entropy_kernel), Launch(logprob_gradient_kernel)


def _constants(logits: Tensor) -> dict[str, int]:
    return {"V": logits.shape[1], "BLOCK": BLOCK, "num_warps": 8}


def launch_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and log sums of exponentials, fp32 [T] each; temperature fp32 [T]."""
    logits = aligned(logits)
    logprob, log_total = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))
    tensors = (logits, aligned(targets), aligned(temperature), logprob, log_total)
    _LOGPROB((logits.shape[0],), tensors, (), _constants(logits))
    return logprob, log_total


def launch_entropies(logits: Tensor, temperature: Tensor, log_total: Tensor) -> Tensor:
    """fp32 [T]."""
    entropy = torch.empty_like(log_total)
    _ENTROPY((logits.shape[0],), (logits, aligned(temperature), aligned(log_total), entropy), (), _constants(logits))
    return entropy


def launch_gradient(
    logits: Tensor, targets: Tensor, temperature: Tensor, log_total: Tensor, entropy: Tensor, dlogprob: Tensor,
    dentropy: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Gradient of the logits [T, V] in dtype."""
    out = torch.empty_like(logits, dtype=dtype)
    rows = (targets, temperature, log_total, entropy, dlogprob, dentropy)
    _GRADIENT((logits.shape[0],), (logits, *(aligned(a) for a in rows), out), (), _constants(logits))
    return out
