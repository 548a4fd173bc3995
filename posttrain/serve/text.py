"""From tokens to text: piece by piece for streams, at once for whole answers, with the same result.

A token may hold half a character, and a stop string may begin in one token and end in another: what could still change or turn
out to be the beginning of a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.types import FinishReason

_BROKEN = "\ufffd"  # what decoders put for bytes that are not a whole character


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text without special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def token_text(tokenizer: Any, token: int) -> str:
    """A lone token's text; special tokens by their names."""
    return str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def final_text(tokenizer: Any, ids: Sequence[int], stop: Sequence[str], finish_reason: FinishReason) -> str:
    """Text of a finished completion, up to the stop string that ended it: the engine keeps the tokens that made it up."""
    text = decode(tokenizer, ids)
    if finish_reason != "stop" or not stop:
        return text
    # It ends in the last token: what looks like one before that did not stop the engine (a special token stood inside).
    known = len(decode(tokenizer, ids[:-1]).rstrip(_BROKEN))
    found = [place for given in stop if (place := text.find(given, max(0, known - len(given) + 1))) >= 0]
    return text[: min(found)] if found else text


class TextStream:
    """The text of one completion while it grows.

    Attributes:
        text: what is known of it, held-back characters included.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.text = ""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._sent = 0
        # Decoding begins a piece early, for decoders treat the first token of a text differently (a leading space).
        self._ids: list[int] = []
        self._begin = self._read = 0

    def feed(self, token: int) -> str:
        """What can be sent after one more token, which may be nothing."""
        self._ids.append(token)
        before = decode(self._tokenizer, self._ids[self._begin : self._read])
        now = decode(self._tokenizer, self._ids[self._begin :])
        if len(now) > len(before) and not now.endswith(_BROKEN):
            self.text += now[len(before) :]
            self._begin, self._read = self._read, len(self._ids)
        safe = len(self.text) - self._held()
        piece, self._sent = self.text[self._sent : safe], max(self._sent, safe)
        return piece

    def finish(self, ids: Sequence[int], finish_reason: FinishReason) -> str:
        """The rest, once all token ids are known."""
        return final_text(self._tokenizer, ids, self._stop, finish_reason)[self._sent :]

    def _held(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for length in range(min(self._longest, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(given.startswith(end) for given in self._stop):
                return length
        return 0
