r"""What an answer claims, on its text alone: one value or several, a hedge, a chain of equations, an option letter, a unit.

math-verify looks for the gold in an answer and drops words; a policy learns to write answers that hold every value. Here an
answer that names several values for one gold is right only where all of them are, and one that takes its value back is wrong.
"""

from __future__ import annotations

import re

from posttrain.rewards.units import is_unit, without_unit

_SEPARATOR = re.compile(
    r"\\text\s*\{\s*,?\s*(?:or|and|ou|oder)\s*\}|\\(?:lor|vee|mid)(?![A-Za-z])|(?<![\\A-Za-z])(?:or|and|ou|oder)(?![A-Za-z])|或者?|или|또는"
    r"|(?<!\\)[,;，、；]|\\\\|\\(?:q?quad|cr|newline)(?![A-Za-z])",
    re.IGNORECASE,
)
_COMMA = re.compile(r"[,;，、；]|\\\\|\\(?:q?quad|cr|newline)(?![A-Za-z])")
_OPENING, _CLOSING = "([{", ")]}"
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\})\d{3})+(?![\d,])")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d{1,2}")
_ARROW = re.compile(
    r"\\(?:to|rightarrow|longrightarrow|Rightarrow|Longrightarrow|implies|mapsto|leadsto|equiv|coloneqq)(?![A-Za-z])|:=|⇒|→|≡"
)
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq|thickapprox)(?![A-Za-z])|≈")
_EQUALS = re.compile(r"(?<![<>!:\\=])=(?!=)")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textnormal|textrm|mathrm|mathbf|mathit|mbox|operatorname)\b\s*\*?")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# Words after which an answer is no longer the claim that it looks like. "or" and "and" part values, see `several`.
_HEDGES = frozenset(
    word
    for line in (
        "not nor neither either maybe perhaps possibly probably if unless otherwise else between least most than except",
        "versus vs to through until within wrong incorrect false untrue too",
        "ruled excluded rejected impossible unlikely invalid fails failed extraneous cannot never bound oder ou nicht nie",
    )
    for word in line.split()
)
# A number told beside the value, but for a base or modulus: `42\text{ (or 43 by the other method)}`.
_TOLD = re.compile(r"\\text[a-z]*\s*\{[^{}]*(?<![\w^.])(?<!base )(?<!mod )\d+(?:\.\d+)?(?!\w)[^{}]*\}")
_HEDGING_CHARACTERS = re.compile(r"(?<!\w)не(?!\w)|不是|并非|‰|n['’]t\b")
# What follows a number and makes it another one; `12\text{ units squared}` stays 12.
_CHANGED = re.compile(
    r"below zero|\d\s*(?:\^\s*T|squared|cubed|factorial|per mille|basis points?"
    r"|halves|thirds|fourths|fifths|(?:six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|million)ths"
    r"|minus|plus|times \d|divided|multiplied|doubled|tripled|halved|(?:in|de)creased|reduced"
    r"|point (?:zero|one|two|three|four|five|six|seven|eight|nine))\b"
    r"|\b(?:twice|double|triple|half|square)\s+(?:of\s+)?the\b[^=]*=|\b(?:minus|negative|twice|double|triple|half(?: of)?)\s*-?\d"
)
_SCALES = {
    "dozen": "12",
    "hundred": "10^{2}",
    "thousand": "10^{3}",
    "million": "10^{6}",
    "billion": "10^{9}",
    "trillion": "10^{12}",
}
_SCALED = re.compile(
    r"(?<=[\d}])(?:\s|\\[,; ]|~)*(?P<opened>\\(?:text|textrm|mathrm|mbox)\s*\{\s*)?"
    rf"(?P<scale>{'|'.join(_SCALES)})s?\b(?(opened)(?P<rest>[^{{}}]*\}})?)"
)
_PRIME = re.compile(r"(?<=[A-Za-z)}])(?:\s*'|\s*\^\s*\{?\s*\\prime)")
_HEDGED_SENTENCE = re.compile(
    r"\b(?:not|n't|nor|neither|either|between|maybe|perhaps|possibly|less than|more than|fewer than|greater than|at least|at most"
    r"|anything but|other than|besides"
    r"|one of|if|unless|minus|negative|twice|double|half of|below zero|squared|cubed|times \d+)\b|\(or\b"
    r"|(?:\d|[\s:$][a-z]|:)\s*(?:[<>≤≥]=?|\\(?:leq?|geq?|lt|gt)(?![a-z]))\s*[-$\d]"
    r"|\d\$?\s*(?:±|\\pm(?![a-z])|\+/-)|(?<![\w.])\d+(?:\.\d+)?e[-+]?\d"
    rf"|\d\s*(?:to|&|[-–]{{2}}|\.\.+)\s*\d|\d\s+(?:{'|'.join(_SCALES)})s?\b"
    r"|\d\s*:\s*\d|\d\s*(?:[<>≤≥]|\\(?:leq?|geq?|lt|gt)(?![a-z]))\s*[a-z](?![a-z>])|\d\s+and\s+an?\s+(?:half|third|quarter)\b"
    r"|[\d}$]\s+and\s+[-$\\(]*\d|(?<=[\d\w.?)$}%])\s+or\s+(?=[\d\\$(-]|[A-J]\b)",
    re.IGNORECASE,
)
_LISTED = re.compile(r"\d\s*[,;]\s*(?:(?:and|or)\s+)?[-$\\(]*\d")
_LAST_CHOICE = re.compile(r"[\d}$)]\s+(?:or|oder|ou|o|или)\s+[-$\\(]*[\d][^\s]*[.!\s]*$")
_DENIED_LAST = re.compile(
    r"(?:(?:\b(?:not|cannot|never)|n['’]t)\s+(?:be\s+|equal\s+(?:to\s+)?)?|不是\s*)[-$\\(]*\d[^\s。]*[.!。\s]*$"
)
_RUN = re.compile(r"(?:\d+(?:\s*[,;]\s*|\s+)(?:\.\.\.\s*)?){4,}\d+[.!\s]*$")
_DROPPED = re.compile(r"\\(?:dim|arg|ker|hom|Pr|wp|Im)(?![A-Za-z])")  # math-verify reads on behind them
_UNCERTAIN = re.compile(r"\^\s*\{?\s*\+[^{}]*\}?\s*_\s*\{?\s*-|_\s*\{?\s*-[^{}]*\}?\s*\^\s*\{?\s*\+")
_BOUND = re.compile(
    r"\s*(?:[<>≤≥≠¬≲≳]|\\(?:[gln]eq?|gt|lt|geqslant|leqslant|ll|gg|lesssim|gtrsim|prec|succ|neg|lnot|not)(?![A-Za-z]))"
)
_UNKNOWN_AFTER_NUMBER = re.compile(r"(?<![\w\\])\d+(?:\.\d+)?([a-z])(?![\w(])")
_LETTER = re.compile(r"(?<![A-Za-z\\])[a-zA-Z](?![A-Za-z])")
_POLES = re.compile(r"\\[dtc]?frac|/|\\div|\^\s*\{?\s*(?:-|0)|\\log_\s*\{?\s*[a-z]")
_BINDERS = re.compile(r"\\(?:lim|sum|prod|int|max|min|sup|inf|gcd|text|mathrm|operatorname)")
_LETTERS = "A-J"
_OPTION = re.compile(rf"\(\s*([{_LETTERS}])\s*\)|([{_LETTERS}])(?=\s*[.):]|\s*$)|([{_LETTERS}])(?=\s+[-\d$])")


def several(text: str, *, words_only: bool = False) -> list[str]:
    r"""The values that `text` names side by side, outside brackets: `3 \text{ or } 4`, `3, 4`, `3 \\ 4`; one where it names one.

    With `words_only`, commas do not part: those of a point or a set that lost its brackets.
    """
    if _DECIMAL_COMMA.fullmatch(text.strip()):
        return [text]
    text = _THOUSANDS.sub(lambda match: re.sub(r"\{?,\}?", "", match.group()), text)
    depths, depth = [], 0
    for position, character in enumerate(text):
        escaped = position and text[position - 1] == "\\"
        depth += (character in _OPENING) - (character in _CLOSING) if not (escaped and character in "()[]") else 0
        depths.append(depth)
    environments = [match.span() for match in re.finditer(r"\\begin\{.*\\end\{[a-z]*\}", text, re.DOTALL)]
    parts, start = [], 0
    for match in _SEPARATOR.finditer(text):
        inside = depths[match.start()] > 0 and not match.group().startswith("\\text")
        if inside or any(a <= match.start() < b for a, b in environments) or (words_only and _COMMA.fullmatch(match.group())):
            continue
        if match.group().lower() in ("or", "and", "ou", "oder") and not _between_values(text, match):
            continue
        parts.append(text[start : match.start()])
        start = match.end()
    parts.append(text[start:])
    return [part.strip() for part in parts if re.search(r"[\w∞]", re.sub(r"\\(?:text|left|right)\b", "", part))] or [text]


def _between_values(text: str, match: re.Match[str]) -> bool:
    return bool(text[: match.start()].strip()) and bool(text[match.end() :].strip())


def hedged(gold: str, answer: str, *, single: bool) -> bool:
    """Whether the answer holds a word that takes its claim back (`not 17`, `42 if n is even`) and that the gold does not hold.

    Where the gold is a single value, so do words that join another to it (`42 \\text{ or more}`).
    """
    if _UNCERTAIN.search(answer) or (_DROPPED.search(answer) and not _DROPPED.search(gold)):
        return True
    if _BOUND.match(answer) and not re.search(r"[<>≤≥]|\\[gln]e", gold):
        return True
    said = _plain(answer)
    if (_CHANGED.search(said) and not _CHANGED.search(_plain(gold))) or (
        _HEDGING_CHARACTERS.search(answer) and not _HEDGING_CHARACTERS.search(gold)
    ):
        return True
    if single and _TOLD.search(answer[1:]) and re.match(r"[-\d]", answer) and not _TOLD.search(gold):
        return True
    found = _words(answer) & (_HEDGES | {"or", "and"} if single else _HEDGES)
    if "to" in found and ":" in gold:
        found.discard("to")
    return bool(found - _words(gold))


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(_TEXT.sub(" ", text))}


def hedged_sentence(text: str) -> bool:
    """The same for an answer within a sentence: "The answer is not 15", "15 or 16", "8, 9", "less than 15"."""
    if _HEDGED_SENTENCE.search(text) or _LISTED.search(_THOUSANDS.sub("0", text)):
        return True
    # math-verify reads 4 from "4x" and "4k", which is thousands rather than kelvins
    return any(match.group(1) == "k" or not is_unit(match.group(1)) for match in _UNKNOWN_AFTER_NUMBER.finditer(text))


def ends_in_a_choice(text: str) -> bool:
    """Whether an output without a marked answer ends in "either 8 or 9", in "not 9", or counts numbers up."""
    return any(end.search(text) for end in (_LAST_CHOICE, _DENIED_LAST, _RUN))


def scaled(text: str) -> str | None:
    r"""A number with its word for a power of ten (or a dozen) as a product: `1.5\text{ million}` -> `1.5\cdot 10^{6}`; None
    where there is none: math-verify drops the word."""
    match = _SCALED.search(text)
    if match is None:
        return None
    rest = (match["rest"] or "").rstrip("}").strip()
    unit = rf"\text{{ {rest}}}" if rest and match["rest"].endswith("}") else rest
    return text[: match.start()] + rf"\cdot {_SCALES[match['scale']]}" + unit + text[match.end() :]


def divides_by_a_symbol(text: str) -> bool:
    """Whether an answer has a variable in it that may be zero where it must not: `x/x` is no number, though sympy makes it 1."""
    said = chain(text)[-1] if chain(text) else text
    said = without_unit(said)
    if not _POLES.search(said) or _BINDERS.search(said):
        return False
    said = re.sub(r"\\[a-zA-Z]+|(?<=[\w}])'+", " ", said)
    return any(letter not in "eidIE" for letter in _LETTER.findall(said))


def primed(text: str) -> bool:
    """Whether a symbol or function carries a prime: `f'(x)` is not `f(x)`, to which math-verify reads it."""
    return _PRIME.search(re.sub(r"\\text[a-z]*\s*\{[^{}]*\}", "", text)) is not None


def other_brackets(gold: str, answer: str) -> bool:
    r"""Whether one is a set in braces and the other a point or an interval: `\{0, 3\}` and `(0, 3)`; math-verify mixes them."""
    return any(
        first.startswith(r"\{") and first.endswith(r"\}") and not re.search(r"[(\[]", first) and second[:1] in ("(", "[")
        for first, second in ((gold, answer.removeprefix(r"\left")), (answer, gold))
        if re.fullmatch(r"[(\[][^()\[\]{}]*,[^()\[\]{}]*[)\]]", second)
    )


def chain(text: str) -> list[str]:
    """The sides of `x = 6 \\cdot 7 = 42` and `41 \\to 42`, outside brackets; none of `=`."""
    text = _ARROW.sub("=", text)
    sides, start, depth = [], 0, 0
    for match in re.finditer(r"[(\[{)\]}]|=", text):
        depth += (match.group() in _OPENING) - (match.group() in _CLOSING)
        if match.group() == "=" and depth <= 0 and _EQUALS.match(text, match.start()):
            sides.append(text[start : match.start()])
            start = match.end()
    sides.append(text[start:])
    return [side.strip() for side in sides if side.strip()]


def approximations(text: str) -> list[str]:
    r"""The sides of `\sqrt 2 \approx 1.41`; an answer that begins with the sign has one."""
    return [side.strip() for side in _APPROXIMATELY.split(text) if side.strip()]


def coordinates(text: str) -> str:
    r"""Values given by name as a point, in the names' order: `y=3\text{ and }x=2` -> `(2,3)`; other text as it is."""
    parts = [re.fullmatch(r"([a-zA-Z](?:_\{?\d\}?)?)\s*=\s*([^=<>]+)", part) for part in several(text)]
    named = {part.group(1): part.group(2).strip() for part in parts if part}
    alike = len(named) == len(parts) > 1 and len({name.isupper() for name in named}) == 1
    if not alike or re.search(r"\\(?:lor|vee)|\b(?:or|ou|oder)\b", text):
        return text
    return "(" + ",".join(named[name] for name in sorted(named)) + ")"


def names_each(values: list[str]) -> bool:
    """Whether every value is assigned to a name of its own: `x=1`, `y=2`. Their order says which is which."""
    names = [re.match(r"([^=<>]+)=[^=]+$", value) for value in values]
    return all(names) and len({name.group(1).strip() for name in names if name}) == len(values)


def bare_numbers(text: str) -> bool:
    """Whether an answer is numbers side by side (`1 7`) that are no groups of thousands: math-verify reads 17."""
    text = text.strip()
    return re.fullmatch(r"\d+(?:\s+\d+)+", text) is not None and re.fullmatch(r"\d{1,3}(?:\s+\d{3})+", text) is None


def option_of_gold(gold: str) -> str | None:
    r"""The option that a multiple-choice gold names: `C`, `(C)`, `\text{C}`."""
    found = re.fullmatch(rf"\(?([{_LETTERS}])\)?\.?", _plain(gold))
    return found.group(1) if found else None


def names_option(letter: str, answer: str) -> bool:
    r"""Whether an answer names the option `letter` and no other.

    The letter stands first, alone or marked as an option (`(C)`, `C.`, `C:`, `C 12`), and what follows is its text: no second
    option, no sign that joins letters to an expression (`A \cup B`), no word that takes it back.
    """
    text = _plain(answer)
    if len(text.strip("()[].: ")) == 1:
        return text.strip("()[].: ").upper() == letter
    text = re.sub(r"^(?:option|choice|answer)\s+", "", text, flags=re.IGNORECASE)
    found = _OPTION.match(text)
    if not found or next(group for group in found.groups() if group) != letter:
        return False
    rest = text[found.end() :].lstrip(".): ")
    if re.match(r"[-+*/|&=,;<>]|\\(?:cup|cap|lor|vee|land|wedge|mid|or|and)\b", rest) and not re.match(r"-?[\d.]", rest):
        return False
    if re.fullmatch(r"(?:all|none|both) of (?:the above|these|them)\.?", rest, re.IGNORECASE):
        return True
    others = re.findall(r"(?<![A-Za-z\\])([A-Z])(?![A-Za-z])", rest)
    return not (set(others) & set("ABCDEFGHIJ")) and not (_words(rest) & (_HEDGES | {"or", "and", "also", "both", "all"}))


def last_option(text: str) -> str | None:
    """The last option letter of a text, where it is not one of several joined by "or", nor negated."""
    found = list(re.finditer(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])", text))
    if not found:
        return None
    before = text[: found[-1].start()]
    if re.search(rf"\bnot\s+[(\\a-z{{]*$|(?<![A-Za-z'])[{_LETTERS}]\)?(?:,|,?\s+(?:or|and))\s+[(]*$", before):
        return None
    if re.search(rf"\([{_LETTERS}]\)[\s,;/|&]*\($|(?<![A-Za-z'])[{_LETTERS}][/|&]$", before):  # "(A) (B) (C)" lists them
        return None
    return found[-1].group(1)


def _plain(text: str) -> str:
    r"""Without text commands and braces: `\textbf{(C)}\ 12` -> `(C) 12`."""
    return " ".join(_TEXT.sub("", text).replace("\\ ", " ").replace("~", " ").translate(str.maketrans("", "", "{}$")).split())


def is_word(text: str) -> bool:
    """Whether bare letters are a word rather than a product of variables: math-verify takes `act` for `cat`.

    Letters in alphabetical order (`abc`, `xy`) are a product, and so is what has no vowel.
    """
    if not re.fullmatch(r"[A-Za-z]{2,}", text):
        return False
    lowered = text.lower()
    if lowered in ("no", "yes", "on"):
        return True
    return len(text) >= 3 and re.search("[aeiou]", lowered) is not None and list(lowered) != sorted(lowered)
