"""Attention of strict mode: a token's row has the same bits packed, in pieces and decoded from pages.

Interpreted where there is no GPU (with short ranges); on one, at the widths of a model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.kernels.paged_attention.exact import exact_attention, exact_paged_attention

pytest.importorskip("triton")
from posttrain.kernels.paged_attention import triton_exact

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
INTERPRETED = pytest.mark.skipif(HAS_GPU, reason="interpreted only where there is no GPU")
PAGE = 64


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One sequence, in float64."""
    group, n = q.shape[1] // k.shape[1], q.shape[0]
    a, b, c = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    behind = torch.arange(n, device=q.device)[:, None] - torch.arange(n, device=q.device)[None]
    seen = (behind >= 0) & (behind < (window or n))
    return F.scaled_dot_product_attention(a, b, c, attn_mask=seen).transpose(0, 1)


def in_pages(k: Tensor, v: Tensor, position: int, window: int | None, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of the tokens up to `position` in slot 1 of three, everything else NaN."""
    draw = torch.Generator().manual_seed(position)
    table = 1 + torch.randperm(3 * count, generator=draw).view(3, count).int()
    keys, values = (torch.full((1 + 3 * count, k.shape[1], PAGE, k.shape[2]), float("nan"), dtype=k.dtype) for _ in range(2))
    tokens = torch.arange(max(0, position + 1 - count * PAGE), position + 1)
    places = tokens % (count * PAGE)
    for pool, rows in ((keys, k), (values, v)):
        pool[table[1, places // PAGE].long(), :, places % PAGE] = rows[tokens.to(rows.device)].cpu()
    return keys.to(k.device), values.to(k.device), table.to(k.device)


RUNS = [(torch.float32, 1, None), (torch.bfloat16, 3, None), (torch.float32, 1, 40), (torch.bfloat16, 2, 70)]
CASES = [
    pytest.param(16, (150, 1, 33), *run, 128, marks=[INTERPRETED, *([pytest.mark.slow] if n else [])], id=f"small-{n}")
    for n, run in enumerate(RUNS)
]
CASES += [
    pytest.param(dim, (1500, 1, 64, 130, 2100), torch.bfloat16, group, window, 1024, marks=GPU, id=f"gpu-{dim}-{group}-{window}")
    for dim, group, window in ((128, 1, None), (64, 4, None), (128, 1, 300), (64, 20, 1100), (72, 2, None))
]


@pytest.mark.parametrize(("dim", "lengths", "dtype", "group", "window", "split"), CASES)
def test_packed_in_pieces_and_decoded(monkeypatch, dim, lengths, dtype, group, window, split):
    monkeypatch.setattr(triton_exact, "SPLIT", split)
    draw = torch.Generator().manual_seed(dim)
    heads, total = 2, sum(lengths)
    q, k, v = (torch.randn(total, h, dim, generator=draw).to(DEVICE, dtype) for h in (heads * group, heads, heads))
    o = exact_attention(q, k, v, lengths, window=window)
    start = 0
    for n in lengths:
        rows = slice(start, start + n)
        want = dense(q[rows], k[rows], v[rows], window)
        assert (o[rows] - want).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * want.norm()
        assert torch.equal(exact_attention(q[rows], k[rows], v[rows], [n], window=window), o[rows])
        start += n
    n = lengths[0]
    for cut in (1, n // 4, n * 2 // 3, n - 1):
        first = 0 if window is None else max(0, cut - window + 1)
        piece = exact_attention(q[cut:n], k[first:n], v[first:n], [n - cut], key_lengths=[n - first], ends=[n], window=window)
        assert torch.equal(piece, o[cut:n])
    pages = -(-(window or n) // PAGE)
    for position in sorted({0, 1, 31, 63, 64, 100, n // 2, split - 1, split, n - 1}):
        keys, values, table = in_pages(k[:n], v[:n], position, window, pages)
        slots, positions = (torch.tensor(a, device=DEVICE) for a in ([-1, 1], [5, position]))
        found = exact_paged_attention(q[[0, position]], keys, values, table, slots, positions, window=window)
        assert torch.equal(found[1], o[position]) and not found[0].any(), position


def test_gradients_are_those_of_another_implementation():
    q, k, v = (torch.randn(20, 2, 16, device=DEVICE).requires_grad_() for _ in range(3))

    def ordinary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(q, k, v, None).to(q.dtype)

    up = torch.randn(20, 2, 16, device=DEVICE)
    found = torch.autograd.grad(exact_attention(q, k, v, [20], ordinary=ordinary), (q, k, v), up)
    want = torch.autograd.grad(ordinary(q, k, v), (q, k, v), up)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_refuses_pages_that_cut_its_blocks():
    q, pool = torch.zeros(1, 2, 16, device=DEVICE), torch.zeros(3, 2, 16, 16, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="pages of 16 rows"):
        exact_paged_attention(q, pool, pool, torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), zero, zero)
