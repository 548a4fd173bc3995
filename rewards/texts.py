"""What can be settled on the texts of gold and answer alone: options, words, dots, times of day, ratios, brackets, written bases.

Each rule decides what math-verify cannot know or reads otherwise; where none applies, the values are compared (`compare`).
"""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.rewards import claims
from posttrain.rewards.policy import AnswerPolicy

_BASED = re.compile(
    r"(-?)\(?([0-9A-Za-z.]+)\)?_\{?(?:\\(?:text|mathrm)\{)?(\d+|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\}*"
)
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
_RATIO = re.compile(r"\d{1,9}(?:\.\d{1,6})?(?::\d{1,9}(?:\.\d{1,6})?){2,9}", re.ASCII)
_DOTS = re.compile(r"\\[lc]?dots[bcm]?|\.\.\.|…|\\cdots")


def squeeze(text: str) -> str:
    """Without spaces, but for those that part numbers: `1 7` is not `17`."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def by_rule(gold: str, answer: str, policy: AnswerPolicy) -> bool | None:
    """What can be settled on the texts alone, else None."""
    letter = claims.option_of_gold(gold) if policy.choices else None
    if letter:
        return claims.names_option(letter, answer)
    if claims.bare_numbers(answer) and not claims.bare_numbers(gold):
        return False
    if claims.is_word(gold) and re.fullmatch(r"[A-Za-z]+", answer):
        return gold.lower() == answer.lower()
    if _DOTS.search(gold) or _DOTS.search(answer):
        forms = [squeeze(_DOTS.sub("…", text)).replace("$", "") for text in (gold, answer)]
        return forms[0] == forms[1]
    halves = [re.search(r"([ap])\.?\s?m\b", text, re.IGNORECASE) for text in (gold, answer)]
    if halves[0] and halves[1] and halves[0].group(1).lower() != halves[1].group(1).lower():
        return False
    for one, other in ((gold, answer), (answer, gold)):
        sides = claims.chain(one)
        if sides and claims.primed(sides[-1]) and not claims.primed(other):
            return False
    if (proportion := _same_ratio(gold, answer)) is not None:
        return proportion
    if _nesting(gold) != _nesting(answer) or claims.other_brackets(gold, answer):
        return False
    return _bases(gold, answer)


def _same_ratio(gold: str, answer: str) -> bool | None:
    """For ratios of three or more terms, which math-verify divides one by the next: 1:2:3 is 2:4:6, not 1:3:2 nor 1/6.

    A term with a leading zero makes it a time of day, 1:02:30.
    """
    forms = [
        re.sub(r"\\[,;:!]|\\colon|\s", lambda match: ":" if match.group() == r"\colon" else "", text) for text in (gold, answer)
    ]
    ratios = [form.split(":") if _RATIO.fullmatch(form) else None for form in forms]
    first, second = ratios
    if first is None and second is None:
        return None
    if first is None or second is None or len(first) != len(second):
        return False
    if any(re.match(r"0\d", term) for term in first + second):
        return first == second
    a, b = [Fraction(term) for term in first], [Fraction(term) for term in second]
    return all(a[i] * b[0] == b[i] * a[0] for i in range(len(a))) and all((x == 0) == (y == 0) for x, y in zip(a, b, strict=True))


def _bases(gold: str, answer: str) -> bool | None:
    """Numerals with a written base: the digits and the base must be the same."""
    based = [_BASED.fullmatch(squeeze(text)) for text in (gold, answer)]
    if not (based[0] and based[1] and any(character.isdigit() for character in gold.split("_")[0])):
        return None
    forms = [
        (match.group(1), match.group(2).lower().lstrip("0"), str(_BASES.get(match.group(3), match.group(3))))
        for match in based
        if match
    ]
    return forms[0] == forms[1]


def _nesting(text: str) -> int:
    r"""Sets inside sets: `\{1, \{2\}\}` is not `\{1, 2\}`, to which math-verify flattens it."""
    depth = deepest = 0
    for brace in re.findall(r"\\([{}])", text):
        depth += 1 if brace == "{" else -1
        deepest = max(deepest, depth)
    return deepest if deepest > 1 else 0
