"""Why a trace is left out: one reason each, the first that holds, in a fixed order, so that the counts add up."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING

from posttrain.distill.journal import Trace

if TYPE_CHECKING:
    from posttrain.config.distill import TraceFilters

# Letters of formulas: Greek, and the mathematical alphabets, stand in texts of every language.
FORMULA_SCRIPTS = ("GREEK", "MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER")
# "han" is Chinese; a Chinese trace names its variables in Latin letters.
SCRIPTS = {"latin": ("LATIN",), "han": ("CJK",), "cyrillic": ("CYRILLIC",)}
# A LaTeX command or a Latin letter by itself: notation, not language.
NOTATION = re.compile(r"\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
REFUSED = "refused by the server"
OPEN, CLOSE = "<think>", "</think>"


def reason_against(trace: Trace, filters: TraceFilters) -> str | None:
    """The reason why a trace is left out, or None."""
    if trace.finish_reason == "refused":
        return REFUSED
    if trace.finish_reason == "length":
        return "truncated"
    if trace.finish_reason != "stop":
        return "aborted"
    if not _answer_part(trace.text).strip():
        return "empty" if not trace.text.strip() else "nothing after the thinking block"
    if OPEN in trace.text and CLOSE not in trace.text:
        return "a thinking block without end"
    if trace.reward is None:
        return "not gradable"
    if trace.reward < filters.min_reward:
        # The maths reward's own verdict reads better than a number.
        return "wrong answer" if trace.parts.get("maths") == 0.0 else f"reward below {filters.min_reward:g}"
    if trace.special:
        return "a special token in the text"
    return _form(trace, filters)


def _form(trace: Trace, filters: TraceFilters) -> str | None:
    count = trace.student_tokens
    if count is not None and count < filters.min_tokens:
        return f"below {filters.min_tokens} tokens"
    if count is not None and filters.max_tokens is not None and count > filters.max_tokens:
        return f"above {filters.max_tokens} tokens"
    if filters.thinking == "required" and not well_formed_thinking(trace.text):
        return "no well-formed thinking block"
    if filters.thinking == "forbidden" and (OPEN in trace.text or CLOSE in trace.text):
        return "a thinking block"
    if filters.language != "any":
        scripts = script_shares(trace.text) if trace.scripts is None else trace.scripts
        if scripts[filters.language] < filters.language_share:
            return f"not {filters.language} enough"
    if filters.max_repetition < 1:
        repetition = repeated_share(trace.text) if trace.repetition is None else trace.repetition
        if repetition > filters.max_repetition:
            return "repeats itself"
    return None


def needs_tokens(filters: TraceFilters) -> bool:
    """Whether the filters count tokens of the student's tokenizer."""
    return filters.min_tokens > 0 or filters.max_tokens is not None


def well_formed_thinking(text: str) -> bool:
    """One opening and one closing tag, in this order, nothing before the first, something between and behind."""
    if text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        return False
    before, _, rest = text.partition(OPEN)
    thought, closed, answer = rest.partition(CLOSE)
    return not before.strip() and bool(closed) and bool(thought.strip()) and bool(answer.strip())


def _answer_part(text: str) -> str:
    return text.rpartition(CLOSE)[2] if CLOSE in text else text


def script_shares(text: str) -> dict[str, float]:
    """Share of the letters in each script; 1.0 for a text without letters. Notation does not count."""
    counts = Counter(NOTATION.sub(" ", text))
    found: Counter[str] = Counter()
    for letter, count in counts.items():
        if letter.isalpha():
            # The first word of a character's name is its script, for letters.
            found[unicodedata.name(letter, "").partition(" ")[0]] += count
    letters = {script: count for script, count in found.items() if not script.startswith(FORMULA_SCRIPTS)}
    total = sum(letters.values())
    return {
        language: sum(count for script, count in letters.items() if script.startswith(wanted)) / total if total else 1.0
        for language, wanted in SCRIPTS.items()
    }


def repeated_share(text: str) -> float:
    """Share of the 20-word sequences that occurred before in the text, as the repetition reward counts them."""
    from posttrain.rewards.format import RepetitionPenalty

    value = RepetitionPenalty(ngram=20)([""], [text])[0]
    return -(value or 0.0)
