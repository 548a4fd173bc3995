r"""Verdicts that need no process: two plain numbers, integers, decimals or fractions, compared as Python fractions.

Nine of ten answers to published problems are such numbers, and math-verify's parser takes 5 to 20 ms for each. The forms are so
narrow that no reading of either side as mathematics says otherwise, and no text turns a wrong number into a right one.
"""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.rewards.policy import FINITE_DECIMALS, AnswerPolicy

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)", re.ASCII)
_PLAIN = re.compile(
    r"(?P<sign>-?)(?:(?P<whole>\d{1,9})(?:\.(?P<decimals>\d{1,6}))?"
    r"|(?:\\[dt]?frac\{(?P<top>\d{1,15})\}\{(?P<bottom>\d{1,15})\}|(?P<over>\d{1,15})/(?P<under>\d{1,15})))",
    re.ASCII,
)


def is_plain(text: str) -> bool:
    """Whether `text` is a number in one of the forms that are read here."""
    return _INTEGER.fullmatch(text) is not None or _value(text) is not None


def same_number(gold: str, answer: str, policy: AnswerPolicy) -> bool | None:
    """Whether two plain numbers are equal; None where one is none, or where the policy's tolerance has a say."""
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        if policy.tolerance > FINITE_DECIMALS:
            return True if gold == answer else None
        return gold == answer or {gold, answer} == {"0", "-0"}  # of any length: no int() of a megabyte of digits
    first, second = _value(gold), _value(answer)
    if first is None or second is None:
        return None
    if ("." in gold or "." in answer) and not (_finite(first) and _finite(second)):
        return None  # a decimal may stand for a fraction without a finite decimal form
    return first == second or (None if policy.tolerance > FINITE_DECIMALS else False)


def _value(text: str) -> Fraction | None:
    match = _PLAIN.fullmatch(text)
    if not match:
        return None
    if match["whole"] is not None:
        value = Fraction(match["whole"] + "." + (match["decimals"] or "0"))
    else:
        bottom = int(match["bottom"] or match["under"])
        if bottom == 0:
            return None
        value = Fraction(int(match["top"] or match["over"]), bottom)
    return -value if match["sign"] else value


def _finite(value: Fraction) -> bool:
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1
