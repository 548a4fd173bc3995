"""Products and log-probabilities of strict mode: right, and bitwise the same for any number of rows and in any tile.

Interpreted where there is no GPU; on one, at the widths of a model, and with every tile."""

from __future__ import annotations

import pytest
import torch

from posttrain.kernels.batch_invariant import exact_linear, few_row_products, head_logprobs, logprobs_of

pytest.importorskip("triton")
from posttrain.kernels.batch_invariant.triton_linear import FEW, MANY, TILES, launch_linear, tile_for

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
INTERPRETED = pytest.mark.skipif(HAS_GPU, reason="interpreted only where there is no GPU")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(72, 70), (16, 8), (64, 64), (3, 1)])
def test_rows_and_columns_depend_on_themselves_alone(dtype, inner, columns):
    x, w, b = draw(90, inner, dtype=dtype), draw(columns, inner, dtype=dtype, seed=1), draw(columns, dtype=dtype, seed=2)
    y = exact_linear(x, w, b)
    want = x.double() @ w.double().t() + b.double()
    assert (y - want).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-7 * want.abs().max())
    for rows in (slice(0, 1), slice(89, 90), slice(7, 24), slice(1, 90)):
        assert torch.equal(exact_linear(x[rows], w, b), y[rows])
    some = slice(columns // 3, columns // 3 + (columns + 2) // 3)
    assert torch.equal(exact_linear(x, w[some].clone(), b[some]), y[:, some])
    assert torch.equal(exact_linear(x.view(9, 10, inner), w, b), y.view(9, 10, columns))
    assert exact_linear(x[:0], w).shape == (0, columns)


def test_gradients_of_a_product():
    x, w, b = (draw(*s, dtype=torch.float32, seed=i).requires_grad_() for i, s in enumerate(((20, 12), (7, 12), (7,))))
    up = draw(20, 7, dtype=torch.float32, seed=9)
    found = torch.autograd.grad(exact_linear(x, w, b), (x, w, b), up)
    for a, want in zip(found, (up @ w, up.t() @ x, up.sum(0)), strict=True):
        torch.testing.assert_close(a, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_the_head(dtype, exact):
    hidden, weight = draw(30, 24, dtype=dtype).requires_grad_(), draw(50, 24, dtype=dtype, seed=1).requires_grad_()
    targets = torch.randint(50, (30,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    logp, entropy = head_logprobs(hidden, weight, targets, temperature=0.7, chunk_rows=16, exact=exact)
    doubled = [a.detach().double().requires_grad_() for a in (hidden, weight)]
    want = torch.log_softmax(doubled[0] @ doubled[1].t() / 0.7, -1)
    picked, spread = want.gather(1, targets[:, None])[:, 0], -(want.exp() * want).sum(1)
    assert (logp - picked).abs().max() < 2e-5 and (entropy - spread).abs().max() < 2e-5
    a, b = draw(30, dtype=torch.float32, seed=3), draw(30, dtype=torch.float32, seed=4)
    found = torch.autograd.grad((logp * a + entropy * b).sum(), (hidden, weight))
    for x, y in zip(found, torch.autograd.grad((picked * a + spread * b).sum(), doubled), strict=True):
        assert (x - y).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * y.norm()
    if not exact:
        return
    # What a generator has: its few rows of logits.
    logits = exact_linear(hidden[5:8].detach(), weight.detach(), out_dtype=torch.float32)
    assert torch.equal(logprobs_of(logits, targets[5:8], torch.full((3,), 0.7, device=DEVICE)), logp[5:8])
    assert head_logprobs(hidden[:0], weight, targets[:0])[0].shape == (0,)


def test_logits_that_are_infinite_or_not_numbers():
    logits = torch.zeros(3, 5000, device=DEVICE)
    logits[0, :4990] = float("-inf")
    logits[1, 4200] = float("nan")
    logits[2, 7] = 80.0
    found = logprobs_of(logits, torch.tensor([4995, 1, 7], device=DEVICE), torch.ones(3, device=DEVICE))
    assert found[0].item() == pytest.approx(-2.302585, abs=1e-5)  # one of ten
    assert found[1].isnan() and found[2].item() == 0.0


def test_refusals():
    x, w = torch.zeros(2, 4, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"weight \[N, K\]"):
        exact_linear(x, w[:, :3])
    with pytest.raises(ValueError, match="must be alike"):
        exact_linear(x, w.bfloat16())
    with pytest.raises(ValueError, match="float64"):
        exact_linear(x.double(), w.double())
    with pytest.raises(ValueError, match="temperature"):
        head_logprobs(x, w, torch.tensor([0, 1], device=DEVICE), temperature=0.0)


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter has one tile")
@pytest.mark.gpu
def test_tiles_for_few_and_many_rows():
    assert tile_for(1, 2304) is FEW[16] and tile_for(17, 2304) is FEW[32]
    assert tile_for(32768, 2304) is MANY[0]


@pytest.mark.parametrize(
    ("inner", "columns"),
    [pytest.param(2304, n, marks=GPU) for n in (2304, 7424, 168)]
    + [pytest.param(k, n, marks=GPU) for k, n in ((7424, 2304), (64, 2304), (16, 2304), (264, 502))],
)  # fmt: skip
def test_every_tile_gives_the_same_bits_on_a_gpu(inner, columns):
    x, w = draw(700, inner, dtype=torch.bfloat16), draw(columns, inner, dtype=torch.bfloat16, seed=1)
    b = draw(columns, dtype=torch.bfloat16, seed=2)
    whole = launch_linear(x, w, b, torch.float32, TILES[0])
    want = x.double() @ w.double().t() + b.double()
    # A tensor core adds 16 products at a time to an fp32 number that it cuts off: K / 16 times up to 2^-23.
    assert (whole - want).norm() <= max(1e-6, inner / 16 * 2**-23) * want.norm()
    for tile in TILES:
        for rows in (1, 3, 16, 33, 64, 200, 256, 700):
            found = launch_linear(x[:rows], w, b, torch.float32, tile)
            assert torch.equal(found, whole[:rows]), (tile, rows)
    for _ in range(3):
        assert torch.equal(launch_linear(x, w, b, torch.float32), whole)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("vocabulary", [151936, 50257])
def test_log_probabilities_at_the_width_of_a_vocabulary(vocabulary):
    hidden, weight = draw(300, 256, dtype=torch.bfloat16), draw(vocabulary, 256, dtype=torch.bfloat16, seed=1)
    targets = torch.randint(vocabulary, (300,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    logp = head_logprobs(hidden, weight, targets, temperature=0.9, chunk_rows=128)[0]
    want = torch.log_softmax(hidden.double() @ weight.double().t() / 0.9, -1).gather(1, targets[:, None])[:, 0]
    assert (logp - want).abs().max() < 1e-4
    for rows in (slice(0, 1), slice(10, 27), slice(100, 300)):
        logits = exact_linear(hidden[rows], weight, out_dtype=torch.float32)
        heat = torch.full((logits.shape[0],), 0.9, device=DEVICE)
        assert torch.equal(logprobs_of(logits, targets[rows], heat), logp[rows])


WIDTHS = [(72, 70), (72, 8), (16, 70), (72, 1), (3, 5)]
GPU_WIDTHS = [(2304, 2304), (2304, 2304), (2304, 8), (64, 2304), (16, 2304), (2304, 7424)]
TOGETHER = [
    pytest.param(WIDTHS, torch.float32, marks=INTERPRETED), pytest.param(WIDTHS[:2] * 5, torch.bfloat16, marks=INTERPRETED),
    pytest.param(GPU_WIDTHS, torch.bfloat16, marks=GPU),
]  # fmt: skip


@pytest.mark.parametrize(("widths", "dtype"), TOGETHER)
@pytest.mark.parametrize("rows", [1, 17, 70, 200])
def test_products_together_have_the_bits_that_they_have_alone(widths, dtype, rows):
    """Inputs are columns of a wider tensor, every other product has a bias."""
    whole = draw(rows, 8 + max(k for k, _ in widths), dtype=dtype)
    xs = [whole[:, 8 * (i % 2) :][:, :k] for i, (k, _) in enumerate(widths)]
    weights = [draw(n, k, dtype=dtype, seed=i) for i, (k, n) in enumerate(widths)]
    biases = [draw(n, dtype=dtype, seed=50 + i) if i % 2 else None for i, (_, n) in enumerate(widths)]
    found = few_row_products(xs, weights, biases)
    for y, x, weight, bias in zip(found, xs, weights, biases, strict=True):
        assert torch.equal(y, exact_linear(x, weight, bias))


def test_products_that_do_not_go_together():
    x, w = torch.zeros(2, 4, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="up to 10 products of up to 256 rows"):
        few_row_products([x] * 11, [w] * 11, [None] * 11)
    with pytest.raises(ValueError, match="up to 10 products of up to 256 rows"):
        few_row_products([x.new_zeros(257, 4)], [w], [None])
    with pytest.raises(ValueError, match=r"x must be \[2, K\]"):
        few_row_products([x, x], [w, w[:, :3]], [None, None])
    assert few_row_products([x[:0]], [w], [None])[0].shape == (0, 3)
