"""Texts to what SymPy computes with, by math-verify's parser; gold answers once each. Runs in the pool's children."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
from sympy import Basic

from posttrain.rewards import units
from posttrain.rewards.normalise import clean

_NORMALISATION = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="all", equations=False
)
_ALONE = (LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALISATION), ExprExtractionConfig())
_WITHIN = (LatexExtractionConfig(), ExprExtractionConfig())


@dataclass(frozen=True)
class Gold:
    """`text` as cleaned; `currency` by its sign, which cleaning takes off."""

    text: str
    parsed: tuple
    currency: str | None = None


@lru_cache(maxsize=512)
def read_gold(text: str) -> Gold | None:
    """The parsed gold answer, or None where nothing can be read from it: every sample of that problem must be left out.

    A LaTeX gold that math-verify can only keep as a string is readable where its braces are balanced: it may be text.
    """
    cleaned = clean(text)
    if not cleaned:
        return None
    parsed = parse_alone(cleaned)
    if not parsed or (all(isinstance(value, str) for value in parsed) and not _plausible_text(cleaned)):
        return None
    return Gold(cleaned, tuple(parsed), units.currency_of(text))


def _plausible_text(text: str) -> bool:
    said = re.sub(r"\\[a-zA-Z]+", "", text)
    return text.count("{") == text.count("}") and any(character.isalnum() for character in said)


def parse_alone(cleaned: str) -> Sequence[Basic | str]:
    """A cleaned answer; empty where nothing can be read from it."""
    return parse(rf"\boxed{{{cleaned}}}", _ALONE, parsing_timeout=None)  # type: ignore[arg-type]  # None: no SIGALRM


def parse_within(text: str) -> Sequence[Basic | str]:
    """The last expression in a text that math-verify finds."""
    return parse(text, _WITHIN, parsing_timeout=None)  # type: ignore[arg-type]
