"""`sse_gdn` in Triton against float64: small calls, interpreted where there is no GPU, and every case on one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.kernels.sse import sse_gdn
from posttrain.kernels.sse.cases import CASES, Case, make_case

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Interpreted programs cost some 20 ms each, so one head and few chunks.
SMALL: dict[str, Case] = {
    "empty and one token": Case(lengths=(0, 19, 1), heads=1, routed=2, partitions=3),
    "no token": Case(lengths=(0, 0), heads=1, partitions=2),
    "most partitions and routes": Case(lengths=(3,), heads=1, key_dim=3, value_dim=2, partitions=64, routed=8, chunk_size=4),
    "two merges, strong decay": Case(lengths=(70,), heads=1, partitions=1, chunk_size=64, decay=-5.0, initial=False),
    "odd chunk, read gate": Case(lengths=(17, 3), heads=1, chunk_size=13, gate="read", partitions=2),
    "per route, no shared, write gate": Case(lengths=(11, 6), heads=2, per_route=True, shared=False, routed=2, gate="write"),
    "blocks of K and V": Case(lengths=(9,), heads=1, key_dim=70, value_dim=130, partitions=1, gate="none"),
}


def run(case: Case, dtype: torch.dtype, backend: str, *, device: str = "cpu", **options) -> dict[str, Tensor]:
    """Results by name, gradients as d<name>, under random upstream gradients; inputs rounded to `dtype`, truth in float64."""
    tensors, call = make_case(replace(case, transition="gdn"), dtype=dtype, device=device)
    if backend == "torch":
        tensors = {n: a.double() if a is not None and a.is_floating_point() else a for n, a in tensors.items()}
    leaves = {n: a.requires_grad_() for n, a in tensors.items() if a is not None and a.is_floating_point()}
    positional = [tensors[n] for n in (*replace(case, transition="gdn").names, "weight", "index")]
    o, final = sse_gdn(*positional, v2=tensors["v2"], initial_state=tensors["initial_state"], backend=backend, **call, **options)
    draw = torch.Generator().manual_seed(1)
    up = [torch.randn(a.shape, generator=draw, dtype=torch.float64).to(dtype).to(a.device, a.dtype) for a in (o, final)]
    found = torch.autograd.grad([o, final], list(leaves.values()), up, allow_unused=True)
    grads = {f"d{n}": torch.zeros_like(a) if g is None else g for (n, a), g in zip(leaves.items(), found, strict=True)}
    return {"o": o.detach(), "final_state": final.detach()} | grads


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    for name, want in truth.items():
        got = found[name].cpu().double()
        assert got.shape == want.shape, name
        assert torch.isfinite(got).all(), f"{name} is not finite"
        if want.numel():
            error = (got - want).norm() / want.norm().clamp_min(1e-12)
            assert error <= tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("name", SMALL)
def test_matches_float64(name):
    case = SMALL[name]
    assert_close(run(case, torch.float32, "triton", device=DEVICE), run(case, torch.float32, "torch"), 2e-6)


def test_states_computed_again_are_the_same():
    case = SMALL["odd chunk, read gate"]
    kept, again = (run(case, torch.float32, "triton", device=DEVICE, keep_states=keep) for keep in (True, False))
    assert all(torch.equal(kept[n], again[n]) for n in kept)


def test_packed_is_bitwise_alone_and_repeats():
    case = Case(lengths=(5, 18), heads=1, routed=2, partitions=2, transition="gdn")
    tensors, options = make_case(case, device=DEVICE)

    def call(first: int, last: int, sequences: slice, lengths: tuple[int, ...]) -> list[Tensor]:
        cut = {n: a if a is None else a[sequences] if n == "initial_state" else a[first:last] for n, a in tensors.items()}
        leaves = [cut[n].detach().requires_grad_() for n in (*case.names, "weight", "initial_state")]
        o, final = sse_gdn(
            *leaves[:-1], cut["index"], initial_state=leaves[-1], backend="triton",
            **{**options, "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)},
        )  # fmt: skip
        rows = [o, *torch.autograd.grad(o.square().sum() + final.sum(), leaves)]
        return [final, rows.pop(), *rows]

    packed, again = (call(0, 23, slice(None), (5, 18)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(packed, again, strict=True))
    alone = call(5, 23, slice(1, 2), (18,))
    for i, (one, all_) in enumerate(zip(alone, packed, strict=True)):
        assert torch.equal(one, all_[1:] if i < 2 else all_[5:]), f"result {i}"


def test_equal_keys_written_in_full():
    """The hardest system to invert: without decay and with b = 1 every entry under its diagonal is 1."""
    case = Case(lengths=(64,), heads=1, partitions=1, chunk_size=64, shared=False, transition="gdn", initial=False)
    tensors, options = make_case(case, device=DEVICE)
    tensors["k2"][:] = tensors["k2"][:1].clone()
    tensors["g2"].zero_()
    tensors["b2"].fill_(1)
    found, truth = (
        sse_gdn(*[None if t[n] is None else t[n] for n in (*case.names, "weight", "index")], backend=backend, **options)
        for backend, t in (
            ("triton", tensors),
            ("torch", {n: a.double() if a is not None and a.is_floating_point() else a for n, a in tensors.items()}),
        )
    )
    assert_close(dict(zip("of", found, strict=True)), {n: a.cpu() for n, a in zip("of", truth, strict=True)}, 2e-6)


def test_only_one_result_is_used():
    case = Case(lengths=(9,), heads=1, partitions=1, transition="gdn")
    tensors, options = make_case(case, device=DEVICE)
    leaf = tensors["k2"].requires_grad_()
    positional = [tensors[n] for n in (*case.names, "weight", "index")]
    state = {"initial_state": tensors["initial_state"], "backend": "triton"}
    both = sse_gdn(*positional, **state, **options)
    o, none = sse_gdn(*positional, **state, **options, output_final_state=False)
    assert none is None
    assert torch.equal(o, both[0])
    parts = [torch.autograd.grad(a.sum(), leaf, retain_graph=True)[0] for a in both]
    together = torch.autograd.grad(both[0].sum() + both[1].sum(), leaf)[0]
    assert (parts[0] + parts[1] - together).abs().max() <= 1e-5 * together.abs().max()


def test_operator_is_registered_well():
    """Shapes and dtypes of the fake kernels are the real ones', and no input is changed: what torch.compile relies on."""
    import posttrain.kernels.sse.triton_gdn_ops  # noqa: F401

    case = Case(lengths=(6,), heads=1, partitions=2, transition="gdn")
    tensors, options = make_case(case, device=DEVICE)
    given = [tensors[n] for n in (*case.names, "v2", "weight", "index")]
    leaves = [a.requires_grad_() if a is not None and a.is_floating_point() else a for a in given]
    cu_seqlens = options["cu_seqlens"].to(DEVICE)
    args = (*leaves, cu_seqlens, tensors["initial_state"], 2, 0.25, "both", 16, True, True)
    eager = sse_gdn(
        *(tensors[n] for n in (*case.names, "weight", "index")),
        initial_state=tensors["initial_state"],
        backend="triton",
        **options,
    )
    wanted = [a for a in leaves if a is not None and a.requires_grad]
    runs = [torch.ops.posttrain.sse_gdn_forward(*args)[:2], eager]
    one, two = ([*r, *torch.autograd.grad(r[0].sum() + r[1].sum(), wanted)] for r in runs)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    torch.library.opcheck(torch.ops.posttrain.sse_gdn_forward.default, args, test_utils=("test_schema", "test_faketensor"))
    saved = torch.ops.posttrain.sse_gdn_forward(*args)
    without_lengths = (*given, tensors["initial_state"])
    args = (torch.ones_like(saved[0]), None, *without_lengths, *saved[2:], 2, 0.25, "both", 16)
    args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    torch.library.opcheck(torch.ops.posttrain.sse_gdn_backward.default, args, test_utils=("test_schema", "test_faketensor"))


def test_says_what_it_cannot_run():
    tensors, options = make_case(Case(lengths=(5,), transition="gdn", chunk_size=129), device=DEVICE)
    positional = [tensors[n] for n in (*Case(lengths=(5,), transition="gdn").names, "weight", "index")]
    with pytest.raises(ValueError, match="chunk_size=129, but the kernels take at most 128"):
        sse_gdn(*positional, backend="triton", **options)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CASES, "long, wide", "widest", "chunks of 128"])
def test_every_case_on_a_gpu(name, dtype):
    own = {
        "long, wide": Case(lengths=(700, 300), key_dim=128, value_dim=128, chunk_size=64),
        "widest": Case(lengths=(130, 70), key_dim=256, value_dim=256, chunk_size=64, routed=2),
        "chunks of 128": Case(lengths=(500,), key_dim=128, value_dim=128, chunk_size=128),
    }
    case = own.get(name) or CASES[name]
    truth = run(case, dtype, "torch")
    # Decays so strong that gradients of decays are nearly zero themselves; bf16: some roundings of 2^-9 one after another.
    tolerance = (1e-4 if case.decay < -10 else 1e-5) if dtype == torch.float32 else 2e-2
    first = run(case, dtype, "triton", device="cuda")
    assert_close(first, truth, tolerance)
    repeated = run(case, dtype, "triton", device="cuda", keep_states=False)
    assert all(torch.equal(first[n], repeated[n]) for n in first)
