"""The torch backend on a GPU: the reference's numbers, deterministic, without making the host wait."""

from dataclasses import replace

import pytest
import torch

from posttrain.kernels.sse import ChunkState, sse, sse_extend, sse_gdn, sse_gdn_extend
from posttrain.kernels.sse.cases import CASES, Case, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run(case: Case, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    tensors, options = make_case(case, dtype=dtype, device=device)
    leaves = {n: a.requires_grad_() for n, a in tensors.items() if a is not None and a.is_floating_point()}
    operator = sse if case.transition == "gla" else sse_gdn
    positional = [tensors[n] for n in (*case.names, "weight", "index")]
    up = None
    mode = "error" if device == "cuda" else "default"
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
    try:
        o, final = operator(*positional, v2=tensors["v2"], initial_state=tensors["initial_state"], **options)
        up = [torch.linspace(-1, 1, a.numel(), dtype=a.dtype, device=a.device).view(a.shape) for a in (o, final)]
        found = torch.autograd.grad([o, final], list(leaves.values()), up, allow_unused=True)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {"o": o, "final_state": final} | {f"d{n}": g for n, g in zip(leaves, found, strict=True) if g is not None}


@pytest.mark.parametrize("transition", ["gla", "gdn"])
@pytest.mark.parametrize("name", [n for n in CASES if n != "violent decay"])
def test_matches_the_cpu_in_float64_and_repeats(name, transition):
    case = replace(CASES[name], transition=transition)
    truth = run(case, torch.float64, "cpu")
    first, second = (run(case, torch.float32, "cuda") for _ in range(2))
    for key, want in truth.items():
        assert torch.equal(first[key], second[key]), key
        assert torch.isfinite(first[key]).all(), key
        if want.numel():
            error = (first[key].cpu().double() - want).abs().max() / want.abs().max().clamp_min(1e-12)
            assert error < 2e-5, f"{key}: {error:.1e}"


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_prefill_then_decode(transition):
    case = Case(lengths=(45, 45, 45), routed=2, transition=transition, initial=False)
    tensors, options = make_case(case, device="cuda")
    full, extend = (sse, sse_extend) if transition == "gla" else (sse_gdn, sse_gdn_extend)
    want = full(*[tensors[n] for n in (*case.names, "weight", "index")], **options)[0].view(3, 45, *tensors["v"].shape[1:])
    state = ChunkState.allocate(3, 4, 2, 16, 24, 16, transition=transition, device="cuda")
    slots, got = torch.tensor([2, 0, 1], device="cuda"), []
    for a, b in [(0, 20), *((t, t + 1) for t in range(20, 45))]:
        cut = [tensors[n].view(3, 45, *tensors[n].shape[1:])[:, a:b].flatten(0, 1) for n in (*case.names, "weight", "index")]
        cu_seqlens = torch.arange(4) * (b - a)
        got.append(
            extend(*cut, state=state, slots=slots, cu_seqlens=cu_seqlens, num_partitions=4).view(3, b - a, *want.shape[2:])
        )
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=0, atol=2e-6 * float(want.abs().max()))


def test_a_long_sequence_fits():
    """32K tokens, 18 heads of 128, forward and backward, in a small part of one GPU."""
    case = Case(lengths=(20000, 12768), heads=18, key_dim=128, value_dim=128, chunk_size=64, initial=False)
    torch.cuda.reset_peak_memory_stats()
    found = run_bf16(case)
    assert all(torch.isfinite(a).all() for a in found)
    assert torch.cuda.max_memory_allocated() < 60 * 2**30


def run_bf16(case: Case) -> list[torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    tokens, shape = sum(case.lengths), (sum(case.lengths), case.heads, case.key_dim)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw, device="cuda").bfloat16().requires_grad_()

    q1, k1, q2, k2, v = (normal(*shape) for _ in range(5))
    g1, g2 = (torch.nn.functional.logsigmoid(normal(*shape).float()) / 16 for _ in range(2))
    weight = torch.rand(tokens, 1, generator=draw, device="cuda")
    index = torch.randint(0, 4, (tokens, 1), generator=draw, device="cuda")
    o, _ = sse(
        q1, k1.softmax(-1), g1, q2, k2.softmax(-1), g2, v, weight, index,
        cu_seqlens=torch.tensor([0, *case.lengths]).cumsum(0), num_partitions=4, chunk_size=case.chunk_size,
    )  # fmt: skip
    return [o, *torch.autograd.grad(o.float().square().mean(), [q1, k1, q2, k2, v])]
