"""Packed, padded and alone give the same bits on CPU; padding and neighbours never leak."""

import pytest
import torch
import torch.nn.functional as F

from posttrain.models.linear import Linear, RMSNorm, elementwise, has_hooks, is_plain, silu

KINDS = ["sse", "sse_gdn", "full_attention", "sliding_attention", "hybrid"]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shape", [(4, 96), (16, 32), (130, 64), (300, 352), (64, 2304)])
def test_linear_rows_do_not_depend_on_the_others(threads, count, shape):
    threads(count)
    torch.manual_seed(0)
    layer = Linear(shape[1], shape[0])
    x = torch.randn(400, shape[1])
    with torch.no_grad():
        whole = layer(x)
        for rows in [*range(1, 34), 63, 65, 127, 399]:
            start = (rows * 7) % (400 - rows)
            assert torch.equal(layer(x[start : start + rows]), whole[start : start + rows]), rows


def test_linear_is_nn_linear_for_gradients():
    torch.manual_seed(0)
    layer = Linear(24, 12)
    x = torch.randn(5, 24, requires_grad=True)
    y = torch.randn(5, 12)
    ours = torch.autograd.grad((layer(x) * y).sum(), (x, layer.weight, layer.bias))
    plain = torch.autograd.grad((F.linear(x, layer.weight, layer.bias) * y).sum(), (x, layer.weight, layer.bias))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    assert isinstance(layer, torch.nn.Linear)


def _replace_forward(module):
    """As Accelerate's `add_hook_to_module`."""
    inner = module.forward
    module.forward = lambda x: inner(x)


@pytest.mark.parametrize(
    "watch",
    [
        _replace_forward,
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    ],
    ids=["replaced forward", "forward", "forward pre", "backward", "backward pre"],
)
def test_watched_modules_are_called(watch):
    layer, pair = Linear(4, 3, bias=False), torch.nn.Sequential(Linear(4, 2, bias=False), Linear(2, 3))
    assert is_plain(layer) and not has_hooks(pair)
    watch(layer)
    watch(pair)
    assert not is_plain(layer) and has_hooks(pair)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("width", [6, 100, 352])
def test_elementwise_bits_do_not_depend_on_the_shape(threads, count, width):
    threads(count)
    torch.manual_seed(0)
    x = torch.randn(1200, width)
    for fn in (F.silu, torch.sigmoid, F.softplus, F.logsigmoid):
        whole = elementwise(fn, x)
        for rows in (1, 3, 37, 501, 1199):
            assert torch.equal(elementwise(fn, x[-rows:]), whole[-rows:]), (fn, rows)


@pytest.mark.parametrize("dim", [16, 96, 128])
def test_norm_rows_do_not_depend_on_the_others(threads, dim):
    threads(2)
    norm = RMSNorm(dim, 1e-6)
    x = torch.randn(1000, dim)
    whole = norm(x)
    for rows in (1, 2, 15, 17, 500):
        assert torch.equal(norm(x[-rows:]), whole[-rows:])
    assert silu(x).shape == x.shape


@pytest.mark.parametrize(("kind", "seed", "count"), [*((kind, 0, 1) for kind in KINDS), ("hybrid", 1, 1), ("hybrid", 2, 2)])
def test_packed_padded_and_alone_are_bitwise_equal(make_model, make_ids, bounds, pad, threads, kind, seed, count):
    threads(count)
    model = make_model(kind, seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 2, 100, *torch.randint(1, 101, (4,), generator=generator).tolist(), 1]
    sequences = make_ids(lengths, seed)
    with torch.no_grad():
        alone = [model(s[None]).logits[0] for s in sequences]
        packed = model(torch.cat(sequences)[None], cu_seq_lens_q=bounds(lengths)).logits[0].split(lengths)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        restarts = model(torch.cat(sequences)[None], position_ids=positions).logits[0].split(lengths)
        padded = {
            side: model(ids, attention_mask=mask).logits for side in ("left", "right") for ids, mask in [pad(sequences, side)]
        }
    for row, (n, want) in enumerate(zip(lengths, alone, strict=True)):
        assert torch.equal(packed[row], want)
        assert torch.equal(restarts[row], want)
        assert torch.equal(padded["left"][row, -n:], want)
        assert torch.equal(padded["right"][row, :n], want)


def test_rows_without_mask_are_whole_sequences(make_model, make_ids):
    model = make_model()
    rows = torch.stack(make_ids([20, 20, 20]))
    with torch.no_grad():
        batch = model(rows, position_ids=torch.arange(20)[None].expand(3, -1)).logits
        for row, want in zip(rows, batch, strict=True):
            assert torch.equal(model(row[None]).logits[0], want)


def test_padding_reaches_neither_loss_nor_balance_nor_router(make_model, make_ids, bounds, pad):
    model = make_model().train()
    sequences = make_ids([9, 30, 17])
    packed = model(
        torch.cat(sequences)[None],
        cu_seq_lens_q=bounds([9, 30, 17]),
        labels=torch.cat(sequences)[None],
        output_router_indices=True,
    )
    for side in ("left", "right"):
        ids, mask = pad(sequences, side)
        for filler in (0, 7):
            filled = ids.masked_fill(mask == 0, filler)
            labels = ids.masked_fill(mask == 0, -100)
            out = model(filled, attention_mask=mask, labels=labels, output_router_indices=True)
            assert torch.equal(out.loss, packed.loss)
            assert torch.equal(out.balance_loss, packed.balance_loss)
            assert torch.equal(out.router_indices, packed.router_indices)


def test_bad_inputs_are_refused(make_model):
    model = make_model("sse")
    ids = torch.ones(1, 10, dtype=torch.long)
    with pytest.raises(ValueError, match="rise from 0 to the 10 tokens"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 4, 9]))
    with pytest.raises(ValueError, match=r"shape \[1, T\]"):
        model(ids.expand(2, -1), cu_seq_lens_q=torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(ids, attention_mask=torch.ones(1, 1, 10, 10))
    with pytest.raises(ValueError, match="every position is padding"):
        model(ids, attention_mask=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="input is empty"):
        model(ids[:, :0])
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match="not both"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 10]), attention_mask=torch.zeros_like(ids))
