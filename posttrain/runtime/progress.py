"""Progress of a stage: workers report to a board, the driver draws one bar from it.

The board is a plain class, wrapped as a Ray actor by `posttrain.runtime.session`; it also carries the two messages that
travel besides progress: "please stop" (driver -> workers, on Ctrl-C) and how a stage ended (worker -> driver).
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

DRAW_SECONDS = 0.1
PLAIN_SECONDS = 5.0
BAR_WIDTH = 24


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a stage ended: `kind` is "done", "stopped" (asked to, its checkpoint is saved) or "failed" (`message` for the user)."""

    kind: str
    message: str = ""
    exit_code: int = 2


@dataclass(kw_only=True)
class Report:
    """The newest state of one stage: `step` of `total`; `metrics` are shown behind the bar, `note` says what is going on."""

    step: int = 0
    total: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""


class ProgressBoard:
    """What the workers said last, one entry a stage."""

    def __init__(self) -> None:
        self._reports: dict[str, Report] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._stop = False

    def report(self, stage: str, step: int, total: int, metrics: dict[str, float], note: str = "") -> bool:
        """Record progress; returns True when the stage should stop."""
        self._reports[stage] = Report(step=step, total=total, metrics=metrics, note=note)
        return self._stop

    def read(self, stage: str) -> Report:
        return self._reports.get(stage, Report())

    def request_stop(self) -> None:
        self._stop = True

    def stop_requested(self) -> bool:
        return self._stop

    def begin(self, stage: str) -> None:
        """A new attempt at a stage: how the last one ended no longer counts."""
        self._outcomes.pop(stage, None)

    def finish(self, stage: str, outcome: Outcome) -> None:
        """Record how a stage ended. The first failure stays: those of other ranks follow from it."""
        if stage not in self._outcomes or self._outcomes[stage].kind != "failed":
            self._outcomes[stage] = outcome

    def outcome(self, stage: str) -> Outcome | None:
        return self._outcomes.get(stage)


class Bar:
    """One progress bar on a terminal; plain lines, at most one every few seconds, where the output is not a terminal."""

    def __init__(self, stage: str, stream: TextIO | None = None, *, now: Any = time.monotonic) -> None:
        self._stage = stage
        self._stream = sys.stderr if stream is None else stream
        self._tty = self._stream.isatty()
        self._now = now
        self._start = now()
        self._first: tuple[float, int] | None = None
        self._drawn_at = -float("inf")
        self._drawn = ""

    def update(self, report: Report) -> None:
        """Draw if something changed and enough time has passed."""
        now = self._now()
        if self._first is None and report.step > 0:
            # Start-up (imports, loading) must not distort the remaining time, nor the steps done before a resume.
            self._first = (now, report.step)
        if now - self._drawn_at < (DRAW_SECONDS if self._tty else PLAIN_SECONDS):
            return
        if not self._tty and not report.total and not report.note:
            return
        self._draw(self._line(report, now), now)

    def close(self, report: Report, ending: str) -> None:
        """Draw the last state and leave the line."""
        now = self._now()
        self._draw(f"{self._line(report, now)}  {ending}", now)
        if self._tty:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, report: Report, now: float) -> str:
        elapsed = now - self._start
        if not report.total:
            return f"{self._stage:<6} {report.note or 'starting'} [{clock(elapsed)}]"
        part = min(1.0, report.step / report.total)
        filled = round(part * BAR_WIDTH)
        times = clock(elapsed)
        if self._first is not None and self._first[1] < report.step < report.total:
            rate = (report.step - self._first[1]) / max(now - self._first[0], 1e-9)
            times += f"<{clock((report.total - report.step) / rate)}"
        shown = " ".join(f"{name} {value:.4g}" for name, value in report.metrics.items())
        bar = "#" * filled + "-" * (BAR_WIDTH - filled)
        return f"{self._stage:<6} {part:4.0%} |{bar}| {report.step}/{report.total} [{times}] {shown} {report.note}".rstrip()

    def _draw(self, line: str, now: float) -> None:
        self._drawn_at = now
        if line == self._drawn:
            return
        self._drawn = line
        if self._tty:
            self._stream.write(f"\r{line}\x1b[K")
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
