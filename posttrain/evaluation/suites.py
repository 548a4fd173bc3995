"""A suite of a recipe -> its problems."""

from __future__ import annotations

from typing import Any

from posttrain.config import SuiteConfig
from posttrain.data.load import load_source
from posttrain.errors import DataError


def load_problems(name: str, suite: SuiteConfig) -> list[dict[str, Any]]:
    """Rows {id, problem, answer, source, ...} of one suite, in the suite's order, `limit` applied.

    Args:
        name: the suite's, for messages.

    Raises:
        DataError: no such file or set, a missing column, no rows, or a row without an answer.
    """
    try:
        return load_source(suite.source())
    except DataError as error:
        raise DataError(f"suite {name}: {error}") from error
