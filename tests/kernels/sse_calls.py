"""Calls of `sse` that several test files make: inputs, results and gradients by name, and what they must be equal to."""

import torch
from torch import Tensor

from posttrain.kernels.sse import sse
from posttrain.kernels.sse.cases import Case, make_case


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
