"""What the benchmark scripts share: timing by device events, errors, the machine's description, Markdown and JSON results."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
PACKAGES = ("torch", "triton", "fla-core", "flash-linear-attention", "liger-kernel", "transformers")
_started = time.monotonic()


def say(text: str) -> None:
    """One line with the seconds since the start, at once: a run that is cut off shows where it was."""
    print(f"[{time.monotonic() - _started:7.1f} s] {text}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of one call: median, least and most of `repeats` timed ones.

    host_ms: until the call came back to Python, its launches queued on an idle device.
    first_s: the very first call, compilation and autotuning included.
    """

    ms: float
    low_ms: float
    high_ms: float
    repeats: int
    host_ms: float
    first_s: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(
    call: Callable[[], Any], device: torch.device, *, warm_s: float = 0.2, budget_s: float = 1.0, least: int = 5, most: int = 100
) -> Timing:
    """Calls for warm_s, so that an idle device's clocks are up, then as many as fit in budget_s, between `least` and `most`.

    The calls are queued without a wait in between, so the launches of one hide behind the work of the one before, as in
    training; a call that is bound by its launches shows host_ms near ms.
    """

    def wall() -> tuple[float, float]:
        synchronize(device)
        start = time.perf_counter()
        call()
        queued = time.perf_counter()
        synchronize(device)
        return queued - start, time.perf_counter() - start

    first_s, start = wall()[1], time.perf_counter()
    host_s, whole_s = wall()
    while time.perf_counter() - start < warm_s:
        host_s, whole_s = wall()
    repeats = int(min(max(budget_s / max(whole_s, 1e-6), least), most))
    if device.type == "cuda":
        # one event ends a call and begins the next
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize(device)
        times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    else:
        times = [wall()[1] * 1e3 for _ in range(repeats)]
    return Timing(
        ms=statistics.median(times), low_ms=min(times), high_ms=max(times), repeats=repeats, host_ms=host_s * 1e3, first_s=first_s
    )


def peak_memory(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes at the peak of one call above what was allocated before it (inputs); its results count."""
    call()  # workspaces that a library keeps are not the call's own
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kept
    return peak


def release(device: torch.device) -> None:
    """Gives freed memory back, so that one variant's leftovers do not make the next one run out."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def attempt(what: str, call: Callable[[], Result], *, trace: bool = True) -> Result | str:
    """The call's result, or why it failed in one line (never empty), so that a peer's failure is a row of the table."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - a peer may raise anything; the reason goes into the results
        expected = isinstance(error, ModuleNotFoundError | torch.cuda.OutOfMemoryError) or not trace
        if not expected:
            traceback.print_exc(file=sys.stdout)
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:240]
        say(f"{what}: FAILED, {reason}")
        return reason


def relative_error(found: Tensor, truth: Tensor) -> float:
    """||found - truth|| / ||truth||; infinite where a shape is wrong or a value is not finite."""
    if found.shape != truth.shape or not bool(torch.isfinite(found).all()):
        return math.inf
    norm = truth.double().norm().item()
    difference = (found.double() - truth.double()).norm().item()
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors start as NaN (integers as their largest value): what a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # this mode is what makes torch.empty fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def kernel_times(call: Callable[[], Any], *, calls: int = 3) -> list[tuple[str, float, int]]:
    """(kernel, microseconds a call, launches a call), the longest first."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    # operators carry the time of the kernels they launch too: only rows of the device are counted
    rows = [e for e in profiler.key_averages() if str(e.device_type).endswith("CUDA") and e.self_device_time_total > 0]
    rows.sort(key=lambda e: -e.self_device_time_total)
    return [(e.key, e.self_device_time_total / calls, round(e.count / calls)) for e in rows]


def environment(device: torch.device) -> dict[str, str]:
    """Device, versions, date and the command, where results went left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    arguments, skip = [], False
    for argument in sys.argv[1:]:
        if not skip and not argument.startswith("--out"):
            arguments.append(argument)
        skip = argument == "--out"
    found = {"device": platform.processor() or platform.machine()}
    if device.type == "cuda":
        found = {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda), "driver": _driver()}
    return found | {
        "python": platform.python_version(),
        **versions,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *arguments]),
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer[0] if answer else "unknown"


def describe(environment: dict[str, str]) -> list[str]:
    """The environment as lines of Markdown."""
    rest = ", ".join(f"{k} {v}" for k, v in environment.items() if k not in ("device", "date", "command"))
    return [f"{environment['date']}, {environment['device']}, {rest}.", "", f"`{environment['command']}`", ""]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table and an empty one; None is a dash."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in rows:
        cells = ("-" if cell is None else str(cell).replace("|", "\\|") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def plain(value: Any) -> Any:
    """The value with floats that JSON does not know written as strings."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def write_results(folder: Path, name: str, record: dict[str, Any], markdown: Sequence[str]) -> None:
    """`name`.json and `name`.md in the folder; each replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(plain(record), indent=1)), (".md", "\n".join(markdown).rstrip())):
        part = folder / f"{name}{suffix}.part"
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(folder / f"{name}{suffix}")
