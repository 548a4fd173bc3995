"""The generator's benchmark: its byte floor by hand, and a trial of the script."""

from __future__ import annotations

import importlib
import json
import math
import sys

import pytest
import torch

from posttrain.models.loading import new_model
from posttrain.types import Completion


@pytest.fixture
def bench(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))
    yield importlib.import_module("bench_generator")
    for name in [n for n in sys.modules if n.startswith("bench_")]:
        del sys.modules[name]


def test_the_floor_counts_weights_and_every_sequences_own(bench):
    fields = {"vocab_size": 11, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    model = new_model({**fields, "layer_types": ["full_attention"]}, 0, dtype="bfloat16")
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 8 + 3 * 32 + 11 * 32)
    found = bench.floor_bytes(model, {**fields, "layer_types": ["full_attention"]}, context=100, sequences=3)
    assert found == weights + 3 * 100 * 2 * 32 * 2


def test_the_comparison_finds_a_shift(bench):
    model = new_model(bench.fields_of("sse-h-2b", "tiny"), 0)
    ids = torch.randint(97, (30,)).tolist()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    plain = [float(logprobs[i - 1, ids[i]]) for i in range(10, 30)]
    parts = {"request_id": "x", "sample": 0, "prompt_ids": ids[:10], "token_ids": ids[10:], "versions": [0] * 20}
    for shift in (0.0, 0.1):
        shifted = [p - shift for p in plain]
        completion = Completion(
            **parts, logprobs=shifted, plain_logprobs=shifted, finish_reason="length", router_indices=None
        )  # fmt: skip
        found = bench.compare(model, [completion], model)
        assert found["tokens"] == 20 and found["mean_difference"] == pytest.approx(shift, abs=1e-5)
        assert found["trainer_error"] == pytest.approx(0, abs=1e-5) and found["generator_error"] == pytest.approx(shift, abs=1e-5)
        assert found["k3"] == pytest.approx(math.exp(shift) - 1 - shift, abs=1e-5)


def test_a_trial_writes_both_files(bench, tmp_path):
    arguments = ["--tiny", "--device", "cpu", "--check", "--models", "sse-h-2b", "--out", str(tmp_path)]
    assert bench.main(arguments) == 0
    record = json.loads((tmp_path / "generator.json").read_text())
    assert [row["sequences"] for row in record["rows"]] == [3, 1] and record["check"][0]["within_goals"]
    assert [row["samples"] for row in record["first_token"]] == [1, 8]
    assert "| sse-h-2b | default | 48 | 3 |" in (tmp_path / "generator.md").read_text()
    with pytest.raises(SystemExit):
        bench.parse(["--tiny", "--device", "cpu"])
