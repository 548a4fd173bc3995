"""Times one decode step of an SSE layer on the chunk grid: `python scripts/bench_decode.py [--batch N ...] [--check] [--sweep]`.

Correctness comes first: tokens one by one against float64, and their states against the prefill's, bit for bit. Then microseconds
a step, folds included, from CUDA graphs of C steps: slots, routing and pending counts differ from step to step, and the slots
together exceed L2. Beside it, in the same process: a large copy, the copy of the touched fp32 states once in and once out, and
fla's `fused_recurrent_gla` on as many states. Written as decode.md and decode.json.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if "--device" in sys.argv and "cpu" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from bench_tools import (
    attempt,
    describe,
    environment,
    kernel_times,
    poisoned_memory,
    relative_error,
    release,
    say,
    synchronize,
    table,
    write_results,
)
from torch import Tensor

from posttrain.kernels.sse import sse
from posttrain.kernels.sse.cases import Case, make_case
from posttrain.kernels.sse.checks import Inputs, check_inputs
from posttrain.kernels.sse.triton_decode_pool import DecodeOptions, TritonChunkState

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SETTINGS = ("heads", "dim", "partitions", "routed", "chunk_size", "dtype", "lockstep")
NAMES = ("q1", "k1", "g1", "q2", "k2", "g2", "v", "weight", "index")
# Buffers that take turns exceed an H200's L2 of 60 MB by this much.
COLD_BYTES = 512 * 2**20
GOAL_RATIO, GOAL_SHARE = 0.55, 0.85


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: int
    dim: int
    partitions: int
    routed: int
    chunk: int
    dtype: torch.dtype

    @property
    def states(self) -> int:
        return 1 + self.routed

    def state_bytes(self, batch: int) -> int:
        """The touched states in fp32, once."""
        return batch * self.states * self.heads * self.dim * self.dim * 4

    def step_bytes(self, batch: int) -> float:
        """What a step has to read and write on average over positions. Per row (token, state) and head, of width D and element
        size e: the state as products read it; (C - 1) / 2 pending rows of ks and v; the token's q, k, v and fp32 g; its total in
        and out; k, ks, v and g appended; its fp32 output written and read. 1/C of a fold: the fp32 state in and out, C rows of
        k, v and g. Per token and head its output."""
        d, e = self.dim, self.dtype.itemsize
        row = e * d * d + (self.chunk - 1) / 2 * 2 * e * d + (3 * e + 4) * d + 2 * 4 * d + (3 * e + 4) * d + 2 * 4 * d
        fold = (2 * 4 * d * d + self.chunk * (2 * e + 4) * d) / self.chunk
        return batch * self.heads * (self.states * (row + fold) + e * d)


def draw(shape: Shape, lengths: tuple[int, ...], device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Rows as a layer gives them: q, k, v of the model's dtype, fp32 decays of the size of logsigmoid / 16."""
    case = Case(
        lengths=lengths, heads=shape.heads, key_dim=shape.dim, value_dim=shape.dim, partitions=shape.partitions,
        routed=shape.routed, chunk_size=shape.chunk, decay=-0.05, initial=False, seed=seed,
    )  # fmt: skip
    tensors, _ = make_case(case)
    given = {n: a for n, a in tensors.items() if n in NAMES and a is not None}
    return {n: given[n].to(device, shape.dtype if n[0] in "qkv" else None) for n in NAMES}


def inputs(t: dict[str, Tensor], shape: Shape) -> Inputs:
    """One token a sequence, of the rows of t."""
    tokens = t["v"].shape[0]
    return check_inputs(
        t["q1"], t["k1"], t["g1"], None, t["q2"], t["k2"], t["g2"], None, t["v"], t["weight"], t["index"], v2=None,
        cu_seqlens=torch.arange(tokens + 1), initial_state=None, num_partitions=shape.partitions, scale=None, gate="both",
        chunk_size=shape.chunk, is_gdn=False,
    )  # fmt: skip


def allocate(shape: Shape, slots: int, device: torch.device, options: DecodeOptions) -> TritonChunkState:
    sizes = (slots, shape.partitions, shape.heads, shape.dim, shape.dim, shape.chunk)
    state = TritonChunkState.allocate(*sizes, device=device, dtype=shape.dtype)
    state.options = options
    return state


def check(shape: Shape, options: DecodeOptions, device: torch.device, *, batch: int = 5) -> dict[str, Any]:
    """Two chunks and a few tokens, one by one -> error against float64, and whether states equal the prefill's."""
    length = 2 * shape.chunk + 3
    t = draw(shape, (length,) * batch, device)
    cu_seqlens = torch.arange(0, (batch + 1) * length, length)
    whole = [a.double() if a.is_floating_point() else a for a in t.values()]
    want, _ = sse(*whole, cu_seqlens=cu_seqlens, num_partitions=shape.partitions, chunk_size=shape.chunk, backend="torch")
    first = torch.arange(batch, device=device) * length
    slots = torch.randperm(batch + 2, generator=torch.Generator().manual_seed(0))[:batch].to(device)
    with poisoned_memory(), torch.no_grad():
        state, found = allocate(shape, batch + 2, device, options), torch.empty_like(t["v"])
        for i in range(length):
            found[first + i] = state.step(inputs({n: a[first + i] for n, a in t.items()}, shape), slots)
        other, x = allocate(shape, batch + 2, device, options), inputs(t, shape)
        prefilled = other.extend(replace(x, cu_seqlens=cu_seqlens.to(device), longest=length), slots, strict=False)
    same = torch.equal(state.high, other.high) and torch.equal(state.low, other.low)
    return {
        "error": relative_error(found, want),
        "prefill_error": relative_error(prefilled, want),
        "states_bitwise_prefill": same,
        "states_differ": float((state.high != other.high).logical_or(state.low != other.low).float().mean()),
        "counts_equal": torch.equal(state.count, other.count),
    }


def passes(found: dict[str, Any] | str, shape: Shape) -> bool:
    limit = 1e-2 if shape.dtype == torch.bfloat16 else 2e-5
    return not isinstance(found, str) and max(found["error"], found["prefill_error"]) < limit and found["counts_equal"]


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device, *, replays: int) -> float:
    """Microseconds of one of `calls`: the median of `replays` runs of all of them, as one CUDA graph each."""

    def all_of_them() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        start = time.perf_counter()
        all_of_them()
        return (time.perf_counter() - start) / len(calls) * 1e6
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        all_of_them()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    synchronize(device)
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    return statistics.median(times) * 1e3 / len(calls)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.shape = Shape(
            heads=args.heads, dim=args.dim, partitions=args.partitions, routed=args.routed, chunk=args.chunk_size,
            dtype=DTYPES[args.dtype],
        )  # fmt: skip
        self.record: dict[str, Any] = {
            "environment": environment(self.device),
            "settings": {n: getattr(args, n) for n in SETTINGS},
            "options": asdict(self.options()), "check": None, "copy_bytes_per_s": None, "rows": [], "sweep": [], "kernels": {},
        }  # fmt: skip

    def options(self) -> DecodeOptions:
        """The first of each flag."""
        return next(iter(combinations(self.args)))

    def steps(self, batch: int, options: DecodeOptions) -> list[Callable[[], Any]]:
        """C steps on slots, routing and inputs of their own, in a state full of small numbers."""
        shape, device = self.shape, self.device
        sets = max(1, min(shape.chunk, -(-COLD_BYTES // int(shape.step_bytes(batch))))) if device.type == "cuda" else 2
        state = allocate(shape, sets * batch, device, options)
        fill(state, lockstep=self.args.lockstep)
        seed = torch.Generator().manual_seed(1)
        x = inputs(draw(shape, (1,) * batch, device), shape)
        calls = []
        for i in range(shape.chunk):
            slots = (torch.randperm(batch, generator=seed) + i % sets * batch).to(device)
            index = torch.rand(batch, shape.partitions, generator=seed).argsort(1)[:, : shape.routed].contiguous().to(device)
            step = replace(x, index=index)
            calls.append(lambda step=step, slots=slots: state.step(step, slots))
        return calls

    def step_us(self, batch: int, options: DecodeOptions) -> float:
        return time_calls(self.steps(batch, options), self.device, replays=self.args.replays)

    def copy_us(self, numbers: int) -> float:
        """Of one device-to-device copy of so many fp32 numbers, cold."""
        sets = max(1, -(-COLD_BYTES // (numbers * 8))) if self.device.type == "cuda" else 1
        pairs = [tuple(torch.zeros(numbers, device=self.device) for _ in range(2)) for _ in range(sets)]
        return time_calls([lambda a=a, b=b: a.copy_(b) for a, b in pairs], self.device, replays=self.args.replays)

    def fla_us(self, batch: int) -> float:
        """fla's recurrent kernel with as many states as a step touches, each row a sequence of one token."""
        from fla.ops.gla import fused_recurrent_gla  # type: ignore[import-not-found]

        shape, rows = self.shape, batch * self.shape.states
        t = {n: a[:, None] for n, a in draw(shape, (1,) * rows, self.device).items()}
        sets = max(1, -(-COLD_BYTES // (2 * shape.state_bytes(batch))))
        states = [torch.zeros(rows, shape.heads, shape.dim, shape.dim, device=self.device) for _ in range(sets)]

        def call(state: Tensor) -> None:
            fused_recurrent_gla(t["q1"], t["k1"], t["v"], gk=t["g1"], initial_state=state, output_final_state=True)

        with torch.no_grad():
            return time_calls([lambda a=a: call(a) for a in states], self.device, replays=self.args.replays)

    def check(self, options: DecodeOptions) -> bool:
        found = attempt("correctness", lambda: check(self.shape, options, self.device))
        self.record["check"] = found
        ok = passes(found, self.shape)
        say(f"against float64 and the prefill: {found} {'ok' if ok else 'WRONG'}")
        return ok

    def time(self, batch: int) -> None:
        shape = self.shape
        row: dict[str, Any] = {"batch": batch}
        us = attempt(f"step at {batch}", lambda: self.step_us(batch, self.options()))
        release(self.device)
        row["bytes"] = shape.step_bytes(batch)
        row["copy_states_us"] = attempt("copy", lambda: self.copy_us(shape.state_bytes(batch) // 4))
        release(self.device)
        row["step_us"] = us
        if self.args.fla:
            row["fla_us"] = attempt("fla", lambda: self.fla_us(batch), trace=False)
            release(self.device)
        if not isinstance(us, str):
            row["share_of_copy"] = row["bytes"] / (us * 1e-6) / self.record["copy_bytes_per_s"]
            if not isinstance(row["copy_states_us"], str):
                row["ratio_to_state_copy"] = us / row["copy_states_us"]
        self.record["rows"].append(row)
        say(", ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in row.items()))

    def sweep(self, batch: int) -> None:
        """Every combination of the launch flags at one batch, the fastest last."""
        for options in combinations(self.args):
            us = attempt(str(options), lambda options=options: self.step_us(batch, options))
            release(self.device)
            self.record["sweep"].append({"batch": batch, **asdict(options), "step_us": us})
            say(f"{options}: {us if isinstance(us, str) else f'{us:.1f} us'}")
        self.record["sweep"].sort(key=lambda row: -row["step_us"] if isinstance(row["step_us"], float) else -float("inf"))

    def profile(self, batch: int) -> None:
        calls = self.steps(batch, self.options())
        rows = kernel_times(lambda: [call() for call in calls])
        self.record["kernels"][batch] = [(name[:60], us / len(calls), n // len(calls)) for name, us, n in rows[:6]]
        for name, us, n in self.record["kernels"][batch]:
            say(f"   {us:8.1f} us a step, {n}x {name}")

    def run(self) -> bool:
        args = self.args
        say(", ".join(f"{k} {v}" for k, v in self.record["environment"].items()))
        ok = self.check(self.options())
        if args.check:
            return all([ok, *(self.check(options) for options in itertools.islice(combinations(args), 1, None))])
        sizes = (2**27, 2**28, 2**29) if self.device.type == "cuda" else (2**16,)
        self.record["copy_bytes_per_s"] = max(8 * numbers / (self.copy_us(numbers) * 1e-6) for numbers in sizes)
        release(self.device)
        say(f"the fastest of three large copies: {self.record['copy_bytes_per_s'] / 1e12:.3f} TB/s")
        if args.sweep:
            self.sweep(args.batch[0])
        else:
            for batch in args.batch:
                self.time(batch)
                self.write()
            if args.profile and self.device.type == "cuda":
                self.profile(max(args.batch))
        self.write()
        return ok

    def write(self) -> None:
        if self.args.out is not None:
            write_results(self.args.out, "decode", self.record, self.markdown())

    def markdown(self) -> list[str]:
        s, r = self.record["settings"], self.record
        found = r["check"] if isinstance(r["check"], dict) else {}
        layer = f"{s['heads']} heads of {s['dim']}, n{s['partitions']}k{s['routed']}, C = {s['chunk_size']}, {s['dtype']}"
        lines = ["# One decode step of an SSE layer (GLA)", "", *describe(r["environment"])]
        positions = "all sequences at the same position" if s["lockstep"] else "positions spread over the chunk"
        lines += [f"{layer}, fp32 decays, {positions}, folds included; launch options {r['options']}.", ""]
        lines += [f"The fastest of three large copies moves {r['copy_bytes_per_s'] / 1e12:.3f} TB/s. "
                  f"Against float64: {found.get('error', 'failed')}; "
                  f"states bitwise the prefill's: {found.get('states_bitwise_prefill', 'failed')}.", ""]  # fmt: skip
        header = ["batch", "us a step", "MB", "share of copy", "copying the fp32 states in and out, us", "ratio", "fla, us"]
        lines += table(header, [self._cells(row) for row in r["rows"]])
        lines += [f"Goals at batch 256, n4k1: ratio at most {GOAL_RATIO}, share at least {GOAL_SHARE}. "
                  "fla: `fused_recurrent_gla` on as many states, or why it did not run.", ""]  # fmt: skip
        if r["sweep"]:
            lines += table(list(r["sweep"][0]), [row.values() for row in r["sweep"]])
        for batch, rows in r["kernels"].items():
            lines += [f"Batch {batch}, by kernel:", "", *table(["kernel", "us a step", "launches"], rows)]
        return lines

    @staticmethod
    def _cells(row: dict[str, Any]) -> list[Any]:
        def number(name: str, form: str) -> Any:
            value = row.get(name)
            return format(value, form) if isinstance(value, float) else value

        return [row["batch"], number("step_us", ".1f"), format(row["bytes"] / 1e6, ".1f"), number("share_of_copy", ".3f"),
                number("copy_states_us", ".1f"), number("ratio_to_state_copy", ".3f"), number("fla_us", ".1f")]  # fmt: skip


def fill(state: TritonChunkState, *, lockstep: bool) -> None:
    """States, pending rows and counts as of sequences on their way, at one position or at random ones."""
    state.high.view(torch.bfloat16).normal_(0, 0.1)
    state.low.random_(-(2**15), 2**15)
    for name in ("k", "v", "ks"):
        state.pending[name].normal_(0, 0.1)
    state.pending["g"].fill_(-0.05)
    state.pending["factor"].fill_(0.5)
    state.total.fill_(-1.0)
    if not lockstep:
        state.count.random_(0, state.chunk_size)


def blocks_of(fold: str) -> tuple[int, int, int, int]:
    """BKxBVxWARPSxREGISTERS."""
    bk, bv, warps, registers = (int(n) for n in fold.split("x"))
    return bk, bv, warps, registers


def combinations(args: argparse.Namespace):
    """DecodeOptions of every combination of the launch flags, in the order given."""
    folds = [None if f == "default" else blocks_of(f) for f in args.fold]
    for bk, bv, bt, stages, warps, registers, programs, fold in itertools.product(
        args.tile_rows, args.tile_columns, args.pending_tile, args.stages, args.warps, args.registers, args.programs, folds
    ):
        yield DecodeOptions(
            BK=bk, BV=bv, BT=bt, STAGES=stages, num_warps=warps, maxnreg=registers or None, programs=programs, fold=fold
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    ours = DecodeOptions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 1, 8, 32, 64, 128, 512])
    parser.add_argument("--heads", type=int, default=18)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--routed", type=int, default=1)
    parser.add_argument("--chunk-size", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--lockstep", action="store_true", help="all sequences at one position: their folds fall together")
    parser.add_argument("--check", action="store_true", help="correctness of every combination of launch options, no times")
    parser.add_argument("--sweep", action="store_true", help="times of every combination at the first --batch")
    parser.add_argument("--tile-rows", type=int, nargs="+", default=[ours.BK])
    parser.add_argument("--tile-columns", type=int, nargs="+", default=[ours.BV])
    parser.add_argument("--pending-tile", type=int, nargs="+", default=[ours.BT])
    parser.add_argument("--stages", type=int, nargs="+", default=[ours.STAGES], help="tiles on their way at once")
    parser.add_argument("--warps", type=int, nargs="+", default=[ours.num_warps])
    parser.add_argument("--registers", type=int, nargs="+", default=[ours.maxnreg or 0], help="a thread at most; 0: no limit")
    parser.add_argument("--programs", type=int, nargs="+", default=[ours.programs], help="of the fold's launch")
    parser.add_argument("--fold", nargs="+", default=["default"], metavar="BKxBVxWARPSxREGISTERS", help="of the fold")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="time by kernel at the largest batch")
    parser.add_argument("--no-fla", dest="fla", action="store_false")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a trial of the script (interpreted)")
    parser.add_argument("--out", type=Path, default=None, help="folder of decode.md and decode.json; default: benchmarks/")
    args = parser.parse_args(arguments)
    if min(args.batch) < 1:
        parser.error("--batch must be at least 1")
    for fold in args.fold:
        if fold != "default" and len(fold.split("x")) != 4:
            parser.error(f"--fold {fold}: give BKxBVxWARPSxREGISTERS, as in 64x64x4x128, or default")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device that PyTorch can use")
    if args.out is None and not args.check:
        if args.device == "cpu":
            parser.error("--device cpu is a trial of the script: give --out, so that it does not replace measured results")
        args.out = Path(__file__).resolve().parents[1] / "benchmarks"
    return args


def main(arguments: list[str] | None = None) -> int:
    bench = Bench(parse(arguments))
    ok = bench.run()
    if not bench.args.check:
        print("\n".join(bench.markdown()), flush=True)
        say(f"written to {bench.args.out}")
    return 0 if ok and not any(isinstance(row["step_us"], str) for row in bench.record["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
