"""Times GRPO in split placement beside the same job colocated: `python scripts/bench_split.py [--gpus N] [--completions ...]`.

Both are `posttrain grpo` of a recipe written here: a model of random bf16 weights (SSE-H-600M), prompts of arithmetic, a random
reward, completions that end at the length limit (the end token is as unlikely as any of 151,936: 5% of completions of 8,192
tokens draw it). On two GPUs split placement has a learner and a generator, each with its GPU, and colocated placement two
learners that generate in turn with training; on one GPU the two processes of split placement share it (CUDA IPC), which shows
that the pieces work, and no speed-up. Per run, as means over the steps after the warm-up ones: seconds of a step, tokens a
second, the share of time that the generators computed and that the learner waited, the weights' way, staleness, and how far the
learner's log-probabilities are from the generator's. Written as split.md and split.json. `--gpus 0 --tiny` tries the script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml
from bench_tools import describe, environment, say, table, write_results

from posttrain.data.tokenizer import arithmetic_tokenizer
from posttrain.models.loading import new_model, save_model
from posttrain.models.sizes import PAPER_SIZES

VOCABULARY = 151936
TINY = {
    "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "adapter_rank": 4, "chunk_size": 8,
}  # fmt: skip
REWARD = '''
import zlib


def random_reward(prompts, completions, **columns):
    """Of the text alone, and different for nearly all texts, so that every group teaches."""
    return [zlib.crc32(str(completion).encode()) / 2**32 for completion in completions]
'''
# Columns of the table: title, metric or what `summary` computes, factor.
COLUMNS = (
    ("s a step", "step_s", 1),
    ("tokens/s trained", "tokens_per_second", 1),
    ("generators busy, %", "generator_busy", 100),
    ("learner waiting, %", "waiting", 100),
    ("weights: s of the learner", "time_sync", 1),
    ("s generating", "time_generate", 1),
    ("s updating", "time_update", 1),
    ("tokens of the newest version, %", "staleness/age_0", 100),
    ("weights: ms of the generator's swap", "sync/pause_s", 1000),
    ("weights: ms under way", "sync/transfer_s", 1000),
    ("mismatch k3", "mismatch_k3", 1),
    ("fresh tokens: k3", "mismatch_fresh_k3", 1),
    ("fresh: mean difference", "mismatch_fresh_abs", 1),
    ("completion tokens", "completion_length", 1),
)


def save_base(name: str, tiny: bool, device: str, folder: Path) -> None:
    """A checkpoint of random weights that knows the arithmetic tokenizer's end token."""
    tokenizer = arithmetic_tokenizer()
    fields = {**PAPER_SIZES[name], "vocab_size": VOCABULARY}
    if tiny:
        types = PAPER_SIZES[name]["layer_types"][:6]
        fields = {**TINY, "num_hidden_layers": len(types), "layer_types": types}
    fields |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.device(device):
        model = new_model(fields, 0, dtype="float32" if tiny else "bfloat16", device=device)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.device = torch.device("cuda" if args.gpus else "cpu")
        self.record: dict[str, Any] = {
            "environment": environment(self.device), "rows": [],
            "settings": {
                "gpus": args.gpus, "model": args.model, "prompts": args.prompts, "samples": args.samples, "steps": args.steps,
                "warm": args.warm, "tiny": args.tiny,
            },
        }  # fmt: skip

    def recipe(self, placement: str, completion: int, run: Path) -> dict[str, Any]:
        args, split = self.args, placement == "split"
        learners = 1 if split or args.gpus < 2 else 2
        shared = split and args.gpus == 1
        task = {"kind": "arithmetic", "limit": (args.steps + args.warm + 2) * args.prompts}
        return {
            "name": f"bench-{placement}", "run_dir": str(run), "stages": ["grpo"], "seed": 0,
            "model": {"path": str(self.folder / "base"), "dtype": "float32" if args.tiny else "bfloat16"},
            "data": {"max_prompt_length": 128, "prompts": task},
            "grpo": {
                "placement": placement, "learners": learners, "generators": 1, "max_staleness": 1,
                "gpus_per_generator": 0.5 if shared else min(1, args.gpus), "cpus_per_generator": 1,
                "num_generations": args.samples, "max_completion_length": completion, "max_steps": args.warm + args.steps,
                "per_device_train_batch_size": args.micro_batch,
                "gradient_accumulation_steps": args.prompts * args.samples // (args.micro_batch * learners),
                "learning_rate": 1.0e-6, "lr_scheduler_type": "constant", "beta": 0.0, "logging_steps": 1,
                "save_strategy": "no", "truncated_completions": "keep", "vllm_importance_sampling_mode": "token_truncate",
                "gradient_checkpointing": not args.tiny, "bf16": False, "report_to": "none",
            },
            "rollout": {
                "max_sequences": args.prompts * args.samples // (1 if split else learners),
                "memory_fraction": 0.3 if args.gpus == 1 else 0.85 if split else 0.5,
            },
            "reward": {"functions": [{"path": f"{self.folder / 'reward.py'}:random_reward"}], "workers": 1},
            "ray": {
                "num_workers": learners, "gpus_per_worker": 0.5 if shared else min(1, args.gpus), "cpus_per_worker": 1,
                "object_store_memory_mb": 200 if args.tiny else 2000,
            },
        }  # fmt: skip

    def cell(self, placement: str, completion: int) -> dict[str, Any]:
        run = self.folder / f"{placement}-{completion}"
        path = self.folder / f"{placement}-{completion}.yaml"
        path.write_text(yaml.safe_dump(self.recipe(placement, completion, run), sort_keys=False))
        begun = time.monotonic()
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "posttrain", "grpo", str(path)]
        with (self.folder / f"{placement}-{completion}.log").open("w") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=self.args.seconds)
        found = {"placement": placement, "completion": completion, "run_s": time.monotonic() - begun}
        text = Path(log.name).read_text(errors="replace")
        if done.returncode:
            return {**found, "error": f"exit code {done.returncode}: {text[-1500:]}"}
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return found | summary([line for line in lines if line.get("stage", "grpo") == "grpo"], self.args.warm)

    def run(self) -> bool:
        say(", ".join(f"{k} {v}" for k, v in self.record["environment"].items()))
        (self.folder / "reward.py").write_text(REWARD)
        save_base(self.args.model, self.args.tiny, self.device.type, self.folder / "base")
        if self.args.gpus:
            torch.cuda.empty_cache()
        for completion in self.args.completions:
            for placement in self.args.placements:
                try:
                    row = self.cell(placement, completion)
                except subprocess.TimeoutExpired as error:
                    row = {"placement": placement, "completion": completion, "error": str(error)}
                say(
                    f"{placement}, {completion} tokens: "
                    + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
                )
                self.record["rows"].append(row)
                write_results(self.args.out, "split", self.record, self.markdown())
        return not any("error" in row for row in self.record["rows"])

    # -- results ------------------------------------------------------------------------------------------------------

    def markdown(self) -> list[str]:
        s = self.record["settings"]
        devices = (
            "on the CPU" if not s["gpus"] else f"on {s['gpus']} GPU" + ("s" if s["gpus"] > 1 else ", shared in split placement")
        )
        lines = ["# GRPO in split placement beside colocated", "", *describe(self.record["environment"])]
        job = f"{s['prompts']} prompts of {s['samples']} samples a step; means of {s['steps']} steps after {s['warm']}."
        lines += [f"{s['model']}{' (tiny)' if s['tiny'] else ''} {devices}; {job}", ""]
        rows = []
        for row in self.record["rows"]:
            head = [row["placement"], row["completion"]]
            if "error" in row:
                rows.append([*head, row["error"][-200:].replace("\n", " ")])
                continue
            cells = [None if row.get(key) is None else f"{row[key] * factor:.4g}" for _, key, factor in COLUMNS]
            rows.append([*head, *cells, self.ratio(row)])
        header = ["placement", "completion limit", *(title for title, _, _ in COLUMNS), "colocated's step over split's"]
        return [*lines, *table(header, rows)]

    def ratio(self, row: dict[str, Any]) -> str | None:
        for other in self.record["rows"]:
            pair = row["placement"] == "split" and other["placement"] == "colocated" and other["completion"] == row["completion"]
            if pair and "step_s" in other:
                return f"{other['step_s'] / row['step_s']:.2f}"
        return None


def summary(lines: list[dict[str, Any]], warm: int) -> dict[str, Any]:
    """Means of the metrics of the steps after the first `warm`, the time between two logs among them."""
    timed = lines[warm:]
    seconds = [b["time"] - a["time"] for a, b in zip(lines[warm - 1 :], timed, strict=False)] if warm else []
    found: dict[str, Any] = {"steps": len(timed), "step_s": statistics.fmean(seconds) if seconds else None}
    names = sorted({name for line in timed for name, value in line.items() if isinstance(value, int | float)})
    for name in names:
        if name not in ("step", "time", "epoch"):
            found[name] = statistics.fmean(line[name] for line in timed if isinstance(line.get(name), int | float))
    if seconds and "time_wait" in found:
        found["waiting"] = found["time_wait"] / found["step_s"]
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=(0, 1, 2), default=2, help="0: a trial on the CPU, with --tiny")
    parser.add_argument("--model", choices=list(PAPER_SIZES), default="sse-h-600m")
    parser.add_argument("--completions", nargs="+", type=int, default=[8192, 16384], help="length limits")
    parser.add_argument("--placements", nargs="+", choices=("split", "colocated"), default=["split", "colocated"])
    parser.add_argument("--prompts", type=int, default=8, help="a step")
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--micro-batch", type=int, default=4, help="completions of one forward and backward")
    parser.add_argument("--warm", type=int, default=2, help="steps before those that count, at least 1")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600, help="that one run may take")
    parser.add_argument("--folder", type=Path, default=None, help="for the runs and their logs; default: a temporary one")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and lengths: a trial of the script")
    parser.add_argument("--out", type=Path, default=None, help="folder of split.md and split.json; default: benchmarks/")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.prompts, args.samples, args.completions = 4, 4, [24]
    if args.warm < 1 or args.steps < 1 or min(args.completions) < 1:
        parser.error("--warm, --steps and --completions must be at least 1")
    if args.prompts * args.samples % (2 * args.micro_batch):
        parser.error(
            f"twice --micro-batch {args.micro_batch} must divide the {args.prompts * args.samples} completions of a step"
        )
    if args.gpus > torch.cuda.device_count():
        parser.error(f"--gpus {args.gpus}, but PyTorch sees {torch.cuda.device_count()} here")
    if not args.gpus and not args.tiny:
        parser.error("--gpus 0 is for --tiny")
    if args.out is None:
        if args.tiny:
            parser.error("--tiny is a trial of the script: give --out, so that it does not replace measured results")
        args.out = Path(__file__).resolve().parents[1] / "benchmarks"
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(args, folder.resolve())
        good = bench.run()
    print("\n".join(bench.markdown()), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
