"""The correctness reward: 1.0 for a right final answer, 0.0 for a wrong one, None where the gold cannot be read.

    completions -> text -> extract.find_answer -> pool (fast path, or a child: normalise, math-verify, compare) -> rewards

reward = MathsReward(VerifierPool(workers=2, timeout_s=5.0, memory_mb=1024))
reward(prompts=["What is 6*7?"], completions=[r"It is \\boxed{42}."], answer=["42"])      # [1.0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.rewards.errors import RewardError
from posttrain.rewards.extract import completion_text
from posttrain.rewards.policy import AnswerPolicy
from posttrain.rewards.pool import VerifierPool


class MathsReward:
    """TRL's reward signature over a verifier pool, which may be shared with others.

    Args:
        pool: where answers are verified; its owner closes it.
        column: dataset column of the gold answers.
        correct, wrong: the values given.
        policy: where an answer stands and what equals it; None leaves it to the pool, a mapping changes the fields it names.
    """

    __name__ = "maths"
    required = True  # a sample whose gold cannot be read is left out of the sum as a whole, see RewardSet

    def __init__(
        self,
        pool: VerifierPool,
        *,
        column: str = "answer",
        correct: float = 1.0,
        wrong: float = 0.0,
        policy: AnswerPolicy | Mapping[str, Any] | None = None,
    ):
        self.pool, self.column, self.correct, self.wrong = pool, column, correct, wrong
        self.policy = AnswerPolicy.of(
            {**pool.policy.as_dict(), **policy} if isinstance(policy, Mapping) else policy or pool.policy
        )

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """One value a completion, in order.

        Raises:
            RewardError: the gold column is missing or of another length.
        """
        golds = columns.get(self.column)
        if golds is None or len(golds) != len(completions):
            given = f"has {len(golds)} entries for {len(completions)} completions" if golds is not None else "is missing"
            others = ", ".join(sorted(columns)) or "none"
            raise RewardError(f"reward {self.__name__!r}: the column {self.column!r} of gold answers {given} (columns: {others})")
        pairs = [(gold, completion_text(completion)) for gold, completion in zip(golds, completions, strict=True)]
        verdicts = self.pool.verify(pairs, policy=self.policy, prompts=[_prompt_text(prompt) for prompt in prompts])
        return [None if v.correct is None else self.correct if v.correct else self.wrong for v in verdicts]


def _prompt_text(prompt: object) -> str | None:
    """The prompt, or the last user turn of a conversation; None for anything else."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[-1], dict):
        content = prompt[-1].get("content")
        return content if isinstance(content, str) else None
    return None
