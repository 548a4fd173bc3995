"""The benchmarks beside vLLM and plain TRL: their arithmetic by hand, and a trial of the one that runs here."""

from __future__ import annotations

import importlib
import json
import sys

import pytest


@pytest.fixture
def load(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))
    yield importlib.import_module
    for name in [n for n in sys.modules if n.startswith("bench_")]:
        del sys.modules[name]


def test_the_llama_has_the_transformers_shape(load):
    bench = load("bench_vllm")
    config = bench.llama_config({**bench.PAPER_SIZES["transformer-2b"], "vocab_size": 151936}, 4096)
    assert (config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]) == (18, 2304, 7424)
    assert config["num_attention_heads"] == config["num_key_value_heads"] == 18 and config["head_dim"] == 128
    assert config["vocab_size"] == 151936 and not config["tie_word_embeddings"] and config["max_position_embeddings"] == 4096


def test_the_mean_context_is_the_one_named(load):
    bench = load("bench_vllm")
    # 256 prompts of 2048 tokens beside up to 256 decoding ones, 7936 tokens a step: 67 steps, the first of them without a token.
    length, joining = bench.plan(2048, 256, 8192, 64, 8)
    assert joining == 68 and length == 2048 - 8 - 32 - 34
    assert bench.plan(1, 1, 8, 64, 8)[0] == 1


def test_our_rows_stand_beside(load, tmp_path):
    bench = load("bench_vllm")
    rows = [
        {"model": "transformer-2b", "mode": "default", "context": 48, "sequences": 3, "decode_tokens_per_s": 5.0},
        {"model": "sse-h-2b", "mode": "default", "context": 48, "sequences": 3, "decode_tokens_per_s": 7.0},
        {"model": "sse-h-2b", "mode": "strict", "context": 48, "sequences": 3, "decode_tokens_per_s": 6.0},
        {"model": "sse-h-2b", "mode": "default", "context": 48, "sequences": 1, "error": "no memory"},
    ]
    (tmp_path / "generator.json").write_text(json.dumps({"rows": rows}))
    assert bench.beside(tmp_path / "generator.json") == {(48, 3): {"transformer-2b": 5.0, "sse-h-2b": 7.0}}


def test_means_are_those_of_the_steps_after_the_warm_ones(load):
    pytest.importorskip("trl")
    found = load("bench_trl").summary([(99.0, 90.0, 10), (4.0, 1.0, 10), (6.0, 3.0, 10)], warm=1)
    assert (found["step_s"], found["sampling_s"], found["rest_s"]) == (5.0, 2.0, 3.0)
    assert (found["tokens_per_s"], found["sampling_tokens_per_s"]) == (2.0, 5.0)
    assert (found["slowest_step_s"], found["first_step_s"]) == (6.0, 99.0)


def test_a_trial_writes_both_files(load, tmp_path):
    pytest.importorskip("trl")
    bench = load("bench_trl")
    with pytest.raises(SystemExit):
        bench.parse(["--tiny", "--device", "cpu"])
    assert bench.main(["--tiny", "--device", "cpu", "--models", "sse-h-600m", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "grpo_step.json").read_text())
    assert [row["side"] for row in record["rows"]] == ["ours", "trl"]
    for row in record["rows"]:
        # 2 prompts, 4 samples of 6 tokens; groups that taught nothing would leave no gradient.
        assert row["completion_tokens"] == 48 and all(norm > 0 for norm in row["grad_norm"])
    assert "| sse-h-600m | 6 | ours |" in (tmp_path / "grpo_step.md").read_text()
