"""Inequalities in one unknown, and those that "or" or "and" joins, as the sets of numbers for which they hold."""

from __future__ import annotations

import re
from typing import Any

from sympy import Intersection, Union
from sympy.core.relational import Equality, Relational
from sympy.logic.boolalg import And

from posttrain.rewards.normalise import clean
from posttrain.rewards.numbers import UNCOMPUTABLE, computed
from posttrain.rewards.parsing import Gold, parse_alone


def same_solutions(first: Any, second: Any) -> bool:
    """Whether two inequalities in one unknown hold for the same numbers: `2x > 6` and `x > 3`."""
    if first.free_symbols != second.free_symbols or len(first.free_symbols) != 1:
        return False
    if isinstance(first, Equality) or isinstance(second, Equality):
        return False
    return computed(lambda: bool(first.as_set() == second.as_set()))


def same_union(gold: Gold, answer: str) -> bool:
    r"""Whether inequalities joined by "or" or "and" in one unknown and intervals are one set: `x < 0 \text{ or } x > 1`."""
    first, second = _described(gold.text), _described(answer)
    if first is None and second is None:
        return False
    parsed = [*gold.parsed, None][0], [*parse_alone(answer), None][0]
    sides = [_as_set(described or value) for described, value in ((first, parsed[0]), (second, parsed[1]))]
    return sides[0] is not None and sides[0] == sides[1]


def _as_set(value: Any) -> Any:
    """The numbers for which a relation holds; anything else as it is."""
    if not isinstance(value, (Relational, And)) or isinstance(value, Equality) or len(value.free_symbols) != 1:
        return value
    try:
        return value.as_set()
    except UNCOMPUTABLE:
        return None


def _described(text: str) -> Any:
    """The set of the numbers for which inequalities joined by "or", or by "and", hold; None for anything else."""
    join, parts = Union, re.split(r"\\text\s*\{\s*or\s*\}|\\(?:lor|vee)\b|\bor\b", text)
    if len(parts) < 2:
        join, parts = Intersection, re.split(r"\\text\s*\{\s*and\s*\}|\\(?:land|wedge)\b|\band\b", text)
    if len(parts) < 2:
        return None  # parsing is most of a verification's cost
    read = [parsed[0] if (parsed := parse_alone(clean(part))) else None for part in parts]
    if not all(isinstance(part, (Relational, And)) and not isinstance(part, Equality) for part in read):
        return None
    if len({symbol for part in read for symbol in part.free_symbols}) != 1:  # type: ignore[union-attr]
        return None
    try:
        return join(*(part.as_set() for part in read))  # type: ignore[union-attr]
    except UNCOMPUTABLE:
        return None
