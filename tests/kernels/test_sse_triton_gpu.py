"""`sse` in Triton on a GPU: the numbers of float64, bitwise promises, and a host that never waits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.kernels.sse import sse
from posttrain.kernels.sse.cases import CASES, Case
from tests.kernels.sse_calls import assert_close, assert_equal, assert_packed_is_alone, call, draw, truth

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDE = Case(lengths=(700, 300), key_dim=128, value_dim=128, chunk_size=64)
# Widths, chunk size, routes and dtype are constants: a new set of them compiles about 20 kernels in a second or more each. So
# there is a case or more for each way through the launches, not for each of CASES (interpreted, all of them are run).
SIXTEEN = ["exact chunks", "one token", "nothing", "lonely partition", "write gate", "no gate"]
MORE = ["empty ones", "many", "read gate", "per route, no shared"]
OWN = {
    "wide": WIDE,
    "wide, strong decay": replace(WIDE, decay=-5.0),
    "two blocks, longest chunk": Case(lengths=(300, 1), key_dim=96, value_dim=80, routed=2, chunk_size=128),
}
FLOAT_ONLY = ["odd chunk", "long chunk", "violent decay"]
RUNS = [(n, torch.float32) for n in [*SIXTEEN, *MORE, *OWN, *FLOAT_ONLY]] + [(n, torch.bfloat16) for n in [*SIXTEEN, *MORE, *OWN]]


def draw_on_gpu(case: Case, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, Tensor | None], dict]:
    tensors, options = draw(case, dtype, "cuda")
    return tensors, {**options, "cu_seqlens": options["cu_seqlens"].cuda()}


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_matches_float64_and_repeats(name, dtype):
    case = OWN.get(name) or CASES[name]
    tensors, options = draw(case, dtype, "cuda")
    found = call(tensors, **options)
    want = truth(tensors, backend="torch", **options)
    if dtype == torch.float32:
        # Gradients of decays so strong that they are nearly zero themselves.
        assert_close(found, want, 1e-4 if case.decay < -10 else 2e-5)
    else:
        # bf16 keeps 2^-9, and a gradient passes through a few roundings.
        near = {"o", "dv"}
        assert_close(found, {n: a for n, a in want.items() if n in near}, 1e-2, norm=True)
        assert_close(found, {n: a for n, a in want.items() if n not in near}, 2e-2, norm=True)
    assert_equal(call(tensors, keep_states=False, **options), found)


@pytest.mark.parametrize("routes", [1, 2])
def test_packed_is_bitwise_alone(routes):
    case = replace(WIDE, lengths=(130, 0, 70, 1), routed=routes)
    tensors, options = draw_on_gpu(case)
    assert_packed_is_alone(tensors, case.lengths, call(tensors, **options), options)


def test_a_chunk_of_strong_decay_among_weak_ones():
    tensors, options = draw_on_gpu(WIDE)
    before = call(tensors, **options)
    for name in ("g1", "g2"):
        tensors[name][800:805, 0] = -40.0
    after = call(tensors, **options)
    assert_close(after, truth(tensors, backend="torch", **options), 2e-2, norm=True)
    for name in after:
        mine = slice(0, 1) if name in ("final_state", "dinitial_state") else slice(0, 700)
        assert torch.equal(after[name][mine], before[name][mine]), name


def test_the_host_never_waits():
    tensors, options = draw_on_gpu(WIDE)
    want = call(tensors, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = call(tensors, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(found, want)


def test_a_cuda_graph_takes_new_inputs():
    """The lengths of the sequences and the routing too: nothing of them went into the launches."""
    tensors, options = draw_on_gpu(WIDE)

    def forward() -> tuple[Tensor, Tensor]:
        positional = [tensors[n] for n in (*WIDE.names, "weight", "index")]
        return sse(*positional, initial_state=tensors["initial_state"], backend="triton", **options)

    with torch.no_grad():
        forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = forward()
        other, other_options = draw_on_gpu(replace(WIDE, lengths=(3, 997), seed=1, decay=-1.0))
        for name, a in tensors.items():
            if a is not None:
                a.copy_(other[name])
        options["cu_seqlens"].copy_(other_options["cu_seqlens"])
        graph.replay()
        want = forward()
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1])


def test_compiles_into_one_graph():
    tensors, options = draw_on_gpu(WIDE)
    torch.compiler.reset()
    assert_equal(call(tensors, run=torch.compile(sse, fullgraph=True), **options), call(tensors, **options))
