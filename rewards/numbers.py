r"""Whether two values are one number. Runs in the pool's children: sympy may compute for hours here.

math-verify rounds to six decimals and drops what is below 1e-15, whatever the size of the numbers, so that 355/113 equals pi and
1/12345 equals 1/12346 for it. Here what is written exactly must be equal exactly, and a decimal stands for a value that has no
finite decimal form only where it gives as many digits as the tolerance asks for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from mpmath.libmp import NoConvergence
from sympy import (
    Derivative,
    Expr,
    Float,
    Function,
    I,
    Limit,
    MatrixBase,
    Pow,
    Rational,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    nan,
    oo,
    zoo,
)
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import And
from sympy.polys.polyerrors import BasePolynomialError
from sympy.sets.sets import FiniteSet, Interval

from posttrain.rewards.policy import FINITE_DECIMALS, AnswerPolicy

_DIGITS = 60  # e^(pi sqrt 163) is an integer to 30 digits
_EQUAL = Rational(1, 10**50)  # relative difference below which two exact values are one
# A decimal such as 0.30000000000000004 was printed by a program that meant 0.3; one of more digits was written by hand.
_DOUBLE, _DOUBLE_DIGITS = Rational(1, 10**14), 17
_PERCENT = UnevaluatedExpr(Rational(1, 100))
# What SymPy raises on expressions that nobody would write but a model: dividing by zero, comparing what has no order, a function
# without the method that its caller expects, a polynomial without a generator, a series that does not converge. Running out of
# memory or stack is not among them: the process ends then, for caches may be half written.
UNCOMPUTABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError,
    BasePolynomialError, NoConvergence,
)  # fmt: skip
_MAX_POINTS = 2
_MAX_PAIRS = 400
_NOT_AT_POINTS = (AppliedUndef, ExprWithLimits, Derivative, Limit, oo, -oo, nan, zoo)


def computed(compute: Callable[..., bool], *arguments: Any) -> bool:
    """`compute(*arguments)`, which is SymPy's and math-verify's work; False where they cannot do it."""
    try:
        return compute(*arguments)
    except UNCOMPUTABLE:
        return False


def same_number(gold: Any, answer: Any, policy: AnswerPolicy) -> bool | None:
    """Whether two numbers are equal; None where one of them is no number. The letter i is the imaginary unit here."""
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return None
    gold, answer = imaginary(gold), imaginary(answer)
    if gold in (oo, -oo) or answer in (oo, -oo):
        return bool(gold == answer) if not (gold.free_symbols or answer.free_symbols) else None
    if not (is_number(gold) and is_number(answer)):
        return None
    if any(power.base.is_zero and power.exp.is_zero for power in answer.atoms(Pow)):
        return False  # 0^0 is no value, though SymPy makes it 1
    decimal = bool(gold.atoms(Float) or answer.atoms(Float))
    golds, answers = _readings(gold, policy), _readings(answer, policy)
    # two percentages are compared as such: read apart, 1% would equal 100%
    pairs = list(zip(golds, answers, strict=True)) if len(golds) == len(answers) else [(g, a) for g in golds for a in answers]
    return any(_equal(first, second, decimal, policy.tolerance) for first, second in pairs)


def same_set(gold: Any, answer: Any, policy: AnswerPolicy) -> bool | None:
    """Whether two finite sets of numbers are equal, in any order; None where they are something else.

    math-verify sorts both by value and compares in that order, which fails for complex numbers and near ties.
    """
    if not (isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet)):
        return None
    first, second = list(gold.args), list(answer.args)
    if len(first) * len(second) > _MAX_PAIRS or not all(is_number(imaginary(value)) for value in first + second):
        return None
    equal = [[same_number(g, a, policy) for a in second] for g in first]
    return all(any(row) for row in equal) and all(any(column) for column in zip(*equal, strict=True))


def imaginary(value: Any) -> Any:
    """`value` with its symbol i, if it has no other, as the imaginary unit; math-verify reads `1+2i` as a polynomial."""
    symbols = value.free_symbols if isinstance(value, Expr) else set()
    if len(symbols) == 1 and str(symbol := next(iter(symbols))) == "i" and not value.has(Function("i")):
        return value.xreplace({symbol: I})
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, Expr) and not value.free_symbols and not value.has(AppliedUndef, nan, zoo, oo, -oo)


def _readings(value: Any, policy: AnswerPolicy) -> list[Any]:
    """A number as it stands; a percentage as its hundredth, and, where the policy is lenient, as what stands before the sign."""
    if value.is_Mul and _PERCENT in value.args:
        number = value.func(*[argument for argument in value.args if argument != _PERCENT])
        return [number / 100, number] if policy.percent == "lenient" else [number / 100]
    return [value]


def _equal(gold: Any, answer: Any, decimal: bool, tolerance: float) -> bool:
    first, second = _exact(gold), _exact(answer)
    if first.is_Rational and second.is_Rational:
        finite = _finite_decimal(first) and _finite_decimal(second)
        if not decimal or first == second or tolerance == 0:
            return first == second
        if finite:
            slack = (_DOUBLE if _printed(gold, answer) else 0) if tolerance <= FINITE_DECIMALS else Rational(tolerance)
            return bool(abs(first - second) <= slack * abs(first))
    difference = (first - second).evalf(15, maxn=400)
    size = abs(first.evalf(15))
    if difference == 0 or abs(difference) <= _EQUAL * size:
        return not (first - second).is_Rational or first == second
    if not (_lone(gold) or _lone(answer)) or tolerance == 0:
        return size < _EQUAL and bool((first - second).equals(0))
    return bool(abs(difference) <= Rational(tolerance) * Rational(100001, 100000) * size) and _digits(gold, answer, tolerance)


def with_fractions(value: Any) -> Any:
    """With decimals as the fractions they are: a difference of doubles loses what is asked about."""
    floats = {number: Rational(str(number)) for number in value.atoms(Float)}
    return value.xreplace(floats) if floats else value


def _exact(value: Any) -> Any:
    return with_fractions(value).doit()


def _lone(value: Any) -> bool:
    """Whether a value is one written decimal, with a power of ten or not: within an expression (`0.75 pi`) decimals are exact."""
    if value.is_Mul:
        return value.has(Float) and all(part.is_Number or (part.is_Pow and part.base == 10) for part in value.args)
    return bool(value.is_Float)


def _printed(*values: Any) -> bool:
    """Whether no decimal has more digits than a double needs."""
    return all(len(_significant(number)) <= _DOUBLE_DIGITS for value in values for number in value.atoms(Float))


def _significant(number: Any) -> str:
    return str(number).lstrip("-").split("e")[0].replace(".", "").strip("0")


def _finite_decimal(value: Any) -> bool:
    denominator = int(value.q)
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _digits(gold: Any, answer: Any, tolerance: float) -> bool:
    """Whether a side that is one decimal gives the digits that `tolerance` asks for: 0.0005 is no value of 0.000499999875."""
    asked = round(-math.log10(tolerance))
    return all(not value.is_Float or len(_significant(value)) >= asked for value in (gold, answer))


def gives(value: Any, decimal: Any, written: str) -> bool:
    """Whether a number is `decimal` when it is rounded or cut to the digits of `written`."""
    if not decimal.is_Number:
        return False
    digits = re.search(r"\.(\d+)", written)
    unit = Rational(1, 10 ** len(digits.group(1))) if digits else Rational(1)
    distance = (with_fractions(value) - with_fractions(decimal)).evalf(30)
    rounded, cut = abs(distance) <= unit / 2, 0 <= distance * (1 if decimal.is_nonnegative else -1) < unit
    return bool(rounded or cut)


def differ(gold: Any, answer: Any, policy: AnswerPolicy) -> bool:
    """Whether two things that math-verify calls equal hold numbers that are not: elements of sets, tuples, matrices, ends of
    intervals, and expressions at two points."""
    gold, answer = _value(gold), _value(answer)
    if isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet):
        return any(all(_apart(g, a, policy) for a in answer) for g in gold) or any(
            all(_apart(g, a, policy) for g in gold) for a in answer
        )
    first, second = _elements(gold), _elements(answer)
    if first is None or second is None:
        return _apart(gold, answer, policy)
    return len(first) != len(second) or any(_apart(g, a, policy) for g, a in zip(first, second, strict=True))


def _value(value: Any) -> Any:
    """The right-hand side of an assignment, else the thing itself."""
    if isinstance(value, And):
        value = value.args[-1]
    if isinstance(value, Relational) and isinstance(value.lhs, (Symbol, AppliedUndef)):
        return value.rhs
    return value


def _elements(value: Any) -> list[Any] | None:
    if isinstance(value, MatrixBase):
        return list(value.flat())
    if isinstance(value, Interval):
        return [value.start, value.end]
    if isinstance(value, (FiniteSet, Tuple)):  # math-verify's own set keeps the order in which it was written
        return list(getattr(value, "_unsorted_args", value.args))
    return None


def _apart(gold: Any, answer: Any, policy: AnswerPolicy) -> bool:
    gold, answer = _value(gold), _value(answer)
    if (_elements(gold) is not None) and (_elements(answer) is not None):
        return differ(gold, answer, policy)
    verdict = same_number(gold, answer, policy)
    return _apart_at_points(gold, answer, policy) if verdict is None else not verdict


def _apart_at_points(gold: Any, answer: Any, policy: AnswerPolicy) -> bool:
    """Whether two expressions differ at a point where both have a value; what cannot be evaluated is not held against it."""
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    if any(value.is_Symbol for value in (gold, answer)):
        return False  # text, which math-verify reads as one symbol here and as a product of letters there
    names = sorted({str(symbol) for symbol in gold.free_symbols | answer.free_symbols})
    if not names or len(names) > 8 or any(value.has(*_NOT_AT_POINTS) for value in (gold, answer)):
        return False
    for point in range(_MAX_POINTS):
        at = {name: Rational(7 * index + 11 + 5 * point, 3 + 2 * point) for index, name in enumerate(names)}
        try:
            first, second = _at(gold, at), _at(answer, at)
            if not (first.is_number and second.is_number) or not (first.is_finite and second.is_finite):
                continue
            limit = max(policy.tolerance, 1e-12) if gold.atoms(Float) or answer.atoms(Float) else 1e-40
            if abs(first - second) > limit * abs(first) and abs(first - second) > 1e-55:
                return True
        except UNCOMPUTABLE:
            continue
    return False


def _at(value: Any, at: dict[str, Any]) -> Any:
    return value.xreplace({symbol: at[str(symbol)] for symbol in value.free_symbols}).evalf(_DIGITS)
