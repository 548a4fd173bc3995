"""Correctness as the kernel benchmark states it: errors against float64, bitwise repeats, bitwise packing."""

from __future__ import annotations

import torch
from bench_problem import Call, Problem, build_ours, build_ours_plain
from bench_tools import poisoned_memory, relative_error, say

from posttrain.kernels.sse import sse, sse_gdn

Errors = dict[str, float]


def truth_of(p: Problem) -> dict[str, torch.Tensor]:
    """o and every gradient of SSE in float64 by the torch backend, on the problem's device."""
    return build_ours(p.double(), "torch").named()


def truth_of_plain(p: Problem) -> dict[str, torch.Tensor]:
    """As `truth_of`, of plain GLA on q1, k1, g1, v; gradients named dq, dk, dg, dv."""
    return build_ours_plain(p.double(), "torch").named()


def errors_of(what: str, call: Call, truth: dict[str, torch.Tensor], *, poison: bool) -> Errors:
    """||found - truth|| / ||truth|| of o and every gradient; `poison` fills new memory with NaN first."""
    if poison:
        with poisoned_memory():
            found = call.named()
    else:
        found = call.named()
    errors = {name: relative_error(a, truth[name]) for name, a in found.items()}
    say(f"errors {what}: " + ", ".join(f"{name} {error:.2e}" for name, error in errors.items()))
    return errors


def repeats_bitwise(call: Call) -> dict[str, bool]:
    """Whether two runs give the same bits, by tensor."""
    first, second = call.named(), call.named()
    same = {name: torch.equal(first[name], second[name]) for name in first}
    say("two runs agree bitwise: " + _verdict(same))
    return same


def packs_bitwise(p: Problem, backend: str, *, chunk_size: int = 64, seed: int = 1) -> dict[str, bool]:
    """Whether every sequence's o, final state and gradients have the same bits alone and packed among the others.

    From random initial states, with gradients of the final states too; a tensor counts only if it agrees in every sequence.
    """
    draw = torch.Generator(p.up.device).manual_seed(seed)
    heads, dim = p.up.shape[1:]
    shape = (2, len(p.lengths), 1 + p.partitions, heads, dim, dim)
    initial, up_final = 0.1 * torch.randn(*shape, generator=draw, device=p.up.device)
    packed = _with_states(p, initial, up_final, backend, chunk_size)
    same = dict.fromkeys(packed, True)
    start = 0
    for s, length in enumerate(p.lengths):
        alone = _with_states(p.sequence(s), initial[s : s + 1], up_final[s : s + 1], backend, chunk_size)
        for name, a in alone.items():
            is_state = name in ("final_state", "dinitial_state")
            part = packed[name][s : s + 1] if is_state else packed[name][start : start + length]
            same[name] &= torch.equal(part, a)
        start += length
    say(f"packed as {list(p.lengths)}, bitwise as alone: " + _verdict(same))
    return same


def _with_states(
    p: Problem, initial: torch.Tensor, up_final: torch.Tensor, backend: str, chunk_size: int
) -> dict[str, torch.Tensor]:
    operator = sse_gdn if "b1" in p.tensors else sse
    leaves = p.tensors | {"initial_state": initial.clone().requires_grad_()}
    o, final = operator(
        *p.tensors.values(), p.index, cu_seqlens=p.cu_seqlens, num_partitions=p.partitions,
        initial_state=leaves["initial_state"], backend=backend, chunk_size=chunk_size,
    )  # type: ignore[arg-type]  # fmt: skip
    assert final is not None
    grads = torch.autograd.grad([o, final], list(leaves.values()), [p.up, up_final])
    return {"o": o.detach(), "final_state": final.detach()} | {f"d{n}": g for n, g in zip(leaves, grads)}


def _verdict(same: dict[str, bool]) -> str:
    wrong = [name for name, equal in same.items() if not equal]
    return f"NO: {', '.join(wrong)} differ" if wrong else "yes"
