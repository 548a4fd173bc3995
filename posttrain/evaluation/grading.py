"""Completions to graded samples, in the verifier's processes, beside the generation and never in its way."""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from posttrain.config import RewardConfig
from posttrain.evaluation.samples import Sample
from posttrain.inference import Text
from posttrain.rewards.extract import find_answer
from posttrain.rewards.policy import AnswerPolicy
from posttrain.rewards.pool import VerifierPool

Row = dict[str, Any]


class Grader:
    """Verifies answers in a pool, and knows which samples still wait.

    Use as a context manager: leaving it waits for what was submitted, or drops it after an error.
    """

    def __init__(self, pool: VerifierPool, keep: Callable[[Sample], None], workers: int) -> None:
        """`keep` gets each graded sample, one at a time."""
        self._pool, self._keep = pool, keep
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grading")
        self._waiting: set[Future[None]] = set()

    def submit(self, row: Row, text: Text) -> None:
        """Grade a completion of the problem `row` later; an error of an earlier one is raised here."""
        done = {future for future in self._waiting if future.done()}
        self._waiting -= done
        for future in done:
            future.result()
        self._waiting.add(self._threads.submit(self._grade, row, text))

    def _grade(self, row: Row, text: Text) -> None:
        [verdict] = self._pool.verify([(row["answer"], text.text)], prompts=[row["problem"]])
        sample = Sample(
            problem_id=row["id"],
            sample=text.sample,
            correct=verdict.correct,
            reason=verdict.reason,
            gold=str(row["answer"]),
            answer=voted_answer(text.text, row["problem"], self._pool.policy),
            length=text.tokens,
            finish_reason=text.finish_reason,
            mean_logprob=text.mean_logprob,
            problem=row["problem"],
            text=text.text,
        )
        with self._lock:
            self._keep(sample)

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=False)
        for future in self._waiting if kind is None else ():
            future.result()


def verifier_pool(reward: RewardConfig) -> VerifierPool:
    """The verifier's processes, by the recipe's rules about answers."""
    return VerifierPool(reward.workers, reward.timeout_s, reward.memory_mb, policy=reward.answer)


def verifier_identity(pool: VerifierPool) -> dict[str, Any]:
    """What a verdict depends on: the library, our own code around it, and the rules that the recipe chose."""
    return {"math_verify": version("math-verify"), "code": code_digest(), "policy": pool.policy.as_dict()}


# The modules that decide verdicts.
RULES = (
    "boxes",
    "claims",
    "compare",
    "extract",
    "normalise",
    "numbers",
    "parsing",
    "policy",
    "quick",
    "relations",
    "texts",
    "units",
)


@cache
def code_digest() -> str:
    """Of the files that decide verdicts: samples graded by another version of them are graded again, never mixed."""
    folder = Path(inspect.getfile(VerifierPool)).parent
    content = b"".join((folder / f"{name}.py").read_bytes() for name in RULES)
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def voted_answer(text: str, problem: str, policy: AnswerPolicy) -> str | None:
    """The answer as it stands in a completion. A tail is where the verifier looks for one, not one: it cannot be a vote."""
    found = find_answer(text, policy=policy, prompt=problem)
    return " ".join(found.text.split()) if found is not None and found.kind != "tail" else None


def regraded(pool: VerifierPool, samples: Sequence[Sample], golds: dict[str, Any]) -> list[Sample]:
    """Samples with the verdicts of today's verifier and today's gold answers."""
    pairs = [(golds[sample.problem_id], sample.text) for sample in samples]
    verdicts = pool.verify(pairs, prompts=[sample.problem for sample in samples])
    return [
        replace(
            sample,
            correct=verdict.correct,
            reason=verdict.reason,
            gold=str(golds[sample.problem_id]),
            answer=voted_answer(sample.text, sample.problem, pool.policy),
        )
        for sample, verdict in zip(samples, verdicts, strict=True)
    ]


def unreadable(pool: VerifierPool, rows: Iterable[Row]) -> list[Row]:
    """The problems whose gold answer cannot be read: nothing could be said about any completion."""
    rows = list(rows)
    verdicts = pool.verify([(row["answer"], "") for row in rows])
    return [row for row, verdict in zip(rows, verdicts, strict=True) if verdict.reason == "unreadable_gold"]


def same_answers(pool: VerifierPool, pairs: list[tuple[str, str]]) -> list[bool]:
    """Whether the answers of each pair are the same in mathematics, by the pool's rules about equality."""
    # Both stand alone: the rules about where an answer is to be found have been followed.
    found = {"thinking": "strip", "answer_tag": "fallback", "boxes": "joined", "prompt_echo": "keep", "run_on": "keep"}
    policy = replace(pool.policy, **found)
    return [v.correct is True for v in pool.verify([(first, rf"\boxed{{{second}}}") for first, second in pairs], policy=policy)]
