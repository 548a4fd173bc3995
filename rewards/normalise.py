r"""Rewriting of answers into forms that math-verify reads. Text to text, applied to gold and answer alike.

Each rule repairs one thing that math-verify 0.9.0 misreads (a currency sign, `0.\overline{3}`, `i(2-i)`); none evaluates
anything.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from posttrain.rewards.units import is_unit, without_code

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty ",
    "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ",
    "∅": r"\emptyset ", "⁄": "/", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\ufeff": "", "\u200b": "",
    "≅": r"\cong ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_WRAPPERS = (r"\boxed", r"\fbox", r"\underline", r"\textbf", r"\mathbf", r"\bm", r"\boldsymbol", r"\mbox")
_MIXED = re.compile(r"(-?)(\d+)(?:\s*\\[dt]?frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)(\d))|(?:\s|\\[,; ])+(\d+)/(\d+))")
# What is not printed is not said: a reader of `43\phantom{42}` sees 43. Bidirectional marks reorder what is printed.
_INVISIBLE = re.compile(
    r"\\[hv]?phantom\s*\{[^{}]*\}|\\[hv]space\*?\s*\{[^{}]*\}|\\(?:label|tag|ref|cite|index)\s*\{[^{}]*\}"
    r"|\\textcolor\s*\{white\}\s*\{[^{}]*\}|\\color\s*\{white\}[^{}]*|[\u00ad\u200c-\u200f\u202a-\u202e\u2060\u2066-\u2069]"
)
# Words around a number that say what it is, or that it is negative.
_CALLED = re.compile(r"^\\text\s*\{\s*(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is|\s*[:=])\s*([^{}]*)\}")
_NEGATIVE = re.compile(r"^(?:\\text\s*\{\s*)?(?:minus|negative)\s*(?:\}\s*|\\? )(?=\d)", re.IGNORECASE)
_TEXT_NUMBER = re.compile(r"^\\text\s*\{\s*(-?\d+(?:\.\d+)?)\s+([a-zA-Z][a-zA-Z ]*)\}$")
_BARE_UNIT = re.compile(r"^(-?[\d.,]+)\s+([A-Za-z]{3,})$")  # math-verify reads the letters of `5 dollars` as a product
_BARE_RATE = re.compile(r"(\d)\s+([a-zA-Z]{1,3}/(?:s|sec|min|h|hr|day|kg|g|l|m))$")  # `60 km/h` is no fraction
_BUILT = re.compile(r"^\\\{\s*([a-z])\s*(?::|\||\\mid)\s*([^:|]*(?:[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt)(?![a-z]))[^:|]*)\\\}$")
_ONE_ROW = re.compile(
    r"^\\begin\{(align|aligned|gather|equation|array)(\*?)\}(?:\{[clr]\})?((?:(?!\\\\|&|\\begin).)*)\\end\{\1\2\}$", re.DOTALL
)
# A decimal that goes on repeats its last digit where it stands there three times, several digits where they stand there twice.
_GOES_ON = re.compile(r"^(-?\d*\.\d{0,12}?)(?:(\d)\2{2,}|(\d{2,6}?)\3+)\s*(?:\.{3,}|…|\\[lc]?dots)$")
# Units as Chinese and Japanese write them, and counters, which say nothing.
_CJK_UNITS = {
    "千米": "km", "公里": "km", "厘米": "cm", "分米": "dm", "毫米": "mm", "米": "m", "千克": "kg", "公斤": "kg", "克": "g",
    "小时": "h", "時間": "h", "分钟": "min", "秒": "s", "毫升": "ml", "升": "l", "度": "degree",
}  # fmt: skip
_CJK_UNIT = re.compile(rf"(?<=[\d}}])\s*(平方|立方)?({'|'.join(_CJK_UNITS)})$")
_CJK_COUNTER = re.compile(r"(?<=[\d}])\s*[元円個个人名只種种本枚页頁岁歳天日年月回次件개명원]$")
_FONT = re.compile(r"\\(?:bf|rm|it|sf|tt|large|Large|huge|tiny|small)\s*\{([^{}]*)\}")
_LETTERS_AFTER_NUMBER = re.compile(r"(?<=\d)[a-z]{2,4}(?![a-zA-Z{(])")
# An amount of money has two decimals, so that its comma is no separator of thousands; nor are two points decimal points.
_CURRENCY = r"(?:[€£¥₹]|\\?\$|EUR|USD|\\text\s*\{\s*(?:€|EUR|[Ee]uros?)\s*\})"
_MONEY = re.compile(rf"^(-?{_CURRENCY}?\s*-?)(\d+|\d{{1,3}}(?:\.\d{{3}})+),(\d\d)((?:\s|\\[ ,])*{_CURRENCY}?)$")
_POINTED = re.compile(r"^(-?\d{1,3}(?:\.\d{3}){2,})(?:,(\d+))?$")
_SPACING = re.compile(r"^(?:\s|~|\\[,;:! ]|\\q?quad(?![a-z]))+|(?<!\\)(?:\s|~|\\[,;:!]|\\q?quad(?![a-z]))+$")
_QUOTED = re.compile(r"^(?:'([^'`\"]+)'|\"([^'`\"]+)\"|“([^“”]+)”|`([^'`\"]+)`|\*\*([^*]+)\*\*)$")
# `\text{Area} = 25\text{ cm}^2`, but not what is said of another quantity: `\text{twice the area}`
_NAMED = re.compile(
    r"^\\text\s*\{(?!(?i:[^{}]*\b(?:not|no|never|less|more|most|least|wrong|false|except|twice|double|triple|half|squared?|minus|negative)\b))"
    r"[A-Za-z ]+\}\s*=(?=[^=,]+$)"
)
_IN_BASE = re.compile(r"^([0-9A-Fa-f]+)\s*(?:\\text\s*\{\s*)?\(?(?:in\s+)?base[\s}-]*(\d{1,2}|[a-z]{3,7})\s*\)?\s*\}?$")
_NUMBER_GAP = re.compile(r"(?<=\d)(?:\{,\}|,\\!\s*|\\[,!;: ]|\\thinspace\s*)(?=\d{3}(?!\d))")


def clean(text: str) -> str:
    """An answer alone (no sentence around it) in math-verify's dialect."""
    text = _INVISIBLE.sub("", _plain_unicode(text))
    text = _unwrap(_outer(_FONT.sub(r"\1", _SPACING.sub("", text))))
    text = _plain_words(_european(_outer(text)))
    text = re.sub(r"\\(?:text)?color(?:box)?\s*\{[a-zA-Z]+\}", "", text)
    text = _NUMBER_GAP.sub("", text)
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?", text.strip()):
        text = text.replace(" ", "")
    text = (
        text.replace("{:}", ":").replace(r"\varnothing", r"\emptyset").replace(r"\degree", r"^\circ").replace(r"\mathrm{i}", "i")
    )
    text = re.sub(r"(?:\\[,; ]|\s)+(?=\^\s*\{?\s*\\circ|\\?%)", "", text)
    text = re.sub(r"\\text\s*\{\s*\\?\$\s*\}", r"\\$", text)
    text = re.sub(r"^(\\(?:text|textbf|mathrm)\s*\{[^{}]*?)[.,;]\s*\}$", r"\1}", text)
    text = re.sub(r"^((?:\\left)?[\[(][^,;()\[\]]+);([^,;()\[\]]+[\])])$", r"\1,\2", text)  # [1;4]
    text = text.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}").replace(r"\mathrm{e}", "e").replace(r"\dfrac", r"\frac")
    text = re.sub(r"\\(?:sfrac|nicefrac)(?=\s*\{)", r"\\frac", text).replace(r"\langle", "(").replace(r"\rangle", ")")
    text = re.sub(r"\\([dt]?)binom\s*(\d)\s*(\d)", r"\\\1binom{\2}{\3}", text)
    text = re.sub(r"\\operatorname\s*\{\s*(sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan)\s*\}", r"\\\1 ", text)
    text = re.sub(r"^([\[\]])([^,;()\[\]]+)[,;]([^,;()\[\]]+)([\[\]])$", _outward, text)
    text = text.replace(r"\log_e", r"\ln").replace(r"\log_{e}", r"\ln").replace(r"\tfrac", r"\frac").replace(r"\!", "")
    text = re.sub(r"(?:\\\$|\$|€|£|¥|₹|\\text\{\s*[€£¥₹]\s*\})\s*(?=[-+]?[\d.])", "", text)
    text = re.sub(r"(?<=\d)\s*(?:\\\$|[$€£¥₹¢])\s*$", "", text)
    text = re.sub(r"(?:\\\\|\\$|(?<!\\left)(?<!\\right)(?<!\.)\.(?!\.)|\\,|\\ |,|;|。)+\s*$", "", text.strip()).strip()
    return _mathematics(_LETTERS_AFTER_NUMBER.sub(_product, text))


def _plain_words(text: str) -> str:
    """Without the words and wrappings around a value that say nothing about it, and with those that do in their usual form."""
    text = _ONE_ROW.sub(r"\3", text).strip()
    text = _QUOTED.sub(lambda match: match[match.lastindex or 0], text)
    text = _NAMED.sub("", _IN_BASE.sub(r"\1_{\2}", text)).strip()
    while text.startswith("((") and text.endswith("))") and _one_pair(text) and _one_pair(text[1:-1]):
        text = text[1:-1]  # the grammar's time doubles with each pair
    if not re.search(r"\\[)\]]", text):  # the delimiter of a formula that lost its other half
        text = re.sub(r"^\\[(\[]", "", text)
    elif not re.search(r"\\[(\[]", text):
        text = re.sub(r"(?<!\\)\\[)\]]$", "", text)
    text = _BUILT.sub(r"\2", text)  # {x : x < 5} by its condition
    text = _CALLED.sub(r"\\text{\1}", text).removeprefix(r"\text{}").strip()
    text = without_code(_NEGATIVE.sub("-", text))
    text = _TEXT_NUMBER.sub(r"\1\\text{ \2}", text)
    text = _BARE_UNIT.sub(lambda match: rf"{match[1]}\text{{ {match[2]}}}" if is_unit(match[2].lower()) else match[0], text)
    text = _BARE_RATE.sub(r"\1\\text{ \2}", text)
    text = _CJK_COUNTER.sub("", _CJK_UNIT.sub(_unit_in_english, text))
    return re.sub(r"(?<=\d)\s*(?:\^\s*o|\^\s*\{o\}|\\deg)$", r"^\\circ", text)


def _european(text: str) -> str:
    """`€1.234,50` and `1.234.567` with a point before decimals and nothing before thousands."""
    money = _MONEY.match(text)
    if money and re.search(_CURRENCY, money[1] + money[4]):
        return f"{money[1]}{money[2].replace('.', '')}.{money[3]}{money[4]}"
    return _POINTED.sub(lambda match: match[1].replace(".", "") + (f".{match[2]}" if match[2] else ""), text)


def _one_pair(text: str) -> bool:
    """Whether the bracket at the start closes at the end."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position == len(text) - 1
    return False


def _unit_in_english(match: re.Match[str]) -> str:
    power = {"平方": "^2", "立方": "^3"}.get(match.group(1), "")
    return rf"\text{{ {_CJK_UNITS[match.group(2)]}}}{power}"


def _outward(match: re.Match[str]) -> str:
    """`]0,1[` and `[0,1[` with round brackets at the ends that are open; `[1,0]` stays what it is."""
    first, start, end, last = match.groups()
    return f"{'(' if first == ']' else '['}{start},{end}{')' if last == '[' else ']'}"


def _product(match: re.Match[str]) -> str:
    r"""`4ab` -> `4 \cdot a \cdot b`: math-verify takes letters at the end for a unit and reads 4. Known units and words stay."""
    letters = match.group()
    if is_unit(letters) or letters in ("am", "pm", "th", "st", "nd", "rd") or list(letters) != sorted(letters):
        return letters
    return "".join(rf" \cdot {letter}" for letter in letters)


def _plain_unicode(text: str) -> str:
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: "_{" + match.group().translate(_SUBSCRIPTS) + "}", text)
    text = re.sub(r"√\s*\(?(\d+(?:\.\d+)?|[a-z])\)?", r"\\sqrt{\1}", text)
    text = "".join(c if c.isascii() else _plain_character(c) for c in text)
    for character, replacement in _UNICODE.items():
        text = text.replace(character, replacement)
    return text


def _plain_character(character: str) -> str:
    r"""Decimal digits of every script, letters and signs that are full-width, small or in a mathematical alphabet, and `⅝`."""
    if character.isdecimal():
        return str(int(character))
    kind = unicodedata.decomposition(character).partition(" ")[0]
    if kind == "<fraction>":
        top, _, bottom = unicodedata.normalize("NFKC", character).partition("⁄")
        return rf"\frac{{{top}}}{{{bottom or 1}}}"
    if kind in ("<wide>", "<small>") or "\U0001d400" <= character <= "\U0001d7ff":
        return unicodedata.normalize("NFKC", character)
    return character


def _outer(text: str) -> str:
    """Without the delimiters of a formula that spans the whole text."""
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text[len(opening) : -len(closing)]
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing) and opening not in inner:
            return inner.strip()
    return text


def _unwrap(text: str) -> str:
    r"""`\underline{7}` -> `7`, `\textbf{(C)}\ 12` -> `(C) 12`, `{{7}}` -> `7`."""
    for wrapper in _WRAPPERS:
        text = re.sub(re.escape(wrapper) + r"\s*\{([^{}]*)\}", r"\1", text)
    previous = None
    while previous != text:
        previous = text
        match = re.fullmatch(r"\{(.*)\}", text, re.DOTALL)
        if match and _balanced(match.group(1)) and "," not in match.group(1):
            text = match.group(1).strip()
    return text


def _balanced(text: str) -> bool:
    depth = 0
    for token in re.findall(r"\\[{}\\]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0


def _mathematics(text: str) -> str:
    text = re.sub(r"Eq\((.*),\s*([^,()]+)\)", r"\1=\2", text).replace("**", "^")
    text = re.sub(r"(?<![\\a-zA-Z])(pi(?![a-zA-Z])|exp(?=\s*\())", r"\\\1 ", text)
    text = re.sub(r"(?<![\w\\.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", _scientific, text)
    text = re.sub(r"(?<=\d)\s*x\s*(?=10\s*\^)", r"\\times ", text)
    text = _GOES_ON.sub(lambda match: rf"{match[1]}\overline{{{match[2] or match[3]}}}", text)
    text = re.sub(r"(?<=\.)(\d*)\\dot\s*\{?(\d)\}?$", r"\1\\overline{\2}", text)
    text = re.sub(r"(?<![\d.])(\d*)\.(\d*)\\overline\s*\{?(\d+)\}?", _repeating, text)
    text = re.sub(r"\\sqrt\[(\d*[13579])\]\{-(\d+)\}", r"-\\sqrt[\1]{\2}", text)  # real roots
    text = re.sub(r"(?<=\d)i(?![a-zA-Z])", " i", text)
    text = re.sub(r"(?<![a-zA-Z\\])i\(", r"i \\cdot (", text)
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?", r"\\frac{\1 \\pi}{180}", text)
    chain = re.fullmatch(r"([^<>=]+)(>|\\geq?\b|\\gt\b)([^<>=]+)(>|\\geq?\b|\\gt\b)([^<>=]+)", text)
    if chain and "\\" not in chain.group(1) + chain.group(3) + chain.group(5):
        high, first, middle, second, low = chain.groups()
        turned = ["<" if sign in (">", r"\gt") else r"\le " for sign in (second, first)]
        text = low + turned[0] + middle + turned[1] + high
    return _mixed(text)


def _scientific(match: re.Match[str]) -> str:
    mantissa, exponent = match.group(1), int(match.group(2))
    power = f"10^{{{exponent}}}"
    return power if mantissa in ("1", "1.0") else rf"{mantissa}\times {power}"


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match.group(1) or "0", match.group(2), match.group(3)
    if len(whole + fixed + period) > 40:
        return match.group()
    shift = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), shift) + Fraction(int(period), shift * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _mixed(text: str) -> str:
    r"""`3\frac{1}{7}` and `3 1/7`, where they are the whole answer, a percent sign or unit apart, are mixed numbers."""
    match = _MIXED.match(text)
    if not match or not re.fullmatch(r"\s*(?:\\?%|\\text\{[^{}]*\}|\\mathrm\{[^{}]*\}|[a-z ]*)?\s*", text[match.end() :]):
        return text
    sign, whole, *parts = match.groups()
    numerator, denominator = (int(part) for part in parts if part)
    if denominator == 0:
        return text
    return rf"{sign}\frac{{{int(whole) * denominator + numerator}}}{{{denominator}}}" + text[match.end() :]
