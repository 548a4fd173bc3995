"""What the report shows, read from a run folder as plain JSON data. Whatever a run has not produced yet is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.run_folder import RunFolder

# The file is opened in a browser: a few megabytes at most, however long the run was.
MAX_POINTS = 600
MAX_ROLLOUT_STEPS = 24
MAX_SAMPLES_PER_STEP = 48
MAX_EVAL_SAMPLES = 150
MAX_TEXT = 4000

# Curves in the order in which they are looked at: (stage, metric, title).
CURVES = (
    ("grpo", "reward", "Reward"),
    ("grpo", "accuracy", "Pass rate"),
    ("grpo", "completion_length", "Completion length (tokens)"),
    ("grpo", "truncated", "Truncated share"),
    ("grpo", "entropy", "Entropy (nats)"),
    ("grpo", "kl", "KL to the reference"),
    ("grpo", "mismatch_k3", "Mismatch KL, generator to trainer (k3)"),
    ("grpo", "loss", "GRPO loss"),
    ("grpo", "grad_norm", "Gradient norm"),
    ("sft", "loss", "SFT loss"),
    ("sft", "accuracy", "SFT token accuracy"),
    ("sft", "balance_loss", "SFT router balance loss"),
    ("sft", "learning_rate", "SFT learning rate"),
)


def collect(run_path: Path) -> dict[str, Any]:
    """Everything the page needs: name, config text, stages, curves, evaluation rows, samples."""
    run = RunFolder(run_path)
    config = _read_text(run_path / "config.yaml")
    return {
        "name": Path(run_path).resolve().name,
        "config": config,
        "stages": json.loads(_read_text(run_path / "stages.json") or "{}"),
        "curves": _curves(run),
        "evaluation": json.loads(_read_text(run_path / "eval" / "results.json") or "[]"),
        "rollouts": _rollouts(run_path / "rollouts"),
        "eval_samples": _eval_samples(run_path / "eval"),
    }


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _curves(run: RunFolder) -> list[dict[str, Any]]:
    records = run.read_metrics()
    curves = []
    for stage, metric, title in CURVES:
        points = [(r["step"], r[metric]) for r in records if r["stage"] == stage and isinstance(r.get(metric), (int, float))]
        if len(points) > 1:
            curves.append({"stage": stage, "metric": metric, "title": title, "points": _thin(points, MAX_POINTS)})
    return curves


def _thin(items: list[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _shorten(text: str) -> str:
    return (
        text
        if len(text) <= MAX_TEXT
        else f"{text[: MAX_TEXT // 2]}\n[... {len(text) - MAX_TEXT} characters ...]\n{text[-MAX_TEXT // 2 :]}"
    )


def _rollouts(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    samples: list[dict[str, Any]] = []
    columns = ["step", "prompt", "completion", "answer", "reward", "rewards", "correct", "advantage", "length", "finish_reason"]
    for file in _thin(sorted(folder.glob("step-*.parquet")), MAX_ROLLOUT_STEPS):
        # A step's rows come group by group: the first ones are whole groups.
        for row in pq.read_table(file, columns=columns).slice(0, MAX_SAMPLES_PER_STEP).to_pylist():
            samples.append(
                row | {"rewards": dict(row["rewards"] or []), **{k: _shorten(row[k] or "") for k in ("prompt", "completion")}}
            )
    return samples


def _eval_samples(folder: Path) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    for file in sorted(folder.glob("*/*/samples.jsonl")):
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        for line in lines[:MAX_EVAL_SAMPLES]:
            sample = json.loads(line)
            samples.append(
                {
                    "model": file.parent.parent.name,
                    "suite": file.parent.name,
                    "id": sample["problem_id"],
                    "prompt": _shorten(sample["problem"]),
                    "completion": _shorten(sample["text"]),
                    "answer": sample["gold"],
                    "correct": sample["correct"],
                    "length": sample["length"],
                    "finish_reason": sample["finish_reason"],
                }
            )
    return samples
