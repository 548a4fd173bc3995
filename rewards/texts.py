"""What can be settled on the texts of gold and answer alone: options, words, dots, times of day, ratios, brackets, written bases.

Each rule decides what math-verify cannot know or reads otherwise; where none applies, the values are compared (`compare`).
"""

from __future__ import annotations

import math
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
_CLOCK = re.compile(r"(\d{1,2})(?:[:.](\d{2}))?(?::(\d{2}))?\s*(?:(?:noon|(a|p)\.?\s?m\b\.?))?", re.IGNORECASE)
_ARTICLE = re.compile(r"^\s*(?:an?|the)\s+(?=[a-z]{3})")
_HOUR = 3600
_TO = re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)")
_NAMED_POINT = re.compile(r"\(?\(\s*([xyz])\s*,\s*([xyz])\s*(?:,\s*([xyz])\s*)?\)\s*=")
_DOTS = re.compile(r"\\[lc]?dots[bcm]?|\.\.\.|…|\\cdots")


def squeeze(text: str) -> str:
    """Without spaces, but for those that part numbers (`1 7` is not `17`), and without braces around one letter or digit."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text))


def by_rule(gold: str, answer: str, policy: AnswerPolicy) -> bool | None:
    """What can be settled on the texts alone, else None."""
    letter = claims.option_of_gold(gold) if policy.choices else None
    if letter:
        return claims.names_option(letter, answer)
    if claims.bare_numbers(answer) and not claims.bare_numbers(gold):
        return False
    if _without_article(gold) == _without_article(answer):
        return True
    if claims.is_word(gold) and re.fullmatch(r"[A-Za-z]+", answer):
        return gold.lower() == answer.lower()
    if _DOTS.search(gold) or _DOTS.search(answer):
        forms = [squeeze(_DOTS.sub("…", text)).replace("$", "") for text in (gold, answer)]
        return forms[0] == forms[1]
    if re.search(r"\[\s*-\s*\\infty|\\infty\s*(?:\\right)?\]", answer) and "infty" in gold and squeeze(gold) != squeeze(answer):
        return False  # no interval is closed at infinity; sympy opens it
    if _other_order(gold, answer) or _other_letters(gold, answer):
        return False
    if (time := _same_time(gold, answer)) is not None:
        return time
    for one, other in ((gold, answer), (answer, gold)):
        sides = claims.chain(one)
        if sides and claims.primed(sides[-1]) and not claims.primed(other):
            return False
    if (proportion := _same_ratio(gold, answer)) is not None:
        return proportion
    if _nesting(gold) != _nesting(answer) or claims.other_brackets(gold, answer):
        return False
    return _bases(gold, answer)


def _without_article(text: str) -> str:
    r"""`\text{An ellipse}` -> `ellipse`."""
    return _ARTICLE.sub("", re.sub(r"^\\text\s*\{([^{}]*)\}$", r"\1", text).lower())


def _other_order(gold: str, answer: str) -> bool:
    """Whether an answer gives the coordinates of a point in another order than that of their names: `(y,x)=(1,2)`."""
    named = _NAMED_POINT.match(answer)
    names = [name for name in named.groups() if name] if named else []
    return names != sorted(names) and not _NAMED_POINT.match(gold)


def _other_letters(gold: str, answer: str) -> bool:
    """Whether both are three capitals or more and not the same: an order or a figure, not a product that commutes."""
    first, second = (re.fullmatch(r"[A-Z]{3,}", squeeze(text)) for text in (gold, answer))
    return first is not None and second is not None and first.group() != second.group()


def with_colons(text: str) -> str:
    r"""`3\text{ to }4` as the ratio 3:4."""
    return _TO.sub(":", text)


def _same_time(gold: str, answer: str) -> bool | None:
    """For times of day, of which one at least says "a.m." or "p.m.": 3:30 p.m. is 15:30 and, where the half is left out, 3:30."""
    first, second = _clock(gold), _clock(answer)
    if first is None or second is None or (first[1] is None and second[1] is None):
        return None
    if first[1] is not None and second[1] is not None:
        return first[0] == second[0]
    plain, halved = (first[0], second[0]) if first[1] is None else (second[0], first[0])
    half_left_out = _HOUR <= plain < 13 * _HOUR
    return plain == halved or (half_left_out and plain % (12 * _HOUR) == halved % (12 * _HOUR))


def _clock(text: str) -> tuple[int, str | None] | None:
    """Seconds since midnight, and the half of the day as written; None for what is no time of day."""
    said = " ".join(re.sub(r"\\(?:text|mathrm)\s*\{|[{}~]|\\[,; ]", " ", text).split())
    match = _CLOCK.fullmatch(said)
    if match is None or int(match[1]) > 24:
        return None
    half = match[4].lower() if match[4] else "p" if "noon" in said.lower() else None
    if half is None and ":" not in said:
        return None
    hour, minutes, seconds = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    if half is not None and hour <= 12:
        hour = hour % 12 + (12 if half == "p" else 0)
    return hour * _HOUR + minutes * 60 + seconds, half


def _same_ratio(gold: str, answer: str) -> bool | None:
    """For ratios of three or more terms, which math-verify divides one by the next: 1:2:3 is 2:4:6, not 1:3:2 nor 1/6.

    A term with a leading zero makes it a time of day, 1:02:30; and so is a gold of two terms that nobody would have left
    unreduced, 10:30.
    """
    forms = [
        re.sub(r"\\[,;:!]|\\colon|\s", lambda match: ":" if match.group() == r"\colon" else "", text) for text in (gold, answer)
    ]
    times = [re.fullmatch(r"(\d{1,2}):([0-5]\d)", form) for form in forms]
    if all(re.fullmatch(r"\d{1,2}:\d{1,2}", form) for form in forms) and (
        any(time and time[2][0] == "0" for time in times)
        or (times[0] and int(times[0][1]) < 25 and math.gcd(int(times[0][1]), int(times[0][2])) > 1)
    ):
        return forms[0].lstrip("0") == forms[1].lstrip("0")
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
