"""Unpad, pack, put back: on index arithmetic alone and through TRL's fused head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from posttrain.grpo.packing import pack_inputs, pack_router_indices, plan_packs, put_back

PAD = 99


def padded(prompts: list[list[int]], completions: list[list[int]]) -> tuple[torch.Tensor, int, int]:
    p, c = max(map(len, prompts)), max(map(len, completions))
    rows = [[PAD] * (p - len(a)) + a + b + [PAD] * (c - len(b)) for a, b in zip(prompts, completions, strict=True)]
    return torch.tensor(rows), p, c


def test_layout_by_hand():
    ids, p, c = padded([[1, 2], [3]], [[4], [5, 6, 7]])
    (pack,) = plan_packs([2, 1], [1, 3], p, c)
    inputs = pack_inputs(pack, ids)
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 5, 6]]
    assert inputs["shift_labels"].tolist() == [[-100, 4, 5, 6, 7]]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 2, 5] and inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == 3
    values = torch.arange(5.0).unsqueeze(0)
    assert put_back(pack, values, torch.zeros(2, 3)).tolist() == [[1, 0, 0], [2, 3, 4]]


def test_masked_rows_are_not_computed():
    ids, p, c = padded([[1, 2], [3]], [[4], [5, 6, 7]])
    (pack,) = plan_packs([2, 1], [0, 3], p, c)
    assert pack_inputs(pack, ids)["input_ids"].tolist() == [[3, 5, 6]] and pack.rows == (1,)
    assert put_back(pack, torch.ones(1, 3), torch.zeros(2, 3)).tolist() == [[0, 0, 0], [1, 1, 1]]


def test_everything_masked_still_reaches_the_model():
    ids, p, c = padded([[1, 2], [3]], [[4], [5, 6, 7]])
    (pack,) = plan_packs([2, 1], [0, 0], p, c)
    inputs = pack_inputs(pack, ids)
    assert inputs["input_ids"].tolist() == [[1, 2]] and inputs["shift_labels"].tolist() == [[-100, -100]]
    values = torch.ones(1, 2, requires_grad=True)
    out = put_back(pack, values, torch.zeros(2, 3))
    out.sum().backward()
    assert out.tolist() == [[0, 0, 0], [0, 0, 0]] and values.grad.tolist() == [[0, 0]]


def test_token_budget_splits_between_rows_and_covers_all():
    lengths, sizes = [3, 1, 2, 4], [5, 0, 2, 9]
    packs = plan_packs(lengths, sizes, 4, 9, max_tokens=10)
    assert [pack.rows for pack in packs] == [(0, 2), (3,)]
    written = torch.cat([pack.write for pack in packs])
    assert sorted(written.tolist()) == [*range(5), *range(18, 20), *range(27, 36)]


def test_router_choices_follow_their_rows():
    (pack,) = plan_packs([2, 1], [1, 3], 2, 3)
    rows = [torch.full((2, 2, 1), 1), torch.full((2, 4, 1), 3)]
    assert pack_router_indices(pack, rows)[0, :, 0].tolist() == [1, 1, 3, 3, 3]
    with pytest.raises(ValueError, match="row 1 cover 2 tokens, but 3"):
        pack_router_indices(pack, [rows[0], torch.zeros(2, 2, 1)])
    with pytest.raises(ValueError, match="a prompt has no token"):
        plan_packs([0], [1], 1, 1)


def test_gradient_flows_to_scored_places_only():
    (pack,) = plan_packs([2, 1], [1, 3], 2, 3)
    values = torch.randn(1, 5, requires_grad=True)
    weights = torch.tensor([[10.0, 20, 30], [1, 2, 3]])
    (put_back(pack, values, torch.zeros(2, 3)) * weights).sum().backward()
    assert values.grad.tolist() == [[0, 10, 1, 2, 3]]


class Bigram(nn.Module):
    """A model without memory: packed and padded logits agree, so only the bookkeeping is tested."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.logits = nn.Embedding(vocab, vocab)


def test_same_log_probabilities_as_a_padded_forward():
    torch.manual_seed(0)
    prompts, completions = [[1, 2, 3], [4], [5, 6]], [[7, 8], [1, 2, 3, 4, 5], [6]]
    ids, p, c = padded(prompts, completions)
    table = Bigram(100).logits
    padded_logps = torch.log_softmax(table(ids[:, :-1]), -1).gather(2, ids[:, 1:, None])[:, -c:, 0]
    mask = torch.tensor([[j < len(row) for j in range(c)] for row in completions])
    (pack,) = plan_packs([3, 1, 2], [2, 5, 1], p, c)
    inputs = pack_inputs(pack, ids)
    labels = inputs["shift_labels"]
    logps = torch.log_softmax(table(inputs["input_ids"]), -1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    assert torch.equal(put_back(pack, logps, torch.zeros(3, c)), padded_logps * mask)
