"""Times the SSE kernels beside their peers in one process: `python scripts/bench_kernels.py [--tokens N ...] [--only NAME ...]`.

Peers: flash-linear-attention's chunk_gla (plain linear attention), SSE composed of it (varlen and masking), cuDNN's causal
attention, and fla's gated delta rule. Correctness first, then times, the ones that matter most first; results are written after
every phase as kernels.md and kernels.json. A peer that fails or is not installed is a row that says why.

Buffers are not rotated between repeats: from 8,192 tokens of 18 heads of 128 one tensor takes 38 MB and a call reads seven, far
more than an H200's 60 MB of L2. Do not read anything into times of smaller problems.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Keeps the choices of fla's autotuning, which takes minutes, in Triton's cache.
os.environ["TRITON_CACHE_AUTOTUNING"] = os.environ.get("TRITON_CACHE_AUTOTUNING", "1")

import torch
from bench_checks import errors_of, packs_bitwise, repeats_bitwise, truth_of, truth_of_plain
from bench_problem import (
    Call,
    Problem,
    build_attention,
    build_composed,
    build_fla_gdn,
    build_gla,
    build_masking,
    build_ours,
    build_ours_plain,
    make_problem,
)
from bench_report import Report
from bench_tools import attempt, environment, kernel_times, peak_memory, release, say, synchronize, time_call

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PACKED_LENGTH = 512
MASKING_TOKENS = 32768  # above, N + 1 whole passes say nothing new
MEMORY_TOKENS = 32768
PLAIN = "plain GLA"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A column of the table. build: problem -> call; build is None for ours."""

    build: Callable[[Problem], Call] | None = None
    partitions: int = 4
    packed: bool = False
    keep_states: bool = True
    is_gdn: bool = False
    most_tokens: int = 1 << 62


VARIANTS = {
    "sse-n4k1": Variant(),
    "sse-n16k1": Variant(partitions=16),
    "sse-packed": Variant(packed=True),
    "sse-recompute": Variant(keep_states=False),
    "fla-gla": Variant(build=build_gla),
    "composed-n4k1": Variant(build=build_composed),
    "composed-n16k1": Variant(build=build_composed, partitions=16),
    "masking-n4k1": Variant(build=build_masking, most_tokens=MASKING_TOKENS),
    "attention": Variant(build=build_attention),
    "sse-gdn": Variant(is_gdn=True),
    "fla-gdn": Variant(build=build_fla_gdn, is_gdn=True),
}


class Bench:
    """The options, the report, and the phases over them."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, torch.device(args.device)
        self.tokens = sorted(set(args.tokens))
        self.ours: dict[str, Any] = dict(backend=args.backend, chunk_size=args.chunk_size)
        settings = {
            k: getattr(args, k) for k in ("heads", "dim", "dtype", "g_dtype", "chunk_size", "backend", "cold", "check_tokens")
        }
        self.report = Report(environment(self.device), settings, self.tokens)

    def wants(self, *names: str) -> bool:
        return any(name in self.args.only for name in names)

    def problem(self, tokens: int, variant: Variant, lengths: tuple[int, ...] | None = None) -> Problem:
        if lengths is None:
            step = min(PACKED_LENGTH, max(1, tokens // 2)) if variant.packed else tokens
            lengths = (*[step] * (tokens // step), *([tokens % step] if tokens % step else []))
        return make_problem(
            lengths, heads=self.args.heads, dim=self.args.dim, partitions=variant.partitions, device=self.device,
            dtype=DTYPES[self.args.dtype], g_dtype=DTYPES[self.args.g_dtype], is_gdn=variant.is_gdn,
        )  # fmt: skip

    def call(self, name: str, tokens: int) -> Call:
        """Raises whatever the peer raises, ModuleNotFoundError where it is not installed."""
        variant = VARIANTS[name]
        if variant.build is None:
            return build_ours(self.problem(tokens, variant), keep_states=variant.keep_states, **self.ours)
        if self.device.type != "cuda":
            raise RuntimeError("needs a GPU")
        return variant.build(self.problem(tokens, variant))

    def trace(self, name: str) -> bool:
        """Whether a failure of the variant is a surprise worth a traceback."""
        return VARIANTS[name].build is None or self.device.type == "cuda"

    def phase(self, title: str, run: Callable[[], Any]) -> None:
        say(f"== {title}")
        failure = attempt(title, run)
        if isinstance(failure, str):
            self.report.failures[title] = failure
        self.report.write(self.args.out)
        release(self.device)

    def time(self, name: str, tokens: int) -> None:
        """Both passes of a variant into the report."""
        if tokens > VARIANTS[name].most_tokens:
            return
        made = attempt(name, lambda: self.call(name, tokens), trace=self.trace(name))
        quick: dict[str, Any] = dict(warm_s=0.05, budget_s=0.2, least=3) if self.args.quick or self.device.type == "cpu" else {}
        for which in ("both", "forward"):
            if isinstance(made, str):
                timing = made
            else:
                run = made.both if which == "both" else made.inference
                timing = attempt(f"{name}, {which}", lambda run=run: time_call(run, self.device, **quick), trace=self.trace(name))
            self.report.add_timing(name, tokens, which, timing)
            if not isinstance(timing, str):
                say(
                    f"{name:>15} {tokens:>7} {which:>7}: {timing.ms:8.3f} ms ({timing.low_ms:.3f} to {timing.high_ms:.3f}, "
                    f"{timing.repeats} runs; host {timing.host_ms:.2f} ms, first {timing.first_s:.1f} s)"
                )
        del made
        release(self.device)

    def time_all(self, names: list[str], *, beside: str | None = None) -> None:
        """Every size of the variants, the smallest first: that is where peers tune themselves. `beside` is timed again there."""
        chosen = [name for name in names if self.wants(name)]
        for tokens in self.tokens:
            for name in chosen:
                self.time(name, tokens)
            if chosen and beside and self.wants(beside):
                self.time(beside, tokens)
                ratio = self.report.ratio((beside, chosen[0]), tokens, "both")
                say(f"   {beside} / {chosen[0]} at {tokens}: {'-' if ratio is None else f'{ratio:.3f}'}")
            self.report.write(self.args.out)

    def first_call(self) -> None:
        call = self.call("sse-n4k1", self.tokens[0])
        synchronize(self.device)
        start = time.perf_counter()
        call.both()
        synchronize(self.device)
        self.report.first_call_s = time.perf_counter() - start
        say(f"first call of ours, forward and backward: {self.report.first_call_s:.2f} s")

    def check(self, who: str) -> None:
        """Errors of ours, of chunk_gla on the plain function ("fla"), or of SSE composed of it ("composed")."""
        for tokens in self.args.check_tokens:
            for title, variant in (("n4k1", VARIANTS["sse-n4k1"]), ("n16k1", VARIANTS["sse-n16k1"])):
                p = self.problem(tokens, variant)
                case = f"SSE-{title}, {tokens:,} tokens"
                if who == "ours":
                    self.add_errors(case, "ours", lambda p=p: build_ours(p, **self.ours), truth_of(p), poison=True)
                elif who == "composed":
                    self.add_errors(case, "SSE from `chunk_gla`", lambda p=p: build_composed(p), truth_of(p))
                release(self.device)
            self.check_plain(who, tokens)
        if who == "ours":
            self.check_bits()

    def check_plain(self, who: str, tokens: int) -> None:
        """The function of chunk_gla on its own inputs: the like-with-like comparison of errors."""
        if who == "composed":
            return
        p, case = self.problem(tokens, VARIANTS["fla-gla"]), f"{PLAIN}, {tokens:,} tokens"
        truth = truth_of_plain(p)
        if who == "ours":
            self.add_errors(case, "ours", lambda: build_ours_plain(p, **self.ours), truth, poison=True)
            return
        errors = self.add_errors(case, "fla `chunk_gla`", lambda: build_gla(p), truth)
        for title in ("n4k1", "n16k1"):  # another function, but tensors of the same kind
            self.report.errors[f"SSE-{title}, {tokens:,} tokens", "fla `chunk_gla` (plain GLA)"] = errors

    def add_errors(self, case: str, who: str, build: Callable[[], Call], truth: dict, *, poison: bool = False) -> Any:
        label = f"{who}, {case}"
        errors = attempt(label, lambda: errors_of(label, build(), truth, poison=poison))
        self.report.errors[case, who] = errors
        return errors

    def check_bits(self, *, is_gdn: bool = False) -> None:
        tokens, name = self.args.check_tokens[0], "sse-gdn" if is_gdn else "sse-n4k1"
        p = self.problem(tokens, VARIANTS[name])
        repeats = attempt("repeats", lambda: repeats_bitwise(build_ours(p, **self.ours)))
        self.report.bitwise[f"{name}: two runs"] = repeats
        third = tokens // 3
        packed = self.problem(tokens, VARIANTS[name], lengths=(third, 0, 1, tokens - third - 1))
        alone = attempt("packing", lambda: packs_bitwise(packed, **self.ours))
        self.report.bitwise[f"{name}: packed as alone"] = alone

    def check_gdn(self) -> None:
        tokens = self.args.check_tokens[0]
        p = self.problem(tokens, VARIANTS["sse-gdn"])
        errors = self.add_errors(
            f"SSE-GDN n4k1, {tokens:,} tokens", "ours", lambda: build_ours(p, **self.ours), truth_of(p), poison=True
        )
        if not isinstance(errors, str):
            self.check_bits(is_gdn=True)

    def measure_memory(self, names: list[str]) -> None:
        if self.device.type != "cuda":
            raise RuntimeError("needs a GPU")
        tokens = MEMORY_TOKENS if MEMORY_TOKENS in self.tokens else self.tokens[-1]
        for name in (n for n in names if self.wants(n)):
            peak = attempt(f"memory of {name}", lambda name=name: peak_memory(self.call(name, tokens).both, self.device))
            self.report.memory[name, tokens] = peak
            if not isinstance(peak, str):
                say(f"peak memory of {name} at {tokens}: {peak / 2**30:.3f} GiB above the inputs")
            release(self.device)

    def profile(self, names: list[str]) -> None:
        if self.device.type != "cuda":
            raise RuntimeError("needs a GPU")
        tokens = MEMORY_TOKENS if MEMORY_TOKENS in self.tokens else self.tokens[-1]
        for name in names:
            rows = attempt(f"profile of {name}", lambda name=name: kernel_times(self.call(name, tokens).both))
            self.report.kernels[f"{name} at {tokens:,}, forward and backward"] = rows
            if not isinstance(rows, str):
                total = sum(us for _, us, _ in rows)
                say(f"kernels of {name} at {tokens}: {total:.0f} us")
                for kernel, us, launches in rows[:20]:
                    print(f"    {us:9.1f} us {us / total:6.1%} {launches:3d}x {kernel[:90]}", flush=True)
            release(self.device)


def run(bench: Bench) -> None:
    """All phases, the ones that matter most first: a run may be cut off."""
    args = bench.args
    say(", ".join(f"{k} {v}" for k, v in bench.report.environment.items()))
    ours = ["sse-n4k1", "sse-n16k1", "sse-packed", "sse-recompute"]
    if bench.wants(*ours):
        bench.phase("first call of ours", bench.first_call)
    if bench.wants("check"):
        bench.phase("errors and bits of ours", lambda: bench.check("ours"))
    if bench.wants(*ours):
        bench.phase("times of ours", lambda: bench.time_all(ours))
        if profiled := [name for name in args.profile if name in ours]:
            bench.phase("kernels of ours", lambda: bench.profile(profiled))
        bench.phase("memory of ours", lambda: bench.measure_memory(["sse-n4k1", "sse-n16k1", "sse-recompute"]))
    if bench.wants("fla-gla"):
        bench.phase("fla chunk_gla (tunes itself first: minutes)", lambda: bench.time_all(["fla-gla"], beside="sse-n4k1"))
        if bench.wants("check") and bench.device.type == "cuda":
            bench.phase("errors of fla chunk_gla", lambda: bench.check("fla"))
    composed = ["composed-n4k1", "composed-n16k1"]
    if bench.wants(*composed):
        bench.phase("SSE from chunk_gla, varlen (tunes itself first)", lambda: bench.time_all(composed))
        bench.phase("memory of SSE from chunk_gla", lambda: bench.measure_memory(composed))
        if bench.wants("check") and bench.device.type == "cuda":
            bench.phase("errors of SSE from chunk_gla", lambda: bench.check("composed"))
    if bench.wants("attention"):
        bench.phase("cuDNN attention", lambda: bench.time_all(["attention"]))
    if bench.wants("masking-n4k1"):
        bench.phase("masking", lambda: bench.time_all(["masking-n4k1"]))
    if bench.wants("sse-gdn"):
        if bench.wants("check"):
            bench.phase("errors and bits of SSE-GDN", bench.check_gdn)
        bench.phase("times of SSE-GDN", lambda: bench.time_all(["sse-gdn"]))
    if bench.wants("fla-gdn"):
        bench.phase("fla gated delta rule (tunes itself first)", lambda: bench.time_all(["fla-gdn"], beside="sse-gdn"))
    if others := [name for name in args.profile if name not in ours]:
        bench.phase("kernels of the rest", lambda: bench.profile(others))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    names = ["check", *VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--heads", type=int, default=18)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--g-dtype", choices=DTYPES, default=None, help="dtype of the decays; default: as --dtype")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="NAME", help="the same names, left out")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and only 8,192 tokens unless --tokens is given")
    # fla's kernels are tuned for a number of heads: the checks use the timed one, or they would tune all over again
    parser.add_argument("--check-tokens", type=int, nargs="+", default=[2048], help="sizes of the comparison with float64")
    parser.add_argument("--profile", nargs="*", choices=VARIANTS, metavar="NAME", help="time by kernel, of sse-n4k1 by default")
    parser.add_argument("--chunk-size", type=int, default=64, help="of our operators")
    parser.add_argument("--cold", action="store_true", help="an empty Triton cache: the first call compiles everything")
    parser.add_argument("--backend", choices=("triton", "torch"), default="triton", help="of our operators")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a trial of the script")
    parser.add_argument("--out", type=Path, default=None, help="folder of kernels.md and kernels.json; default: benchmarks/")
    args = parser.parse_args(arguments)
    args.g_dtype = args.g_dtype or args.dtype
    args.only = [name for name in args.only if name not in args.skip]
    if args.quick and args.tokens == parser.get_default("tokens"):
        args.tokens = [8192]
    args.profile = ["sse-n4k1"] if args.profile == [] else args.profile or []
    if min(args.tokens) < 4 or min(args.check_tokens) < 4:
        parser.error("--tokens and --check-tokens must be at least 4")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device that PyTorch can use")
    if args.out is None:
        if args.device == "cpu":
            parser.error("--device cpu is a trial of the script: give --out, so that it does not replace measured results")
        args.out = Path(__file__).resolve().parents[1] / "benchmarks"
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.cold:
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-cold-")
    bench = Bench(args)
    try:
        run(bench)
    finally:
        print("\n".join(bench.report.markdown()), flush=True)
        say(f"written to {args.out}")
    ours = [t for (name, _, _), t in bench.report.timings.items() if VARIANTS[name].build is None and not VARIANTS[name].is_gdn]
    return 1 if any(isinstance(timing, str) for timing in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
