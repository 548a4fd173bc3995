"""`sse` in Triton, interpreted: against float64, its plan, and its promises; `test_sse_triton_gpu.py` is the same on a GPU."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from posttrain.kernels.sse import checks, sse
from posttrain.kernels.sse.cases import CASES, Case
from tests.kernels.sse_calls import assert_close, assert_equal, assert_packed_is_alone, call, draw, truth

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")

# An interpreted program takes 10 to 50 ms, so calls are small: one head, few partitions, and sequences shorter than on a GPU.
SHORTER = {
    "one sequence": (50,),
    "empty ones": (0, 18, 0, 0, 1, 16, 0),
    "many": (1, 4, 9, 2),
    "exact chunks": (32, 16),
    "every partition": (17, 5),
    "lonely partition": (30, 12),
    "per route": (19, 8),
    "per route, no shared": (18, 4),
    "write gate": (20, 3),
    "read gate": (20, 3),
    "no gate": (20, 3),
    "odd chunk": (30, 4),
    "chunk of one": (3, 1),
    "long chunk": (70,),
    "decay at the limit": (70, 3),
    "strong decay": (50, 7),
    "violent decay": (66,),
}
OWN = {
    "two heads": Case(lengths=(11,), heads=2, partitions=2),
    "widths of two blocks": Case(lengths=(7,), heads=1, key_dim=96, value_dim=80, partitions=1),
    "most partitions and routes": Case(lengths=(3,), heads=1, key_dim=3, value_dim=2, partitions=64, routed=8, chunk_size=4),
    "narrow": Case(lengths=(18,), heads=1, key_dim=1, value_dim=3, partitions=2, decay=-5.0),
    "longest chunk": Case(lengths=(131,), heads=1, chunk_size=128, partitions=1),
    "longest chunk, strong decay": Case(lengths=(90,), heads=1, chunk_size=128, partitions=1, decay=-3.0, initial=False),
}
ALL = [*CASES, *OWN]
MIXED = Case(lengths=(5, 0, 18), heads=1, routed=2, partitions=2)
TINY = replace(MIXED, lengths=(9,))


def small(name: str) -> Case:
    if name in OWN:
        return OWN[name]
    case = CASES[name]
    partitions = case.partitions if case.lonely is not None else min(case.partitions, case.routed + 1)
    return replace(case, lengths=SHORTER.get(name, case.lengths), partitions=partitions, heads=1)


@cache
def computed(name: str) -> dict[str, Tensor]:
    """What several tests compare with; nobody writes to it."""
    tensors, options = draw({"mixed": MIXED, "tiny": TINY}.get(name) or small(name))
    return call(tensors, **options)


@pytest.mark.parametrize("name", ALL)
def test_matches_float64_reference(name):
    tensors, options = draw(small(name))
    decay = small(name).decay
    # exp of a large fp32 exponent, and gradients of decays so strong that they are nearly zero themselves
    tolerance = 1e-4 if decay < -10 else 1e-5 if decay <= -1 else 4e-6
    assert_close(computed(name), truth(tensors, **options), tolerance)


@pytest.mark.parametrize(
    ("lengths", "partitions", "routes", "chunk_size", "shared"),
    [
        ((70,), 4, 1, 16, True),
        ((0, 37, 0, 0, 1, 16, 0), 4, 2, 16, True),
        ((300, 0, 500, 1), 5, 3, 13, True),
        ((1,), 4, 1, 16, False),
        (tuple((7 * i) % 23 for i in range(40)), 64, 8, 64, True),
        ((700, 20), 2, 1, 64, False),
        ((0, 0, 5), 1, 1, 1, True),
        ((0, 0), 3, 2, 16, True),
        ((), 3, 2, 16, True),
    ],
)
def test_plan_is_a_count_of_rows(lengths, partitions, routes, chunk_size, shared):
    from posttrain.kernels.sse.triton_plan import build_device_plan

    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    index = torch.rand(bounds[-1], partitions, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :routes].contiguous()
    plan = build_device_plan(
        index, torch.tensor(bounds), num_partitions=partitions, chunk_size=chunk_size, shared=shared
    )  # fmt: skip
    assert plan.rows.shape == (plan.shared_chunks + plan.routed_chunks, chunk_size)
    assert plan.begin.shape == plan.chunks.shape == (len(lengths), 1 + partitions)
    chosen, unused = index.tolist(), torch.ones(len(plan.rows), dtype=torch.bool)
    for s, (first, last) in enumerate(zip(bounds, bounds[1:])):
        for p in range(1 + partitions):
            if p == 0:
                want = list(range(first, last)) if shared else []
            else:
                want = [t * routes + r for t in range(first, last) for r in range(routes) if chosen[t][r] == p - 1]
            begin, count = int(plan.begin[s, p]), int(plan.chunks[s, p])
            assert count == -(-len(want) // chunk_size), (s, p)
            assert plan.rows[begin : begin + count].flatten().tolist() == want + [-1] * (count * chunk_size - len(want)), (s, p)
            low, high = (0, plan.shared_chunks) if p == 0 else (plan.shared_chunks, len(plan.rows))
            assert count == 0 or (low <= begin and begin + count <= high), (s, p)
            assert unused[begin : begin + count].all(), (s, p)
            unused[begin : begin + count] = False
    assert (plan.rows[unused] == -1).all()


@pytest.mark.parametrize("name", ["mixed", "no initial state"])
def test_packed_is_bitwise_alone(name):
    case = MIXED if name == "mixed" else small(name)
    tensors, options = draw(case)
    assert_packed_is_alone(tensors, case.lengths, computed(name), options)


def test_a_chunk_of_strong_decay_changes_no_other():
    """Which product a chunk takes is its own affair: the first sequence's numbers stay, the second's are right."""
    case = Case(lengths=(6, 20), heads=1, partitions=1)
    tensors, options = draw(case)
    before = call(tensors, **options)
    for name in ("g1", "g2"):
        tensors[name][9:13] = -30.0
        tensors[name][13] = -1e4
    after = call(tensors, **options)
    assert_close(after, truth(tensors, **options), 4e-6)
    for name in after:
        mine = slice(0, 1) if name in ("final_state", "dinitial_state") else slice(0, 6)
        assert torch.equal(after[name][mine], before[name][mine]), name


def test_states_computed_again_are_the_same():
    """Which is the test of two runs being bitwise equal, too."""
    tensors, options = draw(small("one partition"))
    assert_equal(call(tensors, keep_states=False, **options), computed("one partition"))


@pytest.mark.parametrize("used", ["o", "final_state"])
def test_only_one_result_is_used(used):
    tensors, options = draw(TINY)
    del tensors["up.final_state" if used == "o" else "up.o"]
    found = call(tensors, **options)
    assert_close(found, truth(tensors, **options), 4e-6)
    if used == "o":
        assert_equal(call(tensors, output_final_state=False, **options), found)
        positional = [tensors[n] for n in ("q1", "k1", "g1", "q2", "k2", "g2", "v", "weight", "index")]
        assert sse(*positional, backend="triton", output_final_state=False, **options)[1] is None


@pytest.mark.parametrize("wanted", [("v",), ("g2", "weight")])
def test_some_inputs_need_no_gradient(wanted):
    tensors, options = draw(TINY)
    found = call(tensors, wanted=wanted, **options)
    assert set(found) == {"o", "final_state", *(f"d{n}" for n in wanted)}
    assert_equal(found, computed("tiny"))


def test_layout_of_the_inputs_does_not_matter():
    """Every second row or column of wider tensors, expanded upstream gradients, and cu_seqlens of 32 bits."""
    tensors, options = draw(TINY)
    tensors["up.o"] = torch.ones(()).expand_as(tensors["up.o"])
    plain = call(tensors, **options)
    for name, a in tensors.items():
        if a is not None and name != "up.o":
            tensors[name] = torch.stack([a, torch.zeros_like(a)], -1)[..., 0]
            assert not tensors[name].is_contiguous()
    options["cu_seqlens"] = options["cu_seqlens"].int()
    assert_equal(call(tensors, **options), plain)


def test_only_some_projections_are_per_route():
    case = Case(lengths=(9, 4), heads=1, routed=2, partitions=3, per_route=True)
    tensors, options = draw(case)
    tensors["q2"], tensors["v2"] = tensors["q2"][:, 0], tensors["v2"][:, 0]
    assert_close(call(tensors, **options), truth(tensors, **options), 4e-6)


def test_extreme_gates():
    """Tokens of weight 0, channels that keep everything, and every token in one partition."""
    tensors, options = draw(Case(lengths=(19, 3), heads=1, partitions=3))
    tensors["weight"][::3] = 0
    tensors["g1"][:, :, ::2] = 0
    tensors["index"].fill_(2)
    assert_close(call(tensors, **options), truth(tensors, **options), 4e-6)


def test_bfloat16_inputs():
    tensors, options = draw(TINY, torch.bfloat16)
    found = call(tensors, **options)
    given = {"o": tensors["v"], "final_state": torch.empty(0)} | {f"d{n}": a for n, a in tensors.items()}
    assert all(a.dtype == given[n].dtype for n, a in found.items())
    assert_close(found, truth(tensors, **options), 2e-2)


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        ({}, torch.float64, "float64; the kernels compute in fp32"),
        ({"chunk_size": 129}, torch.float32, "chunk_size=129, but the kernels take at most 128"),
        ({"key_dim": 257}, torch.float32, "K=257, but the kernels take at most 256"),
        ({"value_dim": 257}, torch.float32, "V=257, but the kernels take at most 256"),
    ],
)
def test_says_what_it_cannot_run_and_what_to_do(change, dtype, reason):
    tensors, options = draw(replace(Case(lengths=(3,), heads=1), **change), dtype)
    with pytest.raises(ValueError, match=f"backend='triton' cannot run this call: .*{reason}; use backend='torch' or None"):
        call(tensors, **options)


class Operators(TorchDispatchMode):
    """Remembers which operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_as_operators_the_numbers_are_the_same():
    tensors, options = draw(TINY)
    with Operators() as seen:
        found = call(tensors, **options)
    assert {"posttrain::sse_gla_forward", "posttrain::sse_gla_backward"} <= seen.names
    assert_equal(found, computed("tiny"))


@pytest.mark.parametrize("shared", [True, False])
def test_operators_are_registered_well(shared):
    """Shapes and dtypes of the fake kernels are the real ones', and no input is changed: what torch.compile relies on."""
    from posttrain.kernels.sse.triton_gla_ops import sse_gla_forward

    case = Case(lengths=(6,), heads=1, partitions=2, per_route=shared, routed=2 if shared else 1, shared=shared, initial=shared)
    tensors, options = draw(case)
    names = ("q1", "k1", "g1", "q2", "k2", "g2", "v", "v2", "weight", "index")
    given = [tensors[n] if n[-1] != "2" or tensors[n] is None or shared else tensors[n][:, None] for n in names]
    leaves = [a.requires_grad_() if a is not None and a.is_floating_point() else a for a in given]
    args = (*leaves, options["cu_seqlens"], tensors["initial_state"], 2, 0.25, "both", 16, shared, shared)
    torch.library.opcheck(sse_gla_forward, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    o, final, *kept = (a.detach() for a in sse_gla_forward(*args))
    upstream = torch.ones_like(o), torch.ones_like(final) if shared else None
    args = (*upstream, *given, tensors["initial_state"], *kept, 2, 0.25, "both", 16)
    args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    torch.library.opcheck(torch.ops.posttrain.sse_gla_backward.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("around", ["checkpoint", "autocast"])
def test_what_training_puts_around_a_call(around):
    """Gradient checkpointing computes the forward again, and mixed precision must not round the operands of fp32 inputs."""
    tensors, options = draw(TINY)
    if around == "checkpoint":
        found = call(tensors, run=lambda *a, **k: checkpoint(sse, *a, use_reentrant=False, **k), **options)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            found = call(tensors, **options)
    assert_equal(found, computed("tiny"))


def test_compiles_into_one_graph(monkeypatch):
    """As on a GPU: there nothing looks at values, nor at whether Triton interprets."""
    from posttrain.kernels import triton_launch

    monkeypatch.setattr(checks, "_check_index_values", lambda *_: None)
    monkeypatch.setattr(checks, "_check_cu_seqlens", lambda bounds, tokens: (bounds.shape[0] - 1, tokens))
    monkeypatch.setattr(triton_launch, "interpreted", lambda: True)
    tensors, options = draw(TINY)
    torch.compiler.reset()
    assert_equal(call(tensors, run=torch.compile(sse, fullgraph=True, backend="aot_eager"), **options), computed("tiny"))
