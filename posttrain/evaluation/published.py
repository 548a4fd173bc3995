"""Scores that others published, each with its source. They stand beside ours marked as published: nobody ran them here.

The layout is that of Table 5 of the SSE paper (models down, suites across). Its abstract is the only part that was at hand to
quote from, so that most cells of its rows are empty: an empty cell says that no source was at hand, not that no score exists.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model's published scores, in percent: the mean of single samples (avg@k, which sources call pass@1)."""

    model: str
    scores: dict[str, float]
    source: str


PUBLISHED = (
    Published(
        model="SSE-H 2B, RL (preprint)",
        scores={"aime24": 64.7, "aime25": 51.3},
        source="Pan et al., Scaling Linear Attention with Sparse State Expansion, arXiv 2507.16577v1, abstract",
    ),
    Published(
        model="SSE-H 2B, RL (ICLR 2026)",
        scores={"aime24": 64.5, "aime25": 50.2},
        source="Pan et al., Scaling Linear Attention Capacity with Sparse State Expansion, ICLR 2026, abstract",
    ),
    Published(
        model="DeepSeek-R1-Distill-Qwen-1.5B",
        scores={"aime24": 28.9, "math500": 83.9},
        source="DeepSeek-R1's README, distilled models (temperature 0.6, top-p 0.95, 64 samples, 32,768 tokens)",
    ),
    Published(
        model="DeepSeek-R1-Distill-Qwen-1.5B (LightEval)",
        scores={"math500": 81.2},
        source="Open-R1's README (LightEval, greedy decoding)",
    ),
    Published(
        model="DeepSeek-R1-Distill-Qwen-7B",
        scores={"aime24": 55.5, "math500": 92.8},
        source="DeepSeek-R1's README, distilled models",
    ),
)
# Columns of the table, in the paper's order of difficulty.
TITLES = {
    "aime24": "AIME24",
    "aime25": "AIME25",
    "math500": "MATH500",
    "olympiadbench": "OlympiadBench",
    "amc23": "AMC23",
    "gsm8k": "GSM8K",
}
