"""Evaluation suites by name: where the problems are, and the protocol that is used unless the recipe says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One public suite.

    Attributes:
        hub: `datasets` id; a local file replaces it (`eval.suites.NAME.path`).
        problems: rows of the split, for estimates.
        samples: completions a problem.
        answer_after: the gold answer is what follows this mark in the answer column (GSM8K writes its working before it).
    """

    hub: str
    split: str
    problems: int
    name: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    samples: int = 4
    answer_after: str | None = None


# 32 samples for the sets of 30 to 40 problems: the papers' protocol for AIME (with temperature 1.0 and top-p 0.7, EvalConfig's
# defaults); a single pass over 30 problems has a 95% interval of +-18 points. The larger sets take 4 (our choice).
SUITES: dict[str, Suite] = {
    "aime24": Suite(hub="HuggingFaceH4/aime_2024", split="train", problems=30, samples=32),
    "aime25": Suite(hub="math-ai/aime25", split="test", problems=30, samples=32),
    "amc23": Suite(hub="math-ai/amc23", split="test", problems=40, columns={"problem": "question"}, samples=32),
    "math500": Suite(hub="HuggingFaceH4/MATH-500", split="test", problems=500),
    "olympiadbench": Suite(
        hub="Hothan/OlympiadBench",
        name="OE_TO_maths_en_COMP",
        split="train",
        problems=674,
        columns={"problem": "question", "answer": "final_answer", "subject": "subfield"},
    ),
    "gsm8k": Suite(
        hub="openai/gsm8k", name="main", split="test", problems=1319, columns={"problem": "question"}, answer_after="####"
    ),
}
