"""Times the generator: `python scripts/bench_generator.py [--models ...] [--rows CONTEXTxSEQUENCES ...] [--check] [--tiny]`.

Random weights of the 2B shapes of `posttrain.models.sizes`, bf16. `--check` first: the engine's log-probabilities against the
packed forward of the trainer with the router's choices replayed, at small size, then at the real one. Per row: prefill tokens a
second, decode tokens a second with all sequences in flight (CUDA graphs, sampling and reading back included), memory, and the
part of the byte floor: weights once, and of every sequence the states, pending rows, keys and values that a step has to read and
write, at the speed of a large copy measured in the same process. Time to first token of a long prompt, alone and forked to eight
samples. Written as generator.md and generator.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_decode import Shape
from bench_tools import attempt, describe, environment, kernel_times, release, say, synchronize, table, time_call, write_results
from torch import Tensor

from posttrain.kernels.paged_attention import paged_attention
from posttrain.kernels.paged_attention import triton_paged_attention as triton_kernels
from posttrain.models.loading import new_model
from posttrain.models.paged import PAGE
from posttrain.models.sizes import DEFAULTS, PAPER_SIZES, resolve
from posttrain.models.sse_h import SSEHForCausalLM
from posttrain.models.sse_h.causal_lm import scores_labels
from posttrain.rollout import Generator
from posttrain.types import Completion, Request

VOCABULARY = 151936
TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "adapter_rank": 4, "chunk_size": 8,
}  # fmt: skip
SMALL = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4}
# Decode steps that are timed, and those before them that warm up.
STEPS, WARM = 64, 8
LOGPROB_GOAL, KL_GOAL = 2e-3, 2e-4


def fields_of(name: str, size: str) -> dict[str, Any]:
    """The named paper size, or its layer pattern at a small or tiny width."""
    if size == "full":
        return {**PAPER_SIZES[name], "vocab_size": VOCABULARY}
    types = PAPER_SIZES[name]["layer_types"][:6]
    return {**(TINY if size == "tiny" else SMALL), "num_hidden_layers": len(types), "layer_types": types}


def floor_bytes(model: SSEHForCausalLM, fields: dict[str, Any], context: int, sequences: int) -> float:
    """Bytes that a decode step has to move: every weight but the input embedding's, and each sequence's own."""
    f = resolve({**DEFAULTS, **fields})
    parameters = sum(p.nbytes for p in model.parameters())
    if not f["tie_word_embeddings"]:
        parameters -= model.model.embed_tokens.weight.nbytes
    dtype = model.model.embed_tokens.weight.dtype
    shape = Shape(
        heads=f["num_attention_heads"], dim=f["head_dim"], partitions=f["num_partitions"], routed=f["num_selected"],
        chunk=f["chunk_size"], dtype=dtype,
    )  # fmt: skip
    routed = sum(kind == "sse" for kind in f["layer_types"])
    attention = sum(kind == "full_attention" for kind in f["layer_types"])
    kv = 2 * f["num_key_value_heads"] * f["head_dim"] * dtype.itemsize * context
    return parameters + routed * shape.step_bytes(sequences) + attention * kv * sequences


def prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def requests(given: list[list[int]], max_tokens: int, n: int = 1) -> list[Request]:
    return [Request(id=f"{i}", prompt_ids=p, n=n, max_tokens=max_tokens, seed=i) for i, p in enumerate(given)]


def trainer_logprobs(model: SSEHForCausalLM, c: Completion) -> Tensor:
    """The packed forward's log-probabilities of the sampled tokens, routes replayed, float64 [tokens] on the host."""
    device = model.model.embed_tokens.weight.device
    ids = torch.tensor([c.prompt_ids + c.token_ids], device=device)
    bounds = torch.tensor([0, ids.shape[1] - 1], dtype=torch.int32)
    routes = {} if c.router_indices is None else {"router_indices": c.router_indices.long().to(device)}
    first = len(c.prompt_ids) - 1
    with torch.no_grad():
        if scores_labels(model):
            labels = ids[:, 1:].clone()
            labels[:, :first] = -100
            found = model(input_ids=ids[:, :-1], cu_seq_lens_q=bounds, score_labels=labels, **routes).log_probs[0, first:]
        else:
            logits = model(input_ids=ids[:, :-1], cu_seq_lens_q=bounds, **routes).logits[0, first:]
            found = torch.log_softmax(logits.float(), -1).gather(-1, ids[0, first + 1 :, None])[:, 0]
    return found.double().cpu()


def compare(model: SSEHForCausalLM, completions: list[Completion], truth: SSEHForCausalLM | None) -> dict[str, Any]:
    """Engine against trainer over the sampled tokens: mean and largest |difference| of log-probabilities, mean k3 KL; with the
    `truth`, the same weights in fp32, the mean |difference| of either from it."""
    trainer = torch.cat([trainer_logprobs(model, c) for c in completions])
    engine = torch.cat([torch.tensor(c.plain_logprobs, dtype=torch.float64) for c in completions])
    d = trainer - engine
    found = {
        "tokens": d.numel(), "mean_difference": d.abs().mean().item(), "largest_difference": d.abs().max().item(),
        "k3": (d.exp() - 1 - d).mean().item(), "trainer_error": None, "generator_error": None,
    }  # fmt: skip
    if truth is not None:
        right = torch.cat([trainer_logprobs(truth, c) for c in completions])
        found |= {"trainer_error": (trainer - right).abs().mean().item(), "generator_error": (engine - right).abs().mean().item()}
    return found


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy far above the caches."""
    source = torch.zeros(2**29 if device.type == "cuda" else 2**18, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (time_call(lambda: target.copy_(source), device).ms * 1e-3)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.size = "tiny" if args.tiny else "full"
        self.mode = args.modes[0]
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.record: dict[str, Any] = {
            "environment": environment(self.device), "check": [], "rows": [], "first_token": [], "attention": [], "kernels": {},
            "settings": {
                "dtype": str(self.dtype).removeprefix("torch."), "size": self.size, "triton_states": args.triton_states,
            },
        }  # fmt: skip

    def model(self, name: str, size: str) -> tuple[SSEHForCausalLM, dict[str, Any]]:
        """The weights are drawn on the device: on the host a 2B model takes a minute."""
        fields = fields_of(name, size)
        with torch.device(self.device):
            return new_model(fields, 0, dtype=self.dtype, device=self.device), fields

    def generator(self, model: SSEHForCausalLM, sequences: int, length: int, **options: Any) -> Generator:
        found = Generator(
            model, eos_token_ids=[], max_sequences=sequences, max_length=length, max_prefill_tokens=self.args.prefill_tokens,
            memory_fraction=self.args.memory_fraction, cuda_graphs=self.args.graphs, exact=self.mode == "strict", **options,
        )  # fmt: skip
        say(found.memory.describe())
        return found

    # -- correctness --------------------------------------------------------------------------------------------------

    def check(self, name: str, size: str) -> dict[str, Any]:
        model, fields = self.model(name, size)
        samples, length = (4, 40) if self.args.tiny else (self.args.check_samples, self.args.check_tokens)
        given = prompts(samples // 2, length // 4, fields["vocab_size"])
        generator = self.generator(model, samples, length // 4 + length, return_router_indices=True)
        groups = generator.generate(requests(given, length, n=2))
        del generator
        truth = copy.deepcopy(model).float() if self.args.truth else None
        found = compare(model, [c for group in groups for c in group], truth)
        found["within_goals"] = found["mean_difference"] <= LOGPROB_GOAL and found["k3"] <= KL_GOAL
        return {"model": name, "mode": self.mode, "size": size, "samples": samples, "length": length, **found}

    # -- speed --------------------------------------------------------------------------------------------------------

    def row(self, name: str, model: SSEHForCausalLM, fields: dict[str, Any], context: int, sequences: int) -> dict[str, Any]:
        """`context` is about the mean length in the middle of the timed steps: prompts join step by step, the first run on."""
        steps, warm = (8, 2) if self.args.tiny else (STEPS, WARM)
        joining = 1 + sequences * -(-context // self.args.prefill_tokens)
        length = max(1, context - warm - steps // 2 - joining // 2)
        most = joining + 2 * (warm + steps)
        generator = self.generator(model, sequences, length + most)
        given = prompts(sequences, length, fields["vocab_size"], seed=1)
        generator.generate(requests(prompts(1, length, fields["vocab_size"]), 2))  # kernels are compiled
        synchronize(self.device)
        some = given[: max(1, min(sequences, self.args.prefill_total // length))]
        start = time.perf_counter()
        generator.generate(requests(some, 1))
        synchronize(self.device)
        prefill = len(some) * length / (time.perf_counter() - start)
        profiled = self.args.profile and self.device.type == "cuda"
        if profiled:
            title = f"{name}, {self.mode}, a prompt of {length} in pieces of {self.args.prefill_tokens}"
            self.record["kernels"][title] = kernel_times(lambda: generator.generate(requests(given[:1], 1)), calls=1)[:20]
        for request in requests(given, most):
            generator.submit(request)
        while generator.num_running < sequences:
            generator.step()
        # Those that joined first have run further.
        for _ in range(warm):
            generator.step()
        synchronize(self.device)
        before, start = generator.generated_tokens, time.perf_counter()
        for _ in range(steps):
            generator.step()
        synchronize(self.device)
        seconds = time.perf_counter() - start
        tokens = generator.generated_tokens - before
        running = generator.num_running
        if profiled:
            self.record["kernels"][f"{name}, {self.mode}, {context}x{sequences}"] = kernel_times(generator.step)[:16]
        held = [sum(map(len, (s.group.request.prompt_ids, s.token_ids))) for s in generator._scheduler.running]
        mean = sum(held) / max(1, len(held))
        floor = floor_bytes(model, fields, int(mean), running) / self.record["copy_bytes_per_s"]
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {
            "model": name, "mode": self.mode, "context": context, "mean_context": mean, "sequences": running,
            "decode_tokens_per_s": tokens / seconds, "step_ms": seconds / steps * 1e3, "floor_ms": floor * 1e3,
            "share_of_floor": floor / (seconds / steps), "floor_tokens_per_s": running / floor, "prefill_tokens_per_s": prefill,
            "pieces": self.args.prefill_tokens,
            "retracted": generator.counts["retracted"],
            "state_bytes": generator.memory.slots * generator.memory.slot_bytes,
            "kv_bytes": (generator.memory.pages or 0) * generator.memory.page_bytes, "peak_bytes": peak,
        }  # fmt: skip

    def first_token(self, name: str, model: SSEHForCausalLM, fields: dict[str, Any], length: int, n: int) -> dict[str, Any]:
        """Milliseconds from submit() until the first tokens of all n samples are on the host, the median of three."""
        generator = self.generator(model, n, length + 8)
        times = []
        for i in range(4):
            (request,) = requests(prompts(1, length, fields["vocab_size"], seed=i), 4, n)
            synchronize(self.device)
            start, before = time.perf_counter(), generator.generated_tokens
            generator.submit(request)
            while generator.generated_tokens - before < n:
                generator.step()
            times.append((time.perf_counter() - start) * 1e3)
            while generator.has_unfinished:
                generator.step()
        return {
            "model": name,
            "mode": self.mode,
            "prompt": length,
            "pieces": self.args.prefill_tokens,
            "samples": n,
            "ms": sorted(times[1:])[1],
            "first_ms": times[0],
        }

    def attention(self, context: int, sequences: int, sweep: bool) -> None:
        """Decode attention of one layer of the 2B shape by itself, over launch options where asked: the fastest comes last."""
        heads, dim = (2, 16) if self.args.tiny else (18, 128)
        width, device, dtype = -(-context // PAGE), self.device, self.dtype
        pool = (sequences * width, heads, PAGE, dim)
        t = {
            "q": torch.randn(sequences, heads, dim, dtype=dtype, device=device),
            "keys": torch.randn(pool, dtype=dtype, device=device),
            "values": torch.randn(pool, dtype=dtype, device=device),
            "table": torch.randperm(sequences * width, device=device).int().view(sequences, width),
            "slots": torch.arange(sequences, device=device),
            "positions": torch.full((sequences,), context - 1, device=device),
        }
        moved = 2 * sequences * context * heads * dim * self.dtype.itemsize
        ours = (triton_kernels.SPLITS, triton_kernels.LEAST, triton_kernels.STAGES, triton_kernels.WARPS)
        options = itertools.product((8, 16, 32), (4,), (1, 2, 3), (1, 2, 4, 8)) if sweep else (ours,)
        rows = []
        for option in options:
            triton_kernels.SPLITS, triton_kernels.LEAST, triton_kernels.STAGES, triton_kernels.WARPS = option
            ms = attempt(f"attention {option}", lambda: time_call(lambda: paged_attention(**t), self.device, budget_s=0.2).ms)
            if isinstance(ms, float):
                share = moved / (ms * 1e-3) / self.record["copy_bytes_per_s"]
                rows.append(dict(zip(("splits", "least", "stages", "warps"), option, strict=True)) | {
                    "context": context, "sequences": sequences, "us": ms * 1e3, "share_of_copy": share})  # fmt: skip
        triton_kernels.SPLITS, triton_kernels.LEAST, triton_kernels.STAGES, triton_kernels.WARPS = ours
        self.record["attention"] += sorted(rows, key=lambda row: -row["us"])[-12:]
        say(f"attention {context}x{sequences}: {self.record['attention'][-1:]}")

    def run(self) -> bool:
        args = self.args
        say(", ".join(f"{k} {v}" for k, v in self.record["environment"].items()))
        if args.check:
            for size in ("tiny",) if args.tiny else ("small", "full"):
                for name, self.mode in itertools.product(args.models, args.modes):
                    labels = {"model": name, "mode": self.mode, "size": size}
                    self._append("check", f"check {name}, {self.mode}, {size}", labels, lambda n=name, s=size: self.check(n, s))
                self.write()
                if any("error" in row for row in self.record["check"]):
                    return False
        self.record["copy_bytes_per_s"] = copy_speed(self.device)
        say(f"a large copy: {self.record['copy_bytes_per_s'] / 1e12:.3f} TB/s")
        for context, sequences in args.rows if args.attention or args.sweep_attention else ():
            self.attention(context, sequences, args.sweep_attention)
            release(self.device)
            self.write()
        if args.sweep_attention:
            return True
        for name, self.mode in itertools.product(args.models, args.modes) if args.rows or args.first_token else ():
            model, fields = self.model(name, self.size)
            what, labels = f"{name}, {self.mode}", {"model": name, "mode": self.mode}
            for context, sequences in args.rows:
                self._append("rows", f"{what}, {context}x{sequences}", {**labels, "context": context, "sequences": sequences},
                             lambda m=model, f=fields, n=name, c=context, s=sequences: self.row(n, m, f, c, s))  # fmt: skip
            for n in (1, 8) if args.first_token else ():
                self._append("first_token", f"{what}, first token", {**labels, "prompt": args.first_token, "samples": n},
                             lambda m=model, f=fields, k=name, n=n: self.first_token(k, m, f, args.first_token, n))  # fmt: skip
            del model
            release(self.device)
        self.write()
        return all("error" not in row for part in ("check", "rows", "first_token") for row in self.record[part])

    def _append(self, part: str, what: str, labels: dict[str, Any], call: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        found = attempt(what, call)
        self.record[part].append(found if isinstance(found, dict) else {**labels, "error": found})
        say(f"{what}: {self.record[part][-1]}")
        release(self.device)
        self.write()

    # -- results ------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        if self.args.out is not None:
            write_results(self.args.out, "generator", self.record, self.markdown())

    def markdown(self) -> list[str]:
        r, s = self.record, self.record["settings"]
        lines = ["# The generator", "", *describe(r["environment"]), f"Random weights, {s['dtype']}, {s['size']} size.", ""]
        if "copy_bytes_per_s" in r:
            lines += [f"A large copy moves {r['copy_bytes_per_s'] / 1e12:.3f} TB/s.", ""]
        if r["check"]:
            goals = f"goals: mean {LOGPROB_GOAL:g}, k3 {KL_GOAL:g}"
            lines += [f"Log-probabilities against the packed forward, routes replayed ({goals}):", ""]
            names = ("model", "mode", "size", "samples", "tokens", "mean_difference", "largest_difference", "k3", "within_goals",
                     "trainer_error", "generator_error")  # fmt: skip
            header = ["model", "mode", "size", "samples", "tokens", "mean absolute difference", "largest", "k3 KL",
                      "within goals", "trainer's from fp32", "generator's from fp32"]  # fmt: skip
            lines += table(header, [_cells(row, names) for row in r["check"]])
        if r["rows"]:
            lines += table(
                ["model", "mode", "context", "sequences", "decode tokens/s", "ms a step", "/ default", "share of the byte floor",
                 "floor, tokens/s", "prefill tokens/s", "in pieces of", "GiB of state", "GiB of keys and values",
                 "GiB at the peak"],
                [_cells(row | {"ratio": self._over_default(row)}, (
                    "model", "mode", "context", "sequences", "decode_tokens_per_s", "step_ms", "ratio", "share_of_floor",
                    "floor_tokens_per_s", "prefill_tokens_per_s", "pieces", "state_bytes", "kv_bytes", "peak_bytes"))
                 for row in r["rows"]],
            )  # fmt: skip
        if r["first_token"]:
            cells = [_cells(row, ("model", "mode", "prompt", "pieces", "samples", "ms")) for row in r["first_token"]]
            lines += table(["model", "mode", "prompt", "in pieces of", "samples", "ms to all first tokens"], cells)
        if r["attention"]:
            names = ("context", "sequences", "us", "share_of_copy", "splits", "least", "stages", "warps")
            lines += ["Decode attention of one layer by itself:", ""]
            lines += table(names, [_cells(row, names) for row in r["attention"]])
        for what, rows in r["kernels"].items():
            lines += [f"{what}, by kernel:", "", *table(["kernel", "us", "launches"], [
                (kernel[:60], f"{us:.1f}", n) for kernel, us, n in rows])]  # fmt: skip
        return lines

    def _over_default(self, row: dict[str, Any]) -> float | None:
        """A strict step's time over the default one's of this run."""
        same = ("model", "context", "sequences")
        others = [r for r in self.record["rows"] if r["mode"] == "default" and all(r[n] == row[n] for n in same)]
        if row["mode"] == "default" or not others or "error" in row or "error" in others[0]:
            return None
        return row["step_ms"] / others[0]["step_ms"]


def _cells(row: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """Values of a row for the table; a row that failed says why in its last cell."""
    cells: list[Any] = []
    for name in names:
        value = row.get(name)
        if isinstance(value, float):
            value = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        elif name.endswith("_bytes") and isinstance(value, int):
            value = f"{value / 2**30:.1f}"
        cells.append(value)
    return [*cells[:-1], row["error"]] if "error" in row else cells


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PAPER_SIZES), default=["sse-h-2b", "transformer-2b"])
    parser.add_argument("--rows", nargs="*", default=["2048x256", "8192x80", "32768x22", "2048x1"], metavar="CONTEXTxSEQUENCES")
    parser.add_argument("--first-token", type=int, default=32768, help="length of that prompt; 0: leave it out")
    parser.add_argument("--check", action="store_true", help="log-probabilities against the trainer's forward, before all else")
    parser.add_argument("--truth", action="store_true", help="of --check: how far either is from the same weights in fp32")
    parser.add_argument("--check-samples", type=int, default=32)
    parser.add_argument("--check-tokens", type=int, default=4096)
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="prompt tokens in one forward")
    parser.add_argument("--prefill-total", type=int, default=2**18, help="prompt tokens over which prefill is timed, at most")
    parser.add_argument("--memory-fraction", type=float, default=0.85)
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=["default", "strict"],
        default=["default"],
        help="strict: the trainer's bits, `exact` in recipes",
    )
    parser.add_argument("--no-graphs", dest="graphs", action="store_false")
    parser.add_argument("--triton-states", action="store_true", help="decode GLA layers in Triton where that is no default too")
    parser.add_argument("--attention", action="store_true", help="decode attention of one layer by itself too")
    parser.add_argument("--sweep-attention", action="store_true", help="that over launch options, and nothing else")
    parser.add_argument("--profile", action="store_true", help="time by kernel of a step and of a prompt of each row")
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows: a trial of the script")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=None, help="folder of generator.md and generator.json; default: benchmarks/")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.rows, args.first_token, args.prefill_tokens = ["48x3", "48x1"], 64 if args.first_token else 0, 32
    try:
        args.rows = [tuple(int(n) for n in row.split("x")) for row in args.rows]
    except ValueError:
        parser.error("--rows: give CONTEXTxSEQUENCES, as in 2048x256")
    if any(len(row) != 2 or min(row) < 1 for row in args.rows):
        parser.error("--rows: give CONTEXTxSEQUENCES, as in 2048x256")
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
    args = parse(arguments)
    if args.triton_states:
        from posttrain.kernels.sse import decode

        decode.TRITON_ON_GPU = True
    bench = Bench(args)
    ok = bench.run()
    print("\n".join(bench.markdown()), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
