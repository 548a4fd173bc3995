r"""The last `\boxed{...}` of an output, and what its sentence says about it. Plain string scans, linear in the output.

A box with balanced braces is an answer; a last box that was cut off is none, since what stood in an earlier one was given up by
the model. Boxes that only a connective, an alternative or the label of a list parts are one answer, however many they are:
neither alone may pass. What takes a box back ("not \boxed{4}", "\boxed{4} is wrong") or makes it part of something larger
(`\sqrt{\boxed{4}}`, `\boxed{4}^2`, `2\boxed{4}`, `(\boxed{4}, 5)`) counts, since a reader reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from posttrain.rewards.policy import DEFAULT, AnswerPolicy
from posttrain.rewards.units import is_unit

BOX = re.compile(r"\\f?box(?:ed)?\s*(?=[{\s\w])")
_WORD = re.compile(r"\s*([^\s$\\,.;]+)")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_MAYBE = r"(?:perhaps|maybe|possibly|even|also|rather|else)"
# Possessive, with what begins like another alternative before it: a gap of sixty dots or bullets is read once.
_CONNECTIVE = re.compile(
    r"\s*(?:[a-z]+\s+(?=and\b))?(?:\n[ \t]*(?:[-*•]|\d+[.)])[ \t]|[a-zA-Z](?:_\{?\w\}?)?\s*="
    r"|\s|\$|\\[()\[\],;:!\\ ]|\\q?quad|[,;/|&()\[\]~→⇒、，；•·*_]|[-=]>|\.{2,}+|…|</?(?:b|i|u|em|strong|br|p|li|td|tr|div|span)>"
    r"|\\(?:to|rightarrow|Rightarrow|vee|lor|wedge|land|[lc]?dots)\b"
    rf"|\\text\s*\{{\s*(?:and|or)(?:\s+{_MAYBE})*\s*\}}"
    r"|和|或者?|\b(?:and|or|xor|to|und|oder|ou?|et|y|e|и|или|either|versus|vs\.?|alternatively|alternately|plus|as\s+well\s+as"
    rf"|(?:together|along)\s+with|{_MAYBE})\b)*+",
)
# "or, if I am wrong, \boxed{4}" and "\boxed{3} if it is even, \boxed{4} if odd" name both, whatever else they say.
_ALTERNATIVE = re.compile(
    r"(?:[\s$)\],;(?]|\\[)\],; ]|\\q?quad|\\text\s*\{)*\b(?:or|if|when|unless|assuming|depending\s+on|being\s+my|otherwise"
    r"|alternatively|alternately"
    r"|failing\s+(?:that|which)|fall-?back|back-?up|second\s+(?:guess|choice|answer|option)"
    r"|another\s+(?:possible|possibility|answer|option|choice|solution|value))\b[^.!?\n]*"
)
_LABEL = re.compile(
    r"[\s$.,;)\]]*(?:\(?[a-hA-H1-9]\)|\(?(?:i{1,3}|iv|v)\)|\[\d\]|[A-H]:|\([^()\n]{1,40}\)"
    r"|(?:Case|Option|Answer|Solution|Possibility|Guess|Attempt|Candidate)\s*\(?(?:\d+|[A-Z]|one|two|three|four|five)\)?"
    r"\s*[:.)-]?)[\s$(]*"
)
_RELATION = re.compile(
    r"[\s$]*(?:\\(?:pm|mp|cup|cap|cdot|times|div|lt|gt|leq?|geq?)(?![A-Za-z])|[<>≤≥±]|--?)\s*(?:[a-zA-Z]\s*(?:\\(?:lt|gt|leq?|geq?)(?![A-Za-z])|[<>≤≥]))?[\s$]*"
)
_EQUALS = re.compile(r"[\s$]*=[\s$]*")
_OPERATOR_BEFORE = re.compile(r"(?:[-+*/^]|\\(?:cdot|times|div))\s*$")
_MAX_GAP, _MAX_PARTS = 60, 10

_NEAR = 90  # characters before and behind a box that may speak about it; the patterns below take quadratic time
_QUOTED = r"[\s$*(\\]*(?:(?:text(?:bf|it)?|mathbf|bm|boldsymbol|emph|underline)\s*\{\s*)?$"
_DENIED = re.compile(
    rf"(?:\b(?:[Nn]ot|never|cannot)|n['’]t)(?:\s+(?:quite|exactly|really|actually))?(?:\s+(?:be|equal))?\s+{_QUOTED}"
    rf"|\b(?:wrong|incorrect)\s+(?:answer|value|result)\s+is\s+{_QUOTED}"
    r"|\bnot\s+(?:the\s+case|true|so|possible|correct)\s+that\b[^.!?\n]*$"
    rf"|(?:不是|不等于|不为|\b(?:no\s+es|n['’]est\s+pas|nicht|не)\s)\s*{_QUOTED}"
    rf"|\bbetween\s[^.!?\n]*\sand\s+{_QUOTED}"
    rf"|\b(?:[Aa]ny(?:thing|\s+(?:number|value))?|[Ee]very(?:thing)?|[Aa]ll)\s+(?:but|except)\s+(?:for\s+)?{_QUOTED}"
    r"|(?:\\neq?|\\not\s*=?|\\lnot|\\neg|≠|!=|¬|\\text\s*\{[^{}]*\bnot\s*\})\s*$"
    r"|(?:\\(?:[bx]?cancel|sout|st|[hv]?phantom)\s*\{|~~|<(?:del|s|strike)>)[\s$*]*$"  # struck out, or not printed
)
_CLOSED = r"[\s$*)\\\]]*"
_WRONG = r"(?:wrong|incorrect|false|impossible|invalid|rejected|not\s+(?:the|right|correct)\b)"
_DENIED_AFTER = re.compile(
    rf"{_CLOSED}(?:(?:is|was|would\s+be|seems|must\s+be)\s+{_WRONG}"
    r"|(?:can(?:not|\s+not|['’]t)|could(?:n['’]t|\s+not))\s+be\s+(?:right|correct|the)\b"
    r"|(?:is|was)n['’]t\s+(?:right|correct|the)\b|,?\s*or\s+(?:maybe\s+|perhaps\s+)?not\b)"
    rf"|{_CLOSED}\?+\s*(?:No|Nope|Wrong)\b"
    rf"|{_CLOSED}[.,;!]?\s*(?:Correction|Edit|Erratum|Update|Scratch\s+that)\b\s*[:,.;-]|{_CLOSED},\s*no\s*[:,.;]"
    rf"|{_CLOSED}[.,;!]?\s*(?:(?:[Nn]o|[Ww]ait|[Hh]mm|[Aa]ctually),?\s+)?(?:(?:[Bb]ut|(?:al)?though|[Hh]owever,?)\s+)?(?:[Tt]hat|[Tt]his|[Ii]t)(?:\s+is|['’]s|\s+was)\s+{_WRONG}"
)
_WITHIN = re.compile(
    r"(?:\\sqrt\s*(?:\[[^\[\]]*\])?|\\[dtc]?(?:frac|binom)\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}\s*)?|[\^_])\s*\{\s*$"
    r"|\\(?:log(?:_\s*(?:\w|\{[^{}]*\}))?|ln|exp|sin|cos|tan|cot|sec|csc)\s*[({]?\s*$"
)
_GOES_ON = re.compile(
    r"\s*\^\s*\{?\s*[-+]?\d(?!\s*\}?\s*\\text)|\s*(?:[-+*/]|\\(?:cdot|times|div)\b)\s*\d[\d.\s+*/()^{}-]*(?=\$|\\[)\]]|\n|[.,]?\s*$)"
)
# The last term of a formula: `$10-\boxed{4}$`, while `$3+\boxed{4}=7$` fills a blank and "Problem 20 - \boxed{4}" is a label.
_LAST_TERM = re.compile(r"(?:\$|\\[(\[])[^$\n]*[\w)}]\s*(?:[-+*/]|\\(?:cdot|times|div)(?![A-Za-z]))\s*$")
_FORMULA_ENDS = re.compile(r"\s*(?:\$|\\[)\]])")
# What touches a box is part of its value: digits on either side, and in a formula that ends with it a factor.
_IN_FORMULA = r"(?:\$|\\[(\[])[^$\n]*"
_DIGITS_BEFORE = re.compile(r"(?<![A-Za-z])\d\.?\Z")  # `$` would look past the end of a line
_FACTOR_BEFORE = re.compile(
    rf"{_IN_FORMULA}(?:(?<![A-Za-z\\])[a-zA-Z]|\d|\\(?:pi|alpha|beta|theta)|(?<!\\)\)|\\sqrt\s*\{{[^{{}}]*\}}"
    r"|\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\})\s*$"
)
_ENDS_WITH_BOX = re.compile(r"\s*(?:\\text\s*\{[^{}]*\}|[.,;])?\s*(?:\$|\\[)\]])")
_TOUCHING = re.compile(
    r"\.?\d|,\d{3}(?!\d)|\{\s*\d|\s*\\text\s*\{\s*(?:st|nd|rd|th)\b"
    r"|(?:(?P<letter>[a-z])(?![a-zA-Z])|\s*\\(?:pi|sqrt|[dt]?frac)(?![a-z]))[-+*/^\w\\{}(). ]*(?:\$|\\[)\]])"
)
_SCALE_AFTER = re.compile(r"\$?\s*(?:\\text\s*\{\s*|\s)(hundred|thousand|million|billion|trillion)s?\b")
# `(\boxed{4}, 5)`: one coordinate, element or end of several.
_FIRST_OF_SEVERAL = re.compile(rf"{_IN_FORMULA}(?:\(|(?<!\\)\[|\\\{{)\s*$")
_OTHERS_AFTER = re.compile(r"\s*(?:,[-\w.\\{}/^ ]+)+(?:\}|\)|\])")
_LAST_OF_SEVERAL = re.compile(rf"{_IN_FORMULA}(?:\(|(?<!\\)\[|\\\{{)[-\w.,\\{{}}/^ ]+,\s*$")
_FACTORIAL = re.compile(r"!+\s*(?:\$|\\[)\]])")
_BASE = re.compile(r"\s*_\s*(?:\{\s*(\d{1,2})\s*\}|(\d{1,2}))(?=\s*(?:\$|\\[)\]]|[.,]|$))")
_MINUS = re.compile(r"(?:^|[\s$=(\[{:,~])[-−]\Z")
_VALUE = r"(-?(?:\d[\d,.]*\d|\d)|-?\\[dt]?frac\s*\{\d+\}\s*\{\d+\}|-?\d*\\sqrt\s*\{\d+\})"
_OR = rf"(?:[Oo]r\s+(?:{_MAYBE}\s+)?|\\text\s*\{{\s*or\s*\}}\s*)"
_OR_AFTER = re.compile(rf"{_CLOSED}[,.?]?\s*\(?\s*{_OR}[\s$]*{_VALUE}\s*\$?\s*(?=[.,;!?)](?:\s|$)|$|\n)")
_OR_BEFORE = re.compile(rf"(?:^|[\s$(,=]){_VALUE}\s*\$?,?\s+or\s+(?:{_MAYBE}\s+)?[\s$]*$")


@dataclass(frozen=True)
class Box:
    """`text[start:end]` is the box; `content` is None where it never closes."""

    start: int
    end: int
    content: str | None


def last_box(text: str, policy: AnswerPolicy = DEFAULT) -> tuple[bool, str | None]:
    r"""(a box was opened, the answer that the last one gives or None where it gives none).

    Boxes inside a box belong to it: the last *outermost* box counts. Boxes that are one answer (`\boxed{1} and \boxed{-2}`) are
    joined by commas. `\boxed 7` without braces reads one word.
    """
    boxes = _outermost_boxes(text)
    if not boxes:
        return False, None
    if policy.open_box == "previous":
        boxes = [box for box in boxes if box.content is not None] or boxes[-1:]
    last = boxes[-1]
    if last.content is None or _taken_back(text, last) or (len(boxes) > 1 and _cut_off(text, boxes[-2], last)):
        return True, None
    content = _signed(text, last, last.content)
    if policy.boxes == "last":
        return True, content
    if policy.boxes == "same":
        said = {"".join(box.content.split()) for box in boxes if box.content is not None and box.content.strip()}
        return True, content if len(said) == 1 else None
    return True, _joined(text, boxes, content)


def _taken_back(text: str, box: Box) -> bool:
    """Whether the words or the formula around a box say that its content is not the answer."""
    before, after = text[max(0, box.start - _NEAR) : box.start], text[box.end : box.end + _NEAR]
    if (_FORMULA_ENDS.match(after) and _LAST_TERM.search(before)) or _part_of_more(before, after):
        return True
    return any(pattern.search(before) for pattern in (_DENIED, _WITHIN)) or any(
        pattern.match(after) for pattern in (_DENIED_AFTER, _GOES_ON, _FACTORIAL)
    )


def _part_of_more(before: str, after: str) -> bool:
    r"""Whether a box is a factor, some of the digits, or an element of several: `2\boxed{4}`, `\boxed{4}.5`, `(\boxed{4}, 5)`.

    Not where the formula goes on to an equals sign: there the box fills a blank. A letter that is a unit is one.
    """
    if _DIGITS_BEFORE.search(before) and not re.match(r"[^$\n]*=", after):
        return True
    if _FACTOR_BEFORE.search(before) and _ENDS_WITH_BOX.match(after):
        return True
    touching = _TOUCHING.match(after)
    if touching and not (touching["letter"] and is_unit(touching["letter"])):
        return True
    if _FIRST_OF_SEVERAL.search(before):
        return _OTHERS_AFTER.match(after) is not None
    return _LAST_OF_SEVERAL.search(before) is not None and re.match(r"\s*(?:\\right\s*)?(?:\\?\}|\)|\])", after) is not None


def _cut_off(text: str, before: Box, box: Box) -> bool:
    r"""Whether the box before never closes and `box` stands in the same formula: `\boxed{x = \boxed{4}` was cut off."""
    return before.content is None and not re.search(r"[$\n]|\\[)\]]|[.!?]\s", text[before.end : box.start])


def _signed(text: str, box: Box, content: str) -> str:
    r"""`-\boxed{4}` says -4; a dash with a space is a list's. `\boxed{204}_6` says 204_6, and `\boxed{7}` million 7 million."""
    if (scale := _SCALE_AFTER.match(text, box.end)) and content.strip()[-1:].isdecimal():
        content = rf"{content.strip()}\text{{ {scale.group(1)}}}"
    if (base := _BASE.match(text, box.end)) and re.fullmatch(r"\d[\dA-F]*", content.strip()):
        content = f"{content.strip()}_{{{base.group(1) or base.group(2)}}}"
    if not _MINUS.search(text[max(0, box.start - 2) : box.start]):
        return content
    return f"-{content}" if re.fullmatch(r"[\d.,]+(?:_\{\d+\})?", content.strip()) else f"-({content})"


def _joined(text: str, boxes: list[Box], content: str) -> str | None:
    """The last box with those that are one answer with it; None where they only count values up."""
    last = boxes[-1]
    parts = [content]
    if other := _OR_AFTER.match(text[last.end : last.end + _NEAR]):
        parts.insert(0, other.group(1))  # the parts are put together from the end
    start = last.start
    for box in reversed(boxes[:-1]):
        if box.content is None or not _parts_only(text, box, start):
            break
        parts.append(box.content)
        start = box.start
    if other := _OR_BEFORE.search(text[max(0, start - _NEAR) : start]):
        parts.append(other.group(1))
    said = list(dict.fromkeys(part.strip() for part in reversed(parts)))
    if len(said) > _MAX_PARTS:
        return None
    return ", ".join(said) if len(said) > 1 else content


def _parts_only(text: str, box: Box, start: int) -> bool:
    """Whether what stands between a box and the next one, at `start`, makes them one answer."""
    gap = text[box.end : start]
    if len(gap) > _MAX_GAP or "\n\n" in gap:
        return False
    if _EQUALS.fullmatch(gap):  # `\boxed{3} = \boxed{4}` claims both; in `\boxed{3} + \boxed{1} = \boxed{4}` the left is a sum
        return not _OPERATOR_BEFORE.search(text[max(0, box.start - 10) : box.start])
    return any(pattern.fullmatch(gap) for pattern in (_CONNECTIVE, _ALTERNATIVE, _LABEL, _RELATION))


def _outermost_boxes(text: str) -> list[Box]:
    """Every box that is not inside another, in order."""
    boxes: list[Box] = []
    end = 0
    closing: dict[int, int] | None = None
    for match in BOX.finditer(text):
        if match.start() < end:
            continue  # inside the box before it
        content: str | None = None
        brace = end = match.end()
        if text[brace : brace + 1] != "{":
            if word := _WORD.match(text, brace):
                content, end = word.group(1), word.end()
        else:
            closing = _brace_pairs(text, brace) if closing is None else closing
            if brace in closing:
                content, end = text[brace + 1 : closing[brace]], closing[brace] + 1
        boxes.append(Box(match.start(), end, content))
    return boxes


def _brace_pairs(text: str, start: int) -> dict[int, int]:
    """Opening to closing position of every balanced pair from `start` on, in one pass however many boxes stay open."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text, start):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs
