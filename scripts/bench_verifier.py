"""Measure the verifier pool: `python scripts/bench_verifier.py [--workers 2] [--pairs 4000] [--write]`.

Three loads, each through `VerifierPool.verify` in calls of a training step's size:
    numbers     integers, decimals and fractions, as most published answers are: decided without a child
    plain       radicals, expressions, intervals, sets: every one needs a child and is new to it
    1% bombs    the plain load with one answer in a hundred that computes for ever (towers, factorials, binomials)
Latency is a verification's own wall-clock, from when its child takes it, as `Verdict.seconds` gives it; throughput counts the
whole call. A bomb costs its time limit and a new child, so throughput under bombs is set by `--timeout`. `--write` updates
benchmarks/verifier.{md,json}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from posttrain.rewards.pool import VerifierPool  # noqa: E402 - the checkout comes before what is installed

# They compute for ever against most golds of the plain load; against some a glance at the shape is enough.
BOMBS = (r"9^{9^{9^9}}", r"\{1, 9^{9^{9^9}}\}", r"100!!!", r"\sqrt{3^{10^{12}}}", r"x^{9^{9^9}}")
BATCH = 512  # 64 prompts, 8 samples


def plain_pair(index: int, rng: random.Random) -> tuple[str, str]:
    """A gold and an output that is right every second time, both new with every index."""
    a, b, c = rng.randint(2, 9_999), rng.randint(2, 9_999), rng.randint(2, 99)
    wrong = index % 2
    forms = (
        (rf"\frac{{{a}\pi}}{{{b}}}", rf"\frac{{{2 * a + wrong}\pi}}{{{2 * b}}}"),
        (rf"{c}\sqrt{{{a}}}", rf"\sqrt{{{c * c * a + wrong}}}"),
        (rf"{a}x+{b}y", rf"{b}y+{a + wrong}x"),
        (rf"[{a},{a + b})", rf"[{a},{a + b + wrong})"),
        (rf"\{{{a},{b},{c}\}}", rf"\{{{c},{a},{b + wrong}\}}"),
        (rf"({a},\frac{{{b}}}{{2}})", rf"({a}, {b / 2 + wrong})"),
        (rf"{a}\pi", rf"\pi\cdot {a + wrong}"),
    )
    gold, answer = forms[index % len(forms)]
    return gold, rf"Step by step we find that the answer is $\boxed{{{answer}}}$."


def number_pair(index: int, rng: random.Random) -> tuple[str, str]:
    a, b, wrong = rng.randint(1, 99_999), rng.randint(2, 999), index % 2
    forms = ((str(a), str(a + wrong)), (rf"\frac{{{a}}}{{{b}}}", f"{a + wrong}/{b}"), (str(a / 8), rf"\frac{{{a + wrong}}}{{8}}"))
    gold, answer = forms[index % len(forms)]
    return gold, rf"so it is \boxed{{{answer}}}"


def load(name: str, pairs: int, seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    if name == "numbers":
        return [number_pair(index, rng) for index in range(pairs)]
    made = [plain_pair(index, rng) for index in range(pairs)]
    if name == "1% bombs":
        for index in range(50, pairs, 100):
            made[index] = (made[index][0], rf"\boxed{{{BOMBS[index // 100 % len(BOMBS)]}}}")
    return made


def measure(name: str, pairs: list[tuple[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    with VerifierPool(options.workers, options.timeout, options.memory_mb) as pool:
        pool.verify([("1/3", r"\boxed{\frac13}")] * options.workers)  # the children are up
        seconds: list[float] = []
        right = 0
        started = time.perf_counter()
        for at in range(0, len(pairs), BATCH):
            verdicts = pool.verify(pairs[at : at + BATCH])
            seconds += [verdict.seconds for verdict in verdicts]
            right += sum(verdict.correct is True for verdict in verdicts)
        wall = time.perf_counter() - started
        counters = pool.counters.as_dict()
    ordered = sorted(seconds)
    return {
        "load": name,
        "pairs": len(pairs),
        "right": right,
        "wall_s": round(wall, 2),
        "per_s": round(len(pairs) / wall, 1),
        "per_s_per_worker": round(len(pairs) / wall / options.workers, 1),
        "p50_ms": round(1000 * ordered[len(ordered) // 2], 3),
        "p99_ms": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 3),
        "max_ms": round(1000 * ordered[-1], 1),
        "timeouts": counters["timeouts"],
        "crashes": counters["crashes"],
    }


def cpu_model() -> str:
    if Path("/proc/cpuinfo").is_file():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--memory-mb", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write benchmarks/verifier.{md,json}")
    options = parser.parse_args()
    rows = [measure(name, load(name, options.pairs, options.seed), options) for name in ("numbers", "plain", "1% bombs")]
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python scripts/bench_verifier.py", *sys.argv[1:]]),
        "device": f"{cpu_model()}, {os.cpu_count()} logical CPUs",
        "load_average_at_end": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("math-verify", "latex2sympy2_extended", "sympy")},
        "workers": options.workers,
        "timeout_s": options.timeout,
        "rows": rows,
    }
    text = markdown(result)
    print(text)
    if options.write:
        (ROOT / "benchmarks" / "verifier.json").write_text(json.dumps(result, indent=2) + "\n")
        (ROOT / "benchmarks" / "verifier.md").write_text(text)


def markdown(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        "# Verifier pool",
        "",
        f"`{result['command']}`, {result['date']}, {result['device']}, {result['workers']} workers, time limit "
        f"{result['timeout_s']} s, Python {result['python']}, {versions}. Load average at the end: "
        f"{result['load_average_at_end']} (other work on the machine makes these figures worse, never better).",
        "",
        "| load | pairs | per second | per second and worker | p50 | p99 | slowest | killed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['load']} | {row['pairs']} | {row['per_s']} | {row['per_s_per_worker']} | {row['p50_ms']} ms | "
            f"{row['p99_ms']} ms | {row['max_ms']} ms | {row['timeouts'] + row['crashes']} |"
        )
    lines += [
        "",
        "Latency is a verification's own wall-clock in its child, waiting for a free child not counted. One answer in a",
        "hundred that computes for ever holds its worker for the time limit and a second for a new process, which is what",
        "sets the throughput of the last row; a lower `reward.timeout_s` or more `reward.workers` raises it in proportion.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
