"""What every worker process does first, and how it talks to the driver.

context = setup(stage="grpo", run_path=path, board=handle, threads=2, seed=17)
with context.outcome():                    # tells the driver how the stage ended, and logs a failure with its traceback
    train(recipe, run_path, context)

context.report(step, total, loss=0.3)      # cheap: throttled, never waits
if context.stop_requested(): save; raise StageStopped
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import PosttrainError, RunFolderError
from posttrain.run_folder import is_disk_full
from posttrain.runtime.progress import Outcome

REPORT_SECONDS = 0.2
WORKER_ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "warning",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Two threads that spin while they wait for each other take 8 times as long on a busy machine (measured: decoding).
    "OMP_WAIT_POLICY": "PASSIVE",
}

logger = logging.getLogger(__name__)


class StageStopped(Exception):
    """An answer to Ctrl-C, not an error: raised by a stage that was asked to stop, after it saved what `--resume` needs."""


@dataclass(kw_only=True)
class WorkerContext:
    """What a stage function receives besides the recipe and the run folder.

    Attributes:
        stage: "sft", "grpo", "eval".
        run_path: the run folder.
        rank, world_size: of this process among the workers of the stage.
        threads: CPU threads that torch may use here.
        board: Ray handle of the ProgressBoard; None outside Ray (tests, notebooks): reports then go nowhere.
    """

    stage: str
    run_path: Path
    rank: int = 0
    world_size: int = 1
    threads: int = 1
    board: Any = None
    _sent_at: float = field(default=-float("inf"), repr=False)
    _answer: Any = field(default=None, repr=False)
    _stop: bool = field(default=False, repr=False)

    def report(self, step: int, total: int, *, note: str = "", force: bool = False, **metrics: float) -> None:
        """Tell the driver where the stage is. Throttled to a few a second unless `force`; rank 0 alone reports; never waits."""
        now = time.monotonic()
        last = total > 0 and step >= total
        if self.board is None or self.rank != 0 or (now - self._sent_at < REPORT_SECONDS and not last and not force):
            return
        self._collect()
        self._sent_at = now
        self._answer = self.board.report.remote(self.stage, step, total, metrics, note)

    def stop_requested(self) -> bool:
        """Whether the user pressed Ctrl-C. Rank 0 alone knows: distributed stages broadcast it, so that all stop together."""
        self._collect()
        if self.board is not None and not self._stop and time.monotonic() - self._sent_at >= 2 * REPORT_SECONDS:
            # Nothing was reported for a while (a long step): ask.
            self._sent_at = time.monotonic()
            self._answer = self.board.stop_requested.remote()
        return self._stop

    def _collect(self) -> None:
        if self._answer is None:
            return
        import ray

        ready, _ = ray.wait([self._answer], timeout=0)
        if ready:
            self._stop = self._stop or bool(ray.get(self._answer))
            self._answer = None

    def begin(self) -> None:
        """Say that this is a new attempt, so that the failure of the last one is not taken for this one's."""
        if self.board is not None and self.rank == 0:
            import ray

            ray.get(self.board.begin.remote(self.stage))

    @contextlib.contextmanager
    def outcome(self, *, reraise: bool = False) -> Iterator[None]:
        """Report how the stage ended; failures are logged in full here, and reach the driver as one message.

        `reraise` lets failures go on (Ray Train must see them, to end the other ranks).
        """
        try:
            yield
        except StageStopped as stopped:
            self._finish(Outcome(kind="stopped", message=str(stopped)))
        except Exception as error:  # every failure is reported to the driver, which ends the run with it
            logger.exception("stage %s failed on rank %d", self.stage, self.rank)
            if is_disk_full(error):
                error = RunFolderError(
                    f"{self.stage}: no space left on the disk ({error}); the checkpoints that were saved are whole. "
                    "Free some space and continue with --resume"
                )
            known = isinstance(error, PosttrainError)
            message = str(error) if known else f"{type(error).__name__}: {error}"
            self._finish(Outcome(kind="failed", message=message, exit_code=error.exit_code if known else 1))
            if reraise or self.board is None:
                raise
        else:
            self._finish(Outcome(kind="done"))

    def _finish(self, outcome: Outcome) -> None:
        if self.board is None:
            return
        import ray

        ray.get(self.board.finish.remote(self.stage, outcome))


def setup(
    *,
    stage: str,
    run_path: str | os.PathLike[str],
    board: Any = None,
    threads: int = 1,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    redirect: bool | None = None,
    folder: str | None = None,
) -> WorkerContext:
    """Prepare this process: threads, seeds, quiet libraries, log file `run_path/logs/<stage>.log`.

    Args:
        redirect: send stdout and stderr of the process to the log file (default: inside Ray), so that nothing breaks the bar.
        folder: the driver's working folder. Workers of a cluster that ran before start elsewhere, and the relative paths of a
            recipe must mean the same on both sides; a folder that this machine lacks is passed over.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    run_path = Path(run_path)
    if folder is not None and os.path.isdir(folder):
        os.chdir(folder)
    if board is not None if redirect is None else redirect:
        _redirect_output(run_path / "logs" / (f"{stage}.log" if rank == 0 else f"{stage}-{rank}.log"))
    quiet()
    import torch

    torch.set_num_threads(threads)
    random.seed(seed)
    torch.manual_seed(seed)
    return WorkerContext(stage=stage, run_path=run_path, rank=rank, world_size=world_size, threads=threads, board=board)


def quiet() -> None:
    """Keep Hugging Face's libraries from drawing bars of their own and from calling home."""
    os.environ.update({name: os.environ.get(name, value) for name, value in WORKER_ENVIRONMENT.items()})
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _redirect_output(path: Path) -> None:
    """Append everything that this process prints or logs to `path`, libraries written in C included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
