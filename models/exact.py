"""Strict mode: a model whose generator and trainer compute the same bits.

By default a GPU decodes with other kernels than it trains with, and its matrix products choose theirs by the number of rows, so a
token's log-probability differs in its last digits between the two. After `make_exact` every product, attention and recurrent
layer has one order of sums, whatever shares the batch and however a sequence is cut:

    linear layers        one order along K in every tile                 `posttrain.kernels.batch_invariant`
    softmax attention    blocks and ranges at fixed positions            `posttrain.kernels.paged_attention.exact`
    SSE layers           every row added up as decoding adds it up       `posttrain.kernels.sse`, exact=True
    log-probabilities    one kernel on both sides, fp32 logits           `posttrain.kernels.batch_invariant`

Norms, rotations, key maps and gates are row by row already. With the generator's routes replayed, `forward(score_labels=...)`
gives bitwise the log-probabilities that it sampled with, and gradients are the ordinary ones. Autocast changes nothing here.
"""

from __future__ import annotations

import torch
from torch import nn

from posttrain.kernels.batch_invariant import unsupported
from posttrain.models.linear import Linear
from posttrain.models.sse_h.causal_lm import SSEHForCausalLM
from posttrain.models.sse_h.mixer_attention import AttentionMixer
from posttrain.models.sse_h.mixer_sse import SSEMixerBase

# What the kernels of strict attention and of the SSE layers take (`posttrain.kernels`: paged_attention.exact, sse.triton_limits).
MAX_WIDTH, MAX_CHUNK = 128, 128


def why_not_exact(model: nn.Module, device: torch.device | None = None) -> str | None:
    """Why strict mode cannot hold for this model on `device` (by default where it lies); None where it can."""
    if not isinstance(model, SSEHForCausalLM):
        return f"it is for models of the sse_h family without a wrapper, not {type(model).__name__}"
    kinds = model.config.shape.layer_types
    if "sse_gdn" in kinds:
        return f"layer {kinds.index('sse_gdn')} is sse_gdn, which decodes by another sum than it trains with"
    width, chunk = model.config.shape.head_dim, model.config.chunk_size
    if width > MAX_WIDTH or chunk > MAX_CHUNK:
        return f"its kernels take heads of up to {MAX_WIDTH} and chunks of up to {MAX_CHUNK}, got {width} and {chunk}"
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module) is not Linear:
            return f"{name} is a {type(module).__name__}, whose products depend on the batch (adapters are not supported)"
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            return f"{name} is sharded (ZeRO-3); use stage 0, 1 or 2"
        where = device or parameter.device
        reason = unsupported(parameter.dtype, where)
        if reason is not None:
            return reason if where.type == "cuda" else f"its kernels need a GPU, but the model lies on {where.type}"
        if where.type == "cuda" and parameter.dtype != torch.bfloat16:
            return f"{name} is {parameter.dtype}, but the weights must be bfloat16"
    return None


def make_exact(model: nn.Module, device: torch.device | None = None) -> None:
    """Turns strict mode on, for good; copies keep it. `device`: where the model will be moved to.

    Raises:
        ValueError: it cannot hold (`why_not_exact`).
    """
    reason = why_not_exact(model, device)
    if reason is not None:
        raise ValueError(f"strict mode cannot hold for this model: {reason}")
    assert isinstance(model, SSEHForCausalLM)
    for module in model.modules():
        if isinstance(module, Linear | AttentionMixer | SSEMixerBase):
            module.exact = True
    # Rounding logits of 20 to bf16 would cost more digits than everything else together.
    model.lm_head.exact_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
    model.exact = True


def is_exact(model: nn.Module) -> bool:
    """Whether `make_exact` was called on the model, which may be wrapped (DistributedDataParallel, DeepSpeed)."""
    while hasattr(model, "module"):
        model = model.module
    return bool(getattr(model, "exact", False))
