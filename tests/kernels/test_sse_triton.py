"""`sse` in Triton against float64, its plan, and its promises about packing: interpreted where there is no GPU, else on one."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from posttrain.kernels.sse import sse
from posttrain.kernels.sse.cases import CASES, Case, make_case

pytest.importorskip("triton")
HAS_GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(HAS_GPU, reason="Triton's interpreter is for machines without a GPU")
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")

# An interpreted program takes 10 to 50 ms, so calls are small: one head and few partitions, and of these less than in CASES.
OWN = {
    "many": replace(CASES["many"], lengths=(1, 8, 18)),
    "lonely partition": replace(CASES["lonely partition"], lengths=(30, 12), partitions=3),
    "every partition": replace(CASES["every partition"], lengths=(17, 5)),
    "exact chunks": replace(CASES["exact chunks"], lengths=(32, 16)),
    "strong decay": replace(CASES["strong decay"], lengths=(50, 7)),
    "per route": replace(CASES["per route"], lengths=(19, 8)),
    "chunk of one": replace(CASES["chunk of one"], lengths=(5, 2)),
    "widths of two blocks": Case(lengths=(7,), key_dim=96, value_dim=80, routed=2, partitions=2),
    "narrow": Case(lengths=(18,), key_dim=1, value_dim=3, decay=-5.0),
    "longest chunk": Case(lengths=(131,), chunk_size=128, partitions=1),
    "longest chunk, strong decay": Case(lengths=(90,), chunk_size=128, partitions=1, decay=-3.0, initial=False),
    "two heads": Case(lengths=(11,), heads=2),
}
ALL = list(dict.fromkeys([*CASES, *OWN]))
MIXED = Case(lengths=(5, 0, 18), heads=1, routed=2, partitions=2)
TINY = replace(MIXED, lengths=(9,))


def small(name: str) -> Case:
    case = OWN.get(name) or CASES[name]
    partitions = case.partitions if case.lonely is not None else min(case.partitions, case.routed + 1)
    return replace(case, partitions=partitions, heads=2 if name == "two heads" else 1)


def draw(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[dict[str, Tensor | None], dict]:
    """Inputs rounded to `dtype`, upstream gradients of o and the final state ("up.o", "up.final_state"), and the options."""
    tensors, options = make_case(case, dtype=dtype, device=device)
    seed = torch.Generator().manual_seed(1)
    state = (len(case.lengths), 1 + case.partitions, case.heads, case.key_dim, case.value_dim)
    for name, shape in (("o", (sum(case.lengths), case.heads, case.value_dim)), ("final_state", state)):
        tensors[f"up.{name}"] = torch.randn(shape, generator=seed).to(dtype).to(device)
    return tensors, options


def call(tensors: dict[str, Tensor | None], *, backend: str = "triton", run=sse, wanted=None, **options) -> dict[str, Tensor]:
    """Results by name, gradients as d<name>: of the inputs named in `wanted`, by default all."""
    given = {n: a if a is None else a.detach() for n, a in tensors.items() if not n.startswith("up.")}
    leaves = {n: a.requires_grad_() for n, a in given.items() if a is not None and n in (wanted or given) and n != "index"}
    positional = [given[n] for n in ("q1", "k1", "g1", "q2", "k2", "g2", "v", "weight", "index")]
    o, final = run(*positional, v2=given["v2"], initial_state=given["initial_state"], backend=backend, **options)
    results = {n: a for n, a in (("o", o), ("final_state", final)) if a is not None and f"up.{n}" in tensors}
    up = [tensors[f"up.{n}"].to(a.dtype) for n, a in results.items()]
    found = torch.autograd.grad(list(results.values()), list(leaves.values()), up, allow_unused=True)
    return {n: a.detach() for n, a in results.items()} | {f"d{n}": g for n, g in zip(leaves, found) if g is not None}


def truth(tensors: dict[str, Tensor | None], *, backend: str = "reference", **options) -> dict[str, Tensor]:
    doubled = {n: a.cpu().double() if a is not None and n != "index" else a for n, a in tensors.items()}
    doubled["index"] = tensors["index"].cpu()
    return call(doubled, backend=backend, **options)


@cache
def computed(name: str) -> dict[str, Tensor]:
    """What several tests compare with; nobody writes to it."""
    tensors, options = draw({"mixed": MIXED, "tiny": TINY}.get(name) or small(name))
    return call(tensors, **options)


def assert_close(found: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, *, norm: bool = False) -> None:
    """Errors relative to the largest value, or of norms."""
    for name, b in want.items():
        if name not in found:
            assert not b.any(), f"{name}: no gradient, but it is not zero"
            continue
        a = found[name].cpu().double()
        assert a.shape == b.shape, name
        assert torch.isfinite(a).all(), f"{name} is not finite"
        if b.numel():
            error = (a - b).norm() / b.norm().clamp_min(1e-12) if norm else (a - b).abs().max() / b.abs().max().clamp_min(1e-12)
            assert error <= tolerance, f"{name}: relative error {error:.1e}"


def assert_equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Bitwise, in every result that `found` has."""
    assert found
    for name, a in found.items():
        assert torch.equal(a, want[name]), name


def cut(tensors: dict[str, Tensor | None], first: int, last: int, sequences: slice) -> dict[str, Tensor | None]:
    per_sequence = ("initial_state", "up.final_state")
    return {n: a if a is None else a[sequences] if n in per_sequence else a[first:last] for n, a in tensors.items()}


def assert_packed_is_alone(
    tensors: dict[str, Tensor | None], lengths: tuple[int, ...], packed: dict[str, Tensor], options
) -> None:
    start = 0
    for s, length in enumerate(lengths):
        one = cut(tensors, start, start + length, slice(s, s + 1))
        alone = call(one, **{**options, "cu_seqlens": torch.tensor([0, length], device=options["cu_seqlens"].device)})
        for name, a in alone.items():
            mine = slice(s, s + 1) if name in ("final_state", "dinitial_state") else slice(start, start + length)
            assert torch.equal(a, packed[name][mine]), f"{name} of sequence {s}"
        start += length


@interpreted
@pytest.mark.parametrize("name", ALL)
def test_matches_float64_reference(name):
    tensors, options = draw(small(name))
    decay = small(name).decay
    # exp of a large fp32 exponent, and gradients of decays so strong that they are nearly zero themselves
    tolerance = 1e-4 if decay < -10 else 1e-5 if decay <= -1 else 4e-6
    assert_close(computed(name), truth(tensors, **options), tolerance)


@interpreted
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


@interpreted
@pytest.mark.parametrize("name", ["mixed", "no initial state"])
def test_packed_is_bitwise_alone(name):
    case = MIXED if name == "mixed" else small(name)
    tensors, options = draw(case)
    assert_packed_is_alone(tensors, case.lengths, computed(name), options)


@interpreted
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


@interpreted
def test_states_computed_again_are_the_same():
    """Which is the test of two runs being bitwise equal, too."""
    tensors, options = draw(MIXED)
    assert_equal(call(tensors, keep_states=False, **options), computed("mixed"))


@interpreted
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


@interpreted
@pytest.mark.parametrize("wanted", [("v",), ("g2", "weight")])
def test_some_inputs_need_no_gradient(wanted):
    tensors, options = draw(TINY)
    found = call(tensors, wanted=wanted, **options)
    assert set(found) == {"o", "final_state", *(f"d{n}" for n in wanted)}
    assert_equal(found, computed("tiny"))


@interpreted
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


@interpreted
def test_only_some_projections_are_per_route():
    case = Case(lengths=(9, 4), heads=1, routed=2, partitions=3, per_route=True)
    tensors, options = draw(case)
    tensors["q2"], tensors["v2"] = tensors["q2"][:, 0], tensors["v2"][:, 0]
    assert_close(call(tensors, **options), truth(tensors, **options), 4e-6)


@interpreted
def test_extreme_gates():
    """Tokens of weight 0, channels that keep everything, and every token in one partition."""
    tensors, options = draw(Case(lengths=(19, 3), heads=1, partitions=3))
    tensors["weight"][::3] = 0
    tensors["g1"][:, :, ::2] = 0
    tensors["index"].fill_(2)
    assert_close(call(tensors, **options), truth(tensors, **options), 4e-6)


@interpreted
def test_bfloat16_inputs():
    tensors, options = draw(TINY, torch.bfloat16)
    found = call(tensors, **options)
    given = {"o": tensors["v"], "final_state": torch.empty(0)} | {f"d{n}": a for n, a in tensors.items()}
    assert all(a.dtype == given[n].dtype for n, a in found.items())
    assert_close(found, truth(tensors, **options), 2e-2)


@interpreted
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


@interpreted
def test_as_operators_the_numbers_are_the_same():
    tensors, options = draw(TINY)
    with Operators() as seen:
        found = call(tensors, **options)
    assert {"posttrain::sse_gla_forward", "posttrain::sse_gla_backward"} <= seen.names
    assert_equal(found, computed("tiny"))


@interpreted
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


@interpreted
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
