"""Stop strings, found across token boundaries by decoding only the tail of a completion.

A stop string is looked for in the decoded text of the last tokens, never token by token, because it may begin in the middle of
one token and end in another, or hold a character whose bytes are split between tokens. The window reaches back until its text is
longer than the longest stop string by a margin: tokenizers may alter or drop what stands at the very start of a decoded piece (a
leading space, half a character). Special tokens are decoded too, so that a stop string may name one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MARGIN = 8  # characters that a decoder may spoil at the start of a window
_BROKEN = "\ufffd"  # what decoders put for bytes that are not a whole character


class StopMatcher:
    """Looks for the stop strings of one request; holds no state of a completion, so that forks and restarts need nothing.

    Raises:
        ValueError: an empty stop string, one string in place of a sequence of them, or no tokenizer to decode with.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Any, *, request_id: str, texts: dict[int, str] | None = None) -> None:
        if tokenizer is None:
            raise ValueError(f"request {request_id}: stop strings {list(stop)} need a tokenizer; give the Generator one")
        if isinstance(stop, str):
            raise ValueError(f"request {request_id}: stop={stop!r} is one string, but it must be a sequence of strings")
        if not all(stop):
            raise ValueError(f"request {request_id}: a stop string is empty; every one needs at least one character")
        self._stop = tuple(stop)
        self._tokenizer = tokenizer
        self._reach = max(map(len, stop)) + _MARGIN
        # A stop string ends in the newest token. Decoders may move or drop spaces of a lone token, so those always count.
        self._last = frozenset(text[-1] for text in stop)
        self._any_token = any(character.isspace() for character in self._last)
        self._texts: dict[int, str] = {} if texts is None else texts

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _may_end(self, token: int) -> bool:
        """Whether the newest token can hold the last character of a stop string: spares most tokens the decoding."""
        if self._any_token:
            return True
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token])
        return _BROKEN in text or not self._last.isdisjoint(text)

    def ends(self, ids: list[int]) -> bool:
        """Whether a stop string ends in the newest token of `ids` (completion tokens only; earlier ones were asked before)."""
        if not self._may_end(ids[-1]):
            return False
        width = self._reach
        text = self._decode(ids[-width:])
        # A token is usually one character or more; widen where tokens decode to less (bytes, control tokens).
        while width < len(ids) and len(text.replace(_BROKEN, "")) < self._reach:
            width *= 2
            text = self._decode(ids[-width:])
        return any(stop in text for stop in self._stop)
