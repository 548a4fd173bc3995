r"""Whether an answer equals the gold, by math-verify with rules around it. Runs in the pool's children, never in the caller.

Rules before math-verify settle what it cannot know (an option letter, two ellipses, a.m. against p.m., written bases); the
check after it takes back acceptances that come from absolute rounding to six places, where `10^{-7}` equals `2\cdot10^{-7}`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Abs, Basic, Dummy, Expr, I, Pow, Rational

from posttrain.rewards.normalise import clean

RELATIVE_TOLERANCE = Rational(1, 10_000)  # math-verify's six decimals are finer than this for every value above 0.01

_LETTER = re.compile(r"[\s\\{(]*(?:(?:text|mathrm|textbf|mathbf)\s*\{)?\s*\(?\s*([A-Z])\s*\)?\s*(?:[}.:)\s\\,].*)?", re.DOTALL)
_BASED = re.compile(r"([0-9A-Za-z]+)_\{?(?:\\text\{)?(\d+|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\}*")
_BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
    "sixteen": 16,
}
_CODE = re.compile(r"__|\w\s*\(\s*[\"']|(?<!\\)\blambda\b|\bimport\b")
_DOTS = re.compile(r"\\[lc]?dots[bcm]?|\.\.\.|…|\\cdots")
_NORMALISATION = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="all", equations=False
)
_ALONE = (LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALISATION), ExprExtractionConfig())
_TAIL = (LatexExtractionConfig(), ExprExtractionConfig())


@dataclass(frozen=True)
class Gold:
    text: str
    parsed: tuple


def warm_up() -> None:
    """Compile the regular expressions and the grammar, so that the first verification is not charged for them."""
    gold = read_gold(r"\frac{1}{2}")
    assert gold is not None and matches(gold, "0.5") and not matches(gold, "so it is $3$", "tail")


@lru_cache(maxsize=512)
def read_gold(text: str) -> Gold | None:
    """The parsed gold answer, or None where nothing can be read from it: every sample of that problem must be left out.

    A LaTeX gold that math-verify can only keep as a string is readable where its braces are balanced: it may be text.
    """
    cleaned = clean(text)
    if not cleaned:
        return None
    parsed = _parse_alone(cleaned)
    if not parsed or (all(isinstance(value, str) for value in parsed) and not _plausible_text(cleaned)):
        return None
    return Gold(cleaned, tuple(parsed))


def _plausible_text(text: str) -> bool:
    said = re.sub(r"\\[a-zA-Z]+", "", text)
    return text.count("{") == text.count("}") and any(character.isalnum() for character in said)


def _parse_alone(cleaned: str) -> Sequence[Basic | str]:
    return parse(rf"\boxed{{{cleaned}}}", _ALONE, parsing_timeout=None)  # type: ignore[arg-type]  # None: no SIGALRM


def matches(gold: Gold, answer: str, kind: str = "boxed") -> bool:
    """Whether `answer` equals the gold; `kind` as in `extract.Answer`.

    A marked answer may be wrapped in words ("Answer: 100 dollars"): where it does not match as it stands, math-verify looks
    for the expression in it.
    """
    if _CODE.search(answer):
        return False
    if kind != "tail" and _matches_alone(gold, answer):
        return True
    return kind != "boxed" and _matches_within(gold, answer if kind == "tail" else f"Answer: {answer}")


def _matches_within(gold: Gold, text: str) -> bool:
    letter = _single_letter(gold.text)
    if letter:
        letters = re.findall(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])", text)
        return bool(letters) and letters[-1] == letter
    return _agree(gold, parse(text, _TAIL, parsing_timeout=None))  # type: ignore[arg-type]


def _matches_alone(gold: Gold, answer: str) -> bool:
    cleaned = clean(answer)
    if not cleaned:
        return False
    if _squeeze(cleaned) == _squeeze(gold.text):
        return True
    decided = _by_rule(gold.text, cleaned)
    if decided is not None:
        return decided
    gold, cleaned = _common_form(gold, cleaned)
    return _agree(gold, _parse_alone(cleaned))


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _by_rule(gold: str, answer: str) -> bool | None:
    """What can be settled on the texts alone, else None."""
    letter = _single_letter(gold)
    if letter:
        found = _LETTER.fullmatch(answer.upper() if len(answer.strip("(). ")) == 1 else answer)
        return found is not None and found.group(1) == letter
    if _DOTS.search(gold) or _DOTS.search(answer):
        forms = [_squeeze(_DOTS.sub("…", text)).replace("$", "") for text in (gold, answer)]
        return forms[0] == forms[1]
    halves = [re.search(r"([ap])\.?\s?m\b", text, re.IGNORECASE) for text in (gold, answer)]
    if halves[0] and halves[1] and halves[0].group(1).lower() != halves[1].group(1).lower():
        return False
    based = [_BASED.fullmatch(_squeeze(text)) for text in (gold, answer)]
    if based[0] and based[1] and gold[0].isdigit():
        digits = [match.group(1).lower().lstrip("0") for match in based if match]
        bases = [_BASES.get(match.group(2), match.group(2)) for match in based if match]
        return digits[0] == digits[1] and str(bases[0]) == str(bases[1])
    return None


def _single_letter(gold: str) -> str | None:
    r"""The option that a multiple-choice gold names: `C`, `(C)`, `\text{C}`."""
    found = re.fullmatch(r"(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?\s*\(?([A-J])\)?\.?\s*\}?", gold.strip())
    return found.group(1) if found else None


def _common_form(gold: Gold, answer: str) -> tuple[Gold, str]:
    r"""Bring two notations of one thing together: `a \pm b` and a list of both; `9 \pmod{11}` and `9`."""
    if answer.count(r"\pm") == 1 and gold.text.count(r"\pm") == 0 and "," in gold.text:
        answer = _both_signs(answer)
    elif gold.text.count(r"\pm") == 1 and answer.count(r"\pm") == 0 and "," in answer:
        gold = read_gold(_both_signs(gold.text)) or gold
    modulus = re.compile(r"\\p?mod\s*(?:\{[^{}]*\}|\d+)|\\equiv")
    if not modulus.search(gold.text):
        answer = re.sub(r"\s*\(?\\p?mod\s*(?:\{[^{}]*\}|\d+)\)?\s*$", "", answer)
    return gold, answer


def _both_signs(text: str) -> str:
    return text.replace(r"\pm", "+") + ", " + text.replace(r"\pm", "-")


def _agree(gold: Gold, answer: Sequence[Basic | str]) -> bool:
    if not answer or _clearly_different(gold.parsed[0], answer[0]):
        return False
    if _verify(list(gold.parsed), list(answer)):
        return not _only_by_rounding(gold.parsed[0], answer[0])
    first, second = gold.parsed[0], answer[0]
    if not (isinstance(first, Expr) and isinstance(second, Expr)):
        return False
    return any(reread(first) != first and _verify(reread(first), reread(second)) for reread in _rereadings(first, second))


def _clearly_different(gold: Basic | str, answer: Basic | str) -> bool:
    """Whether two numbers differ by more than rounding and percent signs can explain: spares most wrong answers `simplify`."""
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or gold.free_symbols or answer.free_symbols:
        return False
    try:
        values = [complex(value.evalf(15)) for value in (gold, answer)]
    except (TypeError, ValueError, OverflowError, AttributeError, ZeroDivisionError):
        return False  # no plain numbers: math-verify must say
    if not all(1e-3 < abs(value) < 1e15 for value in values):
        return False
    return all(abs(values[0] * scale / values[1] - 1) > 1e-2 for scale in (1, 100, 1e-2))


def _verify(gold, answer) -> bool:
    """A set and the relation that describes it are one answer: `(-\\infty, 3)` and `x < 3`."""
    return verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True)


def _rereadings(gold: Expr, answer: Expr) -> list:
    """Other readings of the symbols that math-verify leaves open, to be applied to both sides.

    The letter i may be the imaginary unit (math-verify reads `1+2i` as a polynomial), and where both sides have the same
    symbols under roots, these stand for positive quantities: `\\sqrt{1/n}` is `1/\\sqrt{n}`. Not where an absolute value
    occurs, or a root of a square, which is one: there the sign is the point.
    """
    symbols = gold.free_symbols | answer.free_symbols
    readings = []
    if any(str(symbol) == "i" for symbol in symbols):
        readings.append({symbol: I for symbol in symbols if str(symbol) == "i"})
    roots = [power for power in gold.atoms(Pow) | answer.atoms(Pow) if power.exp.is_Integer is False]
    about_signs = gold.has(Abs) or answer.has(Abs) or any(root.doit().has(Abs) or _squared(root) for root in roots)
    if symbols and roots and not about_signs and {str(s) for s in gold.free_symbols} == {str(s) for s in answer.free_symbols}:
        readings.append({symbol: Dummy(str(symbol), positive=True) for symbol in symbols})
    return [lambda value, reading=reading: value.xreplace(reading) for reading in readings]


def _squared(root: Pow) -> bool:
    """Whether a root is taken of an even power of a symbol."""
    return any(power.exp.is_even and power.base.free_symbols for power in root.base.atoms(Pow))


def _only_by_rounding(gold: Basic | str, answer: Basic | str) -> bool:
    """Whether two real numbers that math-verify takes as equal differ by more than the relative tolerance."""
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or gold.free_symbols or answer.free_symbols:
        return False
    try:
        gold, answer = gold.doit(), answer.doit()
        if gold == answer or gold.is_real is not True or answer.is_real is not True:
            return False
        if gold.is_zero or answer.is_zero:
            return not (gold - answer).equals(0)
        # exact operands: a difference of doubles, or of evalf's fixed digits, loses what is asked about
        ratio = (_exact(answer) / _exact(gold)).evalf(20)
        percent = {ratio * 100, ratio / 100}
        return all(abs(value - 1) > RELATIVE_TOLERANCE for value in {ratio, *percent})
    except (TypeError, ValueError, AttributeError):
        return False  # not numbers after all: math-verify's word stands


def _exact(value: Expr) -> Any:
    return value.xreplace({number: Rational(str(number)) for number in value.atoms() if number.is_Float})
