r"""What counts as an answer: the choices on which sensible verifiers differ, in one frozen value.

Extraction (`posttrain.rewards.extract`) reads the first seven fields, comparison (`posttrain.rewards.compare`) the others. A
recipe sets them under `reward.answer`; docs/rewards.md says why each default is what it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from posttrain.rewards.errors import RewardError

FINITE_DECIMALS = 1e-6  # a tolerance above this holds for two finite decimals too


@dataclass(frozen=True, kw_only=True)
class AnswerPolicy:
    r"""Where an answer stands and what equals it.

    Attributes:
        thinking: "strip" reads only what follows the last `</think>` (a block that never closes holds no answer); "require" also
            asks that a block was closed; "keep" reads everything.
        answer_tag: `<answer>7</answer>` counts where there is no box ("fallback"), before any box ("prefer"), as the only place
            ("require"), or not at all ("ignore").
        boxes: several boxes: those that only a connective parts are one answer and the last such group counts ("joined"), the
            last box alone counts ("last"), or they must all say the same ("same").
        unboxed_fallback: whether an output without a box may still hold an answer ("The answer is 7", `#### 7`, the last value).
        open_box: a last box that was cut off is no answer ("none"), or the box before it counts ("previous").
        prompt_echo: a verbatim copy of the prompt is taken out before reading ("cut"), or read like the rest ("keep").
        run_on: whether a base model that goes on to the next "Question:" is read to the end ("keep") or up to there ("cut").
        units: "check" refuses an answer whose unit is another one than the gold's (`12 cm`, `12 m`; a missing unit is fine);
            "ignore" compares numbers alone.
        percent: "lenient" lets 35% equal both 35 and 0.35; "value" lets it equal 0.35 alone.
        tolerance: relative distance at which a decimal stands for a value that has no finite decimal form; 1e-6 is six digits. Up
            to 1e-6, two finite decimals must be equal (what a program prints of a double, to 1e-14); a larger tolerance holds for
            them too. 0 asks for exact values.
        choices: a gold of one capital letter A to J is an option: `(C)`, `C. 12` and `\text{c}` name it.
        ordered_lists: whether `1, 2` and `2, 1` differ. Tuples always keep their order, sets never do.
    """

    thinking: Literal["strip", "require", "keep"] = "strip"
    answer_tag: Literal["fallback", "prefer", "require", "ignore"] = "fallback"
    boxes: Literal["joined", "last", "same"] = "joined"
    unboxed_fallback: bool = True
    open_box: Literal["none", "previous"] = "none"
    prompt_echo: Literal["cut", "keep"] = "cut"
    run_on: Literal["keep", "cut"] = "keep"
    units: Literal["check", "ignore"] = "check"
    percent: Literal["lenient", "value"] = "lenient"
    tolerance: float = 1e-6
    choices: bool = True
    ordered_lists: bool = False

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value, allowed = getattr(self, name), get_args(hint)
            if allowed and value not in allowed:
                raise RewardError(f"answer policy: {name}={value!r}, but it is one of {', '.join(map(repr, allowed))}")
            if hint is bool and not isinstance(value, bool):
                raise RewardError(f"answer policy: {name}={value!r}, but it is true or false")
        if isinstance(self.tolerance, bool) or not isinstance(self.tolerance, (int, float)) or not 0 <= self.tolerance < 1:
            raise RewardError(f"answer policy: tolerance={self.tolerance!r}, but it is a number from 0 to below 1")

    @classmethod
    def of(cls, given: AnswerPolicy | Mapping[str, Any] | Any | None) -> AnswerPolicy:
        """A policy from nothing (the defaults), a policy, a mapping, or an object with the same fields (the recipe's section)."""
        if given is None or isinstance(given, cls):
            return given or DEFAULT
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(given, Mapping):
            return cls(**{name: getattr(given, name) for name in names})
        if unknown := set(given) - set(names):
            raise RewardError(f"answer policy: unknown {', '.join(sorted(unknown))}; known: {', '.join(names)}")
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


DEFAULT = AnswerPolicy()
