"""Models of the rollout engine's tests. Imported inside: the tests of recipes and the command line start without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from posttrain.models.sse_h import SSEHForCausalLM


@pytest.fixture(scope="module", params=["hybrid", "two routed", "attention"])
def model(request) -> SSEHForCausalLM:
    """A model of every kind in turn, in evaluation mode."""
    from tests.posttrain.rollout_models import make_model

    return make_model(request.param).eval()


@pytest.fixture(scope="module")
def hybrid() -> SSEHForCausalLM:
    from tests.posttrain.rollout_models import make_model

    return make_model().eval()
