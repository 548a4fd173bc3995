"""Attention over pages against softmax written out a token at a time, and the Triton kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from posttrain.kernels.paged_attention import paged_attention, paged_write
from posttrain.kernels.paged_attention.cases import CASES, make_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def by_hand(t, case):
    """One sequence and one head at a time, over the rows that its last `window` tokens left."""
    outs = torch.zeros_like(t["q"])
    for b, length in enumerate(case.lengths):
        if not length:
            continue
        first = 0 if case.window is None else max(0, length - case.window)
        places = torch.arange(first, length) % (case.ring * case.page)
        pages = t["table"].long()[t["slots"][b], places // case.page]
        for head in range(case.heads):
            kv = head // (case.heads // case.kv_heads)
            k, v = (t[name][pages, kv, places % case.page] for name in ("keys", "values"))
            weights = torch.softmax(k @ t["q"][b, head] * case.dim**-0.5, 0)
            outs[b, head] = weights @ v
    return outs


@pytest.mark.parametrize("name", CASES)
def test_reference_is_attention_by_hand(name):
    t = make_case(CASES[name])
    found = paged_attention(**t, window=CASES[name].window, backend="torch")
    torch.testing.assert_close(found, by_hand(t, CASES[name]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_triton_is_the_reference(name):
    pytest.importorskip("triton")
    case = CASES[name]
    t = make_case(case, device=DEVICE, dtype=torch.float32)
    found = paged_attention(**t, window=case.window, backend="triton")
    want = paged_attention(**{n: a.double() if a.is_floating_point() else a for n, a in t.items()}, window=case.window)
    torch.testing.assert_close(found.double(), want, rtol=0, atol=3e-6)
    for b in range(len(case.lengths)):
        one = {n: a[b : b + 1] if n in ("q", "slots", "positions") else a for n, a in t.items()}
        assert torch.equal(paged_attention(**one, window=case.window, backend="triton")[0], found[b])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["pages", "padding", "grouped", "window"])
def test_a_written_row_is_found_where_it_belongs(name, backend):
    case = CASES[name]
    t = make_case(case, device=DEVICE, dtype=torch.float32)
    pools = {n: t[n].clone() for n in ("keys", "values")}
    k, v = (torch.randn(len(case.lengths), case.kv_heads, case.dim, device=DEVICE) for _ in range(2))
    where = (t["table"], t["slots"], t["positions"])
    paged_write(k, v, *pools.values(), *where, ring=case.window is not None, backend=backend)
    for b, length in enumerate(case.lengths):
        place = (length - 1) % (case.ring * case.page)
        for given, pool in zip((k, v), ("keys", "values"), strict=True):
            if length:
                page = int(t["table"][t["slots"][b], place // case.page])
                assert torch.equal(pools[pool][page, :, place % case.page], given[b])
                pools[pool][page, :, place % case.page] = t[pool][page, :, place % case.page]
    for pool in ("keys", "values"):  # page 0 is padding's in a cache; here it is anyone's
        assert torch.equal(pools[pool][1:].nan_to_num(9.0), t[pool][1:].nan_to_num(9.0)), "no other row is touched"


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("heads", [(18, 18), (16, 2)])
def test_bf16_on_a_gpu(heads):
    from posttrain.kernels.paged_attention.cases import Case

    case = Case(lengths=(1, 63, 64, 65, 2048, 5000, 0), heads=heads[0], kv_heads=heads[1], dim=128, page=64)
    t = make_case(case, device="cuda", dtype=torch.bfloat16)
    found = paged_attention(**t)
    want = paged_attention(**{n: a.double() if a.is_floating_point() else a for n, a in t.items()}, backend="torch")
    assert (found.double() - want).norm() / want.norm() < 6e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = paged_attention(**t)
    again.zero_()
    graph.replay()
    assert torch.equal(again, found)


def test_pages_too_large_for_shared_memory_are_refused():
    pytest.importorskip("triton")
    t = {n: a.float().to(DEVICE) for n, a in make_case(CASES["pages"]).items()}
    t |= {n: torch.zeros(1, 3, 128, 256, device=DEVICE) for n in ("keys", "values")} | {
        "q": torch.zeros(7, 3, 256, device=DEVICE)
    }
    where = {n: t[n][:, :1].int() if n == "table" else t[n].long() for n in ("table", "slots", "positions")}
    with pytest.raises(ValueError, match="use shorter pages"):
        paged_attention(**{**t, **where}, backend="triton")


def test_wrong_shapes_are_refused():
    t = make_case(CASES["grouped"])
    for changes, message in (
        ({"q": t["q"][:, :5]}, "H a multiple of 2"),
        ({"values": t["values"][:1]}, r"keys and values must both be"),
        ({"slots": t["slots"][:1]}, r"slots, positions \[B\] with B = 3"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention(**{**t, **changes})
    with pytest.raises(ValueError, match="window=0, but it must be 1 to 160"):
        paged_attention(**t, window=0)
