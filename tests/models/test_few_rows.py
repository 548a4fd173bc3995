"""Decode steps whose projections share launches: the numbers of the ordinary path (interpreted)."""

from __future__ import annotations

import pytest
import torch

from posttrain.kernels.backend import use_fused_backend
from posttrain.models import linear
from posttrain.models.cache import SlotCache
from posttrain.models.paged import OneToken

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")


def steps(model, tokens: int) -> torch.Tensor:
    """Logits of tokens one by one in two slots, from a paged cache."""
    cache = SlotCache(model.config, 3, max_length=64, paged=True)
    cache.reset([0, 2])
    slots = torch.tensor([0, 2])
    found = []
    for n in range(tokens):
        cache.reserve_next([0, 2])
        where = OneToken(positions=torch.tensor([n, n]), slots=slots)
        with torch.no_grad():
            found.append(model(input_ids=torch.tensor([[n + 3, n + 7]]), past_key_values=cache, one_token=where).logits[0])
        cache.advance([0, 2], [1, 1])
    return torch.stack(found)


@pytest.mark.parametrize("options", [{}, {"use_output_gate": True}, {"projections": "shared"}, {"num_selected": 2}])
@pytest.mark.parametrize("kind", ["sse", "full_attention", "hybrid"])
def test_products_in_one_launch_change_nothing_that_counts(make_model, monkeypatch, kind, options):
    model = make_model(kind, initializer_range=0.1, **options).eval()
    want = steps(model, 4)
    calls = []
    together = linear.few_row_products
    monkeypatch.setattr(linear, "few_row_products", lambda *given: calls.append(len(given[0])) or together(*given))
    with use_fused_backend("triton"):
        found = steps(model, 4)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert max(calls) >= (6 if kind != "full_attention" else 3)


def test_a_hook_on_a_layer_is_called(make_model):
    model = make_model("hybrid").eval()
    want, seen = steps(model, 2), []
    model.model.layers[1].register_forward_hook(lambda *given: seen.append(1))
    assert torch.equal(steps(model, 2), want) and len(seen) == 2
