"""Run a recipe's GRPO stage twice: once undisturbed, once killed (SIGKILL, whole session) at random points and resumed each time.

    python scripts/interrupt_run.py recipes/demo.yaml --folder /tmp/x --times 5 grpo.max_steps=20 grpo.placement=split

Fails unless both runs took the same number of steps, trained on the same prompts in the same order, and have rewards that differ
by no more than chance. On-policy (grpo.max_staleness=0, or colocated) the completions are the same too. `--case NAME` adds the
result to interrupted_run.json and interrupted_run.md in the folder `--out`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

RUN_LIMIT_S = 3600.0
# Standard errors that the mean rewards may lie apart.
NOISE = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--folder", required=True, help="for both run folders")
    parser.add_argument("--times", type=int, default=5, help="interruptions")
    parser.add_argument("--seed", type=int, default=0, help="of the points in time")
    parser.add_argument("--case", help="name of this case in the results")
    parser.add_argument("--out", default="benchmarks", help="folder of the results, with --case")
    arguments = parser.parse_intermixed_args()
    folder = Path(arguments.folder)
    straight, broken = folder / "straight", folder / "interrupted"
    seconds = straight_run(arguments, straight)
    begun = time.monotonic()
    points = interrupted_run(arguments, broken, straight)
    result = environment() | compare(straight, broken)
    result |= {"killed_after_step": points, "straight_s": round(seconds), "interrupted_s": round(time.monotonic() - begun)}
    print("\n".join(lines_of(arguments.case or "interrupted", result)))
    if arguments.case:
        write(Path(arguments.out), arguments.case, result)
    return 0 if result["same_steps"] and result["same_prompts"] and result["within_noise"] else 1


def command(arguments: argparse.Namespace, run: Path, *, resume: bool) -> list[str]:
    stage = [sys.executable, "-m", "posttrain", "grpo", arguments.recipe, f"run_dir={run}", *arguments.overrides]
    return [*stage, "--resume"] if resume else stage


def straight_run(arguments: argparse.Namespace, run: Path) -> float:
    begun = time.monotonic()
    done = subprocess.run(command(arguments, run, resume=False), timeout=RUN_LIMIT_S, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the undisturbed run failed:\n{done.stderr[-2000:]}")
    return time.monotonic() - begun


def interrupted_run(arguments: argparse.Namespace, run: Path, straight: Path) -> list[int]:
    """Kill the run `times` times, each time at a random moment of a random step; returns the steps that had been logged."""
    draw = random.Random(arguments.seed)
    total, step_s = pace(straight)
    points: list[int] = []
    while True:
        process = subprocess.Popen(
            command(arguments, run, resume=bool(points)), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        if len(points) == arguments.times:
            _, said = process.communicate(timeout=RUN_LIMIT_S)
            if process.returncode:
                raise SystemExit(f"the run did not end after its last resume:\n{said[-2000:]}")
            return points
        done, left = steps_of(run), arguments.times - len(points)
        wait_for_steps(process, run, done + draw.randint(1, max(1, (total - done) // (left + 1))))
        time.sleep(draw.uniform(0, step_s))
        if process.poll() is not None:
            raise SystemExit(f"the run ended before interruption {len(points) + 1}: give it more steps")
        kill(process)
        points.append(steps_of(run))


def pace(run: Path) -> tuple[int, float]:
    """Steps of a run, and the seconds that one took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines[-1]["step"], (lines[-1]["time"] - lines[0]["time"]) / max(1, len(lines) - 1)


def wait_for_steps(process: subprocess.Popen, run: Path, steps: int) -> None:
    """Until the run has taken so many steps, so that the interruptions spread over it."""
    deadline = time.monotonic() + RUN_LIMIT_S
    while steps_of(run) < steps and process.poll() is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"no step in {RUN_LIMIT_S:.0f} s")
        time.sleep(0.02)


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL for the driver and all its processes, and wait until none is left."""
    everything = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    for child in everything:
        if child.is_running():
            child.kill()
    process.communicate()
    psutil.wait_procs(everything, timeout=30)


def compare(straight: Path, broken: Path) -> dict[str, Any]:
    curves = [curve(run) for run in (straight, broken)]
    prompts = [consumed(run) for run in (straight, broken)]
    apart = [curves[1][step] - curves[0][step] for step in curves[0] if step in curves[1]]
    mean, error = statistics.fmean(apart), statistics.stdev(apart) / math.sqrt(len(apart))
    return {
        "steps": len(curves[0]),
        "same_steps": sorted(curves[0]) == sorted(curves[1]),
        "same_prompts": prompts[0] == prompts[1],
        "same_completions": texts(straight) == texts(broken),
        "reward_difference": mean,
        "standard_error": error,
        "within_noise": abs(mean) <= NOISE * error,
        "reward": curves[0],
        "reward_interrupted": curves[1],
    }


def curve(run: Path) -> dict[int, float]:
    """Reward by step; a step that was taken again after a resume counts as it was taken last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["reward"] for line in lines if line["stage"] == "grpo" and "reward" in line}


def consumed(run: Path) -> list[list[int]]:
    """Prompts by step."""
    return [pq.read_table(path, columns=["prompt_index"])[0].to_pylist() for path in sorted((run / "rollouts").glob("*.parquet"))]


def texts(run: Path) -> list[list[Any]]:
    return [
        pq.read_table(path, columns=["completion_ids"])[0].to_pylist() for path in sorted((run / "rollouts").glob("*.parquet"))
    ]


def environment() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "device": f"{cpu_model()}, {os.cpu_count()} logical CPUs",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "ray", "trl", "transformers")},
        "command": shlex.join(["python", "scripts/interrupt_run.py", *sys.argv[1:]]),
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def lines_of(case: str, result: dict[str, Any]) -> list[str]:
    """A case in Markdown."""
    yes = {True: "yes", False: "NO"}
    versions = ", ".join(f"{name} {result[name]}" for name in ("python", "torch", "ray", "trl", "transformers"))
    rows = [
        f"| {step} | {reward:.4f} | {result['reward_interrupted'].get(step, float('nan')):.4f} |"
        for step, reward in result["reward"].items()
    ]
    return [
        f"## {case}",
        "",
        f"{result['date']}, {result['device']}, {versions}.",
        "",
        f"`{result['command']}`",
        "",
        f"Killed after steps {', '.join(map(str, result['killed_after_step']))} of {result['steps']}. Same steps: "
        f"{yes[result['same_steps']]}; same prompts in the same order: {yes[result['same_prompts']]}; same completions: "
        f"{yes[result['same_completions']]}; mean reward {result['reward_difference']:+.4f} (standard error "
        f"{result['standard_error']:.4f}), within noise: {yes[result['within_noise']]}. "
        f"{result['straight_s']} s undisturbed, {result['interrupted_s']} s with all starts.",
        "",
        "| step | reward | interrupted |",
        "|---|---|---|",
        *rows,
        "",
    ]


def write(folder: Path, case: str, result: dict[str, Any]) -> None:
    """The case into both files, beside those of other names."""
    path = folder / "interrupted_run.json"
    cases = (json.loads(path.read_text()) if path.is_file() else {}) | {case: result}
    path.write_text(json.dumps(cases, indent=1) + "\n")
    head = [
        "# A run that is killed, beside one that is not",
        "",
        "Made by `scripts/interrupt_run.py`: SIGKILL for the driver and all of its processes.",
        "",
    ]
    text = head + [line for name, of in cases.items() for line in lines_of(name, of)]
    (folder / "interrupted_run.md").write_text("\n".join(text).rstrip() + "\n")


if __name__ == "__main__":
    sys.exit(main())
