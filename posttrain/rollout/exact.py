"""The log-probabilities of strict mode, by the kernel that the trainer uses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from posttrain.kernels.batch_invariant import logprobs_of
from posttrain.rollout.sampling import NO_TOP_K, Draw, SamplingParams


def with_exact_logprobs(draw: Draw, logits: Tensor, params: SamplingParams) -> Draw:
    """`draw` from logits [B, vocab] with the trainer's bits; rows that are greedy or truncated keep their own `logprob`, which no
    trainer computes. Nothing is read back."""
    logits = logits.contiguous()
    plain = logprobs_of(logits, draw.token, torch.ones_like(draw.logprob))
    if params.kind.mode == "greedy":
        return replace(draw, plain_logprob=plain)
    if params.kind.mode == "plain":
        return replace(draw, logprob=plain, plain_logprob=plain)
    greedy = params.temperature == 0
    own = greedy | (params.top_k < NO_TOP_K) | (params.top_p < 1) | (params.log_min_p > -torch.inf)
    scaled = logprobs_of(logits, draw.token, params.temperature.masked_fill(greedy, 1.0))
    return replace(draw, logprob=torch.where(own, draw.logprob, scaled), plain_logprob=plain)
