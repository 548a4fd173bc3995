"""Pages, admission and retraction: memory that runs short changes when a sequence runs, never what it samples."""

from __future__ import annotations

import random

import pytest
import torch

from posttrain.models.cache import SlotCache
from posttrain.models.paged import PAGE, OutOfPages, PageTable
from posttrain.rollout.graphs import graph_sizes
from posttrain.rollout.memory import MemoryPlan, plan_memory
from posttrain.types import Request
from tests.posttrain.rollout_models import by_sample, make_generator, make_model, make_requests, run_out

LONG = 6 * PAGE


def all_pages_are_back(generator) -> bool:
    books = generator._runner.cache.pages
    return sorted(books.free) == list(range(1, books.num_pages)) and not any(books.holders) and not any(books.pages)


def long_requests(count: int = 4) -> list[Request]:
    rng = random.Random(0)
    return [
        Request(
            id=str(i), prompt_ids=[rng.randrange(2, 48) for _ in range(rng.choice((3, 60, 64, 130)))], n=3, seed=i,
            max_tokens=rng.choice((70, 140)),
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("read_late", [False, True])
def test_retraction_changes_no_sample(read_late):
    """Room for two and a half long sequences where twelve want to run: the youngest go to the host and come back."""
    model = make_model("hybrid")
    options = {"eos_token_ids": [], "max_length": LONG, "return_router_indices": True, "read_late": read_late}
    roomy = make_generator(model, **options)
    want = by_sample(c for group in roomy.generate(long_requests()) for c in group)
    tight = make_generator(model, **options, kv_tokens=12 * PAGE)
    found = by_sample(c for group in tight.generate(long_requests()) for c in group)
    assert tight.counts["retracted"] > 0 and roomy.counts["retracted"] == 0
    assert found == want
    assert all_pages_are_back(tight) and all_pages_are_back(roomy)


def test_reading_late_changes_no_sample(model):
    """The tokens of a step are read after the next one was launched."""
    requests = make_requests(12, seed=21)
    want = by_sample(c for group in make_generator(model).generate(requests) for c in group)
    late = make_generator(model, read_late=True, max_sequences=5)
    assert by_sample(c for group in late.generate(requests) for c in group) == want
    assert sorted(late._scheduler.free) == list(range(6)) and late._loop.flight is None


def test_reading_late_snapshots_and_updates_see_every_token():
    requests = make_requests(4, seed=22, n=2, max_tokens=15)
    whole = by_sample(c for group in make_generator(make_model(), eos_token_ids=[]).generate(requests) for c in group)
    late = make_generator(make_model(), eos_token_ids=[], read_late=True)
    for request in requests:
        late.submit(request)
    for _ in range(4):
        assert not late.step()
    saved = [late.snapshot(request.id) for request in requests]
    assert {len(s["token_ids"]) for snapshot in saved for s in snapshot["sequences"]} == {4}
    assert by_sample(run_out(late)) == whole
    for snapshot in saved:
        late.restore(snapshot)
    late.step()
    assert late._loop.flight is not None
    late.update_weights(7)
    assert late._loop.flight is None
    done = run_out(late)
    assert {tuple(c.versions) for c in done} == {(0,) * 5 + (7,) * 10}
    assert {key: fields["token_ids"] for key, (fields, _) in by_sample(done).items()} == {
        key: fields["token_ids"] for key, (fields, _) in whole.items()
    }


def test_forks_share_the_pages_of_their_prompt(hybrid):
    generator = make_generator(hybrid, eos_token_ids=[], max_length=LONG)
    generator.submit(Request(prompt_ids=[5] * (2 * PAGE + 7), n=4, max_tokens=30))
    generator.step()
    books = generator._runner.cache.pages
    held = [books.pages[sequence.slot] for sequence in generator._scheduler.running]
    assert len(held) == 4 and all(pages == held[0] for pages in held)
    generator.step()
    held = [books.pages[sequence.slot] for sequence in generator._scheduler.running]
    assert len({tuple(pages[:2]) for pages in held}) == 1, "full pages stay shared"
    assert len({pages[2] for pages in held}) == 4, "the last page is copied before it is written"
    run_out(generator)
    assert all_pages_are_back(generator)


def test_many_short_requests_with_aborts_leak_nothing(hybrid):
    rng = random.Random(5)
    generator = make_generator(hybrid, max_sequences=6, kv_tokens=8 * PAGE, read_late=True)
    ended = 0
    for i in range(150):
        length = rng.choice((2, 63, 64, 70))
        generator.submit(
            Request(id=str(i), prompt_ids=[rng.randrange(2, 48)] * length, n=rng.randrange(1, 4), max_tokens=rng.randrange(1, 9))
        )
        if i % 3 == 0:
            generator.abort(str(rng.randrange(i + 1)))
        ended += len(generator.step())
    ended += len(run_out(generator))
    assert ended >= 150 and not generator._scheduler.groups
    assert sorted(generator._scheduler.free) == list(range(7)) and all_pages_are_back(generator)


def test_the_books_of_pages():
    table = PageTable(3, 6, max_length=4 * PAGE, device="cpu")
    assert table.reserve(0, 0, PAGE + 1) is None and table.pages[0] == [1, 2]
    table.fork(0, [1])
    assert table.due([0, 1], [PAGE + 1] * 3) == [0, 1], "a shared page is not written"
    assert table.reserve(1, PAGE + 1, PAGE + 2) == (2, 3) and table.pages[1] == [1, 3]
    assert table.due([0, 1], [PAGE + 1] * 3) == []
    table.publish()
    assert table.device_table[:2, :2].tolist() == [[1, 2], [1, 3]]
    assert table.reserve(0, PAGE + 1, 4 * PAGE) is None
    before = table.pages[1].copy()
    with pytest.raises(OutOfPages, match="1 pages of 64 tokens are needed, but 0 of 6"):
        table.reserve(1, 2 * PAGE, 2 * PAGE + 1)
    assert table.pages[1] == before
    assert table.release(0) == [2, 4, 5] and table.release(1) == [1, 3]


def test_a_slot_that_got_its_page_has_its_rows_where_another_gets_none():
    cache = SlotCache(make_model("attention").config, 3, max_length=4 * PAGE, paged=True, num_pages=4)
    keys = cache.states[0].keys
    cache.reserve([0, 2], [10, PAGE])
    cache.lengths[0], cache.lengths[2] = 10, PAGE
    keys[cache.pages.pages[0][0]] = 7.0
    cache.fork(0, [1])
    with pytest.raises(OutOfPages, match="1 pages of 64 tokens are needed, but 0 of 4"):
        cache.reserve([1, 2], [1, 1])
    assert cache.pages.pages[0] != cache.pages.pages[1]
    assert (keys[[pages[0] for pages in cache.pages.pages[:2]]] == 7).all()
    assert cache.pages.device_table[1, 0] == cache.pages.pages[1][0]


def test_a_plan_says_what_fits(hybrid):
    device, dtype = torch.device("cpu"), torch.float32
    plan = plan_memory(hybrid.config, max_sequences=8, max_length=4 * PAGE, device=device, dtype=dtype, kv_tokens=20 * PAGE)
    cache = SlotCache(hybrid.config, 1)
    states = sum(state.nbytes_per_slot for state in cache.states[:2])
    assert plan.slot_bytes == states and plan.page_bytes == 2 * 2 * 16 * PAGE * 4
    assert plan.bytes_of(PAGE + 1) == states + 2 * plan.page_bytes
    assert (plan.sequences_of(4 * PAGE), plan.sequences_of(PAGE), plan.sequences_of(PAGE + 1)) == (5, 8, 8)
    assert "8 sequences" in plan.describe() and "for 1,280 tokens" in plan.describe() and "5 of 256 tokens" in plan.describe()
    with pytest.raises(ValueError, match=r"kv_tokens=300, but a running sequence .* max_length=256 need 512"):
        plan_memory(hybrid.config, max_sequences=8, max_length=256, device=device, dtype=dtype, kv_tokens=300)
    with pytest.raises(ValueError, match="memory_fraction=0"):
        plan_memory(hybrid.config, max_sequences=8, max_length=256, device=device, dtype=dtype, memory_fraction=0)


def test_a_plan_from_measured_memory(hybrid, monkeypatch):
    """States first, then as many pages as are left, and an error that says how many sequences would fit."""
    from posttrain.rollout import memory

    slot, page = SlotCache.measure(hybrid.config, device="cpu", dtype=torch.float32)
    sizes = {"max_sequences": 4, "max_length": 2 * PAGE, "device": torch.device("cpu"), "dtype": torch.float32}
    workspace = memory.workspace_bytes(hybrid.config, 8192, 4, element_size=4)
    monkeypatch.setattr(memory, "_free", lambda _: 5 * slot + 7 * page + workspace)
    assert plan_memory(hybrid.config, **sizes, memory_fraction=1.0).pages == 7, "the largest forward needs its own"
    routed = plan_memory(hybrid.config, **sizes, memory_fraction=0.999, router=True, max_prefill_tokens=1)
    assert routed.slot_bytes == slot + 2 * PAGE * 2, "a byte for each token and SSE layer"
    monkeypatch.setattr(memory, "workspace_bytes", lambda *_, **__: 0)
    for pages, want in ((7, 7), (1000, 11)):  # five slots of two pages, and page 0
        monkeypatch.setattr(memory, "_free", lambda _, pages=pages: 2 * (5 * slot + pages * page))
        assert plan_memory(hybrid.config, **sizes).pages == want
    monkeypatch.setattr(memory, "_free", lambda _: 2 * (3 * slot + 5 * page))
    with pytest.raises(ValueError, match="at most max_sequences=2 fit"):
        plan_memory(hybrid.config, **sizes)


def test_graph_sizes_end_with_the_largest():
    assert graph_sizes(1) == [1]
    assert graph_sizes(22) == [1, 2, 4, 8, 16, 20, 22]
    assert graph_sizes(80)[-4:] == [48, 56, 64, 80]
    assert MemoryPlan(slots=3, pages=None, slot_bytes=1, page_bytes=1, max_length=9).sequences_of(10**6) == 2
