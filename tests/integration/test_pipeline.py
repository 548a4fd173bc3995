"""The whole pipeline as a user runs it: a recipe, every stage on Ray, a second launch that has nothing left to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
name: tiny
seed: 3
model:
  tokenizer: arithmetic
  init: {layer_types: [sse, full_attention], num_hidden_layers: 2, hidden_size: 32, intermediate_size: 64, num_attention_heads: 2,
         adapter_rank: 4, gate_rank: 4, chunk_size: 16, max_position_embeddings: 512}
data:
  max_length: 512
  max_prompt_length: 64
  train: {kind: arithmetic, limit: 200}
trainer: {max_steps: 4, per_device_train_batch_size: 1, logging_steps: 1, save_steps: 2, learning_rate: 1.0e-3}
grpo: {max_steps: 2, num_generations: 4, per_device_train_batch_size: 16, max_completion_length: 16, save_steps: 1}
rollout: {max_sequences: 16}
reward: {workers: 1}
eval:
  suites: {arithmetic: {arithmetic: {}, limit: 5}}
  samples: 2
  max_tokens: 16
ray: {object_store_memory_mb: 100}
"""


def launch(folder: Path, root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "posttrain", "run", "tiny.yaml", f"run_dir={folder / 'run'}", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
def test_recipe_to_report_through_ray(tmp_path, root):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    first = launch(tmp_path, root)
    assert first.returncode == 0, first.stderr[-3000:]
    run = tmp_path / "run"
    for part in ("base", "sft/final", "grpo/final"):
        assert (run / part / "model.safetensors").is_file()
        assert (run / part / "tokenizer_config.json").is_file()
    weights = [(run / part / "model.safetensors").read_bytes() for part in ("base", "sft/final", "grpo/final")]
    assert len(set(weights)) == 3, "every stage changed the weights"
    results = json.loads((run / "eval" / "results.json").read_text())
    assert [(row["model"], row["problems"], row["samples"]) for row in results] == [("base", 5, 2), ("sft", 5, 2), ("grpo", 5, 2)]
    steps = [(r["stage"], r["step"]) for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in r]
    assert steps == [("sft", 1), ("sft", 2), ("sft", 3), ("sft", 4), ("grpo", 1), ("grpo", 2)]
    assert (run / "rollouts" / "step-000002.parquet").is_file()
    assert str(run / "report.html") in first.stdout
    assert "95% interval" in first.stdout

    again = launch(tmp_path, root)
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stderr.count("finished before; skipped") == 3
    assert [(run / part / "model.safetensors").read_bytes() for part in ("base", "sft/final", "grpo/final")] == weights
