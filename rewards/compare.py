r"""Whether an answer equals the gold, by math-verify with rules around it. Runs in the pool's children, never in the caller.

    answer -> clean -> equal as text? -> a rule of our own? -> several values: each on its own
           -> math-verify parses -> numbers: by `numbers`; the rest: by math-verify, then checked number by number
           -> not if it hedges, chains unequal values, or names another unit (`claims`, `units`); inequalities: by `relations`

Rules before math-verify (`texts`) settle what it cannot know (an option letter, two ellipses, a.m. against p.m., ratios, written
bases); the checks after it take back what it accepts wrongly. It never accepts what no rule and no comparison of values accepts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from math_verify import verify
from sympy import Abs, Add, Basic, Dummy, Expr, FiniteSet, I, Interval, Pow, Symbol, Tuple
from sympy.core.function import AppliedUndef
from sympy.core.relational import Equality, Relational
from sympy.logic.boolalg import And

from posttrain.rewards import claims, units
from posttrain.rewards.normalise import clean
from posttrain.rewards.numbers import computed, differ, gives, is_number, same_number, same_set, with_fractions
from posttrain.rewards.parsing import Gold, parse_alone, parse_within, read_gold
from posttrain.rewards.policy import DEFAULT, AnswerPolicy
from posttrain.rewards.relations import same_solutions, same_union
from posttrain.rewards.texts import by_rule, squeeze, with_colons

_CODE = re.compile(
    r"__|\w\s*\(\s*[\"']|(?<!\\)\blambda\b|\bimport\b|\\(?:verb|def|let|newcommand|input|write|csname|catcode)(?![a-z])"
)


def warm_up() -> None:
    """Compile the regular expressions and the grammar, so that the first verification is not charged for them."""
    gold = read_gold(r"\frac{1}{2}")
    assert gold is not None and matches(gold, "0.5") and not matches(gold, "so it is $3$", "tail")


def matches(gold: Gold, answer: str, kind: str = "boxed", policy: AnswerPolicy = DEFAULT) -> bool:
    """Whether `answer` equals the gold; `kind` as in `extract.Answer`.

    A marked answer may be wrapped in words ("Answer: 100 dollars"): where it does not match as it stands, math-verify looks
    for the expression in it.
    """
    if _CODE.search(answer):
        return False
    if kind != "tail" and _matches_alone(gold, answer, policy):
        return True
    return kind != "boxed" and _matches_within(gold, answer if kind == "tail" else f"Answer: {answer}", kind, policy)


def _matches_within(gold: Gold, text: str, kind: str, policy: AnswerPolicy) -> bool:
    if kind == "marked" and claims.bare_numbers(text.removeprefix("Answer:")):
        return False
    if kind == "marked" and claims.hedged_sentence(text) and not claims.hedged_sentence(gold.text):
        return False
    if kind == "tail" and claims.ends_in_a_choice(text) and _names_one(gold):
        return False
    letter = claims.option_of_gold(gold.text) if policy.choices else None
    if letter:
        return claims.last_option(text) == letter
    return _agree(gold, parse_within(text), policy)


def _matches_alone(gold: Gold, answer: str, policy: AnswerPolicy) -> bool:
    cleaned = clean(answer)
    if not cleaned:
        return False
    if policy.units == "check" and _other_currency(gold, answer, cleaned):
        return False
    if squeeze(cleaned) == squeeze(gold.text):
        return True
    if (scaled := _matches_scaled(gold, answer, cleaned, policy)) is not None:
        return scaled
    if gold.text.startswith("("):
        cleaned = re.sub(r"^[A-Z]\s*(?=\([^()]*,[^()]*\)$)", "", cleaned)  # a point's own name
    if gold.text.startswith("(") and isinstance(gold.parsed[0], (Interval, Tuple)):
        cleaned = claims.coordinates(cleaned)
    if policy.choices and not claims.option_of_gold(gold.text):
        cleaned = re.sub(r"^\([A-J]\)(?:\\[ ,;]|\s|~)+(?=\S)", "", cleaned)  # an option's letter before its value
    if ":" in gold.text:
        cleaned = with_colons(cleaned)
    decided = by_rule(gold.text, cleaned, policy)
    if decided is not None:
        return decided
    if len(sides := claims.approximations(cleaned)) > 1 and len(claims.approximations(gold.text)) == 1:
        return _rounds(sides) and any(_matches_alone(gold, side, policy) for side in sides)
    golds = claims.several(gold.text)
    without_names = claims.names_each(golds) and "=" not in cleaned
    if len(golds) > 1 and (policy.ordered_lists or without_names):
        parts = claims.several(cleaned.replace(",", ", ") if without_names else cleaned)
        if policy.ordered_lists or len(parts) == len(golds):
            return _matches_in_order(golds, parts, policy)
    if _names_one(gold):
        if len(re.findall(r"\\(?:pm|mp)(?![A-Za-z])", cleaned)) > 1:
            return False  # `4 \pm 4 \pm 4` names several values, of which math-verify takes one
        parts = claims.several(cleaned, words_only=isinstance(gold.parsed[0], (Interval, Tuple)) and "(" not in cleaned[1:])
        if len(parts) > 1:
            return all(_matches_alone(gold, part, policy) for part in parts) or same_union(gold, cleaned)
    elif gold.text.startswith(r"\{") and len(sets := claims.several(cleaned)) > 1 and sets[0].startswith(r"\{"):
        return False  # several sets are not their union, to which math-verify flattens them
    elif not gold.text.startswith(r"\{") and any(part.startswith(r"\{") for part in claims.several(cleaned)[1:]):
        return False
    gold, cleaned = _common_form(gold, cleaned)
    if not _agree(gold, parse_alone(cleaned), policy):
        return same_union(gold, cleaned)
    return not _overclaims(gold, cleaned, policy)


def _matches_scaled(gold: Gold, answer: str, cleaned: str, policy: AnswerPolicy) -> bool | None:
    """The verdict where a side says "million" or the like; None where neither does, or the gold alone and it may be a unit."""
    if (product := claims.scaled(cleaned)) is not None:
        whole = read_gold(claims.scaled(gold.text) or gold.text)
        return whole is not None and _matches_alone(whole, product, policy)
    product = claims.scaled(gold.text)
    whole = read_gold(product) if product else None
    return True if whole and _matches_alone(whole, answer, policy) else None


def _rounds(sides: Sequence[str]) -> bool:
    r"""Whether each number before a sign of approximation rounds to the one behind: `\sqrt2\approx 1.41`."""
    read = [parsed[0] if (parsed := parse_alone(clean(side.split("=")[-1]))) else None for side in sides]
    return all(
        not (is_number(first) and is_number(second))
        or computed(gives, first, second, right)
        or computed(gives, second, first, left)
        for first, second, left, right in zip(read, read[1:], sides, sides[1:], strict=False)
    )


def _other_currency(gold: Gold, answer: str, cleaned: str) -> bool:
    """Whether both sides name what they are counted in, one of them by a currency's sign, and not the same."""
    first = gold.currency or units.unit_of(gold.text)
    second = units.currency_of(answer) or units.unit_of(cleaned)
    return units.different(first, second) and "pct" not in (first, second)


def _matches_in_order(golds: list[str], parts: list[str], policy: AnswerPolicy) -> bool:
    read = [read_gold(part) for part in golds]
    return len(read) == len(parts) and all(
        gold is not None and _matches_alone(gold, part, policy) for gold, part in zip(read, parts, strict=True)
    )


def _names_one(gold: Gold) -> bool:
    """Whether the gold is one value, so that an answer of several must say it several times."""
    if isinstance(gold.parsed[0], (FiniteSet, str)) or re.search(r"\\pm|\\mp|\\cup|\\setminus|\\begin", gold.text):
        return False
    return len(claims.several(gold.text)) == 1


def _overclaims(gold: Gold, answer: str, policy: AnswerPolicy) -> bool:
    """Whether an answer whose value matches says more than that value, or takes it back."""
    if is_number(gold.parsed[0]) and claims.divides_by_a_symbol(answer):
        return True
    if claims.hedged(gold.text, answer, single=_names_one(gold)) or (policy.units == "check" and units.clash(gold.text, answer)):
        return True
    if units.compound(answer) and not units.compound(gold.text):
        return True
    if _joins(gold.text) != _joins(answer) and all("<" in text or ">" in text or "\\" in text for text in (gold.text, answer)):
        return _joins(gold.text) + _joins(answer) == "orand" or _joins(gold.text) + _joins(answer) == "andor"
    sides = claims.chain(answer)
    if len(sides) < 2 or len(claims.several(answer)) > 1 or isinstance(gold.parsed[0], (FiniteSet, str)):
        return False
    value = gold.parsed[0]
    if isinstance(value, (Equality, And)) and not (
        _assigns(value) and re.fullmatch(r"\\?[A-Za-z]\w*(?:\(.*\))?|\|.*\|", sides[0])
    ):
        return False
    return any(_is_other_number(gold, side, policy) for side in sides)


def _joins(text: str) -> str:
    """The word that joins two inequalities."""
    words = set(re.findall(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])", text))
    return words.pop() if len(words) == 1 else ""


def _assigns(value: Basic) -> bool:
    first = value.args[0] if isinstance(value, And) else value
    return isinstance(first, Equality) and isinstance(first.lhs, (Symbol, AppliedUndef, Abs))


def _is_other_number(gold: Gold, side: str, policy: AnswerPolicy) -> bool:
    """Whether one side of a chain is a number and not the gold: `41 = 42` claims both."""
    parsed = parse_alone(clean(side)) if clean(side) else []
    return bool(parsed) and is_number(parsed[0]) and not _agree(gold, parsed, policy)


def _common_form(gold: Gold, answer: str) -> tuple[Gold, str]:
    r"""Bring two notations of one thing together: `a \pm b` and a list of both; `9 \pmod{11}` and `9`."""
    if answer.count(r"\pm") == 1 and (r"\pm" in gold.text or "," in gold.text):
        answer = _both_signs(answer)
    if gold.text.count(r"\pm") == 1:
        gold = read_gold(_both_signs(gold.text)) or gold
    modulus = re.compile(r"\\p?mod\s*(?:\{[^{}]*\}|\d+)|\\equiv")
    if not modulus.search(gold.text):
        answer = re.sub(r"\s*\(?\\p?mod\s*(\{[^{}]*\}|\d+|[a-zA-Z])\)?\s*$", partial(_residue, answer), answer)
    return gold, answer


def _residue(answer: str, match: re.Match[str]) -> str:
    r"""Nothing in the place of a modulus, but where the number before it is not reduced: `6 \mod 4` says 2."""
    number, modulus = answer[: match.start()].strip(), match.group(1).strip("{} ")
    reduced = not (number.isdecimal() and modulus.isdecimal() and len(number + modulus) < 40) or int(number) < int(modulus)
    return "" if reduced else match.group()


def _both_signs(text: str) -> str:
    return text.replace(r"\pm", "+") + ", " + text.replace(r"\pm", "-")


def _agree(gold: Gold, answer: Sequence[Basic | str], policy: AnswerPolicy) -> bool:
    return bool(answer) and computed(_equal_values, gold, answer, policy)


def _equal_values(gold: Gold, answer: Sequence[Basic | str], policy: AnswerPolicy) -> bool:
    first, second = gold.parsed[0], answer[0]
    if is_number(first) and isinstance(second, Equality) and _to_be_solved(second.lhs):
        return False
    numeric = same_number(_last_side(first, second), _last_side(second, first), policy)
    if numeric is None:
        numeric = same_set(first, second, policy)
    if numeric is not None:
        return numeric
    if _verify(list(gold.parsed), list(answer)):
        return not differ(first, second, policy)
    if isinstance(first, (Relational, And)) and isinstance(second, (Relational, And)):
        return same_solutions(first, second)
    if not (isinstance(first, Expr) and isinstance(second, Expr)):
        return False
    for reread in _rereadings(first, second):
        pair = reread(first), reread(second)
        if pair != (first, second) and _verify(*pair) and not differ(*pair, policy):
            return True
    return False


def _last_side(value: Any, other: Any) -> Any:
    """What an assignment gives to its left side, where the other thing is no relation: `x = 7` against `7`."""
    if isinstance(other, (Relational, And)) or not isinstance(value, (Relational, And)):
        return value
    last = value.args[-1] if isinstance(value, And) else value
    if isinstance(last, Equality) and isinstance(last.rhs, Symbol) and is_number(last.lhs):
        return last.lhs
    return last.rhs if isinstance(last, Equality) and _names_a_value(last.lhs) else value


def _names_a_value(side: Basic) -> bool:
    """Whether a left side is a name (`x`, `f(2)`, `|AB|`) or worked-out numbers, not an equation in unknowns (`11a+c`)."""
    return isinstance(side, (Symbol, Abs)) or not side.free_symbols or not side.is_Add


def _to_be_solved(side: Basic) -> bool:
    """Whether a left side is a sum or a multiple in one unknown: `x + 1 = 4` says 3, though math-verify takes the right side."""
    if len(side.free_symbols) != 1 or not isinstance(side, Expr):
        return False
    if isinstance(side, Add):
        return bool(side.is_polynomial())
    factor = side / next(iter(side.free_symbols))
    return bool(factor.is_Rational and factor != 1)


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
        # math-verify tells a letter in an answer with an i from the same letter in one without
        readings.append({symbol: I if str(symbol) == "i" else Symbol(str(symbol)) for symbol in symbols})
    roots = [power for power in gold.atoms(Pow) | answer.atoms(Pow) if power.exp.is_Integer is False]
    about_signs = gold.has(Abs) or answer.has(Abs) or any(root.doit().has(Abs) or _squared(root) for root in roots)
    if symbols and roots and not about_signs and {str(s) for s in gold.free_symbols} == {str(s) for s in answer.free_symbols}:
        readings.append({symbol: Dummy(str(symbol), positive=True) for symbol in symbols})
    return [lambda value, reading=reading: with_fractions(value.xreplace(reading)) for reading in readings]


def _squared(root: Pow) -> bool:
    """Whether a root is taken of an even power of a symbol."""
    return any(power.exp.is_even and power.base.free_symbols for power in root.base.atoms(Pow))
