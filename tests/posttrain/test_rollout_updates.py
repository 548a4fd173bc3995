"""The engine between steps: new weights, a learner's own model, snapshots, and a step that was interrupted."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch

from posttrain.errors import PosttrainError
from posttrain.models.loading import load_model
from posttrain.rollout import load_snapshot, save_snapshot
from posttrain.rollout.snapshot import pending_snapshot
from posttrain.types import Request
from tests.posttrain.rollout_models import MODELS, by_sample, make_generator, make_model, make_requests, plain_logprobs, run_out

# -- weights ----------------------------------------------------------------------------------------------------------


def test_weights_in_flight_continue_with_a_version_per_token(hybrid):
    generator = make_generator(make_model(), eos_token_ids=[], version=1)
    generator.submit(Request(prompt_ids=[4, 5], n=2, max_tokens=8))
    for _ in range(3):
        generator.step()
    generator.update_weights(2, make_model(seed=1).state_dict())
    for completion in run_out(generator):
        assert completion.versions == [1] * 3 + [2] * 5


def test_restart_gives_what_the_new_weights_alone_give():
    requests = make_requests(5, seed=13)
    new = make_model(seed=1)
    expected = by_sample(c for group in make_generator(new, version=2).generate(requests) for c in group)
    generator = make_generator(make_model(), version=1, max_sequences=4)
    for request in requests:
        generator.submit(request)
    early = [c for _ in range(2) for c in generator.step()]
    generator.update_weights(2, new.state_dict(), unfinished="restart")
    late = by_sample(run_out(generator))
    assert len(early) + len(late) == len(expected)
    assert late == {key: expected[key] for key in late}


def test_samples_not_begun_see_only_the_new_weights():
    """Their prompt was prefilled with the old weights and waits for room: it must be prefilled again."""
    request = Request(id="x", prompt_ids=[6, 7, 8], n=3, max_tokens=6, seed=2)
    new = make_model(seed=1)
    expected = by_sample(make_generator(new, eos_token_ids=[], version=2).generate([request])[0])
    generator = make_generator(make_model(), eos_token_ids=[], version=1, max_sequences=1)
    generator.submit(request)
    generator.step()
    generator.update_weights(2, new.state_dict())
    out = by_sample(run_out(generator))
    assert out["x", 0][0]["versions"] == [1, 2, 2, 2, 2, 2]
    assert [out["x", sample] for sample in (1, 2)] == [expected["x", sample] for sample in (1, 2)]


def test_finish_refuses_while_samples_run(hybrid):
    generator = make_generator(hybrid)
    generator.submit(Request(prompt_ids=[4], max_tokens=5))
    generator.step()
    with pytest.raises(PosttrainError, match="1 samples are unfinished"):
        generator.update_weights(1, unfinished="finish")
    run_out(generator)
    generator.update_weights(1, unfinished="finish")
    assert generator.version == 1
    with pytest.raises(ValueError, match="unfinished='drop', but it must be one of continue, recompute, restart, finish"):
        generator.update_weights(2, unfinished="drop")
    with pytest.raises(ValueError, match="unfinished='drop'"):
        make_generator(hybrid, unfinished="drop")


@pytest.mark.parametrize("read_late", [False, True])
def test_recomputed_states_are_those_that_the_new_weights_make(model, read_late):
    """Tokens stay, and what follows is what the new weights say of them, in one packed forward."""
    requests = make_requests(5, seed=15, max_tokens=20)
    new = make_model(next(kind for kind, options in MODELS.items() if options["layer_types"] == model.config.layer_types), seed=1)
    generator = make_generator(
        copy.deepcopy(model), eos_token_ids=[], version=1, unfinished="recompute", max_sequences=4, max_prefill_tokens=16,
        return_router_indices=True, read_late=read_late,
    )  # fmt: skip
    for request in requests:
        generator.submit(request)
    early = [c for _ in range(6) for c in generator.step()]
    generator.update_weights(2, new.state_dict())
    late = run_out(generator)
    assert len(early) + len(late) == sum(request.n for request in requests)
    assert generator.counts["recomputed"] > 0
    mixed = [c for c in late if set(c.versions) == {1, 2}]
    assert mixed
    for c in late:
        assert c.versions == sorted(c.versions)
        fresh = [version == 2 for version in c.versions]
        found = plain_logprobs(new.eval(), c)[fresh] - torch.tensor(c.plain_logprobs)[fresh]
        assert found.abs().max() < 1e-5
        if c.router_indices is not None:
            replayed = plain_logprobs(new, c, router_indices=c.router_indices.long())
            assert (replayed[fresh] - torch.tensor(c.plain_logprobs)[fresh]).abs().max() < 1e-5


def test_continued_states_are_the_old_weights():
    """The other side of the test above: without recomputation the new weights alone do not explain the log-probabilities."""
    new = make_model(seed=1)
    generator = make_generator(make_model(), eos_token_ids=[])
    generator.submit(Request(prompt_ids=[7] * 20, max_tokens=12))
    for _ in range(6):
        generator.step()
    generator.update_weights(1, new.state_dict(), unfinished="continue")
    (c,) = run_out(generator)
    assert (plain_logprobs(new.eval(), c)[6:] - torch.tensor(c.plain_logprobs)[6:]).abs().max() > 1e-3


def test_what_was_set_aside_is_recomputed_too(hybrid):
    """A restored sample waits for a slot while new weights arrive, and another update follows before it got one."""
    source = make_generator(hybrid, eos_token_ids=[])
    source.submit(Request(id="x", prompt_ids=[7] * 9, n=3, max_tokens=20))
    for _ in range(5):
        source.step()
    saved = source.snapshot("x")
    new = make_model(seed=1)
    target = make_generator(make_model(), eos_token_ids=[], max_sequences=1, unfinished="recompute")
    target.restore(saved)
    target.update_weights(1, make_model(seed=2).state_dict())
    waiting = target.snapshot("x")
    assert [s["cache"] for s in waiting["sequences"]] == [None] * 3
    target.update_weights(2, new.state_dict())
    for c in run_out(target):
        assert c.versions == [0] * 5 + [2] * 15
        assert (plain_logprobs(new.eval(), c)[5:] - torch.tensor(c.plain_logprobs)[5:]).abs().max() < 1e-5


def test_weights_must_arrive_whole():
    model = make_model()
    generator = make_generator(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = make_model(seed=1).state_dict()
    lacking = {name: tensor for name, tensor in new.items() if name != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"1 missing \['lm_head.weight'\], 0 unexpected"):
        generator.update_weights(1, lacking)
    with pytest.raises(ValueError, match=r"1 unexpected \['extra'\]"):
        generator.update_weights(1, {**new, "extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"model.norm.weight: \(3,\) given, \(32,\) needed"):
        generator.update_weights(1, {**new, "model.norm.weight": torch.zeros(3)})
    assert generator.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    generator.update_weights(1, new)
    assert all(torch.equal(tensor, new[name]) for name, tensor in model.state_dict().items())


def test_the_learners_own_model_is_left_as_it_was():
    """Training mode with one frozen part, gradient checkpointing on; it trains on after a rollout, replaying the routes."""
    model = make_model().train()
    model.gradient_checkpointing_enable()
    model.model.norm.eval()
    flags = [module.training for module in model.modules()]
    generator = make_generator(model, return_router_indices=True)
    completion = generator.generate([Request(prompt_ids=[5, 6, 7], max_tokens=20)])[0][0]
    assert [module.training for module in model.modules()] == flags
    ids = torch.tensor([(completion.prompt_ids + completion.token_ids)[:-1]])
    bounds = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
    model(input_ids=ids, cu_seq_lens_q=bounds, labels=ids, router_indices=completion.router_indices.long()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    generator.update_weights(1)
    after = generator.generate([Request(prompt_ids=[5, 6, 7], max_tokens=20)])[0][0]
    model.eval()
    assert (plain_logprobs(model, after) - torch.tensor(after.plain_logprobs)).abs().max() < 1e-5
    assert set(after.versions) == {1}


# -- snapshots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_a_snapshot_continues_elsewhere_bit_for_bit(model, steps):
    request = Request(id="x", prompt_ids=[7] * 9, n=5, max_tokens=14, seed=6)
    options = {"return_router_indices": True, "max_sequences": 3}
    whole = by_sample(make_generator(model, **options).generate([request])[0])
    source = make_generator(model, **options)
    source.submit(request)
    out = [c for _ in range(steps) for c in source.step()]
    saved = pickle.loads(pickle.dumps(source.snapshot("x")))
    assert by_sample([*out, *run_out(source)]) == whole, "taking a snapshot must not disturb the request"

    target = make_generator(model, return_router_indices=True, max_sequences=2)
    target.submit(Request(id="other", prompt_ids=[3, 4], n=3, max_tokens=10))
    target.step()
    assert target.restore(saved) == "x"
    again = pickle.loads(pickle.dumps(target.snapshot("x")))  # of sequences that still wait for a slot
    continued = [c for c in run_out(target) if c.request_id == "x"]
    assert by_sample([*out, *continued]) == whole
    target.restore(again)
    assert by_sample([*out, *run_out(target)]) == whole


def test_a_snapshot_goes_through_a_file_to_another_engine(hybrid, tmp_path):
    request = Request(id="x", prompt_ids=[7] * 70, n=3, max_tokens=14, seed=6, stop=())
    whole = by_sample(make_generator(hybrid, return_router_indices=True).generate([request])[0])
    source = make_generator(hybrid, return_router_indices=True)
    source.submit(request)
    out = [c for _ in range(5) for c in source.step()]
    save_snapshot(source.snapshot("x"), tmp_path / "x.snapshot")
    assert source.abort("x")
    hybrid.save_pretrained(tmp_path / "model")
    target = make_generator(load_model(str(tmp_path / "model")), return_router_indices=True, max_sequences=2)
    target.restore(load_snapshot(tmp_path / "x.snapshot"))
    assert by_sample([*out, *run_out(target)]) == whole
    assert [file.name for file in tmp_path.glob("*.part")] == [] and sorted(os.listdir(tmp_path)) == ["model", "x.snapshot"]


def test_files_that_are_no_snapshots_are_refused(hybrid, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a snapshot")
    torch.save({"run": os.system}, tmp_path / "code")
    for name in ("empty", "text", "code"):
        with pytest.raises(ValueError, match=f"{name}: not a snapshot"):
            load_snapshot(tmp_path / name)
    torch.save({"a": 1}, tmp_path / "other")
    with pytest.raises(ValueError, match="format None given"):
        make_generator(hybrid).restore(load_snapshot(tmp_path / "other"))
    with pytest.raises(FileNotFoundError):
        load_snapshot(tmp_path / "absent")


def test_a_snapshot_without_its_state_is_computed_again(hybrid):
    """Of another layout, or without the router's choices: the same tokens follow where the weights are the same."""
    request = Request(id="x", prompt_ids=[7] * 9, n=2, max_tokens=14, seed=6)
    whole = make_generator(hybrid, return_router_indices=True).generate([request])[0]
    source = make_generator(hybrid)
    source.submit(request)
    for _ in range(5):
        source.step()
    saved = source.snapshot("x")
    target = make_generator(hybrid, return_router_indices=True)
    with pytest.raises(ValueError, match="recompute=True"):
        target.restore(saved)
    assert not target.has_unfinished
    target.restore(saved, recompute=True)
    for c, wanted in zip(sorted(run_out(target), key=lambda c: c.sample), whole, strict=True):
        assert c.token_ids == wanted.token_ids and c.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        assert torch.equal(c.router_indices, wanted.router_indices)
    other = make_generator(make_model("two routed"))
    with pytest.raises(ValueError, match="x: the snapshot's state is of another model or device: layers .*recompute=True"):
        other.restore(saved)
    assert not other.has_unfinished


def test_snapshots_that_do_not_fit_are_refused(hybrid):
    source = make_generator(hybrid, eos_token_ids=[])
    source.submit(Request(id="x", prompt_ids=[7] * 9, max_tokens=60))
    for _ in range(30):
        source.step()
    saved = source.snapshot("x")
    with pytest.raises(ValueError, match="no unfinished|not an unfinished"):
        source.snapshot("y")
    with pytest.raises(ValueError, match="already has this id"):
        source.restore(saved)
    with pytest.raises(ValueError, match="larger max_length"):
        make_generator(hybrid, max_length=30).restore(saved)
    with pytest.raises(ValueError, match="router"):
        make_generator(hybrid, return_router_indices=True).restore(saved)
    with pytest.raises(ValueError, match="format"):
        make_generator(hybrid).restore({"format": 99})
    saved["sequences"][0]["token_ids"][3] = 48
    for recompute in (False, True):
        with pytest.raises(ValueError, match="sample 0 holds token id 48, which is outside the vocabulary, 0 to 47"):
            make_generator(hybrid).restore(saved, recompute=recompute)


@pytest.mark.parametrize(
    ("pending", "begun", "message"),
    [
        ([], [], r"names samples \[\], but they must be at least one"),
        ([0, 0], [], "distinct"),
        ([2], [], r"in \[0, 2\)"),
        ([0], [{"sample": 0}], "distinct"),
        ([1], [{"versions": [0]}], "'versions': 1.*one entry a token"),
        ([1], [{name: [] for name in ("token_ids", "logprobs", "plain_logprobs", "versions")}], "under `pending`"),
    ],
)
def test_snapshots_whose_samples_are_no_samples_are_refused(hybrid, pending, begun, message):
    """One that names no sample would be unfinished for ever."""
    request = Request(id="x", prompt_ids=[7] * 9, n=2, max_tokens=8)
    columns = {"token_ids": [5, 6], "logprobs": [-1.0, -1.0], "plain_logprobs": [-1.0, -1.0], "versions": [0, 0]}
    sequences = [{"sample": 0, "cache": None, "router_indices": None, **columns, **changed} for changed in begun]
    target = make_generator(hybrid)
    with pytest.raises(ValueError, match=message):
        target.restore({**pending_snapshot(request, pending), "sequences": sequences})
    assert not target.has_unfinished


def test_router_indices_stay_with_generators_that_return_them(hybrid):
    source = make_generator(hybrid, return_router_indices=True)
    source.submit(Request(id="x", prompt_ids=[7] * 9, max_tokens=8))
    source.step()
    target = make_generator(hybrid)
    target.restore(source.snapshot("x"))
    target.abort("x")
    assert [completion.router_indices for completion in target.step()] == [None]


def test_an_interrupted_step_begins_again_and_loses_nothing(hybrid):
    requests = make_requests(6, seed=14)
    whole = by_sample(c for group in make_generator(hybrid).generate(requests) for c in group)
    model = make_model().eval()
    generator = make_generator(model, max_sequences=4)
    for request in requests:
        generator.submit(request)
    out = [c for _ in range(4) for c in generator.step()]

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generator.step()
    handle.remove()
    assert by_sample([*out, *run_out(generator)]) == whole
