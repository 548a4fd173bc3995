"""A checkpointed layer's operators run once where their results are kept."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.kernels.recompute import keep_results, kept


class Double(torch.autograd.Function):
    calls = 0

    @staticmethod
    def compute(x: Tensor) -> tuple[Tensor, Tensor]:
        Double.calls += 1
        return 2 * x, x.square()

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return kept(Double.compute, x)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx, da: Tensor, db: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * da + 2 * x * db


def layer(x: Tensor) -> Tensor:
    a, b = Double.apply(x.sin())
    c, d = Double.apply(a * b)
    return (c * d.cos()).sum()


def gradient(**options) -> Tensor:
    x = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    Double.calls = 0
    loss = layer(x) if not options else checkpoint(layer, x, use_reentrant=False, **options)
    (dx,) = torch.autograd.grad(loss, x)
    return dx


def test_the_second_run_takes_the_results_of_the_first():
    want = gradient()
    assert Double.calls == 2
    assert torch.equal(gradient(context_fn=keep_results), want)
    assert Double.calls == 2
    assert torch.equal(gradient(determinism_check="default"), want)
    assert Double.calls == 4


def test_a_graph_can_be_gone_through_twice():
    x = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    loss = checkpoint(layer, x, use_reentrant=False, context_fn=keep_results)
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_layers_inside_a_layer_keep_to_themselves():
    x = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    Double.calls = 0

    def outer(x: Tensor) -> Tensor:
        a, _ = Double.apply(x)
        return checkpoint(layer, a, use_reentrant=False, context_fn=keep_results) + layer(a)

    (dx,) = torch.autograd.grad(checkpoint(outer, x, use_reentrant=False, context_fn=keep_results), x)
    y = x.detach().requires_grad_()
    (want,) = torch.autograd.grad(2 * layer(2 * y), y)
    torch.testing.assert_close(dx, want)


def test_another_way_through_the_layer_is_an_error():
    runs = []

    def changing(x: Tensor) -> Tensor:
        runs.append(1)
        for _ in runs:
            x, _ = Double.apply(x)
        return x.sum()

    x = torch.ones(3, requires_grad=True)
    loss = checkpoint(changing, x, use_reentrant=False, context_fn=keep_results, early_stop=False)
    with pytest.raises(RuntimeError, match="called an operator 1 times at first, and now more often"):
        loss.backward()


def test_a_result_changed_in_place_is_an_error():
    """The second run would start from the changed numbers, and the gradient would be wrong without a word."""

    def changing(x: Tensor) -> Tensor:
        a, _ = Double.apply(x.sin())
        return a.mul_(3).square().sum()

    x = torch.ones(3, requires_grad=True)
    loss = checkpoint(changing, x, use_reentrant=False, context_fn=keep_results)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_results_are_kept_without_gradients_too():
    with torch.inference_mode():
        x = torch.linspace(-1, 1, 7)
        assert torch.equal(checkpoint(layer, x, use_reentrant=False, context_fn=keep_results), layer(x))
