"""Rewards on the form of a completion, each with TRL's signature: format, overlong, repetition. Nothing here reads the gold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from posttrain.rewards.errors import RewardError
from posttrain.rewards.extract import completion_text, last_box


class FormatReward:
    """1.0 where the completion ends in a readable box, 0.0 otherwise.

    Args:
        think: also ask for exactly one thinking block, closed, before the box (its opening tag may stand in the prompt).
    """

    __name__ = "format"

    def __init__(self, *, think: bool = False):
        self.think = think

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(self._well_formed(completion_text(completion))) for completion in completions]

    def _well_formed(self, text: str) -> bool:
        if self.think:
            if text.count("</think>") != 1 or text.count("<think>") > 1:
                return False
            before, text = text.split("</think>")
            if "<think>" in before and before.split("<think>")[0].strip():
                return False
        found, content = last_box(text)
        return found and content is not None and bool(content.strip())


class OverlongPenalty:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), on the number of completion tokens L.

    0 up to `max_length - cache`; from there down a straight line to -1 at `max_length`; -1 beyond.
    """

    __name__ = "overlong"

    def __init__(self, *, max_length: int, cache: int):
        if not 0 < cache <= max_length:
            raise RewardError(f"reward 'overlong': cache={cache} must be above 0 and at most max_length={max_length}")
        self.max_length, self.cache = max_length, cache

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        ids = columns.get("completion_ids")
        if ids is None or len(ids) != len(completions):
            raise RewardError("reward 'overlong' counts tokens: it needs the column `completion_ids`, one list a completion")
        return [self._penalty(len(tokens)) for tokens in ids]

    def _penalty(self, length: int) -> float:
        over = length - (self.max_length - self.cache)
        return -min(1.0, over / self.cache) if over > 0 else 0.0


class RepetitionPenalty:
    """`-max_penalty` times the share of word n-grams that occurred before; 0.0 for a completion shorter than one n-gram."""

    __name__ = "repetition"

    def __init__(self, *, ngram: int = 20, max_penalty: float = 1.0):
        if ngram < 1 or max_penalty < 0:
            raise RewardError(f"reward 'repetition': ngram={ngram} must be at least 1 and max_penalty={max_penalty} at least 0")
        self.ngram, self.max_penalty = ngram, max_penalty

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [self._penalty(completion_text(completion)) for completion in completions]

    def _penalty(self, text: str) -> float:
        # letters and digits by the word, scripts without spaces and signs one by one
        words = re.findall(r"[A-Za-z0-9]+|[^\sA-Za-z0-9]", text.lower())
        grams = [tuple(words[start : start + self.ngram]) for start in range(len(words) - self.ngram + 1)]
        return -self.max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0
