"""The hybrid gate: chunked forward = extension in pieces = prefill and decoding; and the cache that holds the state."""

import pytest
import torch

from posttrain.models.cache import SlotCache

KINDS = ["sse", "sse_gdn", "full_attention", "sliding_attention", "hybrid"]
ABLATIONS = {
    "n8k3": {"num_partitions": 8, "num_selected": 3},
    "shared": {"projections": "shared", "router_gate": "write"},
    "partition": {"projections": "partition", "router_gate": "read", "num_selected": 2},
    "no_shared_partition": {"shared_partition": False, "router_gate": "none", "use_output_gate": True},
    "silu": {"key_map": "silu", "tie_word_embeddings": True},
}
LENGTHS = [1, 40, 33, 52, 5]
SLOTS = [5, 2, 7, 0, 3]


def run_pieces(model, cache, slots, sequences, pieces):
    """Feeds sequence i in the pieces `pieces[i]`, round after round, those that are left packed together -> logits of each."""
    done = [0] * len(sequences)
    outs = [[] for _ in sequences]
    for round_ in range(max(len(p) for p in pieces)):
        active = [i for i, p in enumerate(pieces) if round_ < len(p)]
        take = [pieces[i][round_] for i in active]
        cache.bind([slots[i] for i in active])
        ids = torch.cat([sequences[i][done[i] : done[i] + n] for i, n in zip(active, take, strict=True)])[None]
        with torch.no_grad():
            logits = model(ids, cu_seq_lens_q=torch.tensor([0, *take]).cumsum(0), past_key_values=cache).logits[0].split(take)
        for i, n, out in zip(active, take, logits, strict=True):
            outs[i].append(out)
            done[i] += n
    return [torch.cat(out) for out in outs]


def random_pieces(length, generator):
    pieces = []
    while sum(pieces) < length:
        pieces.append(min(int(torch.randint(1, 20, (1,), generator=generator)), length - sum(pieces)))
    return pieces


def check_gate(model, make_ids, lengths=LENGTHS):
    sequences = make_ids(lengths)
    with torch.no_grad():
        forward = [model(s[None]).logits[0] for s in sequences]
    generator = torch.Generator().manual_seed(0)
    splits = {
        "pieces": [random_pieces(n, generator) for n in lengths],
        "decode": [[max(1, n // 3)] + [1] * (n - max(1, n // 3)) for n in lengths],
    }
    cache = SlotCache(model.config, 8, max_length=512)
    for name, pieces in splits.items():
        cache.reset()
        together = run_pieces(model, cache, SLOTS, sequences, pieces)
        assert [cache.lengths[s] for s in SLOTS[: len(lengths)]] == lengths
        for got, want in zip(together, forward, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")
        for i, s in enumerate(sequences):
            (alone,) = run_pieces(model, SlotCache(model.config, 1), [0], [s], [pieces[i]])
            assert torch.equal(alone, together[i]), f"{name}: sequence {i} depends on its company"


@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_extension_is_decoding(make_model, make_ids, kind):
    check_gate(make_model(kind), make_ids)


@pytest.mark.parametrize("name", ABLATIONS)
def test_gate_holds_for_ablations(make_model, make_ids, name):
    check_gate(make_model("hybrid", **ABLATIONS[name]), make_ids)


@pytest.mark.parametrize("window", [1, 64, 70])
def test_sliding_window_keeps_a_ring(make_model, make_ids, window):
    model = make_model("sliding_attention", sliding_window=window)
    check_gate(model, make_ids, [200, 1, 90])


def test_pre_norm_gate_of_gdn(make_model, make_ids):
    check_gate(make_model("sse_gdn", router_gate="pre_norm", num_selected=2), make_ids)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2)])
def test_attention_decode_bits_depend_on_neither_batch_nor_capacity(make_model, make_ids, threads, heads):
    """Grouped queries, one head in one sequence (a batch of one product), and a pool grown by a long neighbour."""
    model = make_model("full_attention", num_attention_heads=heads[0], num_key_value_heads=heads[1])
    lengths = [3, 64, 65, 150, 300]
    sequences = make_ids(lengths)
    for count in (1, 2):
        threads(count)
        together = SlotCache(model.config, len(lengths))
        prompts = [s[:-2] for s in sequences]
        feeds = [(torch.cat(prompts)[None], [len(p) for p in prompts])]
        feeds += [(torch.stack([s[k] for s in sequences])[None], [1] * len(lengths)) for k in (-2, -1)]
        with torch.no_grad():
            for ids, take in feeds:
                batch = model(ids, cu_seq_lens_q=torch.tensor([0, *take]).cumsum(0), past_key_values=together).logits[0]
            for i, s in enumerate(sequences):
                lone = SlotCache(model.config, 1)
                for ids in (s[:-2], s[-2:-1], s[-1:]):
                    out = model(ids[None], past_key_values=lone).logits[0, -1]
                assert torch.equal(out, batch[i])


def test_fork_export_and_load_continue_bit_for_bit(make_model, make_ids):
    model = make_model()
    (s,) = make_ids([60])
    cache, other = SlotCache(model.config, 4), SlotCache(model.config, 2)
    with torch.no_grad():
        cache.bind([1])
        model(s[None, :41], past_key_values=cache)
        cache.fork(1, [0, 3])
        other.load(1, cache.export(1))
        want = model(s[None, 41:], past_key_values=cache).logits
        for chosen, slot in ((cache, 0), (cache, 3), (other, 1)):
            chosen.bind([slot])
            assert chosen.lengths[slot] == 41
            assert torch.equal(model(s[None, 41:], past_key_values=chosen).logits, want)
        cache.reset([3])
        cache.bind([3])
        again = model(s[None, :41], past_key_values=cache).logits
        assert torch.equal(again, model(s[None, :41], past_key_values=SlotCache(model.config, 1)).logits)


def test_cache_refuses_what_it_cannot_do(make_model, make_ids):
    model = make_model()
    (s,) = make_ids([20])
    cache = SlotCache(model.config, 2, max_length=25)
    with pytest.raises(ValueError, match="distinct numbers"):
        cache.bind([0, 0])
    with pytest.raises(ValueError, match="distinct numbers"):
        cache.bind([2])
    with pytest.raises(ValueError, match="bound to 2 slots, but the input has 1"), torch.no_grad():
        model(s[None], past_key_values=cache)
    cache.bind([1])
    with torch.no_grad():
        model(s[None], past_key_values=cache)
        with pytest.raises(ValueError, match="exceed max_length=25"):
            model(s[None], past_key_values=cache)
    assert cache.lengths == [0, 20]
    with pytest.raises(ValueError, match="no gradients"):
        model.train()(s[None, :2], past_key_values=cache)
    with pytest.raises(NotImplementedError, match="cannot forget"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="another shape"):
        cache.load(0, {"length": torch.tensor(3)})


def test_kv_pool_grows_in_steps(make_model, make_ids):
    model = make_model("full_attention")
    cache = SlotCache(model.config, 1)
    (s,) = make_ids([130])
    with torch.no_grad():
        model(s[None, :100], past_key_values=cache)
        assert cache.states[0].keys.shape[2] == 128
        model(s[None, 100:], past_key_values=cache)
    assert cache.states[0].keys.shape[2] == 256


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_under_autocast(make_model, make_ids, kind):
    """Half-precision projections meet the pools of a float32 model, in prefill, in pieces and token by token."""
    model = make_model(kind, initializer_range=0.05)
    sequences = make_ids([30, 41])
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            want = [model(s[None]).logits[0] for s in sequences]
        pieces = [[9, 12] + [1] * (len(s) - 21) for s in sequences]
        got = run_pieces(model, SlotCache(model.config, 2), [1, 0], sequences, pieces)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b.float()).abs().max() < 5e-2 * b.float().abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_slot_holds_nothing_of_a_broken_sequence(make_model, make_ids, kind):
    """Attention gives stale rows the weight 0, and 0 * NaN is NaN."""
    model = make_model(kind)
    first, second = make_ids([70, 9])
    want = run_pieces(model, SlotCache(model.config, 2), [1], [second], [[4, 1, 1, 1, 1, 1]])
    cache = SlotCache(model.config, 2)
    weight = model.model.embed_tokens.weight
    with torch.no_grad():
        before = weight.clone()
        weight[first[0]] = float("nan")
        cache.bind([1])
        assert model(first[None], past_key_values=cache).logits.isnan().any()
        weight.copy_(before)
    cache.reset([1])
    assert torch.equal(run_pieces(model, cache, [1], [second], [[4, 1, 1, 1, 1, 1]])[0], want[0])


def test_an_export_of_other_layers_is_refused(make_model, make_ids):
    source = SlotCache(make_model("sse").config, 1)
    target = SlotCache(make_model("full_attention").config, 1)
    with pytest.raises(ValueError, match="holds keys and values, got"):
        target.load(0, source.export(0))
