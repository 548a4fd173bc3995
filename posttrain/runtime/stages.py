"""A recipe's stages in order: what `posttrain run`, `sft`, `grpo` and `eval` call.

open the run folder -> prepare (tokenizer, SFT rows, base/) -> Ray -> each unfinished stage behind its bar -> summary
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config import Recipe
from posttrain.errors import PosttrainError, RunFolderError
from posttrain.run_folder import RunFolder
from posttrain.runtime.launch import POLL_SECONDS, StageHandle, launch
from posttrain.runtime.progress import Bar, Outcome, Report
from posttrain.runtime.session import ray_session, start_board

RAY_STAGES = ("distill", "sft", "grpo", "eval")
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# The board is on the driver's own machine.
BOARD_LIMIT_S = 300.0


class StageFailedError(PosttrainError):
    """A stage ended with an error; the message is the worker's own."""


def run_stages(recipe: Recipe, stages: list[str], *, resume: bool) -> int:
    """Run `stages` of a recipe in its run folder, those already finished excepted; returns the exit code.

    0 when all is finished, 130 after Ctrl-C (143 after SIGTERM): `resume=True` then continues where it stopped.

    Raises:
        PosttrainError: bad input, or a stage that failed; nothing that was finished is lost.
    """
    if stages == ["report"]:
        # It only reads the run: it works beside a running stage, and after an interrupted one.
        run = RunFolder(recipe.run_dir)
        if not (run.path / "config.yaml").is_file():
            raise RunFolderError(f"{run.path} is no run folder (it has no config.yaml): there is nothing to report yet")
        _summary(run, _report(run))
        return 0
    try:
        with RunFolder.open(recipe, resume=resume, stages=stages) as run:
            return _run(recipe, stages, run)
    except KeyboardInterrupt:
        print("\ninterrupted; --resume continues", file=sys.stderr)
        return EXIT_CODES[signal.SIGINT]


def _run(recipe: Recipe, stages: list[str], run: RunFolder) -> int:
    for stage in stages:
        if stage in RAY_STAGES and run.stage_done(stage):
            print(f"{stage:<6} finished before; skipped", file=sys.stderr)
    todo = [stage for stage in stages if stage in RAY_STAGES and not run.stage_done(stage)]
    # SFT's rows are made of the teacher's traces, so those are written before the others are prepared.
    groups = [[stage for stage in todo if stage == "distill"], [stage for stage in todo if stage != "distill"]]
    for group in filter(None, groups):
        from posttrain.runtime.prepare import prepare

        prepare(recipe, run, group)
        with ray_session(recipe.ray, other_cpus=_other_cpus(recipe, group)):
            board = start_board()
            for stage in group:
                stopped_by = run_stage(stage, recipe, run, board)
                if stopped_by is not None:
                    print(f"{stage} stopped; --resume continues", file=sys.stderr)
                    return EXIT_CODES[stopped_by]
    report = _report(run) if "report" in stages else None
    if report is not None:
        run.mark_done("report")
    _summary(run, report)
    return 0


def _other_cpus(recipe: Recipe, stages: list[str]) -> float:
    """Cores that a stage holds beside `ray.num_workers` workers: GRPO's other learners and its generators."""
    if "grpo" not in stages:
        return 0
    learners = max(0, recipe.grpo.learners - recipe.ray.num_workers) * recipe.ray.cpus_per_worker
    split = recipe.grpo.placement == "split"
    return learners + (recipe.grpo.generators * recipe.grpo.cpus_per_generator if split else 0)


def _report(run: RunFolder) -> Path:
    from posttrain.report import write_report

    return write_report(run.path)


def run_stage(stage: str, recipe: Recipe, run: RunFolder, board: Any) -> signal.Signals | None:
    """Run one stage on Ray behind its bar, and mark it done. `board` is the handle of a ProgressBoard.

    Returns:
        None when it is finished, else the signal that stopped it.

    Raises:
        StageFailedError: with the worker's message; the full traceback is in logs/<stage>.log.
    """
    bar = Bar(stage)
    handle = launch(stage, recipe, run.path.absolute(), board)
    with _signals() as received:
        asked = 0
        while not handle.wait(POLL_SECONDS):
            bar.update(_ask(board.read.remote(stage)))
            if len(received) > asked:
                asked = len(received)
                if asked > 1:
                    handle.kill()
                    break
                _ask(board.request_stop.remote())
                print("\nstopping after this step; again: stop at once, the last checkpoint remains", file=sys.stderr)
    outcome = _outcome(stage, board, handle, killed=asked > 1, run_path=run.path)
    report: Report = _ask(board.read.remote(stage))
    bar.close(report, outcome.kind)
    if outcome.kind == "failed":
        error = StageFailedError(outcome.message)
        error.exit_code = outcome.exit_code
        raise error
    if outcome.kind == "stopped":
        return received[0] if received else signal.SIGINT
    run.mark_done(stage, steps=report.step)
    return None


def _ask(reference: Any) -> Any:
    """The board's answer.

    Raises:
        StageFailedError: the cluster is gone, or this machine has lost it.
    """
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(reference, timeout=BOARD_LIMIT_S)
    except RayError as error:
        reason = textwrap.shorten(str(error).strip() or type(error).__name__, 200)
        failed = StageFailedError(
            f"the Ray cluster does not answer any more ({reason}); --resume continues from the last checkpoint"
        )
        failed.exit_code = 1
        raise failed from error


def _outcome(stage: str, board: Any, handle: StageHandle, *, killed: bool, run_path: Path) -> Outcome:
    """How the stage ended: what the worker said, or what can be said for a worker that could not speak any more."""
    if killed:
        return Outcome(kind="stopped")
    outcome: Outcome | None = _ask(board.outcome.remote(stage))
    error = handle.error()
    log = run_path / "logs" / f"{stage}.log"
    if outcome is not None and (outcome.kind != "done" or error is None):
        if outcome.kind == "failed" and outcome.exit_code == 1:
            return Outcome(kind="failed", message=f"{stage}: {outcome.message}\nthe traceback is in {log}", exit_code=1)
        return outcome
    if isinstance(error, PosttrainError):
        return Outcome(kind="failed", message=f"{stage}: {error}; --resume continues from the last checkpoint", exit_code=1)
    reason = textwrap.shorten(str(error).strip().split(". ")[0] or "no reason given", 200)
    hint = f"See {log}; --resume continues from the last checkpoint"
    message = f"{stage}: its worker died, perhaps for lack of memory ({reason}). {hint}"
    return Outcome(kind="failed", message=message, exit_code=1)


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Collect SIGINT and SIGTERM in the list that is yielded, instead of ending the driver. In the main thread only."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    old = {number: signal.signal(number, lambda n, _: received.append(signal.Signals(n))) for number in EXIT_CODES}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _summary(run: RunFolder, report: Path | None) -> None:
    results = run.path / "eval" / "results.json"
    if results.is_file():
        from posttrain.evaluation import format_results

        print(format_results(json.loads(results.read_text(encoding="utf-8"))))
    if report is not None:
        print(f"report: {report}")
