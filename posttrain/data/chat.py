"""Row -> token ids through the chat template.

The prompt that SFT trains after is the prompt that GRPO and evaluation sample from: both come from `messages`, and
`encode_sft` refuses a template under which they would differ. Loss falls on the completion alone, up to and including the
end-of-sequence token, which is always the last trained token.
"""

from __future__ import annotations

import re
from typing import Any

from posttrain.errors import DataError

IGNORE = -100  # the label that PyTorch's cross entropy skips
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def messages(row: dict[str, Any], cfg: Any = None) -> list[dict[str, str]]:
    """System prompt (where there is one) and the problem with the recipe's `prompt_suffix` on it."""
    system, suffix = getattr(cfg, "system_prompt", None), getattr(cfg, "prompt_suffix", None)
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": row["problem"] + (suffix or "")}]


def prompt_ids(tokenizer: Any, row: dict[str, Any], cfg: Any = None) -> list[int]:
    """Ids of the prompt, up to where the assistant begins.

    Args:
        cfg: attributes `system_prompt`, `prompt_suffix`, `max_prompt_length` (None: no limit).

    Raises:
        DataError: the prompt is longer than `max_prompt_length`.
    """
    ids = list(tokenizer.apply_chat_template(messages(row, cfg), tokenize=True, add_generation_prompt=True, return_dict=False))
    limit = getattr(cfg, "max_prompt_length", None)
    if limit is not None and len(ids) > limit:
        raise DataError(
            f"row {_name(row)}: its prompt has {len(ids)} tokens, more than the {limit} allowed; "
            "raise the limit, or drop such rows with overlong_prompt: drop"
        )
    return ids


def encode_sft(tokenizer: Any, row: dict[str, Any], cfg: Any = None) -> dict[str, list[int]]:
    """{"input_ids" [T], "labels" [T]}: labels equal the ids on the completion and EOS, and are -100 before it.

    Where the template marks the assistant's turn with {% generation %} the mask is the template's; otherwise the prompt's
    ids must begin the full ids, and everything after them is trained.

    Raises:
        DataError: no solution, a prompt that does not begin the conversation, or nothing to train on.
    """
    if not row.get("solution"):
        raise DataError(f"row {_name(row)}: it has no solution to train on; map one with columns: {{solution: ...}}")
    turns = [*messages(row, cfg), {"role": "assistant", "content": row["solution"]}]
    marked = bool(GENERATION_MARK.search(str(tokenizer.chat_template)))
    encoded = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=marked)
    ids = list(encoded["input_ids"])
    prompt = prompt_ids(tokenizer, row, cfg)
    if ids[: len(prompt)] != prompt:
        raise DataError(
            f"row {_name(row)}: under this chat template the prompt's {len(prompt)} ids do not begin the ids of the whole "
            "conversation, so that training and sampling would see different prompts; use another template or tokenizer"
        )
    mask = list(encoded["assistant_masks"]) if marked else [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    return _end(ids, mask, tokenizer.eos_token_id, row)


def _end(ids: list[int], mask: list[int], eos: int, row: dict[str, Any]) -> dict[str, list[int]]:
    """Cuts what a template writes after the assistant's end (a newline), and makes EOS the last, trained token."""
    if 1 not in mask:
        raise DataError(f"row {_name(row)}: the chat template leaves no token of the solution to train on")
    trained = len(mask) - mask[::-1].index(1)
    # A template may close its turn outside the mark, or write a newline after EOS inside it: look for EOS from the mask on.
    first = mask.index(1)
    ends = [i for i in range(first, len(ids)) if ids[i] == eos]
    if ends and ends[-1] >= trained - 2:
        stop = ends[-1] + 1
        ids, mask = ids[:stop], [*mask[:stop]]
        mask[trained:] = [1] * (stop - trained) if stop > trained else []
        mask[-1] = 1
    else:
        ids, mask = [*ids[:trained], eos], [*mask[:trained], 1]
    return {"input_ids": ids, "labels": [token if kept else IGNORE for token, kept in zip(ids, mask, strict=True)]}


def _name(row: dict[str, Any]) -> str:
    return str(row.get("id", "without id"))
