"""Where an answer stands in an output and what equals it, as a section of a recipe.

The fields, their values and their defaults are those of `posttrain.rewards.policy.AnswerPolicy`, which needs no pydantic.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from pydantic import create_model, model_validator

from posttrain.config.base import Section
from posttrain.rewards.errors import RewardError
from posttrain.rewards.policy import AnswerPolicy

_hints = get_type_hints(AnswerPolicy)
_fields: dict[str, Any] = {field.name: (_hints[field.name], field.default) for field in dataclasses.fields(AnswerPolicy)}
_Fields = create_model("_Fields", __base__=Section, __module__=__name__, **_fields)


class AnswerConfig(_Fields):
    """Choices on which sensible verifiers differ. docs/rewards.md says what each is and why its default is what it is."""

    @model_validator(mode="after")
    def _allowed(self) -> AnswerConfig:
        try:
            AnswerPolicy.of(self)
        except RewardError as error:
            raise ValueError(str(error)) from None
        return self
