"""Row -> token ids through the chat template.

The prompt that SFT trains after is the prompt that GRPO and evaluation sample from: both come from `messages`, and
`encode_sft` refuses a template under which they would differ. Loss falls on the completion alone, up to and including the
end-of-sequence token, which is always the last trained token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from posttrain.errors import ConfigError, DataError

IGNORE = -100  # the label that PyTorch's cross entropy skips
# A batch of the tokenizer: its encodings take some 150 bytes a token until they are cut down to ids, so that a batch of long
# traces is closed before it has BATCH rows.
BATCH = 256
BATCH_CHARACTERS = 1_000_000
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def messages(row: dict[str, Any], cfg: Any = None) -> list[dict[str, str]]:
    """System prompt (where there is one) and the problem with the recipe's `prompt_suffix` on it."""
    system, suffix = getattr(cfg, "system_prompt", None), getattr(cfg, "prompt_suffix", None)
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": row["problem"] + (suffix or "")}]


def prompt_ids(tokenizer: Any, row: dict[str, Any], cfg: Any = None) -> list[int]:
    """Ids of the prompt to sample from, up to where the assistant begins.

    Args:
        cfg: attributes `system_prompt`, `prompt_suffix`, `max_prompt_length` (None: no limit).

    Raises:
        DataError: the prompt is longer than `max_prompt_length`.
    """
    ids = _prompt(tokenizer, row, cfg)
    limit = getattr(cfg, "max_prompt_length", None)
    if limit is not None and len(ids) > limit:
        raise DataError(_too_long(_name(row), len(ids), limit))
    return ids


def conversation_ids(
    tokenizer: Any, turns: Sequence[dict[str, str]], *, name: str, max_prompt_length: int | None = None
) -> list[int]:
    """Ids of a conversation that the assistant is to continue; `prompt_ids` for turns that are already written.

    Raises:
        DataError: a special token in a user's turn, or more than `max_prompt_length` tokens; `name` says whose.
    """
    special = special_tokens(tokenizer)
    for turn in turns:
        if turn["role"] == "user":
            _refuse_special_tokens({"id": name, "problem": turn["content"]}, special, ("problem",))
    ids = list(_rendered(tokenizer, list(turns), add_generation_prompt=True, return_dict=False))
    if max_prompt_length is not None and len(ids) > max_prompt_length:
        raise DataError(_too_long(name, len(ids), max_prompt_length))
    return ids


def _too_long(name: str, tokens: int, limit: int) -> str:
    return (
        f"row {name}: its prompt has {tokens} tokens, more than data.max_prompt_length {limit}; "
        "raise it (and the context with it), or leave such rows out with data.overlong_prompt: drop"
    )


def _prompt(tokenizer: Any, row: dict[str, Any], cfg: Any) -> list[int]:
    _refuse_special_tokens(row, special_tokens(tokenizer), ("problem",))
    return list(_rendered(tokenizer, messages(row, cfg), add_generation_prompt=True, return_dict=False))


def _rendered(tokenizer: Any, turns: Any, **options: Any) -> Any:
    """`apply_chat_template`, where a template that is wrong is the user's mistake.

    Raises:
        ConfigError: the template is not Jinja, asks for something that isn't there, or refuses these roles.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(turns, tokenize=True, **options)
    except TemplateError as error:
        raise ConfigError(f"model.chat_template (or the tokenizer's own): {type(error).__name__}: {error}") from error


def special_tokens(tokenizer: Any) -> list[str]:
    """What the tokenizer reads as control tokens, even in the middle of a text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = getattr(tokenizer, "all_special_tokens", ())
    return list(dict.fromkeys([*named, *(str(token) for token in added.values() if token.special)]))


def has_special_token(row: dict[str, Any], special: list[str], columns: Sequence[str] = ("problem", "solution")) -> bool:
    """Whether one of the row's texts holds a special token, which would end or forge a turn."""
    return any(token in (row.get(name) or "") for name in columns for token in special)


def _refuse_special_tokens(row: dict[str, Any], special: list[str], columns: Sequence[str]) -> None:
    if has_special_token(row, special, columns):
        raise DataError(
            f"row {_name(row)}: its {' or '.join(columns)} holds a special token of this tokenizer ({', '.join(special[:8])}), "
            "which would end or forge a turn; take it out of the text"
        )


def encode_sft(tokenizer: Any, row: dict[str, Any], cfg: Any = None) -> dict[str, list[int]]:
    """{"input_ids" [T], "labels" [T]}: labels equal the ids on the completion and EOS, and are -100 before it.

    Where the template marks the assistant's turn with {% generation %} the mask is the template's; otherwise everything after
    the prompt's ids is trained. The prompt's ids must begin the whole ids in any case.

    Raises:
        DataError: no solution, a prompt that does not begin the conversation, or nothing to train on.
    """
    return _encode_batch(tokenizer, [row], cfg)[0]


def encode_sft_batch(tokenizer: Any, rows: Iterable[dict[str, Any]], cfg: Any = None) -> list[dict[str, list[int]]]:
    """`encode_sft` of many rows, all in memory as lists (72 bytes a token); `iter_sft` for more than a few."""
    return list(iter_sft(tokenizer, rows, cfg))


def iter_sft(tokenizer: Any, rows: Iterable[dict[str, Any]], cfg: Any = None) -> Iterator[dict[str, list[int]]]:
    """`encode_sft` of each row in turn; the tokenizer works on all cores, a batch at a time, and only that batch is held."""
    for batch in _batches(rows):
        yield from _encode_batch(tokenizer, batch, cfg)


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row.get("solution") or "")
        if len(batch) == BATCH or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_batch(tokenizer: Any, rows: Sequence[dict[str, Any]], cfg: Any) -> list[dict[str, list[int]]]:
    special = special_tokens(tokenizer)
    for row in rows:
        if not row.get("solution"):
            raise DataError(f"row {_name(row)}: it has no solution to train on; name its column with columns: {{solution: ...}}")
        _refuse_special_tokens(row, special, ("problem", "solution"))
    prompts = [messages(row, cfg) for row in rows]
    turns = [[*prompt, {"role": "assistant", "content": row["solution"]}] for prompt, row in zip(prompts, rows, strict=True)]
    marked = bool(GENERATION_MARK.search(str(tokenizer.chat_template)))
    whole = _rendered(tokenizer, turns, return_dict=True, return_assistant_tokens_mask=marked)
    begin = _rendered(tokenizer, prompts, return_dict=True, add_generation_prompt=True)
    masks = whole["assistant_masks"] if marked else [None] * len(rows)
    return [
        _labelled(row, ids, prompt, mask, tokenizer)
        for row, ids, prompt, mask in zip(rows, whole["input_ids"], begin["input_ids"], masks, strict=True)
    ]


def _labelled(
    row: dict[str, Any], ids: list[int], prompt: list[int], mask: list[int] | None, tokenizer: Any
) -> dict[str, list[int]]:
    if ids[: len(prompt)] != prompt:
        raise DataError(
            f"row {_name(row)}: under this chat template the prompt's {len(prompt)} ids do not begin the ids of the whole "
            "conversation, so that training and sampling would see different prompts; use another template or tokenizer"
        )
    if mask is None:
        mask = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    if 1 not in mask:
        raise DataError(f"row {_name(row)}: the chat template leaves no token of the solution to train on")
    ids, mask = _end_with_eos(list(ids), list(mask), tokenizer)
    return {"input_ids": ids, "labels": [token if kept else IGNORE for token, kept in zip(ids, mask, strict=True)]}


def _end_with_eos(ids: list[int], mask: list[int], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids and mask cut after the assistant's EOS, which is trained; appended where the template writes none."""
    eos, first = tokenizer.eos_token_id, mask.index(1)
    trained = len(mask) - mask[::-1].index(1)
    stop = trained
    # Templates write a newline after the EOS; the prefix method has it inside the mask.
    while stop > first and ids[stop - 1] != eos and not tokenizer.decode([ids[stop - 1]]).strip():
        stop -= 1
    if stop > first and ids[stop - 1] == eos:
        return ids[:stop], mask[:stop]
    if eos in ids[trained:]:
        # The mark closes before the EOS: what follows up to it ends the turn, so it is what the model must learn to write.
        stop = ids.index(eos, trained) + 1
        return ids[:stop], mask[:trained] + [1] * (stop - trained)
    return [*ids[:trained], eos], [*mask[:trained], 1]


def _name(row: dict[str, Any]) -> str:
    return str(row.get("id", "without id"))
