"""Decoding and prefill in Triton on slots: the token loop in float64, the prefill's states bit for bit, and nobody else's slots.

Interpreted where there is no GPU; on one, the same tests and those that need it."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.kernels.sse import decode, folds_together, sse, sse_extend
from posttrain.kernels.sse.cases import Case, make_case

pytest.importorskip("triton")

import triton
import triton.language as tl

from posttrain.kernels.sse import triton_decode_pool
from posttrain.kernels.sse.triton_decode import load_state, split
from posttrain.kernels.sse.triton_decode_pool import TritonChunkState, join_planes
from posttrain.kernels.sse.triton_plan import build_device_plan

HAS_GPU = torch.cuda.is_available()
GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
INTERPRETED = pytest.mark.skipif(HAS_GPU, reason="interpreted only where there is no GPU")
NAMES = ("q1", "k1", "g1", "q2", "k2", "g2", "v", "weight", "index")
SLOTS = 6

SMALL = Case(lengths=(9, 5, 1), heads=2, key_dim=16, value_dim=24, partitions=2, chunk_size=4, initial=False)
ONE = replace(SMALL, heads=1)
CASES = {
    "n2k1": SMALL,
    "two routes": replace(ONE, routed=2, partitions=3),
    "no shared": replace(ONE, routed=2, shared=False),
    "per route": replace(ONE, routed=2, per_route=True),
    "write gate": replace(ONE, gate="write"),
    "read gate": replace(ONE, gate="read", scale=0.3),
    "no gate": replace(ONE, gate="none"),
    "wide keys": replace(ONE, key_dim=40, value_dim=3),
    "chunk of one": replace(ONE, lengths=(3, 2), chunk_size=1),
    "odd chunk": replace(ONE, lengths=(30, 2), chunk_size=13, partitions=1),
    "decay at the limit": replace(ONE, lengths=(20,), chunk_size=16, decay=-2.5),
    "strong decay": replace(ONE, lengths=(20, 3), chunk_size=16, decay=-5.0),
    "violent decay": replace(ONE, lengths=(20,), chunk_size=16, decay=-60.0),
}
WIDE = Case(lengths=(150, 70, 9), key_dim=128, value_dim=128, chunk_size=64, initial=False)
ON_GPU = {
    "wide": WIDE,
    "wide, strong decay": replace(WIDE, decay=-5.0),
    "wide, two routes": replace(WIDE, routed=2, gate="write"),
}

BOTH = (torch.float32, torch.bfloat16)
WIDE_DTYPES = {"wide": BOTH, "wide, strong decay": BOTH, "wide, two routes": (torch.bfloat16,)}


def runs(*names: str, more: tuple[str, ...] = ("wide",), bits: bool = False):
    """(case, device, dtype): small cases interpreted; on a GPU, where a new set of sizes compiles for 20 seconds, a small one and
    the wide ones. bits: states are compared with the prefill's, whose sums of decays have another order for small K on a GPU."""
    found = [pytest.param(n, "cpu", torch.float32, id=n, marks=INTERPRETED) for n in names]
    on_gpu = [(n, torch.float32) for n in names if n == "n2k1" and not bits] + [(n, d) for n in more for d in WIDE_DTYPES[n]]
    found += [pytest.param(n, "cuda", d, id=f"{n}-gpu-{d}".replace("torch.", ""), marks=GPU) for n, d in on_gpu]
    return pytest.mark.parametrize(("name", "device", "dtype"), found)


def case_of(name: str) -> Case:
    return CASES.get(name) or ON_GPU[name]


@pytest.fixture(autouse=True)
def poisoned():
    """New tensors start as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(case: Case, device: str, dtype: torch.dtype) -> tuple[dict[str, Tensor | None], dict]:
    """What a layer gives: q, k, v of `dtype`, decays and weights in fp32."""
    tensors, options = make_case(case, device=device)
    for n, a in tensors.items():
        if a is not None and n[0] in "qkv":
            tensors[n] = a.to(dtype)
    return tensors, {n: a for n, a in options.items() if n not in ("chunk_size", "cu_seqlens")}


def allocate(case: Case, device: str, dtype: torch.dtype) -> TritonChunkState:
    """Slots full of NaN, all of them reset."""
    sizes = (SLOTS, case.partitions, case.heads, case.key_dim, case.value_dim, case.chunk_size)
    state = TritonChunkState.allocate(*sizes, device=device, dtype=dtype)
    for a in (*state.pending.values(), state.total):
        a.fill_(float("nan"))
    state.high.fill_(0x7FC0)
    state.count.fill_(7)
    state.reset(list(range(SLOTS)))
    return state


def feed(case: Case, given: tuple[dict, dict], state, slots: list[int], spans: dict[int, tuple[int, int]], out, **extra) -> None:
    """Tokens [a, b) of sequence s go to slot slots[s] and their outputs into `out`, sequences in the order of `spans`."""
    tensors, options = given
    starts = [sum(case.lengths[:s]) for s in range(len(case.lengths))]
    rows = torch.cat([torch.arange(starts[s] + a, starts[s] + b) for s, (a, b) in spans.items()]).to(out.device)
    cut = {n: a if a is None or n == "initial_state" else a[rows] for n, a in tensors.items()}
    bounds = torch.tensor([0, *(b - a for a, b in spans.values())]).cumsum(0)
    where = torch.tensor([slots[s] for s in spans], device=out.device)
    out[rows] = sse_extend(
        *[cut[n] for n in NAMES], v2=cut["v2"], cu_seqlens=bounds, state=state, slots=where, **options, **extra
    )


def one_by_one(case: Case, given, state, slots: list[int], out, begin: int = 0) -> None:
    """One token of each sequence that has some left, in another order each step."""
    for t in range(begin, max(case.lengths)):
        alive = [s for s, n in enumerate(case.lengths) if t < n]
        order = alive[t % len(alive) :] + alive[: t % len(alive)]
        feed(case, given, state, slots, dict.fromkeys(order, (t, t + 1)), out)


@runs("n2k1", "two routes", "no shared", more=())
def test_layers_fold_together_as_one_by_one(name, device, dtype):
    """Three layers of one pool, of which the second sits out every other step, and the first steps twice now and then."""
    case = case_of(name)
    given = [draw(replace(case, seed=seed), device, dtype) for seed in range(3)]
    alone = [allocate(case, device, dtype) for _ in range(3)]
    sizes = (case.partitions, case.heads, case.key_dim, case.value_dim, case.chunk_size)
    shared = TritonChunkState.allocate_layers(3, SLOTS, *sizes, device=device, dtype=dtype)
    assert shared[1].high.data_ptr() - shared[0].high.data_ptr() == shared[0].high.nbytes
    outputs = [[empty_output(g) for g in given] for _ in range(2)]
    slots = [3, 0, 5]
    for t in range(max(case.lengths)):
        alive = {s: (t, t + 1) for s, n in enumerate(case.lengths) if t < n}
        steps = [0, 2] if t % 2 else [0, 1, 2]
        groups = [[0], [1, 2]] if t == 4 and len(alive) > 1 else [list(alive)]
        for layer in steps:
            for some in groups if layer == 0 else [list(alive)]:
                spans = {s: alive[s] for s in some if s in alive}
                feed(case, given[layer], alone[layer], slots, spans, outputs[0][layer])
        before = shared[2].count.clone()
        with folds_together():
            for layer in steps:
                for some in groups if layer == 0 else [list(alive)]:
                    spans = {s: alive[s] for s in some if s in alive}
                    feed(case, given[layer], shared[layer], slots, spans, outputs[1][layer])
            assert torch.equal(shared[2].count, before)
    assert (alone[0].count >= case.chunk_size).any()
    for layer in range(3):
        torch.testing.assert_close(outputs[0][layer], outputs[1][layer], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(alone[layer].count, shared[layer].count)
        touched = alone[layer].count[slots] > 0
        for n in ("high", "low"):
            a, b = (getattr(group[layer], n)[slots] for group in (alone, shared))
            assert torch.equal(a[touched], b[touched])


def test_a_step_that_fails_leaves_the_states_as_they_were():
    case, device = CASES["n2k1"], "cuda" if HAS_GPU else "cpu"
    given, state = draw(case, device, torch.float32), allocate(case, device, torch.float32)
    with pytest.raises(RuntimeError, match="in the middle"), folds_together():
        feed(case, given, state, [0, 1, 2], {0: (0, 1)}, empty_output(given))
        raise RuntimeError("in the middle")
    assert not state.count.any()


def test_a_longer_call_comes_after_the_folds_that_wait(monkeypatch):
    """Within a block a token of each sequence fills chunks, then pieces go on from them; folds enter their pool's device."""
    entered, folded = [], []

    @contextmanager
    def on_device_of(marks):
        entered.append(marks.device)
        yield
        entered.pop()

    def fold(*arguments, **options):
        folded.append(list(entered))
        run_fold(*arguments, **options)

    case, device = CASES["n2k1"], "cuda" if HAS_GPU else "cpu"
    given, slots = draw(case, device, torch.float32), [3, 0]
    outputs, states = [empty_output(given) for _ in range(2)], [allocate(case, device, torch.float32) for _ in range(2)]
    run_fold = triton_decode_pool._fold
    for together, state, out in zip((False, True), states, outputs, strict=True):
        feed(case, given, state, slots, {0: (0, 3), 1: (0, 3)}, out)
        if together:
            monkeypatch.setattr(triton_decode_pool, "_fold", fold)
            monkeypatch.setattr(triton_decode_pool, "on_device_of", on_device_of)
        with folds_together() if together else nullcontext():
            feed(case, given, state, slots, {0: (3, 4), 1: (3, 4)}, out)
            feed(case, given, state, slots, {0: (4, 9)}, out)
            feed(case, given, state, slots, {1: (4, 5)}, out)
    assert torch.equal(outputs[1][:14], outputs[0][:14]) and bool(outputs[0][:14].isfinite().all())
    for slot in slots:
        assert_same(live(states[1], slot), live(states[0], slot))
    # A step's sums, its folds, and once more: only the folds are away from their layer.
    assert [bool(devices) for devices in folded] == [False, True, False, True]


def empty_output(given) -> Tensor:
    return torch.full_like(given[0]["v"], float("nan"))


def truth(case: Case, given) -> Tensor:
    doubled = {n: a if a is None or n == "index" else a.double() for n, a in given[0].items()}
    bounds = torch.tensor([0, *case.lengths]).cumsum(0)
    o, _ = sse(
        *[doubled[n] for n in NAMES], v2=doubled["v2"], cu_seqlens=bounds, chunk_size=case.chunk_size, backend="torch", **given[1]
    )
    return o


def assert_near(out: Tensor, want: Tensor, dtype: torch.dtype, decay: float) -> None:
    """Interpreted, exp and products are exact; on a GPU exp is one instruction, and fp32 products are made of tf32."""
    if dtype == torch.float32:
        limit = 2e-5 if out.is_cuda else 1e-5 if decay < -10 else 2e-6
        assert (out - want).abs().max() <= limit * want.abs().max()
    else:
        assert (out.double() - want).norm() <= 1e-2 * want.norm()


def live(state: TritonChunkState, slot: int) -> list[Tensor]:
    """All that a slot's next token may read: states, counts, pending rows and their total."""
    found = [state.high[slot], state.low[slot], state.count[slot]]
    for p, n in enumerate((state.count[slot] % state.chunk_size).tolist()):
        found += [state.pending[name][slot, p, :, :n] for name in ("k", "g", "v", "ks")]
        found += [state.pending["factor"][slot, p, :n], state.total[slot, p, :, n % 2] * (n > 0) if n else torch.zeros(())]
    return found


def assert_same(found: list[Tensor], want: list[Tensor]) -> None:
    assert len(found) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(found, want))


@runs(*CASES, more=tuple(ON_GPU))
def test_one_token_at_a_time_is_the_token_loop(name, device, dtype):
    case = case_of(name)
    given = draw(case, device, dtype)
    state, out = allocate(case, device, dtype), empty_output(given)
    slots = [4, 0, 3][: len(case.lengths)]
    others = [s for s in range(SLOTS) if s not in slots]
    before = {n: a[others].clone() for n, a in state._tensors().items()}
    one_by_one(case, given, state, slots, out)
    assert_near(out, truth(case, given), dtype, case.decay)
    for n, a in state._tensors().items():
        assert torch.equal(a[others].view(torch.uint8), before[n].view(torch.uint8)), n
    rows = torch.tensor([n * (case.shared + case.routed) for n in case.lengths])
    assert torch.equal(state.count[slots].sum(1).cpu(), rows)


@runs("n2k1", "two routes", "per route", "no shared", "strong decay", "chunk of one", more=tuple(ON_GPU), bits=True)
def test_prefill_in_pieces_leaves_what_tokens_leave(name, device, dtype):
    """Outputs against float64; states, pending rows and all bitwise, wherever the pieces were cut."""
    case = case_of(name)
    given = draw(case, device, dtype)
    slots = [2, 5, 1][: len(case.lengths)]
    state, out = allocate(case, device, dtype), empty_output(given)
    cuts = [[0, n // 3, n // 3, 2 * n // 3 + 1, n] for n in case.lengths]
    for i in range(4):
        feed(case, given, state, slots, {s: (min(c[i], c[-1]), min(c[i + 1], c[-1])) for s, c in enumerate(cuts)}, out)
    assert_near(out, truth(case, given), dtype, case.decay)
    single, one_out = allocate(case, device, dtype), empty_output(given)
    one_by_one(case, given, single, slots, one_out)
    for slot in slots:
        assert_same(live(state, slot), live(single, slot))


@runs("n2k1", "two routes", "per route", "no shared", "odd chunk", more=tuple(ON_GPU))
def test_a_prefill_of_empty_slots_needs_nothing_from_them(name, device, dtype):
    """Told that the slots are fresh: the same bits, over what earlier sequences left behind too."""
    case = case_of(name)
    given = draw(case, device, dtype)
    slots = [2, 5, 1][: len(case.lengths)]
    whole = {s: (0, n) for s, n in enumerate(case.lengths)}
    known, out = allocate(case, device, dtype), empty_output(given)
    feed(case, given, known, slots, whole, out)
    state, fresh_out = allocate(case, device, dtype), empty_output(given)
    one_by_one(case, given, state, slots, empty_output(given))
    state.reset(torch.tensor(slots, device=device))
    feed(case, given, state, slots, whole, fresh_out, fresh=True)
    assert torch.equal(fresh_out, out)
    for slot in slots:
        assert_same(live(state, slot), live(known, slot))


@runs("n2k1", "two routes", "strong decay", more=tuple(ON_GPU))
def test_tokens_after_a_prefill(name, device, dtype):
    case = replace(case_of(name), lengths=(case_of(name).lengths[0],))
    given, first = draw(case, device, dtype), case.lengths[0] // 2
    state, out = allocate(case, device, dtype), empty_output(given)
    feed(case, given, state, [3], {0: (0, first)}, out)
    one_by_one(case, given, state, [3], out, begin=first)
    assert_near(out, truth(case, given), dtype, case.decay)


@runs("n2k1", bits=True)
def test_boundaries_are_the_trainers_bitwise(name, device, dtype):
    size = case_of(name).chunk_size
    case = replace(case_of(name), lengths=(3 * size,), partitions=1)
    given = draw(case, device, dtype)
    state = allocate(case, device, dtype)
    one_by_one(case, given, state, [1], empty_output(given))
    bounds = torch.tensor([0, 3 * size], device=device)
    tensors = [given[0][n] for n in NAMES]
    _, final = sse(*tensors, cu_seqlens=bounds, chunk_size=size, backend="triton", **given[1])
    assert torch.equal(state.boundary[1], final[0])


@runs("n2k1", bits=True)
def test_ways_to_say_one_token(name, device, dtype):
    """With bounds and without: the same bits. Over whole chunks, as the trainer computes: the same states."""
    case = replace(case_of(name), lengths=(5, 5), heads=1)
    given = draw(case, device, dtype)
    found = []
    for how in ("bounds", "none", "strict"):
        state, out = allocate(case, device, dtype), empty_output(given)
        for t in range(5):
            if how == "none":
                rows = torch.tensor([t, 5 + t], device=device)
                cut = [None if given[0][n] is None else given[0][n][rows] for n in NAMES]
                where = torch.tensor([1, 0], device=device)
                out[rows] = sse_extend(*cut, cu_seqlens=None, state=state, slots=where, **given[1])
            else:
                feed(case, given, state, [1, 0], {0: (t, t + 1), 1: (t, t + 1)}, out, strict=how == "strict")
        assert_near(out, truth(case, given), dtype, case.decay)
        found.append((out, live(state, 0) + live(state, 1)))
    assert torch.equal(found[0][0], found[1][0])
    assert_same(found[1][1], found[0][1])
    assert_same(found[2][1], found[0][1])


@runs("two routes")
def test_a_step_does_not_depend_on_its_neighbours(name, device, dtype):
    case = replace(case_of(name), lengths=(5, 5, 5))
    given = draw(case, device, dtype)
    state, out = allocate(case, device, dtype), empty_output(given)
    one_by_one(case, given, state, [0, 1, 2], out)
    alone = empty_output(given)
    for t in range(5):
        feed(case, given, state, [3, 4, 5], {1: (t, t + 1)}, alone)
    assert torch.equal(alone[5:10], out[5:10])
    assert_same(live(state, 4), live(state, 1))


@runs("n2k1")
def test_rows_without_a_sequence(name, device, dtype):
    """A batch padded to a fixed size: negative slots."""
    case = replace(case_of(name), lengths=(1, 1, 1))
    given = draw(case, device, dtype)
    state, out = allocate(case, device, dtype), empty_output(given)
    feed(case, given, state, [0], {0: (0, 1)}, out)
    x = inputs(case, given)
    padded = allocate(case, device, dtype)
    found = padded.step(x, torch.tensor([0, -1, -1], device=device))
    assert torch.equal(found[0], out[0])
    assert not found[1:].any()
    assert_same(live(padded, 0), live(state, 0))
    assert not padded.count[1:].any()


def inputs(case: Case, given):
    from posttrain.kernels.sse.checks import check_inputs

    t, options = given
    return check_inputs(
        t["q1"], t["k1"], t["g1"], None, t["q2"], t["k2"], t["g2"], None, t["v"], t["weight"], t["index"], v2=t["v2"],
        cu_seqlens=torch.tensor([0, *case.lengths]).cumsum(0), initial_state=None, chunk_size=case.chunk_size, is_gdn=False,
        **options,
    )  # fmt: skip


@runs("two routes")
def test_fork_export_load_reset(name, device, dtype):
    case = replace(case_of(name), lengths=(7,))
    given = draw(case, device, dtype)
    state, out = allocate(case, device, dtype), empty_output(given)
    feed(case, given, state, [1], {0: (0, 6)}, out)
    state.fork(1, [3, 4])
    exported = state.export(1)
    assert all(a.device.type == "cpu" for a in exported.values())
    assert sum(a.nbytes for a in exported.values()) == state.nbytes_per_slot
    feed(case, given, state, [1], {0: (6, 7)}, out)
    other = allocate(case, device, dtype)
    other.load(2, exported)
    for owner, slot in ((state, 3), (other, 2)):
        again = empty_output(given)
        feed(case, given, owner, [slot], {0: (6, 7)}, again)
        assert torch.equal(again[6], out[6])
        assert_same(live(owner, slot), live(state, 1))
    assert_same(live(state, 4), live_of(exported, state))
    state.reset(torch.tensor([1, 4], device=device))
    assert not state.count[[1, 4]].any() and not state.boundary[[1, 4]].any() and state.count[3].any()
    fresh, first = empty_output(given), empty_output(given)
    feed(case, given, state, [4], {0: (0, 1)}, fresh)
    feed(case, given, allocate(case, device, dtype), [0], {0: (0, 1)}, first)
    assert torch.equal(fresh[0], first[0])
    with pytest.raises(ValueError, match="slots must lie"):
        state.fork(1, [SLOTS])


def live_of(exported: dict[str, Tensor], like: TritonChunkState) -> list[Tensor]:
    other = TritonChunkState.allocate(
        1, like.sizes[0] - 1, *like.sizes[1:], like.chunk_size, device=like.count.device, dtype=like.pending["k"].dtype
    )
    other.load(0, exported)
    return live(other, 0)


@triton.jit
def _round_trip(x, high, low, whole, half, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = split(tl.load(x + i))
    tl.store(high + i, a)
    tl.store(low + i, b)
    tl.debug_barrier()
    tl.store(whole + i, load_state(high, low, i, i >= 0, True))
    tl.store(half + i, load_state(high, low, i, i >= 0, False))


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=GPU)])
def test_two_planes_hold_a_state_exactly(device):
    """Ties, infinities, the smallest and largest numbers, both zeros; NaN stays NaN in the half that is read."""
    bits = torch.randint(-(2**31), 2**31 - 1, (1024,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    special = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 1, 0x8000, 0, -(2**31), 0x7FFFFFFF, 0x7FC00000, -1]
    bits[: len(special)] = torch.tensor(special, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32).to(device)
    high, low = (torch.empty(1024, dtype=torch.int16, device=device) for _ in range(2))
    whole, half = torch.empty_like(x), torch.empty_like(x)
    _round_trip[(1,)](x, high, low, whole, half, BLOCK=1024)
    number = ~x.isnan()
    assert torch.equal(whole[number].view(torch.int32), x[number].view(torch.int32))
    assert torch.equal(join_planes(high, low)[number].view(torch.int32), x[number].view(torch.int32))
    assert whole[~number].isnan().all() and half[~number].isnan().all()
    near = x.bfloat16().float()
    tie = (bits & 0xFFFF).to(device) == 0x8000
    assert torch.equal(half[number & ~tie], near[number & ~tie])
    assert half[0] == 1.0078125 and half[1] == 1.015625


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("lengths", "routes", "size", "shared"), [((5, 0, 9), 2, 4, True), ((1, 1, 3), 1, 13, False)])
def test_plan_puts_pending_rows_first(lengths, routes, size, shared, device):
    draw_from = torch.Generator().manual_seed(0)
    tokens, partitions = sum(lengths), 3
    index = torch.rand(tokens, partitions, generator=draw_from).argsort(1)[:, :routes].contiguous()
    pending = torch.randint(0, size, (len(lengths), 1 + partitions), generator=draw_from).int()
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    plan = build_device_plan(
        index.to(device), torch.tensor(bounds, device=device), num_partitions=partitions, chunk_size=size, shared=shared,
        pending=pending.to(device),
    )  # fmt: skip
    used = 0
    for s, (first, last) in enumerate(zip(bounds, bounds[1:])):
        for p in range(1 + partitions):
            step = 1 if p == 0 else routes
            own = list(range(first, last)) if p == 0 and shared else []
            if p > 0:
                own = [t * routes + r for t in range(first, last) for r in range(routes) if index[t, r] == p - 1]
            held = [(tokens + (s * (1 + partitions) + p) * size + j) * step for j in range(int(pending[s, p]))]
            want = held + own if own else []
            begin, count = int(plan.begin[s, p]), int(plan.chunks[s, p])
            assert count == -(-len(want) // size), (s, p)
            assert plan.rows[begin : begin + count].flatten().tolist() == want + [-1] * (count * size - len(want)), (s, p)
            used += count
    assert (plan.rows >= 0).any(1).sum() == used


def test_bytes_of_a_slot():
    """SSE-H-2B: two planes of 2 bytes; k, v, ks of 2 and g of 4 bytes a channel; two totals; the factors and the count."""
    state = TritonChunkState.allocate(3, 4, 18, 128, 128, 64, device="meta", dtype=torch.bfloat16)
    states, rows, totals = 18 * 128 * 128 * 4, 18 * 64 * 128 * 10, 18 * 2 * 128 * 4
    assert state.nbytes_per_slot == 5 * (states + rows + totals + 64 * 4 + 4) == 13_364_500


def test_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="chunk_size=129, but it must be 1 to 128"):
        TritonChunkState.allocate(1, 1, 1, 16, 16, 129, device="meta")
    with pytest.raises(ValueError, match="heads=0, but it must be at least 1"):
        TritonChunkState.allocate(1, 1, 0, 16, 16, 16, device="meta")
    with pytest.raises(ValueError, match="use ChunkState"):
        TritonChunkState.allocate(1, 1, 1, 16, 16, 16, transition="gdn", device="meta")
    with pytest.raises(ValueError, match="use ChunkState"):
        TritonChunkState.allocate(1, 1, 1, 16, 16, 16, device="meta", dtype=torch.float64)


def test_refuses_rows_that_it_would_round():
    given = draw(ONE, "cpu", torch.float32)
    state = TritonChunkState.allocate(SLOTS, 2, 1, 16, 24, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="k is torch.float32, but the state was allocated for torch.bfloat16"):
        feed(ONE, given, state, [0, 1, 2], {0: (0, 1)}, empty_output(given))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
class TestOnAGPU:
    def test_the_host_never_waits(self):
        case = replace(WIDE, lengths=(1, 1, 1))
        given = draw(case, "cuda", torch.bfloat16)
        state, slots = allocate(case, "cuda", torch.bfloat16), torch.tensor([5, 0, 2], device="cuda")
        for bounds in (None, torch.tensor([0, 1, 1, 3], device="cuda")):

            def call(bounds=bounds) -> Tensor:
                tensors = [given[0][n] for n in NAMES]
                return sse_extend(*tensors, cu_seqlens=bounds, state=state, slots=slots, **given[1])

            call()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def test_a_cuda_graph_goes_on_through_folds(self):
        """A step recorded once, other slots and other routing at each replay."""
        case = replace(WIDE, lengths=(70, 70))
        tensors, options = draw(case, "cuda", torch.bfloat16)
        state, want_state = (allocate(case, "cuda", torch.bfloat16) for _ in range(2))
        want = empty_output((tensors, options))
        one_by_one(case, (tensors, options), want_state, [1, 4], want)
        rows = torch.tensor([0, 70], device="cuda")
        still = {n: a if a is None or n == "initial_state" else a[rows].clone() for n, a in tensors.items()}
        slots = torch.tensor([1, 4], device="cuda")

        def step() -> Tensor:
            return sse_extend(*[still[n] for n in NAMES], cu_seqlens=None, state=state, slots=slots, **options)

        step()
        state.reset([1, 4])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for t in range(70):
            order = torch.tensor([0, 1] if t % 2 else [1, 0], device="cuda")
            for n, a in still.items():
                if a is not None and n != "initial_state":
                    a.copy_(tensors[n][t + 70 * order])
            slots.copy_(torch.tensor([1, 4], device="cuda")[order])
            graph.replay()
            assert torch.equal(found, want[t + 70 * order]), t

    def test_models_get_it_where_it_is_on(self, monkeypatch):
        monkeypatch.setattr(decode, "TRITON_ON_GPU", True)
        sizes = (2, 4, 2, 16, 16, 16)
        assert isinstance(decode.ChunkState.allocate(*sizes, device="cuda"), TritonChunkState)
        for other in (dict(device="cpu"), dict(device="cuda", transition="gdn"), dict(device="cuda", dtype=torch.float64)):
            assert type(decode.ChunkState.allocate(*sizes, **other)) is decode.ChunkState
