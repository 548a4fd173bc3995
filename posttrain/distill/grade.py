"""What the teacher wrote -> a graded trace. The rewards see the very text that SFT will read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.distill.filters import CLOSE, OPEN, repeated_share, script_shares
from posttrain.distill.journal import Trace
from posttrain.inference import Text, sample_seed
from posttrain.rewards.registry import RewardSet

Row = dict[str, Any]


class Grader:
    """Grades batches of texts by the recipe's rewards.

    Args:
        rewards: the recipe's; closed by their owner.
        problems: id -> row.
        seeds: id -> the prompt's seed.
        tokenizer: the student's, where its tokens are asked for.
    """

    def __init__(self, rewards: RewardSet, problems: Mapping[str, Row], seeds: Mapping[str, int], tokenizer: Any = None) -> None:
        self._rewards, self._problems, self._seeds, self._tokenizer = rewards, problems, seeds, tokenizer
        self._special: list[str] = []
        if tokenizer is not None:
            from posttrain.data.chat import special_tokens

            self._special = special_tokens(tokenizer)

    def grade(self, texts: Sequence[Text]) -> list[Trace]:
        """One trace a text, in order; what is empty or unfinished is not put to the rewards.

        Raises:
            RewardError: a reward raised, or returned something unusable.
        """
        solutions = [close_thinking(text.text) for text in texts]
        whole = [i for i, text in enumerate(texts) if text.finish_reason == "stop" and solutions[i].strip()]
        ids = self._student_ids([solutions[i] for i in whole])
        totals: dict[int, float | None] = {}
        parts: dict[int, dict[str, float | None]] = {}
        if whole:
            rows = [self._problems[texts[i].prompt_id] for i in whole]
            columns = {name: [row.get(name) for row in rows] for name in ("answer", "source", "level")}
            if ids is not None:
                columns["completion_ids"] = ids
            scores = self._rewards.score(
                [[{"role": "user", "content": row["problem"]}] for row in rows], [solutions[i] for i in whole], **columns
            )
            totals = dict(zip(whole, scores.total, strict=True))
            parts = {i: {name: values[n] for name, values in scores.parts.items()} for n, i in enumerate(whole)}
        counts = {} if ids is None else {i: len(tokens) for i, tokens in zip(whole, ids, strict=True)}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return [
            Trace(
                problem=text.prompt_id,
                sample=text.sample,
                text=solutions[i],
                finish_reason=text.finish_reason,
                seed=sample_seed(self._seeds[text.prompt_id], text.sample),
                tokens=text.tokens,
                student_tokens=counts.get(i),
                mean_logprob=text.mean_logprob,
                reward=totals.get(i),
                parts=parts.get(i, {}),
                repetition=round(repeated_share(solutions[i]), 4) if i in totals else None,
                scripts={name: round(share, 4) for name, share in script_shares(solutions[i]).items()} if i in totals else None,
                special=any(token in solutions[i] for token in self._special),
                written=now,
            )
            for i, text in enumerate(texts)
        ]

    def _student_ids(self, solutions: list[str]) -> list[list[int]] | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer(solutions, add_special_tokens=False)["input_ids"] if solutions else []


def close_thinking(text: str) -> str:
    """The text with the opening tag that the chat template of many reasoning models writes into the prompt, and half a surrogate
    pair, which no file can hold, replaced."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if CLOSE in text and OPEN not in text:
        return f"{OPEN}\n{text.lstrip()}"
    return text
