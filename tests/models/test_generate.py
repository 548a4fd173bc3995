"""transformers' generate() on the model's own cache."""

import pytest
import torch

from posttrain.models.cache import SlotCache

KINDS = ["sse", "sse_gdn", "full_attention", "sliding_attention", "hybrid"]
OPTIONS = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
LENGTHS = [33, 5, 20, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batch_generates_what_each_prompt_generates_alone(make_model, make_ids, pad, kind):
    model = make_model(kind)
    prompts = make_ids(LENGTHS)
    alone = [model.generate(p[None], **OPTIONS)[0, len(p) :] for p in prompts]
    for side in ("left", "right"):
        ids, mask = pad(prompts, side)
        batch = model.generate(ids, attention_mask=mask, **OPTIONS)
        for row, want in zip(batch, alone, strict=True):
            assert torch.equal(row[ids.shape[1] :], want)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_changes_nothing(make_model, make_ids, kind):
    model = make_model(kind)
    (prompt,) = make_ids([21])
    assert torch.equal(model.generate(prompt[None], **OPTIONS), model.generate(prompt[None], use_cache=False, **OPTIONS))


def test_returns_a_slot_cache_that_continues(make_model, make_ids):
    model = make_model()
    (prompt,) = make_ids([21])
    out = model.generate(prompt[None], return_dict_in_generate=True, **OPTIONS)
    assert isinstance(out.past_key_values, SlotCache)
    longer = model.generate(prompt[None], **{**OPTIONS, "max_new_tokens": 40})
    mask = torch.ones_like(out.sequences)
    more = model.generate(out.sequences, attention_mask=mask, past_key_values=out.past_key_values, **OPTIONS)
    assert torch.equal(more, longer)


def test_sampling_with_many_sequences_a_prompt(make_model, make_ids, pad):
    model = make_model()
    ids, mask = pad(make_ids(LENGTHS), "left")
    options = {"max_new_tokens": 8, "do_sample": True, "pad_token_id": 0, "num_return_sequences": 3}
    torch.manual_seed(0)
    out = model.generate(ids, attention_mask=mask, **options)
    assert out.shape == (12, ids.shape[1] + 8)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), out)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, attention_mask=mask, use_cache=False, **options), out)


def test_beam_search_reorders_the_state(make_model, make_ids, pad):
    model = make_model()
    ids, mask = pad(make_ids(LENGTHS), "left")
    options = {**OPTIONS, "max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2}
    cached = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **options))


def test_stops_at_the_end_token(make_model, make_ids):
    model = make_model()
    (prompt,) = make_ids([21])
    free = model.generate(prompt[None], **OPTIONS)[0, 21:]
    end = int(free[3])
    stopped = model.generate(prompt[None], eos_token_id=end, **OPTIONS)[0, 21:]
    first = free.tolist().index(end)
    assert stopped.tolist() == free[: first + 1].tolist()
