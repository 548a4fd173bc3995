"""What the report shows, read from a run folder as plain JSON data. Whatever a run has not produced yet is left out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import RunFolderError
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
    ("grpo", "pass_rate", "Pass rate of all that was sampled"),
    ("grpo", "accuracy", "Pass rate of what was trained on"),
    ("grpo", "completion_length", "Completion length (tokens)"),
    ("grpo", "truncated", "Truncated share"),
    ("grpo", "entropy", "Entropy (nats)"),
    ("grpo", "kl", "KL to the reference"),
    ("grpo", "mismatch_k3", "Mismatch KL, generator to trainer (k3)"),
    ("grpo", "mismatch_fresh_k3", "Mismatch KL of tokens of the newest version (k3)"),
    ("grpo", "importance_weight_bounded", "Importance weights at a bound (share)"),
    ("grpo", "flat_groups", "Groups that teach nothing"),
    ("grpo", "generator_busy", "Generators at work (share of their time)"),
    ("grpo", "loss", "GRPO loss"),
    ("grpo", "grad_norm", "Gradient norm"),
    ("sft", "loss", "SFT loss"),
    ("sft", "accuracy", "SFT token accuracy"),
    ("sft", "balance_loss", "SFT router balance loss"),
    ("sft", "learning_rate", "SFT learning rate"),
)

# Several lines in one picture: (stage, title, what the names of the metrics begin with, metrics of other names).
PICTURES = (
    ("grpo", "Seconds of a step", "time_", ()),
    ("grpo", "Tokens a second", "", ("learner_tokens_per_second", "generator_tokens_per_second", "tokens_per_second")),
    ("grpo", "Age of tokens in versions (share)", "staleness/age_", ()),
    ("grpo", "Busiest partition by layer (1: balanced)", "router/max_load_", ()),
)


def collect(run_path: Path) -> dict[str, Any]:
    """Everything the page needs: name, config text, stages, curves, evaluation rows, account of the traces, samples."""
    run = RunFolder(run_path)
    config = _read_text(run_path / "config.yaml")
    return {
        "name": Path(run_path).resolve().name,
        "config": config,
        "stages": _read_json(run_path / "stages.json", {}),
        "curves": _curves(run),
        "evaluation": _read_json(run_path / "eval" / "results.json", []),
        "distillation": _read_json(run_path / "distill" / "final" / "report.json", {}),
        "rollouts": _rollouts(run_path / "rollouts"),
        "comparisons": _comparisons(run_path / "compare"),
        "eval_samples": _eval_samples(run_path / "eval"),
    }


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _read_json(path: Path, absent: Any) -> Any:
    """A file's JSON, or `absent`; RunFolderError where the file is damaged, named, so that the user can delete it."""
    with _damage_named(path):
        return json.loads(_read_text(path)) if path.exists() else absent


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    # pyarrow's ArrowInvalid and json's and Unicode's errors are ValueErrors; a truncated Parquet footer is an OSError.
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RunFolderError(f"{path} is damaged ({error}); delete it and write the report again") from error


def _curves(run: RunFolder) -> list[dict[str, Any]]:
    records = run.read_metrics()
    curves: list[dict[str, Any]] = []
    for stage, metric, title in CURVES:
        points = _points(records, stage, metric)
        if len(points) > 1:
            curves.append({"stage": stage, "metric": metric, "title": title, "points": points})
    for stage, title, prefix, others in PICTURES:
        found = {name for record in records if record["stage"] == stage for name in record if prefix and name.startswith(prefix)}
        names = sorted(found, key=lambda name: (len(name), name)) + list(others)
        series = [{"name": name.removeprefix(prefix), "points": _points(records, stage, name)} for name in names]
        series = [line for line in series if len(line["points"]) > 1]
        if series:
            curves.append({"stage": stage, "metric": prefix or names[0], "title": title, "series": series})
    return curves


def _points(records: list[dict[str, Any]], stage: str, metric: str) -> list[Any]:
    values = [(r["step"], r[metric]) for r in records if r["stage"] == stage and isinstance(r.get(metric), (int, float))]
    return _thin(values, MAX_POINTS)


def _thin(items: list[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _shorten(text: str | None) -> str:
    if text is None or len(text) <= MAX_TEXT:
        return text or ""
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - MAX_TEXT} characters ...]\n{text[-half:]}"


def _rollouts(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    samples: list[dict[str, Any]] = []
    columns = ["step", "prompt", "completion", "answer", "reward", "rewards", "correct", "advantage", "length", "finish_reason"]
    for file in _thin(sorted(folder.glob("step-*.parquet")), MAX_ROLLOUT_STEPS):
        # A step's rows come group by group: the first ones are whole groups.
        with _damage_named(file):
            with pq.ParquetFile(file) as table:
                # Not the whole file: a step of a thousand completions of 32K tokens is a hundred megabytes of text.
                first = next(table.iter_batches(batch_size=MAX_SAMPLES_PER_STEP, columns=columns), None)
            rows = [] if first is None else first.to_pylist()
        for row in rows:
            texts = {name: _shorten(row[name]) for name in ("prompt", "completion")}
            samples.append({**row, **texts, "rewards": dict(row["rewards"] or [])})
    return samples


def _comparisons(folder: Path) -> list[dict[str, Any]]:
    """What `posttrain compare` left in this run's folder."""
    comparisons = []
    for file in sorted(folder.glob("*.json")):
        with _damage_named(file):
            comparison = json.loads(_read_text(file))
            for suite in comparison["suites"]:
                for change in suite["changes"]:
                    change.update({name: _shorten(change[name]) for name in ("problem", "a_text", "b_text")})
        comparisons.append(comparison)
    return comparisons


def _eval_samples(folder: Path) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    for file in sorted(folder.glob("*/*/samples.jsonl")):
        # The text behind the last newline is a line that a running evaluation is writing.
        for line in _read_text(file).split("\n")[:-1][:MAX_EVAL_SAMPLES]:
            with _damage_named(file):
                samples.append(_eval_sample(json.loads(line), file))
    return samples


def _eval_sample(sample: dict[str, Any], file: Path) -> dict[str, Any]:
    return {
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
