"""The one thread that touches the generator, and its asyncio side.

    submit(requests) -> Job;  job.events: StreamedToken... (if it streams), a Completion a sample;  close(job) aborts what is left

Commands go in through a queue that the thread empties between two steps; what a step produced goes back in one call to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from posttrain.errors import PosttrainError
from posttrain.rollout import Generator, StreamedToken
from posttrain.serve.errors import ApiError, bad_request
from posttrain.types import Completion, Request

logger = logging.getLogger(__name__)
RETRY_AFTER_S = 5
_ID = re.compile(r"[0-9a-f]{32}")  # of a request, as `Request` makes it
Event = StreamedToken | Completion | ApiError


@dataclass(eq=False, kw_only=True)
class Job:
    """The engine's requests of one HTTP request.

    Attributes:
        stream: whether every token is an event, or the completions alone.
        events: what has happened; after an ApiError nothing follows.
        accepted: done when the engine has taken all requests; holds the reason where it refused one.
        open: samples that count against the limit.
        order: place of each request id; left: unfinished samples of each, the engine thread's own account.
    """

    requests: tuple[Request, ...]
    stream: bool
    accepted: asyncio.Future[None]
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    open: int = 0
    order: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def choice(self, event: StreamedToken | Completion) -> int:
        """Index of the event's sample among all samples of the job: prompt by prompt."""
        return self.order[event.request_id] * self.requests[0].n + event.sample


class EngineThread:
    """Runs a generator for as long as there is work.

    Args:
        generator: nobody else may use it from here on; its `on_token` is taken.
        max_sequences: of the generator.
        max_queue: samples that may wait beside them.
        on_failure: called, in the engine's thread, when an error has ended it.
    """

    def __init__(
        self, generator: Generator, *, max_sequences: int, max_queue: int, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.generator, self.on_failure = generator, on_failure
        self.capacity = max_sequences + max_queue
        self.open_samples = 0
        self.failure: BaseException | None = None
        generator.on_token = self._token
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}
        self._outbox: list[tuple[Job, Event]] = []
        self._thread = threading.Thread(target=self._run, name="posttrain-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- the loop's side ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; called in the event loop that will ask."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End after the running step; what is unfinished is dropped. May be called twice."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def check_fits(self, samples: int) -> None:
        """Raises ApiError 400 where one request asks for more samples than could ever be open."""
        if samples > self.capacity:
            raise bad_request(f"{samples} samples in one request, but at most {self.capacity} are taken; ask for fewer", "n")

    async def submit(self, requests: list[Request], *, stream: bool) -> Job:
        """Queue the requests of one job, all or none.

        Raises:
            ApiError: 400 the engine refuses one of them, or they could never fit; 429 the queue is full; 503 the engine failed.
        """
        samples = sum(request.n for request in requests)
        if self.failure is not None:
            raise self._failed()
        self.check_fits(samples)
        if self.open_samples + samples > self.capacity:
            raise ApiError(
                429,
                f"{self.open_samples} samples are running or waiting, {samples} more would exceed the limit of {self.capacity}"
                f" (--max-sequences and --max-queue together); come back in {RETRY_AFTER_S} seconds",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        assert self._loop is not None
        job = Job(requests=tuple(requests), stream=stream, accepted=self._loop.create_future(), open=samples)
        job.order = {request.id: i for i, request in enumerate(requests)}
        job.left = {request.id: request.n for request in requests}
        self.open_samples += samples
        self._commands.put(partial(self._submit, job))
        try:
            if self.failure is not None:  # it failed in between, and may have emptied the queue before
                raise self._failed()
            await job.accepted
        except BaseException:
            self.close(job)
            raise
        return job

    def close(self, job: Job) -> None:
        """Abort what is unfinished of a job. May be called twice."""
        self.open_samples -= job.open
        if job.open:
            self._commands.put(partial(self._abort, job))
        job.open = 0

    def _deliver(self, outbox: list[tuple[Job, Event]]) -> None:
        for job, event in outbox:
            job.events.put_nowait(event)
            if isinstance(event, Completion) and job.open:
                job.open -= 1
                self.open_samples -= 1

    def _accept(self, job: Job, refusal: ApiError | None) -> None:
        if job.accepted.done():  # the client has gone meanwhile
            return
        if refusal is None:
            job.accepted.set_result(None)
        else:
            job.accepted.set_exception(refusal)

    def _failed(self) -> ApiError:
        return ApiError(503, f"the engine has stopped after an error ({type(self.failure).__name__}); look at the server's log")

    # -- the engine's side --------------------------------------------------------------------------------------------

    def _call_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # a second Ctrl-C has closed the loop
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        except BaseException as error:  # ends the thread: all who wait are told, and the server stops
            logger.exception("the engine has failed; the server stops")
            self.failure = error
            self._fail_all()
            self.on_failure()

    def _obey(self) -> bool:
        """Carry out what was asked for, waiting where there is nothing to do; False once it is time to stop."""
        while True:
            try:
                command = self._commands.get(block=not self.generator.has_unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _step(self) -> None:
        try:
            done = self.generator.step()
        except PosttrainError as error:
            self._drop(error)
            done = []
        for completion in done:
            job = self._jobs.get(completion.request_id)
            if job is None:  # aborted
                continue
            self._outbox.append((job, completion))
            job.left[completion.request_id] -= 1
            if not job.left[completion.request_id]:
                del self._jobs[completion.request_id]
        outbox, self._outbox = self._outbox, []
        if outbox:
            self._call_loop(self._deliver, outbox)

    def _drop(self, error: PosttrainError) -> None:
        """Tell the requests that the engine dropped, which its error names; an error about nobody is not ours to survive."""
        jobs = {self._jobs[name] for name in _ID.findall(str(error)) if name in self._jobs}
        if not jobs:
            raise error
        logger.error("%s", error)
        for job in jobs:
            self._abort(job)
            self._outbox.append((job, ApiError(500, "the model gave logits that cannot be sampled; look at its weights")))

    def _token(self, token: StreamedToken) -> None:
        job = self._jobs.get(token.request_id)
        # A sample's last token comes with its completion.
        if job is not None and job.stream and token.finish_reason is None:
            self._outbox.append((job, token))

    def _submit(self, job: Job) -> None:
        refusal = None
        try:
            for request in job.requests:
                self.generator.submit(request)
                self._jobs[request.id] = job
        except ValueError as error:
            self._abort(job)
            refusal = bad_request(reason(error), "prompt")
        self._call_loop(self._accept, job, refusal)

    def _abort(self, job: Job) -> None:
        for request in job.requests:
            if self._jobs.pop(request.id, None) is not None:
                self.generator.abort(request.id)

    def _fail_all(self) -> None:
        """Answer all that run, and all whose submission was never seen."""
        refusal = self._failed()
        self._call_loop(self._deliver, [(job, refusal) for job in set(self._jobs.values())])
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, partial) and command.func == self._submit:
                self._call_loop(self._accept, command.args[0], refusal)


def reason(error: ValueError) -> str:
    """The engine's words without the id that it gave the request."""
    said = str(error)
    return said.partition(": ")[2] if said.startswith("request ") else said
