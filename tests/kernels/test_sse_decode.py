"""Prefill in any pieces, then decoding, gives what one call over everything gives; and a slot can be copied, moved and reused."""

from dataclasses import replace

import pytest
import torch

from posttrain.kernels.sse import ChunkState, chunked, decode, plan, sse, sse_extend, sse_gdn, sse_gdn_extend
from posttrain.kernels.sse.cases import CASES, Case, make_case

SLOTS = {"one": (1,), "few": (2, 0), "many": tuple(range(18, -1, -1))}


def operators(case: Case):
    return (sse, sse_extend) if case.transition == "gla" else (sse_gdn, sse_gdn_extend)


def state_for(case: Case, slots: int | None = None, **options) -> ChunkState:
    return ChunkState.allocate(
        slots or len(case.lengths) + 1, case.partitions, case.heads, case.key_dim, case.value_dim, case.chunk_size,
        transition=case.transition, **options,
    )  # fmt: skip


def extend(case: Case, tensors: dict, options: dict, state: ChunkState, slots: list[int], spans: list[tuple[int, int]], **extra):
    """Feeds tokens [a, b) of each sequence to its slot."""
    starts = [0]
    for length in case.lengths:
        starts.append(starts[-1] + length)
    rows = torch.cat([torch.arange(starts[s] + a, starts[s] + b) for s, (a, b) in enumerate(spans)])
    cut = {n: a if a is None or n == "initial_state" else a[rows] for n, a in tensors.items()}
    cu_seqlens = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0)
    options = {n: a for n, a in options.items() if n != "chunk_size"} | {"cu_seqlens": cu_seqlens}
    o = operators(case)[1](
        *[cut[n] for n in (*case.names, "weight", "index")],
        v2=cut["v2"],
        state=state,
        slots=torch.tensor(slots),
        **options,
        **extra,
    )
    return rows, o


def run_in_pieces(case: Case, pieces: list[list[tuple[int, int]]], **extra):
    """-> (output of one call, output of the pieces, the state, the slots)."""
    tensors, options = make_case(case)
    full, final = operators(case)[0](*[tensors[n] for n in (*case.names, "weight", "index")], v2=tensors["v2"], **options)
    slots = list(range(len(case.lengths), 0, -1))
    state, o = state_for(case), torch.full_like(full, float("nan"))
    for spans in pieces:
        rows, part = extend(case, tensors, options, state, slots, spans, **extra)
        o[rows] = part
    return full, o, final, state, slots


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def decode_all(case: Case, prefill: list[int]) -> list[list[tuple[int, int]]]:
    """Prefill the first tokens of each sequence, then one token a step each while any has some left."""
    pieces = [[(0, n) for n in prefill]]
    for step in range(max(case.lengths)):
        spans = [(min(n + step, length), min(n + step + 1, length)) for n, length in zip(prefill, case.lengths, strict=True)]
        if any(b > a for a, b in spans):
            pieces.append(spans)
    return pieces


DECODE = ["one sequence", "every partition", "lonely partition", "no shared", "per route", "write gate", "read gate", "no gate",
          "odd chunk", "chunk of one", "long chunk", "decay at the limit", "strong decay", "violent decay"]  # fmt: skip


@pytest.mark.parametrize("transition", ["gla", "gdn"])
@pytest.mark.parametrize("name", DECODE)
def test_prefill_then_decode_is_one_call(name, transition):
    case = replace(CASES[name], transition=transition, initial=False)
    # equal remainders, so that every decode step takes the one-token path
    rest = min(case.lengths) - 3
    prefill = [length - rest for length in case.lengths]
    full, o, _, _, _ = run_in_pieces(case, decode_all(case, prefill))
    assert relative(o, full) < (5e-6 if case.decay < -1 else 2e-6)


@pytest.mark.parametrize("transition", ["gla", "gdn"])
@pytest.mark.parametrize("name", ["many", "no shared", "per route", "decay at the limit", "strong decay", "long chunk"])
def test_strict_decode_is_bitwise_one_call(name, transition):
    case = replace(CASES[name], transition=transition, initial=False)
    prefill = [length // 3 for length in case.lengths]
    full, o, _, _, _ = run_in_pieces(case, decode_all(case, prefill), strict=True)
    assert torch.equal(o, full)


@pytest.mark.parametrize("transition", ["gla", "gdn"])
@pytest.mark.parametrize("name", ["many", "no shared", "long chunk", "strong decay"])
def test_prefill_in_pieces_is_bitwise_one_call(name, transition):
    case = replace(CASES[name], transition=transition, initial=False)
    draw = torch.Generator().manual_seed(3)
    done, pieces = [0] * len(case.lengths), []
    while done != list(case.lengths):
        steps = torch.randint(0, 12, (len(done),), generator=draw).tolist()
        spans = [(a, min(a + n, length)) for a, n, length in zip(done, steps, case.lengths, strict=True)]
        pieces.append(spans)
        done = [b for _, b in spans]
    full, o, _, _, _ = run_in_pieces(case, pieces)
    assert torch.equal(o, full)


@pytest.mark.parametrize("transition", ["gla", "gdn"])
@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_boundaries_are_the_trainers_bitwise(transition, one_at_a_time):
    """The boundary holds the folded chunks only: it is the final state of the tokens up to each partition's last full chunk."""
    case = Case(lengths=(32,), partitions=1, chunk_size=16, transition=transition, initial=False)
    pieces = [[(t, t + 1)] for t in range(32)] if one_at_a_time else [[(0, 32)]]
    _, _, final, state, slots = run_in_pieces(case, pieces)
    assert torch.equal(state.boundary[slots], final)
    assert not state.count.any() and not state.total.any() and not any(a.any() for a in state.pending.values())


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_an_unfinished_chunk_is_not_in_the_boundary(transition):
    case = Case(lengths=(21,), partitions=1, chunk_size=16, transition=transition, initial=False)
    _, _, final, state, slots = run_in_pieces(case, [[(0, 21)]])
    assert state.count[slots].tolist() == [[5, 5]]
    assert not torch.equal(state.boundary[slots], final)
    whole = run_in_pieces(replace(case, lengths=(21,)), [[(0, 16)]])[3]
    assert torch.equal(state.boundary[slots], whole.boundary[slots])


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_a_decode_step_does_not_depend_on_its_neighbours(transition):
    case = Case(lengths=tuple([41] * 24), routed=2, transition=transition, initial=False)
    together = run_in_pieces(case, decode_all(case, [9] * 24))[1]
    tensors, options = make_case(case)
    for s in (0, 5, 23):
        rows = slice(41 * s, 41 * (s + 1))
        alone = replace(case, lengths=(41,))
        cut = {n: a if a is None else a[rows] for n, a in tensors.items()}
        state, outs = state_for(alone), []
        for spans in decode_all(alone, [9]):
            outs.append(extend(alone, cut, options, state, [1], spans)[1])
        assert torch.equal(torch.cat(outs), together[rows])


@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_fork_export_load_reset(transition):
    case = Case(lengths=(37,), routed=2, transition=transition, initial=False)
    tensors, options = make_case(case)
    state = state_for(case, slots=5)
    extend(case, tensors, options, state, [1], [(0, 23)])
    state.fork(1, [3, 4])
    exported = state.export(1)
    assert all(a.device.type == "cpu" for a in exported.values())
    assert sum(a.nbytes for a in exported.values()) == state.nbytes_per_slot
    expected = extend(case, tensors, options, state, [1], [(23, 37)])[1]
    assert torch.equal(extend(case, tensors, options, state, [3], [(23, 37)])[1], expected)
    other = state_for(case, slots=2)
    other.load(1, exported)
    assert torch.equal(extend(case, tensors, options, other, [1], [(23, 37)])[1], expected)
    assert torch.equal(extend(case, tensors, options, state, [4], [(23, 37)])[1], expected), "the other forks changed this one"
    state.reset([1, 4])
    assert all(not a[[1, 4]].any() for a in state._tensors().values()) and state.count[3].any()
    again = extend(case, tensors, options, state, [4], [(0, 37)])[1]
    fresh = extend(case, tensors, options, state_for(case), [0], [(0, 37)])[1]
    assert torch.equal(again, fresh)


def test_load_refuses_another_layout():
    case = Case(lengths=(3,))
    state = state_for(case)
    with pytest.raises(ValueError, match="an exported gla slot holds"):
        state.load(0, state_for(replace(case, transition="gdn")).export(0))
    with pytest.raises(ValueError, match="boundary has shape"):
        state.load(0, state_for(replace(case, heads=3)).export(0))
    with pytest.raises(ValueError, match="slots must lie"):
        state.export(7)


def test_only_the_named_slots_change():
    case = Case(lengths=(5, 5), initial=False)
    tensors, options = make_case(case)
    state = state_for(case, slots=4)
    for a in (state.boundary, *state.pending.values()):
        a[1] = 7.0
    before = state.export(1)
    extend(case, tensors, options, state, [0, 3], [(0, 4), (0, 4)])
    extend(case, tensors, options, state, [0, 3], [(4, 5), (4, 5)])
    assert all(torch.equal(a, before[n]) for n, a in state.export(1).items())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_autocast_changes_nothing(transition, strict):
    case = Case(lengths=(37, 40), routed=2, transition=transition, initial=False)
    pieces = decode_all(case, [14, 17])
    plain = run_in_pieces(case, pieces, strict=strict)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = run_in_pieces(case, pieces, strict=strict)
    assert torch.equal(plain[1], mixed[1])
    assert torch.equal(plain[3].boundary, mixed[3].boundary)


def test_slots_from_the_host_are_checked_wherever_the_state_lies():
    """Meta tensors stand in for a GPU: nothing can be read back from them."""
    state = ChunkState.allocate(3, 2, 1, 4, 4, 4, device="meta")
    for call in (lambda: state.reset([3]), lambda: state.fork(0, [1, -1]), lambda: state.fork(5, [0]), lambda: state.export(3)):
        with pytest.raises(ValueError, match=r"slots must lie in \[0, 3\)"):
            call()
    state.reset([0, 2])
    state.fork(1, [0, 2])


@pytest.mark.parametrize("name", ["many", "no shared", "long chunk", "strong decay"])
@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_pieces_on_the_grid_of_upper_bounds(name, transition, monkeypatch):
    """The grid that a GPU uses, here on the CPU: prefill in two pieces, some of them empty, then one token a step."""
    case = replace(CASES[name], transition=transition, initial=False)
    monkeypatch.setattr(decode, "build_plan", lambda *a, **k: plan.build_plan(*a, **k, exact=False))
    monkeypatch.setattr(chunked, "unsafe_matrices", lambda safe: slice(None))
    half = [length // 2 for length in case.lengths]
    pieces = [[(0, n) for n in half], [(n, max(n, length - 2)) for n, length in zip(half, case.lengths, strict=True)]]
    done = [b for _, b in pieces[1]]
    while done != list(case.lengths):
        pieces.append([(n, min(n + 1, length)) for n, length in zip(done, case.lengths, strict=True)])
        done = [b for _, b in pieces[-1]]
    full, o, _, _, _ = run_in_pieces(case, pieces)
    assert relative(o, full) < (5e-6 if case.decay < -1 else 2e-6)
