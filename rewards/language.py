"""The language consistency reward: the share of a completion's letters that belong to the script of the wanted language.

DeepSeek-R1 (arXiv 2501.12948, section 2.3.2) pays the share of words in the target language, against answers that change language
in the middle. Scripts are what can be told without a model, and what mixed answers differ in; languages of one script look alike.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from posttrain.rewards.errors import RewardError
from posttrain.rewards.extract import completion_text

# First words of the Unicode names of a script's letters.
_SCRIPTS: dict[str, tuple[str, ...]] = {
    "latin": ("LATIN", "FULLWIDTH"),
    "han": ("CJK",),
    "kana": ("HIRAGANA", "KATAKANA", "HALFWIDTH"),
    "hangul": ("HANGUL",),
    "cyrillic": ("CYRILLIC",),
    "arabic": ("ARABIC",),
    "devanagari": ("DEVANAGARI",),
    "greek": ("GREEK",),
    "hebrew": ("HEBREW",),
    "thai": ("THAI",),
}
LANGUAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("en", "fr", "de", "es", "it", "pt", "nl", "pl", "tr", "vi", "id"), ("latin",)),
    "zh": ("han",),
    "ja": ("han", "kana"),
    "ko": ("hangul",),
    "ru": ("cyrillic",),
    "uk": ("cyrillic",),
    "ar": ("arabic",),
    "fa": ("arabic",),
    "hi": ("devanagari",),
    "el": ("greek",),
    "he": ("hebrew",),
    "th": ("thai",),
}
# Formulas, commands and tags are written in Latin letters in every language, and single letters are variables.
_FORMULAS = re.compile(
    r"\$\$.{0,1000}?\$\$|\$[^$\n]{0,1000}\$|\\\(.{0,1000}?\\\)|\\\[.{0,1000}?\\\]|\\[a-zA-Z]+|<[^<>\n]{1,40}>|(?<![A-Za-z])[A-Za-z](?![A-Za-z])",
    re.DOTALL,
)
_MAX_TEXT = 100_000  # characters read, about 25K tokens


class LanguageReward:
    """Share of letters, outside formulas, in the script of `language` (an ISO 639-1 code); 1.0 where there is no letter."""

    __name__ = "language"

    def __init__(self, *, language: str = "en"):
        if language not in LANGUAGES:
            raise RewardError(f"reward 'language': language={language!r} is not known; known: {', '.join(LANGUAGES)}")
        self.language = language
        self._prefixes = tuple(prefix for script in LANGUAGES[language] for prefix in _SCRIPTS[script])

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [self._share(completion_text(completion)) for completion in completions]

    def _share(self, text: str) -> float:
        letters = [character for character in _FORMULAS.sub(" ", text[-_MAX_TEXT:]) if character.isalpha()]
        if not letters:
            return 1.0
        return sum(unicodedata.name(letter, "").startswith(self._prefixes) for letter in letters) / len(letters)
