"""Where an answer stands in an output and what equals it: the recipe's form of `posttrain.rewards.policy.AnswerPolicy`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.base import Section


class AnswerConfig(Section):
    """Choices on which sensible verifiers differ. docs/rewards.md says why each default is what it is."""

    thinking: Literal["strip", "require", "keep"] = "strip"
    """Read only what follows `</think>`; require such a block; or read everything. A block that never closes holds no answer."""

    answer_tag: Literal["fallback", "prefer", "require", "ignore"] = "fallback"
    """`<answer>7</answer>` counts where there is no box, before any box, as the only place, or not at all."""

    boxes: Literal["joined", "last", "same"] = "joined"
    """Several boxes: those that only a connective parts are one answer and the last group counts, the last, or all agree."""

    unboxed_fallback: bool = True
    """An output without a box may still hold an answer: "The answer is 7", `#### 7`, else the last value."""

    open_box: Literal["none", "previous"] = "none"
    """A last box that was cut off is no answer, or the box before it counts."""

    prompt_echo: Literal["cut", "keep"] = "cut"
    """A verbatim copy of the prompt in the output is taken out before reading, or read like the rest."""

    run_on: Literal["keep", "cut"] = "keep"
    """A base model that goes on to the next "Question:" is read to the end, or up to there."""

    units: Literal["check", "ignore"] = "check"
    """Refuse an answer whose unit is another known one than the gold's, or compare numbers alone."""

    percent: Literal["lenient", "value"] = "lenient"
    """35% equals both 35 and 0.35, or 0.35 alone."""

    tolerance: Annotated[float, Field(ge=0, lt=1)] = 1e-6
    """Relative distance at which a decimal stands for a value without a finite decimal form; above 1e-6 for every decimal."""

    choices: bool = True
    """A gold of one capital letter A to J is an option: `(C)` and `C. 12` name it."""

    ordered_lists: bool = False
    """`1, 2` and `2, 1` differ. Tuples always keep their order, sets never do."""
