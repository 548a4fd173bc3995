r"""Where a model's answer stands in its output. Plain string scans, linear in the output, safe in the caller's process.

With the default policy (`posttrain.rewards.policy` has the others), in order:
 1. Only the last `MAX_OUTPUT` characters count, and where a thinking block closes (`</think>`), only what follows it.
    A thinking block that never closes holds no answer, nor does a second one.
 2. The last `\boxed{...}`, with what its sentence says about it (`posttrain.rewards.boxes`).
 3. With `unboxed_fallback`: "The final answer is 7. I hope it is correct." after the last box (the Minerva prompt's template
    ends every answer so, and its outputs box steps on the way), or "Actually, the answer is 8.", which takes the box back
    without the fallback too. Without any box, the last `<answer>7</answer>`, else the last `#### 7`, else the last
    "answer is 7" / "Answer: 7" / "A: 7", else the end of the output as a whole, in which math-verify looks for the last
    expression.

    >>> find_answer(r"... so \boxed{\frac{1}{2}}.")
    Answer(text='\\frac{1}{2}', kind='boxed')
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from posttrain.rewards.boxes import BOX, last_box
from posttrain.rewards.policy import DEFAULT, AnswerPolicy

MAX_OUTPUT = 400_000  # characters scanned for a box, about 100K tokens
MAX_TAIL = 1_000  # characters handed to math-verify's own extraction, whose regular expressions backtrack
_MAX_MARKED = MAX_OUTPUT // 20  # characters searched for the words around an answer
MAX_ANSWER = 4_000  # a longer answer is refused unread; published golds stay below 500

# Models that were not trained on the usual tag write the others.
_THINKING_BEGINS, _THINKING_ENDS = (
    re.compile(rf"<{end}(?:think|thinking|reasoning|thought)>", re.IGNORECASE) for end in ("", "/")
)
_MARKERS = (  # what follows on the line is the answer; the first kind that occurs decides, and its last occurrence counts
    re.compile(r"####:?[ \t]*"),
    re.compile(
        r"(?:\banswers?\b[ \t]*(?:is|are|(?:could|may|might|must|should|would|will) be|equals|=|:)"
        r"|^[ \t*]*A:|答案(?:是|为|：|:))[ \t*:：]*",
        re.IGNORECASE | re.MULTILINE,
    ),
)
_MIN_ECHO = 20  # characters; a shorter prompt may stand in an answer for good reason
_NEXT_QUESTION = re.compile(r"\n\s*(?:Question|Problem|Q|Human|User|Exercise)\s*\d*\s*:|<\|im_start\|>\s*user|<\|user\|>")
_MINERVA = re.compile(r"[Ff]inal answer is:?[ \t]*([^\n]{1,400}?)\.?[ \t]*I hope it is correct")
# "Actually, the answer is 43." after the last box takes the box back.
_CORRECTED = re.compile(
    r"\b(?:[Aa]ctually|[Ww]ait|[Hh]old on|[Ss]orry|[Oo]ops|[Cc]orrection|[Oo]n second thought|[Nn]o(?=[,.!]))\b[^\n]{0,120}?"
    r"\b(?:(?:answer|result|value|solution)\s*(?:is|are|=|:|should\s+(?:be|have\s+been)|must\s+be|equals)|[Ii]t\s+should\s+(?:be|have\s+been))"
    r"(?:\s+(?:really|actually|in fact))?[\s:*]*(?=\$?(?:\\\()?\s*-?(?:\d|\\(?:[dt]?frac|sqrt|pi)))([^\n]{1,400})"
)
_QUESTIONED = re.compile(r"[^.!?]*\?+\s*(?:[Nn]o|[Nn]ope|[Ww]rong|[Nn]ot)\b")
_SENTENCE_END = re.compile(
    r"(?:[.!?](?=\s|$)(?!\s+(?:[Oo]r|[Mm]aybe|[Pp]erhaps)\b)|\*\*|<\||I hope it is|;\s(?![\s$]*-?\d)"
    r"|(?:,|\s)\s*(?:because|since|so|which|where|and not|not|in total)\b).*$",
    re.DOTALL,
)


@dataclass(frozen=True)
class Answer:
    """`text` is an answer alone ("boxed", "marked"), or the end of an output in which one may stand ("tail")."""

    text: str
    kind: Literal["boxed", "marked", "tail"]


def find_answer(output: str, *, policy: AnswerPolicy = DEFAULT, prompt: str | None = None) -> Answer | None:
    """The answer in a whole model output, or None where there is none; `prompt` is looked for where an echo of it is cut."""
    text = output[-MAX_OUTPUT:]
    if policy.prompt_echo == "cut" and prompt and len(prompt.strip()) >= _MIN_ECHO:
        text = text.replace(prompt.strip(), " ")
    read = _after_thinking(text, policy)
    if read is None:
        return None
    text = _first_answer(read) if policy.run_on == "cut" else read
    if policy.answer_tag in ("prefer", "require"):
        tagged = _tagged(text)
        if tagged is not None:
            return _within_tag(tagged, policy)
        if policy.answer_tag == "require":
            return None
    found, content = last_box(text, policy)
    if found and policy.unboxed_fallback and (template := _MINERVA.search(text, text.rindex("box"))):
        return Answer(template.group(1).replace('\\"', "").strip(' "'), "marked")
    if found and (corrected := _CORRECTED.search(text[text.rindex("box") :][-_MAX_MARKED:])):
        return Answer(_SENTENCE_END.sub("", corrected.group(1)).strip(" *"), "marked") if policy.unboxed_fallback else None
    if found:
        return None if content is None or not content.strip() else Answer(content, "boxed")
    if not policy.unboxed_fallback:
        return None
    tagged = _tagged(text) if policy.answer_tag != "ignore" else None
    for marked in (tagged, *(_last_marked(marker, text[-_MAX_MARKED:]) for marker in _MARKERS)):
        if marked is not None:
            return Answer(marked, "marked") if marked else None
    tail = text[-MAX_TAIL:].strip()
    return Answer(tail, "tail") if tail else None


def _after_thinking(text: str, policy: AnswerPolicy) -> str | None:
    """What follows the thinking; None where a block is open at the end, or where one is required and none was closed."""
    if policy.thinking == "keep":
        return text
    *before, rest = _THINKING_ENDS.split(text)
    if _THINKING_BEGINS.search(rest) or (policy.thinking == "require" and not before):
        return None
    return rest


def _first_answer(text: str) -> str:
    """Up to the next question that a base model asks itself after its first box or marked answer."""
    for match in _NEXT_QUESTION.finditer(text):
        before = text[: match.start()]
        if BOX.search(before) or any(marker.search(before) for marker in _MARKERS):
            return before
    return text


def _within_tag(tagged: str, policy: AnswerPolicy) -> Answer | None:
    found, content = last_box(tagged, policy)
    if found:
        return None if content is None or not content.strip() else Answer(content, "boxed")
    return Answer(tagged, "marked")


def _tagged(text: str) -> str | None:
    """What the last `<answer>...</answer>` holds."""
    start = text.rfind("<answer>")
    return None if start < 0 else text[start + len("<answer>") :].split("</answer>", 1)[0].strip() or None


def _last_marked(marker: re.Pattern[str], text: str) -> str | None:
    """What follows the last match of `marker` on its line, or on the next where nothing does, cut at the sentence's end."""
    matches = list(marker.finditer(text))
    if not matches:
        return None
    line = text[matches[-1].end() :].lstrip().split("\n", 1)[0]
    if asked := _QUESTIONED.match(line):  # "Answer: 4? No, 5": what was asked about is no answer
        return line[asked.end() :].strip(" \t,:;*\"'") or ""
    return _SENTENCE_END.sub("", line).strip(" \t*\"'") or None


def completion_text(completion: object) -> str:
    """The text of a completion as TRL passes it: a string, or a conversation whose assistant turns are joined.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, (list, tuple)) and all(isinstance(turn, dict) for turn in completion):
        return "\n".join(
            _content_text(turn.get("content")) for turn in completion if turn.get("role", "assistant") == "assistant"
        )
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
    """The gold answer as text: the last box of a worked solution, what follows `####`, or the whole; None where empty, and for
    NaN, by which tables say that a number is missing."""
    if gold is None or isinstance(gold, bool) or gold != gold:
        return None
    if isinstance(gold, float):
        return repr(gold)
    if isinstance(gold, int):
        return format(Decimal(gold), "f")  # str refuses more than 4,300 digits
    if not isinstance(gold, str):
        return None
    found, content = last_box(gold)
    if found:
        gold = content or ""
    elif "####" in gold:
        gold = gold.rsplit("####", 1)[1]
    return gold.strip() or None
