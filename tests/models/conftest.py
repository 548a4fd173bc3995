"""Small models of every mixer kind, and batches for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.models.loading import new_model
from posttrain.models.sse_h import SSEHForCausalLM

VOCAB = 50
KINDS = {
    "sse": ["sse", "sse"],
    "sse_gdn": ["sse_gdn", "sse_gdn"],
    "full_attention": ["full_attention", "full_attention"],
    "sliding_attention": ["sliding_attention", "sliding_attention"],
    "hybrid": ["sse", "sse_gdn", "full_attention", "sliding_attention"],
}


def small_fields(kind: str = "hybrid", **changes: Any) -> dict[str, Any]:
    """Weights ten times the usual size, so that logits differ enough for argmax to be meaningful."""
    types = KINDS[kind]
    fields = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": len(types), "layer_types": types,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "adapter_rank": 16, "chunk_size": 16,
        "sliding_window": 8, "qk_norm": True, "initializer_range": 0.2,
    }  # fmt: skip
    return {**fields, **changes}


@pytest.fixture
def make_model() -> Callable[..., SSEHForCausalLM]:
    def make(kind: str = "hybrid", seed: int = 0, **changes: Any) -> SSEHForCausalLM:
        return new_model(small_fields(kind, **changes), seed)

    return make


@pytest.fixture
def make_ids() -> Callable[..., list[Tensor]]:
    """Random sequences of given lengths; id 0 is left for padding."""

    def make(lengths: list[int], seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(1, VOCAB, (n,), generator=generator) for n in lengths]

    return make


@pytest.fixture
def bounds() -> Callable[[list[int]], Tensor]:
    return lambda lengths: torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.fixture
def pad() -> Callable[..., tuple[Tensor, Tensor]]:
    """Sequences -> (ids [B, T], mask [B, T]), padded with 0 on one side."""

    def make(sequences: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
        columns = max(len(s) for s in sequences)
        ids = torch.zeros(len(sequences), columns, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, s in enumerate(sequences):
            where = slice(columns - len(s), columns) if side == "left" else slice(0, len(s))
            ids[row, where], mask[row, where] = s, 1
        return ids, mask

    return make


@pytest.fixture
def threads() -> Any:
    """Sets PyTorch's thread count for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
