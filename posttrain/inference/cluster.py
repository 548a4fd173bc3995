"""Several engines of one model as one backend: Ray actors that take prompts from one queue.

    prompts -> PromptQueue (an actor) <- take - EngineActor 0..E-1 - stream of Texts -> caller

Engines pull, so that a fast one does more and none waits at the end of a batch. The queue remembers who took what: when an engine
dies, its unfinished samples go back in front and another engine draws them, from the same random numbers, so that nothing is lost
and nothing changes. A dead engine is started anew, `max_failures` times in all.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from posttrain.inference.protocol import Backend, BackendError, Prompt, Text

logger = logging.getLogger(__name__)

LOOK_S = 30.0  # how often somebody looks whether a cluster that says nothing has any engine left
START_LIMIT_S = 900.0  # an autoscaler may need minutes to bring a machine


class PromptQueue:
    """Prompts that wait, and who holds the others (wrapped as a Ray actor).

    Messages of an engine may come late: of one that was declared dead, or of a call that has ended. They get nothing, for nobody
    would receive what they took.
    """

    def __init__(self) -> None:
        self._waiting: deque[Prompt] = deque()
        self._taken: dict[int, list[str]] = {}
        self._dead: set[int] = set()
        self._call = 0

    def put(self, prompts: list[Prompt], call: int) -> None:
        """Add prompts in front of those that wait; `call` is the number of the `generate` that asks for them."""
        if call != self._call:
            self._call, self._taken = call, {}
            self._waiting.clear()
        self._waiting.extendleft(reversed(prompts))

    def take(self, engine: int, call: int) -> Prompt | None:
        """The next prompt for an engine; None when none waits."""
        if call != self._call or engine in self._dead or not self._waiting:
            return None
        prompt = self._waiting.popleft()
        self._taken.setdefault(engine, []).append(prompt.id)
        return prompt

    def waiting(self) -> int:
        return len(self._waiting)

    def give_back(self, engine: int) -> list[str]:
        """Declare an engine dead; the ids that it took, for the caller to put back what is still missing of them."""
        self._dead.add(engine)
        return self._taken.pop(engine, [])


class EngineActor:
    """One engine in a process of its own. The model is loaded by the first `run`, so that its errors are that call's."""

    def __init__(self, open_backend: Callable[[], Backend], folder: str) -> None:
        """`folder`: the caller's working folder, from which relative paths are meant; passed over where this machine lacks it."""
        if os.path.isdir(folder):
            os.chdir(folder)
        self._open = open_backend
        self._backend: Backend | None = None

    def placed(self) -> bool:
        """True, once this process runs."""
        return True

    def run(self, prompts: Any, number: int, call: int) -> Iterator[Text]:
        """Draw samples until the queue is empty. `prompts`: handle of a PromptQueue; `number`: this engine's name there."""
        import ray

        self._backend = self._backend or self._open()
        yield from self._backend.generate(iter(lambda: ray.get(prompts.take.remote(number, call)), None))


class ClusterBackend:
    """Engines on a Ray cluster that is already connected.

    Args:
        open_backend: makes one engine's backend, in the actor's process; it and what it holds are pickled.
        identity: of that backend, which is opened only in the actors.
        engines: how many.
        num_cpus, num_gpus: what each of them holds.
        max_failures: how many may die and be started anew before `generate` gives up.
        start_limit_s: how long `generate` waits for Ray to place an engine while it has none.
    """

    def __init__(
        self,
        open_backend: Callable[[], Backend],
        identity: dict[str, Any],
        *,
        engines: int,
        num_cpus: float = 1,
        num_gpus: float = 0,
        max_failures: int = 3,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        import ray

        self._open, self._identity, self.max_failures = open_backend, identity, max_failures
        self.start_limit_s, self._asks = start_limit_s, f"{num_cpus:g} CPUs and {num_gpus:g} GPUs"
        self._make: Any = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus)(EngineActor)
        self._queue: Any = ray.remote(num_cpus=0)(PromptQueue).remote()
        self._failures, self._next, self._call = 0, engines, 0
        self._engines: dict[int, Any] = {}
        self._placed: dict[int, Any] = {}
        for number in range(engines):
            self._start(number)

    def _start(self, number: int) -> None:
        self._engines[number] = self._make.remote(self._open, os.getcwd())
        self._placed[number] = self._engines[number].placed.remote()

    def identity(self) -> dict[str, Any]:
        return self._identity

    def close(self) -> None:
        """Ends the actors at once."""
        import ray

        for actor in [*self._engines.values(), *([self._queue] if self._queue is not None else [])]:
            ray.kill(actor)
        self._engines, self._placed, self._queue = {}, {}, None

    def generate(self, prompts: Iterable[Prompt]) -> Iterator[Text]:
        """See `Backend.generate`; `prompts` is read to its end at once.

        Raises:
            BackendError: more than `max_failures` engines died, or Ray has placed none for `start_limit_s`.
            PosttrainError: what a backend raises, as it raised it.
        """
        import ray

        waiting = {prompt.id: prompt for prompt in prompts}
        missing = {(prompt.id, sample) for prompt in waiting.values() for sample in prompt.samples}
        self._call += 1
        ray.get(self._queue.put.remote(list(waiting.values()), self._call))
        streams: dict[Any, int] = {}
        self._start_idle(streams)
        try:
            while missing:
                for stream in self._ready(streams):
                    text = self._next_of(stream, streams, waiting, missing)
                    if text is not None and (text.prompt_id, text.sample) in missing:
                        missing.discard((text.prompt_id, text.sample))
                        yield text
        finally:
            if missing:  # an error, or the reader left: engines that are in the middle of it cannot be asked to stop
                self.close()

    def _start_idle(self, streams: dict[Any, int]) -> None:
        for number in self._engines.keys() - set(streams.values()):
            streams[self._engines[number].run.options(num_returns="streaming").remote(self._queue, number, self._call)] = number

    def _ready(self, streams: dict[Any, int]) -> list[Any]:
        """Streams that have something to say. A running engine may be silent for long; having none may not last.

        Raises:
            BackendError: Ray has placed no engine for `start_limit_s`.
        """
        import ray

        none_since = None
        while True:
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=min(LOOK_S, self.start_limit_s / 2), fetch_local=False)
            if ready:
                return ready
            placed, _ = ray.wait(list(self._placed.values()), num_returns=1, timeout=0, fetch_local=False)
            if placed:
                none_since = None
                continue
            none_since = none_since or time.monotonic()
            waited = time.monotonic() - none_since
            offered = {kind: f"{amount:g}" for kind, amount in ray.cluster_resources().items() if kind in ("CPU", "GPU")}
            awaited = f"Ray to place an engine that asks for {self._asks}; the cluster has {offered or 'nothing'}"
            if waited >= self.start_limit_s:
                raise BackendError(
                    f"no engine is left, and waited {waited:.0f} s in vain for {awaited}. What was finished is kept; bring the "
                    "machines back, then continue with --resume"
                )
            logger.warning("no engine runs: waiting for %s (giving up after %.0f s)", awaited, self.start_limit_s)

    def _next_of(
        self, stream: Any, streams: dict[Any, int], prompts: dict[str, Prompt], missing: set[tuple[str, int]]
    ) -> Text | None:
        """What an engine says next; None where it has emptied the queue, or died (its prompts wait in the queue again then)."""
        import ray
        from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

        number = streams[stream]
        try:
            text: Any = ray.get(next(stream))
            return text
        except StopIteration:
            del streams[stream]
            if ray.get(self._queue.waiting.remote()):  # given back after this engine had looked
                self._start_idle(streams)
        except RayTaskError as error:
            raise error.cause from error
        except ObjectLostError:
            pass  # it lay on a machine that has gone: its engine has too, which the next turn hears
        except RayActorError as error:
            del streams[stream]
            self._replace(number, error)
            lost = ray.get(self._queue.give_back.remote(number))
            left = {name: tuple(sample for sample in prompts[name].samples if (name, sample) in missing) for name in lost}
            again = [replace(prompts[name], samples=samples) for name, samples in left.items() if samples]
            ray.get(self._queue.put.remote(again, self._call))
            self._start_idle(streams)
        return None

    def _replace(self, number: int, error: Exception) -> None:
        """Start an engine in the place of a dead one, under a new number: messages of the old one may still be on their way."""
        del self._engines[number], self._placed[number]
        self._failures += 1
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if self._failures > self.max_failures:
            raise BackendError(
                f"{self._failures} engines died (max_failures allows {self.max_failures}), at last with: {reason}. What they had "
                "finished is kept; look at the log for the cause (memory?), then continue with --resume"
            )
        logger.warning("engine %d died (%s); its samples go to the others, and a new one starts", number, reason)
        self._start(self._next)
        self._next += 1
