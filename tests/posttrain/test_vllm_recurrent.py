"""The recurrence that vLLM's pages are advanced by, against the operator's reference; no vLLM needed."""

import importlib
import tomllib

import pytest
import torch

from posttrain.kernels.sse import sse, sse_gdn
from posttrain.vllm_plugin.recurrent import Pages, advance, stack, touched
from posttrain.vllm_plugin.triton_recurrent import advance_triton

T, B, H, K, N = 5, 3, 2, 8, 4


def problem(gdn: bool, routes: int, seed: int = 0):
    """T tokens of B sequences: every input [B, T, ...] of the operator, its gate "none"."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    tensors = {name: draw(B, T, H, K) * 0.5 for name in ("q1", "k1", "q2", "k2", "v")}
    shape = (B, T, H) if gdn else (B, T, H, K)
    tensors |= {name: -draw(*shape).abs() for name in ("g1", "g2")}
    if gdn:
        tensors |= {name: draw(B, T, H).sigmoid() for name in ("b1", "b2")}
    index = torch.stack([torch.randperm(N, generator=generator)[:routes] for _ in range(B * T)]).view(B, T, routes)
    return tensors, index, torch.rand(B, T, routes, generator=generator)


def pages(blocks: list[int], begun: list[bool]) -> tuple[Pages, torch.Tensor]:
    """Pages full of NaN, a page of padding between two blocks, as vLLM lays them out; and the raw memory."""
    size = (1 + N) * H * K * K
    raw = torch.full((6, size + 7), float("nan"))
    pool = torch.as_strided(raw, (6, 1 + N, H, K, K), (size + 7, H * K * K, K * K, K, 1))
    written = torch.full((6, 1 + N), float("nan"))
    return Pages(pool, written, torch.tensor(blocks), torch.tensor(begun)), raw


@pytest.mark.parametrize("routes", [1, 2])
@pytest.mark.parametrize("gdn", [False, True], ids=["gla", "gdn"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shared", [True, False])
def test_token_by_token_is_the_operator(gdn, routes, backend, shared, monkeypatch):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the kernel runs interpreted, on a CPU")
    tensors, index, weight = problem(gdn, routes)
    store, _ = pages([4, 1, 2], [False] * B)
    outs = []
    for t in range(T):
        now = Pages(store.pool, store.written, store.blocks, torch.full((B,), t > 0))
        partitions, _ = touched(index[:, t], weight[:, t], shared)
        first = {name: a[:, t] if shared else None for name, a in tensors.items()}
        rows = [
            stack(first[name + "1"], tensors[name + "2"][:, t], routes, a_row_a_route=False)
            for name in ("q", "k", "g", *(("b",) if gdn else ()))
        ]
        v = stack(first["v"], tensors["v"][:, t], routes, a_row_a_route=False)
        q, k, g, *b = rows
        if backend == "torch":
            outs.append(advance(now, partitions, q, k, g, v, *b))
        else:
            live = now.flags().gather(1, partitions) > 0
            now.written[now.blocks[:, None], partitions] = 1.0
            outs.append(advance_triton(now, partitions, live, q, k, g, v, b[0] if b else None))
    flat = {name: a.flatten(0, 1) for name, a in tensors.items()}
    order = ("q", "k", "g", "b") if gdn else ("q", "k", "g")
    some = [flat[name + "1"] if shared else None for name in order]
    routed = [flat[name + "2"] for name in order]
    expected, final = (sse_gdn if gdn else sse)(
        *some, *routed, flat["v"], weight.flatten(0, 1), index.flatten(0, 1),
        cu_seqlens=torch.arange(0, B * T + 1, T), num_partitions=N, gate="none", scale=1.0, backend="reference",
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(outs, 1).flatten(0, 1), expected, rtol=1e-5, atol=1e-5)
    now = Pages(store.pool, store.written, store.blocks, torch.ones(B, dtype=torch.bool))
    torch.testing.assert_close(now.load(), final, rtol=1e-5, atol=1e-5)


def test_a_block_that_is_handed_out_again_starts_empty():
    first, raw = pages([3], [False])
    first.store(torch.ones(1, 1 + N, H, K, K))
    outside = raw.clone()
    again = Pages(first.pool, first.written, first.blocks, torch.tensor([True]))
    assert again.load().sum() == (1 + N) * H * K * K
    fresh = Pages(first.pool, first.written, first.blocks, torch.tensor([False]))
    one = torch.ones(1, 1, H, K)
    o = advance(fresh, torch.tensor([[2]]), one, one, torch.zeros(1, 1, H, K), one)
    assert o.tolist() == [[[K] * K] * H], "q k^T v of the new token alone"
    loaded = again.load()[0]
    assert loaded[2].eq(1).all()
    assert loaded[[0, 1, 3, 4]].eq(0).all()
    changed = (raw != outside) & ~(raw.isnan() & outside.isnan())
    assert not changed[[0, 1, 2, 4, 5]].any(), "no other block was touched"


def test_padding_of_a_graph_shares_the_block_that_nobody_has():
    store, _ = pages([0, 0, 5], [False, False, False])
    q = torch.ones(3, 1, H, K)
    o = advance(store, torch.tensor([[1], [1], [1]]), q, q, torch.zeros(3, 1, H, K), q)
    assert o[2].eq(K).all()


def test_the_entry_point_that_vllm_looks_for_exists(root):
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    [path] = declared.values()
    module, _, name = path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_kernel_refuses_states_that_are_not_contiguous():
    pool = torch.zeros(2, 1 + N, H, K, K).transpose(3, 4)
    store = Pages(pool, torch.zeros(2, 1 + N), torch.tensor([1]), torch.tensor([False]))
    q = torch.ones(1, 1, H, K)
    with pytest.raises(ValueError, match="must be contiguous"):
        advance_triton(store, torch.tensor([[1]]), torch.tensor([[False]]), q, q, q, q, None)
