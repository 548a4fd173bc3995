"""Procedural arithmetic with worked steps: integer problems of several operations, in symbols, brackets or words.

    problem   (3+5)*2-4=?
    solution  3+5=8
              8*2=16
              16-4=12
              \\boxed{12}

Training and evaluation problems are disjoint whatever their seeds: a problem's side is a hash of its canonical text, one in
ten going to evaluation. The canonical text of a word problem is its arithmetic without names and things, so that "Tom has 5
coins, ..." in training also keeps "Ann has 5 pens, ..." out of evaluation.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from posttrain.errors import DataError

Split = Literal["train", "eval"]
Tree = Any  # an int, or (operator, left tree, right tree); None stands for an operand that is not drawn yet

SPLITS = ("train", "eval")
NAMES = ("Tom", "Ann", "Sam", "Mia", "Leo", "Eva")
THINGS = ("coins", "pens", "books", "apples", "cards", "stamps")
PHRASES = {
    "+": (", gets {}", ", buys {}", ", finds {}"),
    "-": (", loses {}", ", sells {}", ", gives away {}"),
    "*": (", then has {} times as many",),
    "/": (", keeps 1 of {} equal parts",),
}
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
EVAL_SHARE = 10
# Redraws in a row that bring no new problem before the difficulty counts as exhausted.
PATIENCE = 4000
LEAF_TRIES = 30


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """How hard the problems are. Every intermediate result is an integer.

    Attributes:
        min_operations, max_operations: operations a problem, drawn uniformly; also the row's `level`.
        max_operand: largest number written in a problem (smallest: 1, or 2 as a factor or divisor).
        max_multiplier: in a product one side is at most this; a divisor is at most this.
        max_value: no intermediate result is above this in absolute value.
        operators: any of "+", "-", "*", "/"; a quotient is always exact.
        bracket_fraction, word_fraction: share of the problems with brackets, and in words; the rest are flat expressions.
            A problem of one operation has no brackets: it is drawn flat instead.
        allow_negative: whether intermediate results may be below zero (word problems never are).
        teacher_error_rate: share of the reductions in `solution` that come out wrong and are carried on from there, as in the
            traces of a teacher that nobody verified. `answer` is right whatever the solution says.
    """

    min_operations: int = 2
    max_operations: int = 3
    max_operand: int = 20
    max_multiplier: int = 5
    max_value: int = 99
    operators: str = "+-*"
    bracket_fraction: float = 0.3
    word_fraction: float = 0.2
    allow_negative: bool = False
    teacher_error_rate: float = 0.0

    def __post_init__(self) -> None:
        checks = (
            ("min_operations", self.min_operations >= 1, "at least 1"),
            ("max_operations", self.min_operations <= self.max_operations <= 12, "min_operations to 12"),
            ("max_operand", self.max_operand >= 2, "at least 2"),
            ("max_multiplier", self.max_multiplier >= 2, "at least 2"),
            ("max_value", self.max_value >= self.max_operand, f"at least max_operand ({self.max_operand})"),
            ("operators", bool(self.operators) and set(self.operators) <= set(PRECEDENCE), "one or more of + - * /"),
            ("bracket_fraction", 0 <= self.bracket_fraction <= 1, "in [0, 1]"),
            ("teacher_error_rate", 0 <= self.teacher_error_rate <= 1, "in [0, 1]"),
            ("word_fraction", 0 <= self.word_fraction <= 1 - self.bracket_fraction + 1e-9, "in [0, 1 - bracket_fraction]"),
        )
        for name, ok, allowed in checks:
            if not ok:
                raise ValueError(f"arithmetic: {name}={getattr(self, name)!r}, but it must be {allowed}")

    @classmethod
    def of(cls, source: Any = None, **knobs: Any) -> Difficulty:
        """From any object with (some of) the fields as attributes, e.g. an ArithmeticConfig; `knobs` win over it."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(knobs) - set(known))
        if unknown:
            raise ValueError(f"arithmetic: unknown difficulty {', '.join(unknown)}; known: {', '.join(known)}")
        values = {name: getattr(source, name) for name in known if hasattr(source, name)}
        return cls(**{**values, **knobs})


def generate(n: int, seed: int = 0, split: Split = "train", difficulty: Any = None, **knobs: Any) -> list[dict[str, Any]]:
    """`n` different problems; the first m of them do not depend on n.

    Args:
        n: how many.
        seed: same seed, split and difficulty: same problems.
        split: "train" or "eval"; the two never share a problem, whatever their seeds and difficulties.
        difficulty: an object with the fields of `Difficulty`, or None for its defaults; `knobs` override single fields.

    Returns:
        rows {id, problem, answer, solution, source, level, kind}; level is the number of operations, kind "expression",
        "bracket" or "word".

    Raises:
        ValueError: a setting out of range.
        DataError: fewer than `n` different problems could be found at this difficulty.
    """
    if split not in SPLITS:
        raise ValueError(f"arithmetic: split={split!r}, but it must be one of {SPLITS}")
    if n < 0:
        raise ValueError(f"arithmetic: n={n}, but it must be at least 0")
    hard = Difficulty.of(difficulty, **knobs)
    rng = random.Random(f"posttrain-arithmetic:{split}:{seed}")
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    misses = 0
    while len(rows) < n:
        drawn = _draw(rng, hard)
        if drawn is None or drawn[0] in seen or split_of(drawn[1]) != split:
            misses += 1
            if misses > PATIENCE:
                raise DataError(
                    f"arithmetic: only {len(rows)} different {split} problems found at this difficulty, {n} were asked for; "
                    "raise max_operand, max_operations or max_value, or ask for fewer"
                )
            continue
        misses = 0
        problem, _, tree, kind = drawn
        seen.add(problem)
        steps: list[str] = []
        # Slips have their own random numbers: the problems are the same whatever the teacher's error rate.
        slips = random.Random(f"posttrain-arithmetic-slips:{seed}:{problem}")
        written = evaluate(tree, steps, partial(_slip, rng=slips, rate=hard.teacher_error_rate))
        rows.append(
            {
                "id": f"arithmetic-{split}-{seed}-{len(rows):06d}",
                "problem": problem,
                "answer": str(evaluate(tree)),
                "solution": "\n".join([*steps, f"\\boxed{{{written}}}"]),
                "source": "arithmetic",
                "level": len(steps),
                "kind": kind,
            }
        )
    return rows


def split_of(canonical: str) -> Split:
    """The side on which a problem with this canonical text lies."""
    digest = hashlib.blake2b(canonical.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % EVAL_SHARE == 0 else "train"


def evaluate(tree: Tree, steps: list[str] | None = None, slip: Callable[[int], int] = int) -> int:
    """Value of a tree; appends one line a reduction to `steps`, innermost and leftmost first.

    `slip` maps each result to the one that is written and carried on.
    """
    if isinstance(tree, int):
        return tree
    operator, left, right = tree
    a, b = evaluate(left, steps, slip), evaluate(right, steps, slip)
    value = slip(_apply(operator, a, b))
    if steps is not None:
        steps.append(f"{_number(a)}{operator}{_number(b)}={value}")
    return value


def _slip(value: int, rng: random.Random, rate: float) -> int:
    """The value, or with probability `rate` a neighbour that a careless reckoner would write: off by one, two or ten."""
    if rng.random() >= rate:
        return value
    slipped = value + rng.choice((-10, -2, -1, 1, 2, 10))
    return slipped if slipped >= 0 or value < 0 else value + 1


def render(tree: Tree) -> str:
    """The tree as text, with just the brackets without which it would be read differently."""
    if isinstance(tree, int):
        return str(tree)
    operator, left, right = tree
    return _side(left, PRECEDENCE[operator]) + operator + _side(right, PRECEDENCE[operator] + 1)


def _side(tree: Tree, least: int) -> str:
    text = render(tree)
    return text if isinstance(tree, int) or PRECEDENCE[tree[0]] >= least else f"({text})"


def _number(value: int) -> str:
    return str(value) if value >= 0 else f"({value})"


def _apply(operator: str, a: int, b: int) -> int:
    if operator == "+":
        return a + b
    if operator == "-":
        return a - b
    if operator == "/":
        return a // b if b else 0  # a divisor that slipped to zero
    return a * b


def _draw(rng: random.Random, hard: Difficulty) -> tuple[str, str, Tree, str] | None:
    """(problem, canonical text, tree, kind), or None where the drawn shape found no operands within the limits."""
    operations = rng.randint(hard.min_operations, hard.max_operations)
    operators = [rng.choice(hard.operators) for _ in range(operations)]
    where = rng.random()
    if where < hard.word_fraction:
        kind, shape = "word", _chain(operators)
    elif operations > 1 and where < hard.word_fraction + hard.bracket_fraction:
        kind, shape = "bracket", _random_tree(operators, rng)
    else:
        kind, shape = "expression", _by_precedence(operators)
    # Operands are redrawn for a drawn shape, so that products are not crowded out by sums, which fit more often.
    for _ in range(LEAF_TRIES):
        tree = _fill(shape, rng, hard)
        if not _within(tree, hard, negative=hard.allow_negative and kind != "word"):
            continue
        text = render(tree)
        if kind == "word":
            return _in_words(tree, rng), f"word:{text}", tree, kind
        return None if kind == "bracket" and "(" not in text else (f"{text}=?", text, tree, kind)
    return None


def _chain(operators: list[str]) -> Tree:
    """((x o1 x) o2 x) o3 x: operations in the order in which they are told. Leaves are None until filled."""
    tree: Tree = None
    for operator in operators:
        tree = (operator, tree, None)
    return tree


def _by_precedence(operators: list[str]) -> Tree:
    """The tree of x o1 x o2 x ... written without brackets."""
    if not operators:
        return None
    # The root is the rightmost operator of the lowest precedence: operators of one precedence bind from the left.
    low = min(PRECEDENCE[operator] for operator in operators)
    at = max(i for i, operator in enumerate(operators) if PRECEDENCE[operator] == low)
    return (operators[at], _by_precedence(operators[:at]), _by_precedence(operators[at + 1 :]))


def _random_tree(operators: list[str], rng: random.Random) -> Tree:
    if not operators:
        return None
    at = rng.randrange(len(operators))
    return (operators[at], _random_tree(operators[:at], rng), _random_tree(operators[at + 1 :], rng))


def _fill(shape: Tree, rng: random.Random, hard: Difficulty, parent: str = "", right: bool = False) -> Tree:
    """The shape with numbers for its leaves; a leaf's range depends on its parent operator and side."""
    if shape is not None:
        operator, a, b = shape
        filled_right = _fill(b, rng, hard, operator, True)
        if operator == "/" and a is None and isinstance(filled_right, int) and filled_right <= hard.max_operand:
            return (operator, filled_right * rng.randint(1, max(1, hard.max_operand // filled_right)), filled_right)
        return (operator, _fill(a, rng, hard, operator), filled_right)
    if parent in ("*", "/") and right:
        return rng.randint(2, min(hard.max_multiplier, hard.max_operand))
    return rng.randint(2 if parent == "*" else 1, hard.max_operand)


def _within(tree: Tree, hard: Difficulty, *, negative: bool) -> bool:
    return _bounded(tree, hard, negative) is not None


def _bounded(tree: Tree, hard: Difficulty, negative: bool) -> int | None:
    """Value of the tree, or None where any reduction breaks a limit of the difficulty."""
    if isinstance(tree, int):
        return tree
    operator, left, right = tree
    a = _bounded(left, hard, negative)
    b = None if a is None else _bounded(right, hard, negative)
    if a is None or b is None:
        return None
    if operator == "/" and (not 1 < b <= hard.max_multiplier or a % b):
        return None
    if operator == "*" and min(abs(a), abs(b)) > hard.max_multiplier:
        return None
    value = _apply(operator, a, b)
    return value if abs(value) <= hard.max_value and (negative or value >= 0) else None


def _in_words(tree: Tree, rng: random.Random) -> str:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    told: list[tuple[str, int]] = []
    while not isinstance(tree, int):
        told.append((tree[0], tree[2]))
        tree = tree[1]
    told.reverse()
    if told[0][0] == "*" and rng.random() < 0.5:
        text = f"{name} has {tree} bags of {told.pop(0)[1]} {things}"
    else:
        text = f"{name} has {tree} {things}"
    for operator, operand in told:
        text += rng.choice(PHRASES[operator]).format(operand)
    return f"{text}. How many {things}?"
