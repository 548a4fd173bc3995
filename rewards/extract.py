r"""Where a model's answer stands in its output. Plain string scans, linear in the output, safe in the caller's process.

Policy, in order:
 1. Only the last `MAX_OUTPUT` characters count, and where a thinking block closes (`</think>`), only what follows it.
    A thinking block that never closes holds no answer.
 2. The last `\boxed{...}` with balanced braces. A last box that was cut off is no answer: what stood in an earlier box
    was given up by the model.
 3. With `unboxed_fallback`: the last `#### 72`, then the last "answer is 72" / "Answer: 72" / "A: 72", then the last
    characters of the output as a whole, in which math-verify looks for the last expression.

    >>> find_answer(r"... so \boxed{\frac{1}{2}}.")
    Answer(text='\\frac{1}{2}', kind='boxed')
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MAX_OUTPUT = 400_000  # characters scanned for a box, about 100K tokens
MAX_TAIL = 1_000  # characters handed to math-verify's own extraction, whose regular expressions backtrack
MAX_ANSWER = 4_000  # a longer answer is refused unread; published golds stay below 500

_BOX = re.compile(r"\\f?box(?:ed)?\s*(?=[{\s\w])")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_PHRASE = re.compile(
    r"(?:\banswers?\b[ \t]*(?:is|are|equals|=|:)|^[ \t*]*A:)[ \t*:]*([^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"(?:[.!?](?=\s|$)|\*\*|;\s|(?:,|\s)\s*(?:because|since|so|which|where|and not|not)\s).*$", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """`text` is an answer alone ("boxed", "marked"), or the end of an output in which one may stand ("tail")."""

    text: str
    kind: Literal["boxed", "marked", "tail"]


def find_answer(output: str, *, unboxed_fallback: bool = True) -> Answer | None:
    """The answer in a whole model output, or None where there is none."""
    text = output[-MAX_OUTPUT:]
    if "</think>" in text:
        text = text.rsplit("</think>", 1)[1]
    elif "<think>" in text:
        return None
    found, content = last_box(text)
    if found:
        return None if content is None or not content.strip() else Answer(content, "boxed")
    if not unboxed_fallback:
        return None
    for pattern in (_HASHES, _PHRASE):
        marked = _last_marked(pattern, text[-MAX_OUTPUT // 20 :])
        if marked is not None:
            return Answer(marked, "marked")
    tail = text[-MAX_TAIL:].strip()
    return Answer(tail, "tail") if tail else None


def last_box(text: str) -> tuple[bool, str | None]:
    r"""(a box was opened, content of the last one or None where it never closes).

    Boxes inside a box belong to it: the last *outermost* box counts. `\boxed 7` without braces reads one word.
    """
    matches = list(_BOX.finditer(text))
    if not matches:
        return False, None
    start, content = 0, None
    for match in matches:
        if match.start() < start:
            continue  # inside the box before it
        end = _closing_brace(text, match.end()) if text[match.end() : match.end() + 1] == "{" else None
        if text[match.end() : match.end() + 1] != "{":
            word = re.match(r"\s*([^\s$\\,.;]+)", text[match.end() :])
            content = word.group(1) if word else None
            start = match.end()
        elif end is None:
            # unbalanced to the end: later boxes inside it may still close, an earlier one is void
            content, start = None, match.end()
        else:
            content, start = text[match.end() + 1 : end], end
    return True, content


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`, or None."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        token = match.group()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


def _last_marked(pattern: re.Pattern[str], text: str) -> str | None:
    """What the last match of `pattern` marks, cut at the end of its sentence."""
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    content = _SENTENCE_END.sub("", matches[-1].group(1).strip().strip("*").strip()).strip()
    return content or None


def completion_text(completion: object) -> str:
    """The text of a completion as TRL passes it: a string, or a conversation whose assistant turns are joined.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, (list, tuple)) and all(isinstance(turn, dict) for turn in completion):
        return "\n".join(_content_text(turn.get("content")) for turn in completion if turn.get("role", "assistant") == "assistant")
    raise TypeError(f"a completion is a string or a list of {{'role', 'content'}}, got {type(completion).__name__}")


def _content_text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):  # content blocks, as in {"type": "text", "text": ...}
        return "".join(block.get("text", "") for block in content if isinstance(block, dict))
    raise TypeError(f"the content of a turn is a string or a list of blocks, got {type(content).__name__}")


def gold_text(gold: object) -> str | None:
    """The gold answer as text: the last box of a worked solution, what follows `####`, or the whole; None where empty."""
    if gold is None or isinstance(gold, bool):
        return None
    if isinstance(gold, (int, float)):
        return repr(gold) if isinstance(gold, float) else str(gold)
    if not isinstance(gold, str):
        return None
    found, content = last_box(gold)
    if found:
        gold = content or ""
    elif "####" in gold:
        gold = gold.rsplit("####", 1)[1]
    return gold.strip() or None
