"""Times vLLM on the Transformer of the 2B shape: `python scripts/bench_vllm.py [--rows CONTEXTxSEQUENCES ...] [--tiny]`.

The figures that `bench_generator.py` takes of this project's engine, by the same definitions: per row prefill tokens a second,
and decode tokens a second with all sequences in flight at about the mean context that is named, sampling at temperature 1 and
reading back included; milliseconds to the first token of a long prompt; memory. The shape is written as a Llama (the same
layers: full attention, RoPE, SwiGLU, RMSNorm), with dummy weights in bf16 and prompts of token ids. vLLM returns no
log-probabilities here, which the engine always computes. Prefix caching is off.

One process (VLLM_ENABLE_V1_MULTIPROCESSING=0) unless the environment says otherwise. `--compilation none` (the default) leaves
torch.compile out, whose cold start may take minutes: vLLM's own fused kernels, decode steps as full CUDA graphs, prefill
launched one by one. `--compilation full` is what vLLM does when it is told nothing. Written as vllm.md and vllm.json; rows of a
generator.json that `--beside` names stand beside vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_tools import attempt, describe, environment, say, synchronize, table, write_results

from posttrain.models.sizes import PAPER_SIZES, resolve

VOCABULARY = 151936
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "layer_types": None}
# As in bench_generator.py: decode steps that are timed, and those before them that warm up.
STEPS, WARM = 64, 8


def llama_config(fields: dict[str, Any], max_length: int) -> dict[str, Any]:
    """config.json of the Llama that is a Transformer of these fields (`posttrain.models.sizes`)."""
    f = resolve({**fields, "layer_types": ["full_attention"] * fields["num_hidden_layers"]})
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "tie_word_embeddings",
    )  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "rope_theta": f["rope_theta"], "max_position_embeddings": max_length, "torch_dtype": "bfloat16",
        "bos_token_id": None, "eos_token_id": None, **{name: f[name] for name in same},
    }  # fmt: skip


def plan(context: int, sequences: int, prefill_tokens: int, steps: int, warm: int) -> tuple[int, int]:
    """Prompt length and steps of joining, such that the mean context in the middle of the timed steps is about `context`.

    A step takes `prefill_tokens` tokens of prompts and of decoding sequences together; the first sequence decodes while the last
    ones join.
    """
    joining = 1 + -(-sequences * context // max(1, prefill_tokens - sequences))
    return max(1, context - warm - steps // 2 - joining // 2), joining


def beside(path: Path) -> dict[tuple[int, int], dict[str, float]]:
    """Decode tokens a second of this project's engine, in its default mode, by (context, sequences) and model, from a
    generator.json."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if "decode_tokens_per_s" in row and row["mode"] == "default":
            found.setdefault((row["context"], row["sequences"]), {})[row["model"]] = row["decode_tokens_per_s"]
    return found


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.fields = {**(TINY if args.tiny else PAPER_SIZES["transformer-2b"]), "vocab_size": 97 if args.tiny else VOCABULARY}
        self.llm: Any = None
        self.requests = 0
        self.ours = beside(args.beside) if args.beside else {}
        self.record: dict[str, Any] = {"environment": environment(self.device), "rows": [], "first_token": []}

    # -- the engine ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        import vllm

        args = self.args
        longest = max([c for c, _ in args.rows] + [args.first_token]) + 1024
        most = max([n for _, n in args.rows] + [1])
        options: dict[str, Any] = {"enforce_eager": True}
        if self.device.type == "cuda":
            compilation: dict[str, Any] = {"cudagraph_capture_sizes": sorted({1, *(n for _, n in args.rows)})}
            if args.compilation == "none":
                compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            options = {"compilation_config": compilation}
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(llama_config(self.fields, longest)))
            self.llm = vllm.LLM(
                model=folder, load_format="dummy", skip_tokenizer_init=True, generation_config="vllm", seed=0,
                dtype="bfloat16" if self.device.type == "cuda" else "float32", max_model_len=longest, max_num_seqs=most,
                max_num_batched_tokens=max(args.prefill_tokens, most), enable_prefix_caching=False,
                gpu_memory_utilization=args.memory_fraction, **options,
            )  # fmt: skip
        config = self.llm.llm_engine.vllm_config
        self.record["environment"] |= {"vllm": vllm.__version__}
        self.record["settings"] = {
            "load_s": time.perf_counter() - start, "compilation": str(config.compilation_config.mode),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "processes": "one" if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" else "engine in its own",
            "kv_blocks": config.cache_config.num_gpu_blocks, "block_size": config.cache_config.block_size,
            "memory_fraction": args.memory_fraction, "prefill_tokens": args.prefill_tokens,
        }  # fmt: skip
        say(f"loaded: {self.record['settings']}")

    def submit(self, prompts: list[list[int]], tokens: int) -> list[str]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Deltas, so that counting tokens costs no copies of what came before.
        kind = RequestOutputKind.DELTA
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=kind)
        names = []
        for ids in prompts:
            names.append(f"r{self.requests}")
            self.requests += 1
            self.llm.llm_engine.add_request(names[-1], {"prompt_token_ids": ids}, params)
        return names

    def step(self) -> dict[str, int]:
        """New tokens by request of the next step that gives any; none where all has ended.

        A part of a prompt gives none, and under asynchronous scheduling a call may only launch a step.
        """
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            new = {o.request_id: len(o.outputs[0].token_ids) for o in engine.step() if o.outputs[0].token_ids}
            if new:
                return new
        return {}

    def drain(self) -> None:
        while self.step():
            pass

    def prompts(self, count: int, length: int, seed: int = 0) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(self.fields["vocab_size"]) for _ in range(length)] for _ in range(count)]

    # -- speed --------------------------------------------------------------------------------------------------------

    def row(self, context: int, sequences: int) -> dict[str, Any]:
        args = self.args
        steps, warm = (8, 2) if args.tiny else (STEPS, WARM)
        length, joining = plan(context, sequences, args.prefill_tokens, steps, warm)
        given = self.prompts(sequences, length, seed=1)
        some = given[: max(1, min(sequences, args.prefill_total // length))]
        self.submit(some[:1], 2)
        self.drain()
        start = time.perf_counter()
        self.submit(some, 1)
        self.drain()
        synchronize(self.device)
        prefill = len(some) * length / (time.perf_counter() - start)
        # Twice what joining should take: a sequence that ended early would leave fewer in flight.
        self.submit(given, 2 * joining + 2 * (warm + steps))
        counts: dict[str, int] = {}

        def step() -> int:
            new = self.step()
            for name, tokens in new.items():
                counts[name] = counts.get(name, 0) + tokens
            return sum(new.values())

        for _ in range(2 * joining + warm):
            if len(counts) == sequences:
                break
            step()
        if len(counts) < sequences:
            self.abandon()
            raise RuntimeError(f"only {len(counts)} of {sequences} sequences fit at once: memory holds no more")
        for _ in range(warm):
            step()
        synchronize(self.device)
        before, start = sum(counts.values()), time.perf_counter()
        tokens = sum(step() for _ in range(steps))
        synchronize(self.device)  # as many steps were launched as were read
        seconds = time.perf_counter() - start
        mean = length + (before + tokens / 2) / sequences
        full = tokens == steps * sequences
        self.abandon()
        if not full:
            raise RuntimeError(f"{tokens} tokens in {steps} steps of {sequences} sequences: some waited for memory")
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        free, total = torch.cuda.mem_get_info(self.device) if self.device.type == "cuda" else (0, 0)
        return {
            "context": context, "mean_context": mean, "sequences": sequences, "decode_tokens_per_s": tokens / seconds,
            "step_ms": seconds / steps * 1e3, "prefill_tokens_per_s": prefill, "peak_bytes": peak,
            "device_bytes": total - free or None,
        }  # fmt: skip

    def abandon(self) -> None:
        """Ends what runs; the next row starts on an empty engine."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        self.drain()
        # An asynchronous step may still be under way.
        self.submit(self.prompts(1, 4), 2)
        self.drain()

    def first_token(self, length: int) -> dict[str, Any]:
        """Milliseconds from submission until the first token is on the host, the median of three after one."""
        times = []
        for i in range(4):
            prompts = self.prompts(1, length, seed=i)
            synchronize(self.device)
            start = time.perf_counter()
            (name,) = self.submit(prompts, 4)
            if name not in self.step():
                raise RuntimeError("the engine ended the request without a token")
            times.append((time.perf_counter() - start) * 1e3)
            self.drain()
        return {"prompt": length, "ms": sorted(times[1:])[1], "first_ms": times[0]}

    def run(self) -> bool:
        say(", ".join(f"{k} {v}" for k, v in self.record["environment"].items()))
        self.open()
        for context, sequences in self.args.rows:
            found = attempt(f"{context}x{sequences}", lambda c=context, n=sequences: self.row(c, n))
            failed = {"context": context, "sequences": sequences, "error": found}
            self.record["rows"].append(found if isinstance(found, dict) else failed)
            say(f"{context}x{sequences}: {self.record['rows'][-1]}")
            self.write()
        if self.args.first_token:
            found = attempt("first token", lambda: self.first_token(self.args.first_token))
            failed = {"prompt": self.args.first_token, "error": found}
            self.record["first_token"].append(found if isinstance(found, dict) else failed)
            say(f"first token: {self.record['first_token']}")
            self.write()
        return all("error" not in row for part in ("rows", "first_token") for row in self.record[part])

    # -- results ------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        write_results(self.args.out, "vllm", self.record, self.markdown())

    def markdown(self) -> list[str]:
        settings = ", ".join(f"{name} {value}" for name, value in self.record["settings"].items() if name != "load_s")
        lines = ["# vLLM on the Transformer of the 2B shape", "", *describe(self.record["environment"])]
        lines += ["Dummy weights as a Llama, prefix caching off, no log-probabilities asked for.", "", f"{settings}.", ""]
        models = sorted({model for rates in self.ours.values() for model in rates})
        header = ["context", "sequences", "decode tokens/s", "ms a step", "prefill tokens/s", "mean context", "GiB at the peak"]
        rows = []
        for row in self.record["rows"]:
            rates = self.ours.get((row["context"], row["sequences"]), {})
            if "error" in row:
                rows.append([row["context"], row["sequences"], row["error"]])
                continue
            peak = row["peak_bytes"] and f"{row['peak_bytes'] / 2**30:.1f}"
            cells = [f"{row['decode_tokens_per_s']:,.0f}", f"{row['step_ms']:.3g}", f"{row['prefill_tokens_per_s']:,.0f}"]
            own = [f"{rates[model]:,.0f}" if model in rates else None for model in models]
            rows.append([row["context"], row["sequences"], *cells, f"{row['mean_context']:.0f}", peak, *own])
        lines += table([*header, *(f"ours, {model}: decode tokens/s" for model in models)], rows)
        first = [[row["prompt"], row.get("error") or f"{row['ms']:,.1f}"] for row in self.record["first_token"]]
        return lines + (table(["prompt", "ms to the first token"], first) if first else [])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=["2048x256", "8192x80", "32768x22", "2048x1"], metavar="CONTEXTxSEQUENCES")
    parser.add_argument("--first-token", type=int, default=32768, help="length of that prompt; 0: leave it out")
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="tokens of one step, at most")
    parser.add_argument("--prefill-total", type=int, default=2**18, help="prompt tokens over which prefill is timed, at most")
    parser.add_argument("--memory-fraction", type=float, default=0.92, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--compilation", choices=("none", "full"), default="none")
    parser.add_argument("--beside", type=Path, default=None, help="a generator.json, whose rows stand beside vLLM's")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and rows: a trial of the script")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=None, help="folder of vllm.md and vllm.json; default: benchmarks/")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.rows, args.first_token, args.prefill_tokens = ["48x3", "48x1"], 64 if args.first_token else 0, 32
    try:
        args.rows = [tuple(int(n) for n in row.split("x")) for row in args.rows]
    except ValueError:
        parser.error("--rows: give CONTEXTxSEQUENCES, as in 2048x256")
    if any(len(row) != 2 or min(row) < 1 for row in args.rows):
        parser.error("--rows: give CONTEXTxSEQUENCES, as in 2048x256")
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
