"""The generators of split placement: actors that are watched, and replaced when they die."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from posttrain.errors import PosttrainError

logger = logging.getLogger(__name__)

WATCH_S = 0.2


class SplitError(PosttrainError):
    """The generators cannot go on, or somebody is late; the message names whom."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """The split part of a recipe's `grpo` section, resolved.

    Attributes:
        generators: actors, each holding `num_cpus` and `num_gpus`; rewards: actors that score, spread over the nodes.
        max_staleness, ahead: see `ExperienceBuffer`.
        max_failures: generators that may die and be replaced.
        limit_s: longest time without any group of the batch that the learner waits for, and for any single answer.
        start_limit_s: longest time without any generator placed.
    """

    generators: int
    max_staleness: int
    rewards: int = 1
    ahead: int = 0
    num_cpus: float = 1
    num_gpus: float = 0
    max_failures: int = 3
    limit_s: float = 1800.0
    start_limit_s: float = 900.0


class GeneratorPool:
    """Generators that are watched by a thread: one that died is retired and replaced, while the learner computes too.

    Args:
        make: name -> handle of a new actor.
        retire: called with the name of a dead one, before its successor starts.
    """

    def __init__(self, make: Callable[[str], Any], retire: Callable[[str], None], settings: SplitSettings) -> None:
        self._make, self._retire, self._settings = make, retire, settings
        self._runs: dict[Any, str] = {}
        self._actors: dict[str, Any] = {}
        self._placed: dict[str, Any] = {}
        self._failures, self._count = 0, 0
        self._error: BaseException | None = None
        self._none_since: float | None = None
        self._closed = threading.Event()
        for _ in range(settings.generators):
            self._start()
        self._thread = threading.Thread(target=self._watch, name="generator pool", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what went wrong since.

        Raises:
            SplitError: too many died, or none can be placed.
            PosttrainError: what a generator raised, as it raised it.
        """
        if self._error is not None:
            raise self._error

    def pids(self) -> list[int]:
        """Processes of the generators that run."""
        import ray

        ready, _ = ray.wait(list(self._placed.values()), num_returns=len(self._placed), timeout=0)
        return ray.get(ready)

    def close(self) -> None:
        import ray

        self._closed.set()
        self._thread.join(5)  # it may be in the middle of a question to an actor that is gone
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._runs = {}, {}

    def _start(self) -> None:
        name = f"generator-{self._count}"
        self._count += 1
        actor = self._actors[name] = self._make(name)
        self._placed[name] = actor.placed.remote()
        self._runs[actor.run.remote()] = name

    def _watch(self) -> None:
        try:
            while not self._closed.wait(WATCH_S):
                self._look()
        except BaseException as error:  # noqa: BLE001 - handed to the learner's thread by check()
            self._error = error

    def _look(self) -> None:
        import ray
        from ray.exceptions import RayActorError

        ended, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0, fetch_local=False)
        for run in ended:
            name = self._runs.pop(run)
            del self._actors[name], self._placed[name]
            try:
                answer(run, self._settings.limit_s, f"{name} has not ended")
            except RayActorError as error:
                self._replace(name, error)
        placed, _ = ray.wait(list(self._placed.values()), num_returns=1, timeout=0, fetch_local=False)
        if placed:
            self._none_since = None
            return
        self._none_since = self._none_since or time.monotonic()
        if time.monotonic() - self._none_since > self._settings.start_limit_s:
            offered = {kind: f"{amount:g}" for kind, amount in ray.cluster_resources().items() if kind in ("CPU", "GPU")}
            asks = f"{self._settings.num_cpus:g} CPUs and {self._settings.num_gpus:g} GPUs"
            raise SplitError(
                f"Ray has placed no generator for {self._settings.start_limit_s:.0f} s: each asks for {asks}, and the cluster "
                f"has {offered or 'nothing'}, what the learner holds included; lower grpo.generators or add machines"
            )

    def _replace(self, name: str, error: Exception) -> None:
        self._failures += 1
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if self._failures > self._settings.max_failures:
            allowed = f"grpo.generator_failures allows {self._settings.max_failures}"
            raise SplitError(
                f"{self._failures} generators died ({allowed}), at last {name}: {reason}. Finished groups are kept; look at the "
                "log for the cause (memory?), then continue with --resume"
            )
        logger.warning("%s died (%s); a new one starts", name, reason)
        self._retire(name)
        self._start()


def answer(reference: Any, limit_s: float, late: str) -> Any:
    """The value of a Ray reference; an error of ours comes as itself, whatever number of actors it went through.

    Raises:
        SplitError: it took longer than `limit_s`; `late` begins the message.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayTaskError

    try:
        return ray.get(reference, timeout=limit_s)
    except GetTimeoutError:
        raise SplitError(f"{late} for {limit_s:.0f} s") from None
    except RayTaskError as error:
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and cause.cause is not None:
            cause = cause.cause
        raise cause from error
