"""Times a GRPO step, plain TRL beside ours: `python scripts/bench_trl.py [--models ...] [--completions ...] [--tiny]`.

The same model class, random bf16 weights, prompts, reward and TRL arguments on both sides, in one process on one GPU, no Ray:

    trl   `trl.GRPOTrainer` as it comes: transformers' generate() with the model's own cache, padded forwards
    ours  `posttrain.grpo.learner.Learner` on the generator of `posttrain.rollout`: CUDA graphs, prompts prefilled once for their
          samples, packed forwards, the generator's partitions replayed, the balance loss

Completions have a forced length. Per side: seconds of a step and of the sampling in it (the rest: reward, forward, backward,
optimiser), each the mean of the timed steps after the warm-up ones; completion tokens a second; memory. Written as grpo_step.md
and grpo_step.json. A cell that the time left would not see through is left out, and said to be.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_tools import attempt, describe, environment, release, say, synchronize, table, write_results
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from posttrain.data.tokenizer import arithmetic_tokenizer
from posttrain.grpo.learner import Learner
from posttrain.grpo.scoring import Scorer
from posttrain.models.loading import new_model
from posttrain.models.sizes import PAPER_SIZES
from posttrain.rewards.registry import Reward, RewardSet
from posttrain.rollout import Generator

VOCABULARY = 151936
TINY = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "adapter_rank": 4, "chunk_size": 8,
}  # fmt: skip
SIDES = ("ours", "trl")


def fields_of(name: str, tiny: bool) -> dict[str, Any]:
    """The named paper size with room for these completions, or its layer pattern at a tiny width."""
    tokenizer = arithmetic_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if not tiny:
        return {**PAPER_SIZES[name], "vocab_size": VOCABULARY, **ends}
    types = PAPER_SIZES[name]["layer_types"][:6]
    return {**TINY, "num_hidden_layers": len(types), "layer_types": types, **ends}


def make_prompts(count: int, length: int, seed: int = 0) -> Dataset:
    """`count` different texts of `length` tokens give or take a quarter: digits, one token each."""
    draw, tokenizer = random.Random(seed), arithmetic_tokenizer()
    rows = []
    for i in range(count):
        text = "".join(draw.choice("0123456789") for _ in range(draw.randint(length * 3 // 4, length * 5 // 4)))
        rows.append({"id": f"p{i}", "prompt": text, "prompt_ids": tokenizer(text)["input_ids"], "prompt_index": i})
    return Dataset.from_list(rows)


class RandomReward:
    """1 and something random, so that every group teaches; TRL's signature."""

    __name__ = "random_reward"

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
        return [1.0 + self._draw.random() for _ in completions]


class Stopwatch(TrainerCallback):
    """Seconds of every step, and of the sampling within it.

    Attributes:
        steps: (seconds of the step, of its sampling, completion tokens) of each step that ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._begun = device, 0.0
        self._sampling, self._tokens = 0.0, 0
        self.steps: list[tuple[float, float, int]] = []

    def now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def sampled(self, begun: float, tokens: int) -> None:
        self._sampling += self.now() - begun
        self._tokens += tokens

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun, self._sampling, self._tokens = self.now(), 0.0, 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append((self.now() - self._begun, self._sampling, self._tokens))
        say(f"  step {len(self.steps)}: {self.steps[-1][0]:.2f} s, sampling {self.steps[-1][1]:.2f} s")


class PlainTrainer(GRPOTrainer):
    """TRL's, with a clock around its sampling."""

    stopwatch: Stopwatch

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        begun = self.stopwatch.now()
        found = super()._generate_single_turn(*arguments, **named)
        self.stopwatch.sampled(begun, sum(map(len, found[0])))
        return found


def summary(steps: list[tuple[float, float, int]], warm: int) -> dict[str, float]:
    """Means over the steps after the first `warm`."""
    timed = steps[warm:]
    step, sampling, tokens = (sum(column) / len(timed) for column in zip(*timed, strict=True))
    return {
        "step_s": step, "sampling_s": sampling, "rest_s": step - sampling, "completion_tokens": tokens,
        "tokens_per_s": tokens / step, "sampling_tokens_per_s": tokens / sampling, "slowest_step_s": max(s for s, _, _ in timed),
        "first_step_s": steps[0][0],
    }  # fmt: skip


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        self.begun = time.perf_counter()
        self.record: dict[str, Any] = {
            "environment": environment(self.device) | {"trl": _version("trl")}, "rows": [],
            "settings": {
                "prompts": args.prompts, "samples": args.samples, "prompt_tokens": args.prompt_tokens,
                "micro_batch": args.micro_batch,
                "gradient_checkpointing": not args.no_checkpointing, "dtype": self.dtype, "warm_steps": args.warm,
                "timed_steps": args.steps, "tiny": args.tiny,
            },
        }  # fmt: skip

    def arguments(self, folder: str, completion: int, **own: Any) -> GRPOConfig:
        """TRL's, the same on both sides but for `own`."""
        args, cuda = self.args, self.device.type == "cuda"
        return GRPOConfig(
            output_dir=folder, max_steps=args.warm + args.steps, num_generations=args.samples, max_completion_length=completion,
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=args.prompts * args.samples // args.micro_batch,
            gradient_checkpointing=not args.no_checkpointing, learning_rate=1e-6, lr_scheduler_type="constant", beta=0.0,
            mask_truncated_completions=False, logging_steps=1, save_strategy="no", report_to=[], seed=0, disable_tqdm=True,
            # Weights are bf16 themselves; autocast beside that is what neither side needs.
            bf16=False, use_cpu=not cuda, dataloader_pin_memory=cuda, remove_unused_columns=False, **own,
        )  # fmt: skip

    def trainer(self, side: str, model: Any, folder: str, completion: int, watch: Stopwatch) -> GRPOTrainer:
        args, tokenizer = self.args, arithmetic_tokenizer()
        data = make_prompts((args.warm + args.steps) * args.prompts, args.prompt_tokens)
        if side == "trl":
            plain = PlainTrainer(
                model=model, reward_funcs=[RandomReward()], train_dataset=data, processing_class=tokenizer, callbacks=[watch],
                args=self.arguments(folder, completion, generation_kwargs={"min_new_tokens": completion}),
            )  # fmt: skip
            plain.stopwatch = watch
            return plain
        routed = any(str(kind).startswith("sse") for kind in model.config.layer_types)
        longest = max(map(len, data["prompt_ids"])) + completion
        generators: list[Generator] = []

        def generate(requests: list[Any], version: int) -> list[list[Any]]:
            begun = watch.now()
            if not generators:
                # No token ends a completion: their length is forced.
                generators.append(
                    Generator(
                        model, eos_token_ids=[], max_sequences=args.prompts * args.samples, max_length=longest,
                        return_router_indices=routed,
                    )
                )  # fmt: skip
                say(f"  {generators[0].memory.describe()}")
            generators[0].update_weights(version)
            groups = generators[0].generate(requests)
            watch.sampled(begun, sum(len(c.token_ids) for group in groups for c in group))
            return groups

        scorer = Scorer(
            RewardSet([Reward(name="random", function=RandomReward(), required=True)]),
            lambda ids: tokenizer.batch_decode(ids, skip_special_tokens=True),
            truncated_completions="keep",
        )
        return Learner(
            model, args=self.arguments(folder, completion), prompts=data, tokenizer=tokenizer, generate=generate, scorer=scorer,
            replay_router=routed, callbacks=[watch],
        )  # fmt: skip

    def cell(self, name: str, completion: int, side: str) -> dict[str, Any]:
        torch.manual_seed(0)  # new_model seeds the host's generator alone, and these weights are drawn on the device
        with torch.device(self.device):
            model = new_model(fields_of(name, self.args.tiny), 0, dtype=self.dtype, device=self.device)
        model.config.use_cache = side == "trl"
        watch = Stopwatch(self.device)
        with tempfile.TemporaryDirectory() as folder:
            trainer = self.trainer(side, model, folder, completion, watch)
            for unwanted in (PrinterCallback, ProgressCallback):
                trainer.remove_callback(unwanted)
            trainer.train()
            logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {
            "model": name, "completion": completion, "side": side, **summary(watch.steps, self.args.warm), "peak_bytes": peak,
            "grad_norm": [entry["grad_norm"] for entry in logs],
        }  # fmt: skip

    def run(self) -> bool:
        say(", ".join(f"{k} {v}" for k, v in self.record["environment"].items()))
        took: dict[tuple[str, str], float] = {}
        for completion in self.args.completions:
            for name in self.args.models:
                for side in SIDES:
                    left = self.args.seconds - (time.perf_counter() - self.begun)
                    labels = {"model": name, "completion": completion, "side": side}
                    what = f"{name}, {completion} tokens, {side}"
                    if took.get((name, side), 0.0) > left or left <= 0:
                        say(f"{what}: left out, {left:.0f} s are left")
                        self.record["rows"].append({**labels, "left_out": True})
                        continue
                    if self.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats(self.device)
                    start = time.perf_counter()
                    found = attempt(what, lambda n=name, c=completion, s=side: self.cell(n, c, s))
                    seconds = time.perf_counter() - start
                    # A longer completion takes at least as much longer.
                    longer = max([c for c in self.args.completions if c > completion], default=completion)
                    took[name, side] = seconds * longer / completion
                    self.record["rows"].append(found if isinstance(found, dict) else {**labels, "error": found})
                    say(f"{what}: {self.record['rows'][-1]}")
                    release(self.device)
                    self.write()
        self.write()
        return not any("error" in row for row in self.record["rows"])

    # -- results ------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        write_results(self.args.out, "grpo_step", self.record, self.markdown())

    def markdown(self) -> list[str]:
        s = self.record["settings"]
        lines = ["# A GRPO step, plain TRL beside ours", "", *describe(self.record["environment"])]
        lines += [
            f"{s['prompts']} prompts of {s['prompt_tokens']} tokens give or take a quarter, {s['samples']} samples each, "
            f"completions of forced length, one optimiser step (AdamW) of micro-batches of {s['micro_batch']}, gradient "
            f"checkpointing {'on' if s['gradient_checkpointing'] else 'off'}, {s['dtype']} weights, no reference model. Means of "
            f"{s['timed_steps']} steps after {s['warm_steps']}.",
            "",
        ]  # fmt: skip
        rows = []
        for row in self.record["rows"]:
            head = [row["model"], row["completion"], row["side"]]
            if "step_s" not in row:
                rows.append([*head, row.get("error", "left out for want of time")])
                continue
            peak = row["peak_bytes"] and f"{row['peak_bytes'] / 2**30:.1f}"
            seconds = [f"{row[key]:.3g}" for key in ("step_s", "sampling_s", "rest_s")]
            rates = [f"{row[key]:,.0f}" for key in ("sampling_tokens_per_s", "tokens_per_s")]
            rows.append([*head, *seconds, *rates, peak, self.ratio(row)])
        header = [
            "model",
            "completion tokens",
            "side",
            "s a step",
            "s sampling",
            "s the rest",
            "tokens/s sampling",
            "tokens/s of the step",
        ]
        return [*lines, *table([*header, "GiB at the peak", "TRL's step over ours"], rows)]

    def ratio(self, row: dict[str, Any]) -> str | None:
        """On our rows, how many times as long plain TRL's step takes."""
        for other in self.record["rows"]:
            same = (other["model"], other["completion"]) == (row["model"], row["completion"])
            if same and row["side"] == "ours" and other["side"] == "trl" and "step_s" in other:
                return f"{other['step_s'] / row['step_s']:.2f}"
        return None


def _version(package: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(package)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PAPER_SIZES), default=["sse-h-600m", "transformer-600m"])
    parser.add_argument("--completions", nargs="+", type=int, default=[512, 1024], help="tokens of a completion, shortest first")
    parser.add_argument("--prompts", type=int, default=8, help="a step")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--micro-batch", type=int, default=8, help="completions of one forward and backward")
    parser.add_argument("--no-checkpointing", action="store_true", help="without gradient checkpointing, TRL's default")
    parser.add_argument("--warm", type=int, default=1, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed")
    parser.add_argument("--seconds", type=float, default=120, help="in which all must fit: cells that would not are left out")
    parser.add_argument("--tiny", action="store_true", help="tiny models and lengths: a trial of the script")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=None, help="folder of grpo_step.md and grpo_step.json; default: benchmarks/")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.prompts, args.prompt_tokens, args.samples, args.micro_batch, args.steps = 2, 12, 4, 4, 1
        args.completions = [6]
    args.completions = sorted(args.completions)
    if (
        min(args.completions[0], args.prompts, args.samples, args.micro_batch, args.steps, args.prompt_tokens) < 1
        or args.warm < 0
    ):
        parser.error("sizes and steps must be 1 or more (--warm may be 0)")
    if args.samples < 2:
        parser.error("--samples: a group needs 2 or more")
    if args.prompts * args.samples % args.micro_batch:
        parser.error(f"--micro-batch {args.micro_batch} does not divide the {args.prompts * args.samples} completions of a step")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device that PyTorch can use")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu is for --tiny")
    if args.out is None:
        if args.tiny:
            parser.error("--tiny is a trial of the script: give --out, so that it does not replace measured results")
        args.out = Path(__file__).resolve().parents[1] / "benchmarks"
    return args


def main(arguments: list[str] | None = None) -> int:
    bench = Bench(parse(arguments))
    ok = bench.run()
    print("\n".join(bench.markdown()), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
