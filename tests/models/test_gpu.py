"""The model on a GPU: the numbers of the CPU, in the precision of the device."""

import copy

import pytest
import torch

from posttrain.models.cache import SlotCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = [1, 40, 130]


@pytest.mark.parametrize("kind", ["sse", "sse_gdn", "full_attention", "sliding_attention", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_gradients_and_decoding(make_model, make_ids, bounds, kind, dtype):
    """fp32 takes scaled_dot_product_attention, bf16 the variable-length kernel; router choices are replayed, since a near-tie
    may fall the other way."""
    host = make_model(kind, initializer_range=0.05).train()
    device = copy.deepcopy(host).to(device="cuda", dtype=dtype)
    ids, cu = torch.cat(make_ids(LENGTHS))[None], bounds(LENGTHS)
    out = host(ids, cu_seq_lens_q=cu, labels=ids, skip_logits=False, output_router_indices=True)
    out.loss.backward()
    routes = {} if out.router_indices is None else {"router_indices": out.router_indices.cuda()}
    on_gpu = device(ids.cuda(), cu_seq_lens_q=cu.cuda(), labels=ids.cuda(), skip_logits=False, **routes)
    on_gpu.loss.backward()
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    scale = out.logits.abs().max()
    assert (on_gpu.logits.float().cpu() - out.logits).abs().max() < tolerance * scale
    for (name, a), b in zip(host.named_parameters(), device.parameters(), strict=True):
        error = (b.grad.float().cpu() - a.grad).norm() / a.grad.norm().clamp(min=1e-6)
        assert error < 4 * tolerance, name
    device.eval()
    cache = SlotCache(device.config, 1, device="cuda", dtype=dtype)
    whole = device(ids.cuda()[:, :60]).logits[0]
    with torch.no_grad():
        steps = [
            device(ids.cuda()[:, a:b], past_key_values=cache).logits[0]
            for a, b in [(0, 40), *((i, i + 1) for i in range(40, 60))]
        ]
    if dtype == torch.float32:
        torch.testing.assert_close(torch.cat(steps), whole, rtol=0, atol=1e-3 * scale.item())
    assert torch.isfinite(torch.cat(steps)).all()


@pytest.mark.parametrize("kind", ["sse", "sse_gdn", "full_attention", "sliding_attention", "hybrid"])
def test_float32_weights_under_autocast(make_model, make_ids, bounds, kind):
    """What a trainer with bf16=True does: half-precision projections, operators in fp32, and decoding between the steps."""
    model = make_model(kind, initializer_range=0.05).cuda().train()
    ids, cu = torch.cat(make_ids(LENGTHS))[None].cuda(), bounds(LENGTHS)
    plain = model(ids, cu_seq_lens_q=cu, labels=ids).loss
    with torch.autocast("cuda", torch.bfloat16):
        mixed = model(ids, cu_seq_lens_q=cu, labels=ids).loss
    mixed.backward()
    assert abs(mixed - plain) < 2e-2 * plain
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    cache = SlotCache(model.config, 1, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        steps = [model(ids[:, a:b], past_key_values=cache).logits[0] for a, b in [(0, 40), *((i, i + 1) for i in range(40, 60))]]
    assert torch.isfinite(torch.cat(steps)).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_scores_are_the_log_probabilities_that_a_generator_has(make_model, make_ids, bounds, autocast):
    """fp32 logits on both sides; masked labels give zeros, and gradients are those of the whole logits."""
    model = make_model("hybrid", initializer_range=0.05).to("cuda", torch.float32 if autocast else torch.bfloat16)
    ids, cu = torch.cat(make_ids(LENGTHS))[None].cuda(), bounds(LENGTHS)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(ids.shape[1], device="cuda") % 5 == 0, -100)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = model(ids, cu_seq_lens_q=cu, score_labels=labels, temperature=0.8)
        hidden = model.model(ids, cu_seq_lens_q=cu).last_hidden_state
    logits = hidden.to(torch.bfloat16).double() @ model.lm_head.weight.to(torch.bfloat16).double().t() / 0.8
    want = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0)
    assert out.log_probs.dtype == torch.float32 and (out.log_probs - want).abs().max() < 1e-4
    up = torch.randn(labels.shape, device="cuda")
    found, wanted = (torch.autograd.grad((a * up).sum(), list(model.parameters())) for a in (out.log_probs, want))
    for (name, _), a, b in zip(model.named_parameters(), found, wanted, strict=True):
        assert (a.double() - b.double()).norm() <= 3e-2 * b.double().norm() + 1e-6, name
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        assert (
            model(ids[:, :5], past_key_values=SlotCache(model.config, 1, device="cuda", dtype=model.dtype)).logits.dtype
            == torch.float32
        )


def test_long_sequences_have_attention_of_their_own(monkeypatch):
    """Sequences above and below the length from which cuDNN is asked, one of them no whole number of steps."""
    from posttrain.models.sse_h import SSEHConfig, mixer_attention

    lengths = [300, 1100, 40, 1024, 7]
    monkeypatch.setattr(mixer_attention, "LONG", 1024)
    fields = {"hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    host = mixer_attention.AttentionMixer(SSEHConfig(**fields), 0)
    device = copy.deepcopy(host).to(device="cuda", dtype=torch.bfloat16)
    x = torch.randn(sum(lengths), 256)
    positions = torch.cat([torch.arange(n) for n in lengths])
    table = mixer_attention.RotaryTable(128, 10000.0)
    grads = []
    for mixer, given in ((host, x), (device, x.to("cuda", torch.bfloat16))):
        leaf = given.detach().requires_grad_()
        y = mixer(leaf, lengths=lengths, rotary=table(positions.to(given.device), 2048))
        (dx,) = torch.autograd.grad(y.square().sum(), leaf)
        grads.append([y.detach().float().cpu(), dx.float().cpu()])
    for found, want in zip(grads[1], grads[0], strict=True):
        for a, b in zip(found.split(lengths), want.split(lengths), strict=True):
            assert (a - b).norm() / b.norm() < 4e-2
