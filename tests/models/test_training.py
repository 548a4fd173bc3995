"""Loss, balance loss, gradients, router replay, TRL's fused head, and that small models learn."""

import copy

import pytest
import torch
import torch.nn.functional as F

from posttrain.kernels.linear_cross_entropy import linear_cross_entropy
from posttrain.kernels.sse import use_backend
from posttrain.models import loss
from posttrain.models.linear import Linear, is_plain
from posttrain.models.loading import new_model
from posttrain.models.loss import chunked_cross_entropy

LENGTHS = [20, 1, 40]


@pytest.fixture
def batch(make_ids, bounds):
    ids = torch.cat(make_ids(LENGTHS))[None]
    return {"input_ids": ids, "cu_seq_lens_q": bounds(LENGTHS)}


def reference_loss(logits, ids, lengths):
    """Mean over the targets inside each sequence, from whole logits."""
    parts = [
        F.cross_entropy(a[:-1], b[1:], reduction="sum") for a, b in zip(logits.split(lengths), ids.split(lengths), strict=True)
    ]
    return sum(parts) / sum(n - 1 for n in lengths)


def test_loss_is_shifted_within_sequences_and_has_the_balance_loss(make_model, batch):
    model = make_model().train()
    out = model(**batch, labels=batch["input_ids"])
    assert out.logits is None
    logits = model(**batch).logits[0]
    want = reference_loss(logits, batch["input_ids"][0], LENGTHS)
    torch.testing.assert_close(out.loss, want + 0.01 * out.balance_loss)
    torch.testing.assert_close(model.model.balance_loss, 0.01 * out.balance_loss)
    evaluated = model.eval()(**batch, labels=batch["input_ids"])
    torch.testing.assert_close(evaluated.loss, want)
    assert evaluated.balance_loss is None and model.model.balance_loss is None
    assert torch.equal(evaluated.logits[0], logits)


def test_num_items_and_ignored_labels(make_model, batch):
    model = make_model().eval()
    labels = batch["input_ids"].clone()
    labels[:, :10] = -100
    plain = model(**batch, labels=labels).loss
    counted = model(**batch, labels=labels, num_items_in_batch=torch.tensor(500)).loss
    torch.testing.assert_close(counted, plain * (19 - 9 + 39) / 500)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    shifted[0, [19, 20, 60]] = -100
    assert torch.equal(model(**batch, shift_labels=shifted).loss, plain)
    nothing = model.train()(**batch, labels=torch.full_like(labels, -100))
    torch.testing.assert_close(nothing.loss, 0.01 * nothing.balance_loss)
    nothing.loss.backward()


def test_chunked_cross_entropy_has_the_gradients_of_the_whole():
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 30)
    hidden = torch.randn(100, 16, requires_grad=True)
    targets = torch.randint(0, 30, (100,)).masked_fill(torch.rand(100) < 0.3, -100)
    leaves = (hidden, head.weight, head.bias)
    chunked = torch.autograd.grad(chunked_cross_entropy(hidden, targets, head, chunk_rows=7), leaves)
    whole = torch.autograd.grad(F.cross_entropy(head(hidden), targets), leaves)
    for a, b in zip(chunked, whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("given", "used"), [(None, [(100, 4096)]), (7, [(100, 7)])])
def test_chunk_rows_reach_the_fused_loss(monkeypatch, given, used):
    asked = []

    def watch(hidden, weight, targets, *, chunk_rows, **options):
        asked.append((hidden.shape[0], chunk_rows))
        return linear_cross_entropy(hidden, weight, targets, chunk_rows=chunk_rows, **options)

    monkeypatch.setattr(loss, "_takes_fused", lambda hidden, head: is_plain(head))
    monkeypatch.setattr(loss, "linear_cross_entropy", watch)
    torch.manual_seed(0)
    head, hidden, targets = Linear(16, 30, bias=False), torch.randn(100, 16), torch.randint(0, 30, (100,))
    found = chunked_cross_entropy(hidden, targets, head, chunk_rows=given)
    assert asked == used
    torch.testing.assert_close(found, F.cross_entropy(head(hidden), targets))


def test_logits_to_keep(make_model, batch):
    model = make_model()
    with torch.no_grad():
        whole = model(**batch).logits
        assert torch.equal(model(**batch, logits_to_keep=3).logits, whole[:, -3:])
        rows = torch.tensor([0, 19, 20, 60])
        assert torch.equal(model(**batch, logits_to_keep=rows).logits, whole[:, rows])


@pytest.mark.parametrize("kind", ["hybrid", "sse_gdn"])
def test_gradient_checkpointing_gives_the_same_gradients(make_model, batch, kind):
    model = make_model(kind).train()
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for m in (model, other):
        m(**batch, labels=batch["input_ids"]).loss.backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert p.grad is not None, name
        assert torch.equal(p.grad, q.grad), name


def test_checkpointing_keeps_what_triton_computed(make_model, batch, monkeypatch):
    """Every SSE layer's forward runs once, or with keep_mixers off twice; the gradients are the same bits."""
    pytest.importorskip("triton")
    from posttrain.kernels.sse import triton_gdn_ops, triton_gla_ops

    calls = []

    def count(compute):
        return lambda *args, **options: calls.append(1) or compute(*args, **options)

    monkeypatch.setattr(triton_gla_ops, "start_states", count(triton_gla_ops.start_states))
    monkeypatch.setattr(triton_gdn_ops, "outputs", count(triton_gdn_ops.outputs))
    model = make_model("hybrid").train()
    layers, found = sum(layer.routed for layer in model.model.layers), []
    for keep in (True, False):
        other = copy.deepcopy(model)
        other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"keep_mixers": keep})
        calls.clear()
        with use_backend("triton"):
            other(**batch, labels=batch["input_ids"]).loss.backward()
        assert len(calls) == (layers if keep else 2 * layers)
        found.append({name: p.grad for name, p in other.named_parameters()})
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


def test_router_replay_uses_given_choices_with_live_weights(make_model, batch):
    model = make_model("hybrid", num_selected=2)
    with torch.no_grad():
        free = model(**batch, output_router_indices=True)
        assert free.router_indices.shape == (2, 61, 2)
        replayed = model(**batch, router_indices=free.router_indices)
        assert torch.equal(replayed.logits, free.logits)
        other = (free.router_indices + 1) % 4
        forced = model(**batch, router_indices=other, output_router_indices=True)
    assert torch.equal(forced.router_indices, other)
    assert not torch.equal(forced.logits, free.logits)
    with pytest.raises(ValueError, match=r"router_indices must be .* \[2, 61, 2\]"):
        model(**batch, router_indices=other[:1])
    loss = model.train()(**batch, router_indices=other, labels=batch["input_ids"]).loss
    loss.backward()
    assert model.model.layers[0].mixer.e_proj.weight.grad.abs().sum() > 0


def test_router_replay_keeps_float64(make_model, batch):
    model = make_model("hybrid", num_selected=2).double()
    with torch.no_grad():
        free = model(**batch, output_router_indices=True)
        assert torch.equal(model(**batch, router_indices=free.router_indices).logits, free.logits)


def test_copies_leave_the_graph_behind(make_model, batch):
    model = make_model().train()
    model(**batch, labels=batch["input_ids"])
    assert model.model.balance_loss is not None
    twin = copy.deepcopy(model)
    assert twin.model.balance_loss is None and model.model.balance_loss is not None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_hidden_states_and_embeddings_as_input(make_model, batch):
    model = make_model()
    with torch.no_grad():
        out = model(**batch, output_hidden_states=True)
        assert len(out.hidden_states) == 5
        rest = {k: v for k, v in batch.items() if k != "input_ids"}
        embedded = model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]), **rest)
        assert torch.equal(embedded.logits, out.logits)
        as_tuple = model(**batch, return_dict=False)
        assert torch.equal(as_tuple[0], out.logits)


def test_trl_fused_head_packed_and_padded(make_model, make_ids, pad, batch):
    utils = pytest.importorskip("trl.trainer.utils")
    model = make_model().train()
    plain = copy.deepcopy(model).eval()
    utils.add_fused_lm_head(model)
    flash = {"cu_seq_lens_k": batch["cu_seq_lens_q"], "max_length_q": 40, "max_length_k": 40}
    out = model(**batch, **flash, labels=batch["input_ids"], fused_lm_head=True)
    logits = plain(**batch).logits
    want = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    torch.testing.assert_close(out.log_probs, want)
    (out.loss + model.model.balance_loss).backward()
    assert model.model.layers[0].mixer.e_proj.weight.grad is not None
    sequences = make_ids([9, 30, 17])
    for side in ("left", "right"):
        ids, mask = pad(sequences, side)
        labels = ids.masked_fill(mask == 0, -100)
        out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        logits = plain(ids, attention_mask=mask).logits
        want = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        counts = mask[:, 1:].bool() & mask[:, :-1].bool()
        torch.testing.assert_close(out.log_probs[counts], want[counts])


def test_bfloat16_trains(make_model, batch):
    model = make_model().to(torch.bfloat16).train()
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("types", "goal"), [(["sse", "full_attention"], 0.5), (["sse", "sse"], 1.6), (["sse_gdn", "sse_gdn"], 1.2)]
)
def test_small_models_learn_to_copy(types, goal):
    fields = {"vocab_size": 12, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = new_model({**fields, "layer_types": types, "adapter_rank": 8, "chunk_size": 16}, seed=1).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(150):
        half = torch.randint(2, 12, (16, 5), generator=generator)
        ids = torch.cat([half, torch.ones(16, 1, dtype=torch.long), half], dim=1)
        labels = ids.clone()
        labels[:, :6] = -100
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss - model.model.balance_loss).item())
        if losses[-1] < goal:
            break
    assert losses[0] > 2.0
    assert losses[-1] < goal
