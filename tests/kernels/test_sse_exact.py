"""`sse(exact=True)`: every row has the bits that decoding gives it, alone or packed, however its sequence is cut.

Interpreted where there is no GPU; on one, at the layer's own widths too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.kernels.sse import sse, sse_extend
from tests.kernels.test_sse_triton_decode import (
    CASES,
    GPU,
    INTERPRETED,
    NAMES,
    SMALL,
    WIDE,
    allocate,
    assert_near,
    draw,
    empty_output,
    feed,
    one_by_one,
    truth,
)

LONG = replace(WIDE, lengths=(200, 1, 129, 64))
OWN = {
    **CASES,
    "wide": LONG,
    "wide, strong decay": replace(LONG, decay=-5.0),
    "wide, two routes": replace(LONG, routed=2, gate="write"),
    "wide, no shared": replace(LONG, shared=False, heads=3),
    "narrow": replace(LONG, key_dim=64, value_dim=64, chunk_size=16),
}
TINY = replace(SMALL, lengths=(7, 1, 2))
OWN |= {n: replace(OWN[n], lengths=TINY.lengths) for n in ("n2k1", "per route")}
QUICK = ["n2k1"]
SLOW = ["per route", "no shared", "write gate", "read gate", "odd chunk", "strong decay"]
RUNS = [pytest.param(n, "cpu", torch.float32, id=n, marks=INTERPRETED) for n in QUICK]
RUNS += [pytest.param(n, "cpu", torch.float32, id=n, marks=[INTERPRETED, pytest.mark.slow]) for n in SLOW]
RUNS += [pytest.param(n, "cuda", torch.bfloat16, id=f"{n}-gpu", marks=GPU) for n in OWN if n not in CASES]


def whole(case, given, rows: slice = slice(None), lengths: tuple[int, ...] | None = None) -> Tensor:
    tensors, options = given
    cut = [None if tensors[n] is None else tensors[n][rows] for n in NAMES]
    v2 = None if tensors["v2"] is None else tensors["v2"][rows]
    bounds = torch.tensor([0, *(lengths or case.lengths)]).cumsum(0).to(tensors["v"].device)
    return sse(*cut, v2=v2, cu_seqlens=bounds, chunk_size=case.chunk_size, exact=True, **options)[0]


@pytest.mark.parametrize(("name", "device", "dtype"), RUNS)
def test_rows_are_those_of_decoding(name, device, dtype):
    case = OWN[name]
    given = draw(case, device, dtype)
    o = whole(case, given)
    assert_near(o, truth(case, given), dtype, case.decay)
    alone = empty_output(given)
    one_by_one(case, given, allocate(case, device, dtype), [3, 0, 5, 1], alone)
    assert torch.equal(alone, o)
    pieces, state = empty_output(given), allocate(case, device, dtype)
    cuts = {s: sorted({0, n, n // 3, n - n // 4}) for s, n in enumerate(case.lengths)}
    for i in range(max(map(len, cuts.values())) - 1):
        spans = {s: (c[i], c[i + 1]) for s, c in cuts.items() if i + 1 < len(c)}
        feed(case, given, state, [4, 2, 1, 0], spans, pieces, exact=True)
    assert torch.equal(pieces, o)


@pytest.mark.parametrize(
    ("case", "device", "dtype"),
    [
        pytest.param(TINY, "cpu", torch.float32, marks=[INTERPRETED, pytest.mark.slow], id="small"),
        pytest.param(LONG, "cuda", torch.bfloat16, marks=GPU, id="wide-gpu"),
    ],
)
def test_packed_is_alone_and_gradients_are_the_ordinary_ones(case, device, dtype):
    given = draw(case, device, dtype)
    o = whole(case, given)
    start = 0
    for n in case.lengths:
        assert torch.equal(whole(case, given, slice(start, start + n), (n,)), o[start : start + n])
        start += n
    leaves = [n for n in (*NAMES, "v2") if n != "index" and given[0].get(n) is not None]
    tensors = {n: a if n not in leaves else a.detach().requires_grad_() for n, a in given[0].items()}
    upstream = torch.randn_like(o)
    found = torch.autograd.grad(whole(case, (tensors, given[1])), [tensors[n] for n in leaves], upstream)
    bounds = torch.tensor([0, *case.lengths]).cumsum(0).to(device)
    ordinary = sse(
        *[tensors[n] for n in NAMES],
        v2=tensors["v2"],
        cu_seqlens=bounds,
        chunk_size=case.chunk_size,
        backend="triton",
        **given[1],
    )[0]
    want = torch.autograd.grad(ordinary, [tensors[n] for n in leaves], upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's own state")
def test_refuses_a_state_in_pytorch():
    from posttrain.kernels.sse import ChunkState

    given = draw(SMALL, "cpu", torch.float32)
    sizes = (SMALL.partitions, SMALL.heads, SMALL.key_dim, SMALL.value_dim, SMALL.chunk_size)
    with pytest.raises(ValueError, match="needs the Triton state"):
        sse_extend(
            *[given[0][n][:2] for n in NAMES], cu_seqlens=torch.tensor([0, 2]), state=ChunkState.allocate(1, *sizes),
            slots=torch.tensor([0]), exact=True, **{k: v for k, v in given[1].items() if k != "initial_state"},
        )  # fmt: skip
