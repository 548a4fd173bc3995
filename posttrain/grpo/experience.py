"""From prompts to what the loss reads: requests, groups, padded tensors.

    rows --build_requests--> Request --Generator--> Completion --Scorer--> Group --collate--> inputs of TRL's loss

Ids are the truth on the whole way: what the generator sampled is what is trained on, and text is made for the rewards alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.grpo.sampler import derived_seed
from posttrain.types import Completion, Group, Request


def build_requests(
    rows: Sequence[dict[str, Any]],
    *,
    num_generations: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    max_tokens: int,
    stop: Sequence[str],
    run_seed: int,
    step: int,
    extras: Sequence[int | None] | None = None,
) -> list[Request]:
    """One request a prompt, its seed a function of (run, step, prompt).

    So a resumed run samples what the uninterrupted one would have, whatever the batch, the number of processes or the machine.

    Args:
        rows: with `prompt_ids` and `prompt_index`, the prompt's place in the data set.
        step: the optimiser steps taken when the request is made.
        extras: number of each row among the extra candidates of its batch, None for its own prompts. The same prompt may come
            again as an extra one, and is then sampled anew.
    """
    marks = [() if extra is None else ("extra", extra) for extra in extras or [None] * len(rows)]
    return [
        Request(
            prompt_ids=row["prompt_ids"],
            n=num_generations,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_tokens=max_tokens,
            stop=tuple(stop),
            seed=derived_seed("rollout", run_seed, step, row["prompt_index"], *mark),
            id="-".join(map(str, ("step", step, "prompt", row["prompt_index"], *mark))),
        )
        for row, mark in zip(rows, marks, strict=True)
    ]


def collate(
    groups: Sequence[Group],
    *,
    pad_token_id: int,
    masked: Sequence[Sequence[bool]],
    version: int,
    plain_logprobs: bool = False,
    replay_router: bool = False,
) -> dict[str, Any]:
    """Inputs of TRL's `_compute_loss` for P groups of G, as B = P G rows on the host.

    Args:
        masked: [P][G], completions that take no part in the loss (truncated, or not judged).
        version: of the policy that is trained on these groups.
        plain_logprobs: take the log-probabilities of the model's own softmax, not those of the distribution that was drawn from.
        replay_router: keep the generator's partition choices for the forward.

    Returns:
        prompt_ids, prompt_mask [B, P'] padded on the left; completion_ids, completion_mask [B, C] padded on the right, the mask
        0 on masked completions; advantages [B]; sampling_per_token_logps [B, C]; fresh [B, C], whether a token is of `version`;
        and lists of B, which TRL's shuffling and splitting of a batch takes along: prompt_lengths, completion_lengths (0 where
        masked), router_indices.

    Raises:
        ValueError: a log-probability is not finite, or router choices are missing.
    """
    completions = [completion for group in groups for completion in group.completions]
    for completion in completions:
        # One of them would make the loss, and with it every weight, NaN.
        if not np.isfinite(completion.plain_logprobs if plain_logprobs else completion.logprobs).all():
            raise ValueError(
                f"{completion.request_id}, sample {completion.sample}: the generator's log-probabilities are not finite, so that "
                "nothing can be trained on them; the weights or the kernels are broken: look at grad_norm of the steps before"
            )
    masks = [flag for flags in masked for flag in flags]
    inputs: dict[str, Any] = {
        "prompt_ids": _pad([c.prompt_ids for c in completions], pad_token_id, left=True),
        "prompt_mask": _pad([[1] * len(c.prompt_ids) for c in completions], 0, left=True),
        "completion_ids": _pad([c.token_ids for c in completions], pad_token_id),
        "completion_mask": _pad([[int(not m)] * len(c.token_ids) for c, m in zip(completions, masks, strict=True)], 0),
        "advantages": torch.tensor([a for group in groups for a in group.advantages], dtype=torch.float32),
        "sampling_per_token_logps": _pad(
            [c.plain_logprobs if plain_logprobs else c.logprobs for c in completions], 0.0, dtype=torch.float32
        ),
        "fresh": _pad([[v == version for v in c.versions] for c in completions], False, dtype=torch.bool),
        "prompt_lengths": [len(c.prompt_ids) for c in completions],
        "completion_lengths": [0 if m else len(c.token_ids) for c, m in zip(completions, masks, strict=True)],
    }
    if replay_router:
        inputs["router_indices"] = [_router_indices(c) for c in completions]
    return inputs


def _router_indices(completion: Completion) -> torch.Tensor:
    if completion.router_indices is None:
        raise ValueError("router replay was asked for, but the generator returned no router choices")
    # Copied: the generator runs in inference mode, whose tensors autograd may not save, and arrays from Ray cannot be written to.
    given = completion.router_indices
    return given.clone() if isinstance(given, torch.Tensor) else torch.from_numpy(np.array(given))


def _pad(rows: Sequence[Sequence[Any]], value: Any, *, left: bool = False, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Rows of different length as one tensor [B, longest]."""
    width = max(len(row) for row in rows)
    fill = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([[*f, *row] if left else [*row, *f] for row, f in zip(rows, fill, strict=True)], dtype=dtype)
