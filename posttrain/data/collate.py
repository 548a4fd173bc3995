"""Packed rows or single samples -> the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posttrain.data.chat import IGNORE


def collate(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """All features of a micro-batch end to end as one packed batch, without padding.

    Args:
        features: each {"input_ids" [T], "labels" [T]} and, where it holds several samples, "seq_lengths" (they sum to T).

    Returns:
        input_ids, labels, position_ids [1, T] int64 and cu_seq_lens_q [S + 1] int32, all on the host: nothing about the packing
        needs to be read back from a device. Positions restart at each sample. The label of each sample's first token is -100:
        labels are shifted inside the model, and that label would be predicted from the sample before.
    """
    if not features:
        raise ValueError("collate: a batch needs at least one sample")
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    bounds = [0]
    for feature in features:
        lengths = feature.get("seq_lengths") or [len(feature["input_ids"])]
        if not sum(lengths) == len(feature["input_ids"]) == len(feature["labels"]):
            raise ValueError(
                f"collate: seq_lengths sum to {sum(lengths)}, but there are {len(feature['input_ids'])} input_ids "
                f"and {len(feature['labels'])} labels"
            )
        ids.extend(feature["input_ids"])
        labels.extend(feature["labels"])
        for length in lengths:
            labels[bounds[-1]] = IGNORE
            positions.extend(range(length))
            bounds.append(bounds[-1] + length)
    return {
        "input_ids": torch.tensor([ids], dtype=torch.int64),
        "labels": torch.tensor([labels], dtype=torch.int64),
        "position_ids": torch.tensor([positions], dtype=torch.int64),
        "cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32),
    }
