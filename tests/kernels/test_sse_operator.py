"""Output, final state and every gradient of the torch backend against the float64 reference, and the promises about packing."""

from dataclasses import replace

import pytest
import torch

from posttrain.kernels.sse import chunked, chunked_gdn, plan, sse, sse_gdn
from posttrain.kernels.sse.cases import CASES, Case, make_case

ALL = [(name, t) for name in CASES for t in ("gla", "gdn")]


def run(case: Case, dtype: torch.dtype, backend: str, grads: bool = True) -> dict[str, torch.Tensor]:
    """Results by name, gradients as d<name>, under random upstream gradients of o and of the final state."""
    tensors, options = make_case(case, dtype=dtype)
    leaves = {n: a.requires_grad_() for n, a in tensors.items() if a is not None and a.is_floating_point()}
    positional = [tensors[n] for n in (*case.names, "weight", "index")]
    operator = sse if case.transition == "gla" else sse_gdn
    o, final = operator(*positional, v2=tensors["v2"], initial_state=tensors["initial_state"], backend=backend, **options)
    out = {"o": o, "final_state": final}
    if grads:
        draw = torch.Generator().manual_seed(1)
        up = [torch.randn(a.shape, generator=draw, dtype=torch.float64).to(a.dtype) for a in (o, final)]
        found = torch.autograd.grad([o, final], list(leaves.values()), up, allow_unused=True)
        out |= {f"d{n}": g for n, g in zip(leaves, found, strict=True) if g is not None}
    return {n: a.detach() for n, a in out.items()}


def assert_close(found: dict, truth: dict, tolerance: float) -> None:
    for name, want in truth.items():
        if name not in found:
            assert not want.any(), f"{name}: no gradient, but it is not zero"
            continue
        got = found[name]
        assert got.shape == want.shape, name
        assert torch.isfinite(got).all(), f"{name} is not finite"
        if want.numel():
            error = (got.double() - want).abs().max() / want.abs().max().clamp_min(1e-12)
            assert error <= tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(("name", "transition"), ALL)
def test_matches_float64_reference(name, transition):
    case = replace(CASES[name], transition=transition)
    truth = run(case, torch.float64, "reference")
    assert_close(run(case, torch.float64, "torch"), truth, 1e-11)
    # exp of a large fp32 exponent, and gradients of decays so strong that they are nearly zero themselves
    tolerance = 1e-4 if case.decay < -10 else 1e-5 if case.decay < -1 else 4e-6
    assert_close(run(case, torch.float32, "torch"), truth, tolerance)


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_reference_in_fp32_is_near_float64(transition):
    case = replace(CASES["empty ones"], transition=transition)
    assert_close(run(case, torch.float32, "reference"), run(case, torch.float64, "reference"), 3e-6)


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_bfloat16_inputs_are_computed_in_fp32(transition):
    case = replace(CASES["many"], transition=transition)
    tensors, options = make_case(case, dtype=torch.bfloat16)
    operator = sse if transition == "gla" else sse_gdn
    rounded = {n: a.float() if a is not None and a.is_floating_point() else a for n, a in tensors.items()}
    low, high = (
        operator(*[t[n] for n in (*case.names, "weight", "index")], initial_state=t["initial_state"], **options)
        for t in (tensors, rounded)
    )
    assert low[0].dtype == torch.bfloat16 and low[1].dtype == torch.float32
    assert torch.equal(low[1], high[1])
    assert torch.equal(low[0], high[0].to(torch.bfloat16))


PACKED = [(n, 1) for n in ("many", "empty ones", "decay at the limit", "strong decay", "per route", "long chunk")]


@pytest.mark.parametrize(("name", "threads"), [*PACKED, ("long chunk", 2)])
@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_packed_is_bitwise_alone(name, transition, threads):
    case = replace(CASES[name], transition=transition)
    tensors, options = make_case(case)
    operator = sse if transition == "gla" else sse_gdn

    def call(first: int, last: int, sequences: slice, lengths: tuple[int, ...]):
        cut = {n: a if a is None else a[sequences] if n == "initial_state" else a[first:last] for n, a in tensors.items()}
        leaves = [cut[n].detach().requires_grad_() for n in case.names]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        o, final = operator(
            *leaves, cut["weight"], cut["index"], v2=cut["v2"], initial_state=cut["initial_state"],
            **{**options, "cu_seqlens": cu_seqlens},
        )  # fmt: skip
        grads = torch.autograd.grad(o.square().sum() + final.sum(), leaves)
        return o, final, grads

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        o, final, grads = call(0, sum(case.lengths), slice(None), case.lengths)
        start = 0
        for s, length in enumerate(case.lengths):
            alone = call(start, start + length, slice(s, s + 1), (length,))
            assert torch.equal(alone[0], o[start : start + length])
            assert torch.equal(alone[1], final[s : s + 1])
            for name, mine, packed in zip(case.names, alone[2], grads, strict=True):
                assert torch.equal(mine, packed[start : start + length]), f"gradient of {name}"
            start += length
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_deterministic(transition):
    case = replace(CASES["many"], transition=transition)
    first, second = run(case, torch.float32, "torch"), run(case, torch.float32, "torch")
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_an_untouched_partition_keeps_its_state(transition):
    case = replace(CASES["lonely partition"], transition=transition)
    tensors, _ = make_case(case)
    final = run(case, torch.float32, "torch", grads=False)["final_state"]
    assert torch.equal(final[:, 1 + case.lonely], tensors["initial_state"][:, 1 + case.lonely])


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_gradcheck(transition):
    case = Case(lengths=(5, 0, 3), heads=1, key_dim=2, value_dim=2, partitions=2, routed=2, chunk_size=3, transition=transition)
    tensors, options = make_case(case, dtype=torch.float64)
    names = [*case.names, "weight", "initial_state"]
    operator = sse if transition == "gla" else sse_gdn

    def f(*leaves):
        given = dict(zip(names, leaves, strict=True))
        return operator(
            *[given[n] for n in (*case.names, "weight")], tensors["index"], initial_state=given["initial_state"], **options
        )

    assert torch.autograd.gradcheck(f, [tensors[n].requires_grad_() for n in names])


@pytest.mark.parametrize("transition", ["gla", "gdn"])
@pytest.mark.parametrize("decay", [-0.05, -3.0])
def test_without_host_knowledge_the_grid_is_the_same(transition, decay, monkeypatch):
    """The grid of upper bounds that a GPU uses, here on the CPU."""
    module = chunked if transition == "gla" else chunked_gdn
    case = replace(CASES["empty ones"], decay=decay, transition=transition)
    expected = run(case, torch.float32, "torch")
    monkeypatch.setattr(module, "build_plan", lambda *a, **k: plan.build_plan(*a, **k, exact=False))
    monkeypatch.setattr(chunked, "unsafe_matrices", lambda safe: slice(None))
    assert_close(run(case, torch.float32, "torch"), {n: a.double() for n, a in expected.items()}, 2e-6)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", ["many", "strong decay"])
@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_autocast_changes_nothing(transition, name, backend):
    """Mixed-precision training calls the operator with half-precision products allowed; a state must not be made of them."""
    case = replace(CASES[name], transition=transition)
    tensors, options = make_case(case)
    operator = sse if transition == "gla" else sse_gdn

    def call(enabled: bool):
        leaves = [tensors[n].clone().requires_grad_() for n in case.names]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            o, final = operator(
                *leaves, tensors["weight"], tensors["index"], initial_state=tensors["initial_state"], backend=backend, **options
            )
        return o, final, *torch.autograd.grad(o.square().sum() + final.sum(), leaves)

    for plain, mixed in zip(call(False), call(True), strict=True):
        assert mixed.dtype == torch.float32
        assert torch.equal(plain, mixed)


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_a_backward_pass_under_autocast_works(transition):
    case = replace(CASES["many"], transition=transition)
    tensors, options = make_case(case)
    operator = sse if transition == "gla" else sse_gdn
    leaves = [tensors[n].requires_grad_() for n in case.names]
    total = operator(*leaves, tensors["weight"], tensors["index"], **options)[0].square().sum()
    want = torch.autograd.grad(total, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(total, leaves)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 2e-2 * b.abs().max()


def test_every_tensor_must_be_on_one_device():
    case = Case(lengths=(5,), per_route=True)
    tensors, options = make_case(case)
    positional = [tensors[n] for n in (*case.names, "weight", "index")]
    with pytest.raises(ValueError, match="v2 is on meta, but v is on cpu"):
        sse(*positional, v2=tensors["v2"].to("meta"), **options)


@pytest.mark.parametrize("names", ["qkgb", "b"])
@pytest.mark.parametrize("low", ["1", "2"])
@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_half_precision_in_one_kind_of_partition_rounds_nothing_of_the_other(transition, low, names):
    """A mixed-precision model may hand over fp32 decays beside bf16 keys, or adapters in another dtype."""
    case = replace(CASES["no gate"], transition=transition)
    tensors, options = make_case(case)
    halved = [n for n in case.names if n[0] in names and n[1:] == low]
    mixed = tensors | {n: tensors[n].bfloat16() for n in halved}
    widened = mixed | {n: mixed[n].float() for n in halved}
    operator = sse if transition == "gla" else sse_gdn
    found, want = (
        operator(*[t[n] for n in (*case.names, "weight", "index")], initial_state=t["initial_state"], **options)
        for t in (mixed, widened)
    )
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_second_derivatives_are_refused(transition):
    case = replace(CASES["one token"], transition=transition)
    tensors, options = make_case(case)
    leaves = [tensors[n].requires_grad_() for n in case.names]
    operator = sse if transition == "gla" else sse_gdn
    o, _ = operator(*leaves, tensors["weight"], tensors["index"], **options)
    (dv,) = torch.autograd.grad(o.square().sum(), leaves[-1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dv.square().sum().backward()
