r"""Units of answers: told apart where both sides name one that is known, ignored otherwise. Nothing is converted.

A unit that is missing or unknown is no mistake (`12`, `12\text{ apples}`), and `9\text{ m}^2` is `9` square meters.
"""

from __future__ import annotations

import re

# One row a unit: the name that stands for it, then the other spellings; plurals and dots are taken off before the look-up.
_ROWS = """
mm millimeter millimetre
cm centimeter centimetre
dm decimeter decimetre
m meter metre
km kilometer kilometre
in inch inches
ft foot feet
yd yard
mi mile
mg milligram
g gram
kg kilogram
t tonne
lb pound gbp
oz ounce
s sec second
min minute
h hr hour
day
week
month
year yr
ml milliliter millilitre
l liter litre
n newton
j joule
w watt
kw kilowatt
hz hertz
khz kilohertz
pa pascal
v volt
kelvin k
celsius c
fahrenheit f
acre
hectare ha
gallon gal
quart qt
pint pt
cup
decade
century centuries
dollar usd
cent
penny pennies
nickel
dime
quarter
euro eur
yen jpy
rupee inr
pct percent
degree deg
radian rad
"""
_NAMES = {spelling: row.split()[0] for row in _ROWS.strip().splitlines() for spelling in row.split()}
_COMPOUND = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
_UNIT = re.compile(
    r"(?<=[\d.})a-z!])(?:\s|\\[,; !]|~)*"
    r"(?:\\(?:text|textnormal|textrm|mathrm|mbox|operatorname)\s*\{(?P<text>[^{}]*)\}|(?<=[\s,;])(?P<bare>[A-Za-z][A-Za-z/ ]*))"
    r"\s*(?:\^\s*\{?\s*(?P<power>\d)\s*\}?)?\s*\.?\s*$"
)
# 20 degrees, and of what: a scale of temperature, or a point of the compass
_DEGREE = re.compile(
    r"\^\s*\{?\s*\\circ\s*\}?\s*(?:(?:\\(?:text|textrm|mathrm)\s*\{\s*)?(?P<of>[CFNSEW]|[Nn]orth|[Ss]outh|[Ee]ast|[Ww]est)\s*\}?)?\s*$"
)
_PRIME = re.compile(r"\d\s*(?:\^\s*)?\{?(['′″]{1,2}|(?:\\prime\s*){1,2})(?!\d)")
_SCALES = {"c": "celsius", "f": "fahrenheit", "n": "north", "s": "south", "e": "east", "w": "west"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


_CODES = {"usd": "dollar", "eur": "euro", "gbp": "lb", "jpy": "yen", "inr": "rupee"}
_CODE_BEFORE = re.compile(rf"^\s*(?:\\(?:text|mathrm)\s*\{{\s*)?({'|'.join(_CODES)})\s*\}}?\s*(?=[\d.])", re.IGNORECASE)
_SIGNS = {"€": "euro", "¥": "yen", "₹": "rupee", "¢": "cent", "£": "lb"}  # £: by its word, "pounds", which says both


def currency_of(text: str) -> str | None:
    r"""The currency sign of an answer, as the unit it stands for; a dollar sign that delimits a formula is none."""
    for sign, name in _SIGNS.items():
        if sign in text:
            return name
    if code := _CODE_BEFORE.match(text):
        return _CODES[code.group(1).lower()]
    if r"\$" in text or (text.count("$") == 1 and re.match(r"\s*[-+]?\$\s*[\d.]", text)):
        return "dollar"
    return None


def without_code(text: str) -> str:
    """An amount without the currency's code before it: `USD 5` -> `5`."""
    return _CODE_BEFORE.sub("", text)


def compound(text: str) -> bool:
    r"""Whether a second number with a known unit follows the first: `5\text{ feet }6\text{ inches}` is not 5."""
    said = re.sub(r"\\(?:text|textrm|mathrm|mbox)\b|[{}~]|\\[,; ]", " ", text).lower()
    match = re.search(r"\d\s*([a-z]+)\s*(?:,|and)?\s*\d+(?:\.\d+)?\s*([a-z]+)", said)
    return match is not None and is_unit(match.group(1)) and is_unit(match.group(2))


def unit_of(text: str) -> str | None:
    r"""The known unit at the end of an answer in one spelling, `cm^2`, `km/h`; None where there is none that is known."""
    if degree := _DEGREE.search(text):
        return _SCALES[degree["of"][0].lower()] if degree["of"] else "degree"
    match = _UNIT.search(text.strip())
    if not match:
        return None
    said = " ".join((match.group("text") or match.group("bare") or "").lower().replace("\\", " ").split())
    power = int(match.group("power") or 1)
    exponent = re.fullmatch(r"(.*?)\s*\^\s*(\d)", said)
    if exponent:
        said, power = exponent.group(1), int(exponent.group(2))
    words = said.split()
    if words and words[0] in _POWERS:
        power, said = _POWERS[words[0]], " ".join(words[1:])
    said = _COMPOUND.get(said, said)
    names = [_name(part) for part in re.split(r"\s*/\s*|\s+per\s+", said)]
    if not names or any(name is None for name in names):
        return None
    return "/".join(str(name) for name in names) + (f"^{power}" if power != 1 else "")


def without_unit(text: str) -> str:
    """Without the known unit at its end."""
    return _UNIT.sub("", text.strip()) if unit_of(text) else text


def _name(said: str) -> str | None:
    said = said.strip(" .")
    return _NAMES.get(said) or (_NAMES.get(said[:-1]) if said.endswith("s") and len(said) > 2 else None)


def is_unit(said: str) -> bool:
    return said in _COMPOUND or _name(said) is not None


def clash(gold: str, answer: str) -> bool:
    """Whether both name a known unit, and not the same."""
    first, second = unit_of(gold), unit_of(answer)
    # minutes or seconds, of arc or not, feet or inches
    if (prime := _PRIME.search(answer)) and not _PRIME.search(gold):
        return first not in (("in", "s") if len(prime[1]) > 1 else ("ft", "min"))
    return different(first, second)


def different(first: str | None, second: str | None) -> bool:
    """Whether two names of units are both known and not the same; plain degrees may be of any scale or direction."""
    if first is None or second is None or first == second:
        return False
    return not ("degree" in (first, second) and (first in _SCALES.values() or second in _SCALES.values()))
