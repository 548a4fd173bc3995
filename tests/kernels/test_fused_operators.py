"""The small fused operators, Triton (interpreted where there is no GPU) and PyTorch: every gradient against float64."""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.kernels import backend as backends
from posttrain.kernels.backend import on_device_of, use_fused_backend
from posttrain.kernels.decode_inputs import decode_inputs
from posttrain.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from posttrain.kernels.linear_cross_entropy.chunked import _loss_and_gradient
from posttrain.kernels.pair_map import log_decay, pair_map
from posttrain.kernels.rms_norm import MAX_WIDTH, add_rms_norm, rms_norm
from posttrain.kernels.rotary import rotary
from posttrain.kernels.swiglu import swiglu

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts a number to bf16 instead of rounding it.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def error(found: Tensor, truth: Tensor) -> float:
    assert found.shape == truth.shape
    return ((found.double().cpu() - truth.cpu()).norm() / truth.norm().clamp(min=1e-12)).item()


def check(
    fused: Callable[..., Any], truth: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype, tolerance: float | None = None
) -> None:
    """Outputs and gradients of `fused` on inputs rounded to dtype against `truth` in float64 on the rounded inputs."""
    low = [a.to(DEVICE, dtype).requires_grad_() for a in inputs]
    high = [a.to(dtype).double().requires_grad_() for a in inputs]
    results = []
    for fn, leaves in ((fused, low), (truth, high)):
        outs = fn(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        ups = [randn(*o.shape, seed=7 + i).to(o.device, o.dtype) for i, o in enumerate(outs)]
        results.append([*outs, *torch.autograd.grad(outs, leaves, ups)])
    for i, (found, want) in enumerate(zip(*results, strict=True)):
        assert error(found, want) < (tolerance or TOLERANCE[dtype]), f"tensor {i}: {error(found, want)}"


BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@BACKENDS
@DTYPES
@pytest.mark.parametrize("shape", [(3, 2304), (5, 7, 128), (1, 3), (2, 100), (70, 3, 16)])
def test_rms_norm(backend, dtype, shape):
    def truth(x: Tensor, w: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w

    def fused(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x, w, 1e-6, backend=backend)

    check(fused, truth, [randn(*shape), randn(shape[-1], seed=1)], dtype)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("shape", [(3, 2304), (5, 7, 128), (1, 3), (70, 3, 16)])
def test_gated_rms_norm(backend, dtype, shape):
    def truth(x: Tensor, w: Tensor, gate: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w * F.silu(gate)

    def fused(x: Tensor, w: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x, w, 1e-6, gate=gate, backend=backend)

    check(fused, truth, [randn(*shape), randn(shape[-1], seed=1), randn(*shape, seed=2, scale=3)], dtype)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("shape", [(3, 2304), (5, 7, 128), (1, 3), (70, 3, 16)])
def test_add_rms_norm(backend, dtype, shape):
    def truth(x: Tensor, delta: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w

    def fused(x: Tensor, delta: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, delta, w, 1e-6, backend=backend)

    check(fused, truth, [randn(*shape), randn(*shape, seed=3), randn(shape[-1], seed=1)], dtype)
    alone = [randn(*shape), randn(shape[-1], seed=1)]
    check(lambda x, w: fused(x, None, w), lambda x, w: truth(x, torch.zeros_like(x), w), alone, dtype)  # type: ignore[arg-type]


def test_add_rms_norm_has_the_bits_of_its_parts_and_the_wider_dtype():
    x, delta, w = (randn(9, 40, seed=i).float().to(DEVICE) for i in (0, 1, 2))
    total, y = add_rms_norm(x, delta, w[0], 1e-6, backend="triton")
    assert torch.equal(total, x + delta) and torch.equal(y, rms_norm(x + delta, w[0], 1e-6, backend="triton"))
    low = delta.bfloat16().requires_grad_()
    for a, b in ((x, low), (low, x)):
        total, y = add_rms_norm(a, b, w[0], 1e-6, backend="triton")
        assert total.dtype == y.dtype == torch.float32 and torch.equal(total, a + b)
        (grad,) = torch.autograd.grad(y.sum() + total.sum(), low)
        assert grad.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="delta must be shaped as x"):
        add_rms_norm(x, delta[:, :1], w[0], 1e-6)
    with pytest.raises(ValueError, match="gate must be shaped as x"):
        rms_norm(x, w[0], 1e-6, gate=delta[:1])


def test_rms_norm_of_many_rows_sums_the_weights_gradient_over_all_programs(monkeypatch):
    from posttrain.kernels.rms_norm import triton_rms_norm

    monkeypatch.setattr(triton_rms_norm, "PROGRAMS", 3)
    monkeypatch.setattr(triton_rms_norm, "TILE", 64)
    test_rms_norm("triton", torch.float32, (67, 16))
    test_gated_rms_norm("triton", torch.float32, (67, 16))
    test_add_rms_norm("triton", torch.float32, (67, 16))


def test_rms_norm_keeps_the_dtype_of_x_and_takes_weights_of_another():
    x, w = randn(4, 32).to(DEVICE, torch.bfloat16), randn(32, seed=1).to(DEVICE, torch.float32).requires_grad_()
    y = rms_norm(x, w, 1e-6, backend="triton")
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert w.grad is not None and w.grad.dtype == torch.float32
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(x, w[:3], 1e-6)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (13, 333), (2048, 2)])
def test_swiglu(backend, dtype, shape):
    inputs = [randn(*shape, scale=3), randn(*shape, seed=1)]
    check(lambda a, b: swiglu(a, b, backend=backend), lambda a, b: F.silu(a) * b, inputs, dtype)


@BACKENDS
@DTYPES
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(5, 3, 128), (1, 1, 2), (70, 2, 20)])
def test_rotary(backend, dtype, tokens, heads, dim):
    # As the model's table gives them: halves of one tensor, rows not next to each other.
    table = randn(tokens, 2, dim // 2, seed=3).float()
    cos, sin = (a[:, None] for a in table.to(DEVICE).unbind(1))

    def truth(x: Tensor) -> Tensor:
        (a, b), (c, s) = x.chunk(2, dim=-1), (a[:, None] for a in table.double().unbind(1))
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1)

    check(lambda x: rotary(x, cos, sin, backend=backend), truth, [randn(tokens, heads, dim)], dtype)


@BACKENDS
def test_rotary_reads_tables_of_half_precision(backend):
    x, table = randn(5, 2, 20).float().to(DEVICE), randn(5, 1, 20, seed=1).to(DEVICE, torch.bfloat16)
    cos, sin = table.chunk(2, dim=-1)
    found = rotary(x, cos, sin, backend=backend)
    torch.testing.assert_close(found, rotary(x, cos.float(), sin.float(), backend="torch"), rtol=1e-6, atol=1e-6)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("fn", ["silu", "softmax"])
@pytest.mark.parametrize("shape", [(5, 3, 128), (1, 1, 1), (37, 2, 20)])
def test_pair_map(backend, dtype, fn, shape):
    def apply(x: Tensor) -> Tensor:
        return F.silu(x) if fn == "silu" else torch.softmax(x, dim=-1)

    check(
        lambda x, d: pair_map(x, d, fn, backend=backend),
        lambda x, d: (apply(x), apply(x + d)),
        [randn(*shape, scale=3), randn(*shape, seed=1)],
        dtype,
        tolerance=1.6e-2 if dtype == torch.bfloat16 else None,  # PyTorch also rounds x + delta
    )


@BACKENDS
@DTYPES
@pytest.mark.parametrize("shape", [(1,), (3, 700)])
def test_log_decay(backend, dtype, shape):
    inputs = [randn(*shape, scale=8)]
    check(lambda x: log_decay(x, 16.0, backend=backend), lambda x: F.logsigmoid(x) / 16, inputs, dtype)
    # Gates far open, where 1 + exp(-x) has no digits left.
    found = log_decay(torch.tensor([12.0, 30.0, -200.0], device=DEVICE), 16.0, backend=backend)
    want = F.logsigmoid(torch.tensor([12.0, 30.0, -200.0], dtype=torch.float64)) / 16
    torch.testing.assert_close(found.double().cpu(), want, rtol=1e-5, atol=0)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("key_map", ["silu", "softmax"])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "values", "partitions", "selected"), [(5, 2, 20, 24, 4, 1), (1, 3, 128, 128, 7, 3)]
)
def test_decode_inputs(backend, dtype, key_map, tokens, heads, width, values, partitions, selected):
    tensors = [randn(tokens, heads, width, seed=i, scale=3).to(DEVICE, dtype) for i in range(6)]
    v = randn(tokens, heads, values, seed=6).to(DEVICE, dtype)
    router = randn(tokens, partitions, seed=7).to(DEVICE, dtype)
    router[0, 1:3] = router[0].max()  # a tie, which goes to the lowest
    q, dq, k, dk, gate1, gate2 = tensors
    found = decode_inputs(
        q, dq, k, dk, v, gate1, gate2, router, selected=selected, key_map=key_map, normalizer=16.0, backend=backend
    )
    f = F.silu if key_map == "silu" else (lambda x: torch.softmax(x, -1))
    q, dq, k, dk, gate1, gate2, v64 = (a.double() for a in (*tensors, v))
    want = (F.silu(q), f(k), F.silu(q + dq), f(k + dk), F.silu(v64), F.logsigmoid(gate1) / 16, F.logsigmoid(gate2) / 16)
    for name, a, b in zip(found._fields, found, want):
        tolerance = 1.6e-2 if a.dtype == torch.bfloat16 else 1e-5  # PyTorch also rounds x + delta
        assert (a.double() - b).norm() <= tolerance * b.norm(), name
    probs = torch.softmax(router.double(), -1)
    order = probs.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.index, order.indices[:, :selected]) and found.weight.dtype == torch.float32
    torch.testing.assert_close(found.weight.double(), order.values[:, :selected], rtol=1e-5, atol=1e-6)
    assert found.g1.dtype == torch.float32


def test_decode_inputs_refuses_what_does_not_fit():
    a, v, router = torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), torch.zeros(2, 4)
    options = dict(selected=1, key_map="silu", normalizer=1.0)
    with pytest.raises(ValueError, match=r"must be \[T, H, K\]"):
        decode_inputs(a, a, a, a[:1], v, a, a, router, **options)
    with pytest.raises(ValueError, match=r"router \[T, N\]"):
        decode_inputs(a, a, a, a, v, a, a, router[:1], **options)
    with pytest.raises(ValueError, match="selected=5"):
        decode_inputs(a, a, a, a, v, a, a, router, **{**options, "selected": 5})


@BACKENDS
@DTYPES
@pytest.mark.parametrize(("tokens", "vocabulary", "chunk"), [(11, 50, 4), (3, 5000, 100), (1, 1, 1)])
def test_linear_cross_entropy(backend, dtype, tokens, vocabulary, chunk):
    targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(2))
    targets[1:2] = -100
    inputs = [randn(tokens, 16), randn(vocabulary, 16, seed=1, scale=0.5)]

    def fused(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, targets.to(DEVICE), chunk_rows=chunk, backend=backend)

    check(fused, lambda h, w: linear_cross_entropy_reference(h, w, targets), inputs, dtype)


def test_linear_cross_entropy_of_nothing_and_of_wrong_shapes():
    hidden, weight = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4)
    loss = linear_cross_entropy(hidden, weight, torch.full((3,), -100))
    loss.backward()
    assert loss == 0 and hidden.grad is not None and not hidden.grad.any()
    with pytest.raises(ValueError, match="targets"):
        linear_cross_entropy(hidden, weight, torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="alike"):
        linear_cross_entropy(hidden, weight.double(), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="targets must be int64"):
        linear_cross_entropy(hidden, weight, torch.zeros(3))
    for rows in (0, -1):  # a negative step would walk over nothing and find no loss
        with pytest.raises(ValueError, match=f"chunk_rows={rows}"):
            linear_cross_entropy(hidden, weight, torch.zeros(3, dtype=torch.long), chunk_rows=rows)


@pytest.mark.parametrize("items", [777, 1021])
def test_linear_cross_entropy_scales_half_precision_gradients_in_full_precision(items):
    """bf16 gradients round to 8 bits with no bias; a factor of 1 / items in bf16 would move all of them by up to 0.4%."""
    hidden = randn(40, 32).to(DEVICE, torch.bfloat16).requires_grad_()
    weight = randn(60, 32, seed=1, scale=0.5).to(DEVICE, torch.bfloat16)
    targets = torch.randint(60, (40,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    (whole,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, chunk_rows=7), hidden)
    (scaled,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, chunk_rows=7) / items, hidden)
    assert scaled.dtype == torch.bfloat16
    whole, scaled = whole.double().flatten(), scaled.double().flatten()
    assert abs((whole @ scaled) / (whole @ whole) * items - 1) < 3e-4
    torch.testing.assert_close(scaled, (whole / items).bfloat16().double(), rtol=2**-7, atol=0)


@BACKENDS
@pytest.mark.parametrize("wrong", [-1, 50, 10**9])
def test_linear_cross_entropy_of_a_target_out_of_range(backend, wrong):
    hidden, weight = randn(5, 16).float().to(DEVICE).requires_grad_(), randn(50, 16, seed=1).float().to(DEVICE)
    targets = torch.tensor([3, wrong, -100, 49, 0], device=DEVICE)
    if backend == "torch" and DEVICE == "cpu":
        with pytest.raises(ValueError, match=rf"\[0, 50\).*got {wrong}"):
            linear_cross_entropy(hidden, weight, targets, backend=backend)
        return
    loss = linear_cross_entropy(hidden, weight, targets, backend=backend)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert loss.isnan()
    assert gradient.isnan().any(1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("fused", [False, True])
def test_a_target_out_of_range_is_nan_in_its_own_row_alone(fused):
    """What a GPU does, where looking at the targets first would make the host wait."""
    logits, targets = randn(4, 50).float().to(DEVICE), torch.tensor([3, -1, -100, 50], device=DEVICE)
    want = F.cross_entropy(logits[:1], targets[:1])
    loss = _loss_and_gradient(logits, targets, -100, fused)
    assert loss.isnan().tolist() == logits.isnan().all(1).tolist() == logits.isnan().any(1).tolist() == [False, True, False, True]
    torch.testing.assert_close(loss[0], want)
    assert loss[2] == 0 and not logits[2].any()


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: rms_norm(x, x[0, 0], 1e-6, backend="triton"),
        lambda x: swiglu(x, x + 1, backend="triton"),
        lambda x: rotary(x, x[:, :1, :4].detach(), x[:, :1, 4:].detach(), backend="triton"),
        lambda x: pair_map(x, x + 1, "silu", backend="triton")[1],
        lambda x: log_decay(x, 16.0, backend="triton"),
    ],
    ids=["rms_norm", "swiglu", "rotary", "pair_map", "log_decay"],
)
def test_second_derivatives_are_refused(operator):
    """Triton's gradients have no graph: they would count as constants."""
    x = randn(3, 2, 8).float().to(DEVICE).requires_grad_()
    (first,) = torch.autograd.grad(operator(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


def test_backend_choice():
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="'torch', 'triton' or None"):
        rms_norm(x, x[0], 1e-6, backend="cuda")
    with pytest.raises(ValueError, match="float64"):
        rms_norm(x.double(), x[0], 1e-6, backend="triton")
    with use_fused_backend("triton"), pytest.raises(ValueError, match="float64"):
        swiglu(x.double(), x.double())
    assert torch.equal(swiglu(x.double(), x.double()), F.silu(x.double()))


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    x = torch.ones(2, MAX_WIDTH + 1)
    with pytest.raises(ValueError, match=f"up to {MAX_WIDTH}, got {MAX_WIDTH + 1}"):
        rms_norm(x.to(DEVICE), x[0].to(DEVICE), 1e-6, backend="triton")
    assert rms_norm(x.to(DEVICE), x[0].to(DEVICE), 1e-6).shape == x.shape
    monkeypatch.setattr(backends, "_interpreted", lambda: False)
    with pytest.raises(ValueError, match="needs tensors on a GPU, got cpu"):
        swiglu(x, x, backend="triton")
    with use_fused_backend("triton"), pytest.raises(ValueError, match="needs tensors on a GPU, got cpu"):
        linear_cross_entropy(x, x, torch.zeros(2, dtype=torch.long))


def test_launches_enter_the_device_of_their_tensors(monkeypatch):
    x = randn(3, 2, 8).float().to(DEVICE)
    entered: list[Tensor] = []

    def watch(tensor: Tensor) -> Any:
        entered.append(tensor)
        return on_device_of(tensor)

    for module in ("rms_norm", "swiglu", "rotary", "pair_map", "linear_cross_entropy"):
        monkeypatch.setattr(importlib.import_module(f"posttrain.kernels.{module}"), "on_device_of", watch)
    rms_norm(x, x[0, 0], 1e-6, backend="triton")
    swiglu(x, x, backend="triton")
    rotary(x, x[:, :1, :4], x[:, :1, 4:], backend="triton")
    pair_map(x, x, "silu", backend="triton")
    log_decay(x, 16.0, backend="triton")
    linear_cross_entropy(x[:, 0], x[0], torch.zeros(3, dtype=torch.long, device=DEVICE), backend="triton")
    assert len(entered) == 6
    assert isinstance(on_device_of(x.cpu()), nullcontext)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one():
    results = []
    for device in ("cuda:0", "cuda:1"):
        x = randn(3, 2, 8).float().to(device).requires_grad_()
        y = (
            rms_norm(x, x[0, 0], 1e-6)
            + swiglu(x, x)
            + rotary(x, x[:, :1, :4].detach(), x[:, :1, 4:].detach())
            + log_decay(x, 16.0)
        )
        y = y + pair_map(x, x, "silu")[1]
        loss = linear_cross_entropy(y[:, 0], y[0], torch.zeros(3, dtype=torch.long, device=device))
        results.append([loss.detach().cpu(), torch.autograd.grad(loss, x)[0].cpu()])
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
