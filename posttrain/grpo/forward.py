"""Log-probabilities of a padded batch by packed forwards: what the learner computes in place of TRL's padded ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.balance import last_balance_loss
from posttrain.grpo.packing import pack_inputs, pack_router_indices, plan_packs, put_back
from posttrain.models.sse_h.causal_lm import scores_labels


@dataclass(frozen=True, kw_only=True)
class Forwarded:
    """logps, entropies: [B, C], 0 on padding and masked completions (entropies too where they were not asked for).
    balance: the weighted balance loss of the last forward, None where there is none."""

    logps: torch.Tensor
    entropies: torch.Tensor
    balance: torch.Tensor | None


def packed_logprobs(
    model: Any,
    rows: dict[str, Any],
    input_ids: torch.Tensor,
    completion_width: int,
    *,
    temperature: float,
    max_tokens: int | None,
    replay: bool,
    entropies: bool,
    balance: bool,
    autocast: Callable[[], AbstractContextManager[Any]],
    own_head: bool = True,
) -> Forwarded:
    """Forwards of `input_ids` [B, P + C], of which the last C = `completion_width` are completions.

    Args:
        rows: the batch: `prompt_lengths`, `completion_lengths` and, where they are replayed, `router_indices` of its rows.
        max_tokens: packed tokens of one forward; None makes a single one, as gradients need it.
        replay: use the generator's partitions.
        own_head: let a model that `scores_labels` do so; else by TRL's fused head, which the learner adds.
    """
    logps = torch.zeros((input_ids.size(0), completion_width), dtype=torch.float32, device=input_ids.device)
    entropy, balance_loss = torch.zeros_like(logps), None
    packs = plan_packs(
        rows["prompt_lengths"],
        rows["completion_lengths"],
        input_ids.size(1) - completion_width,
        completion_width,
        max_tokens=max_tokens,
    )
    for pack in packs:
        arguments = pack_inputs(pack, input_ids)
        if replay:
            arguments["router_indices"] = pack_router_indices(pack, rows["router_indices"]).to(input_ids.device)
        with autocast():
            if own_head and scores_labels(model):
                # The model's own head, whose logits are the generator's: fp32, in strict mode bit for bit.
                labels = arguments.pop("shift_labels")
                outputs = model(**arguments, score_labels=labels, temperature=temperature, use_cache=False)
            else:
                outputs = model(**arguments, fused_lm_head=True)
        logps = put_back(pack, outputs.log_probs, logps)
        if entropies:
            entropy = put_back(pack, outputs.entropy, entropy)
        if balance:
            balance_loss = last_balance_loss(model)
    return Forwarded(logps=logps, entropies=entropy, balance=balance_loss)
