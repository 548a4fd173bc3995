r"""Verification in processes that can be killed.

math-verify hands a model's text to sympy, which may compute for hours or take all memory (`\boxed{9^{9^{9^9}}}`), and guards
itself by SIGALRM, which works on the main thread alone and not inside one long C call. Here every verification runs in a child
process with a wall-clock limit of its own; past it the child is killed and replaced.

        verify([...]) -> task queue -> slot thread -> child (posttrain.rewards.worker)
                                         one child each, started when first needed, replaced when it dies

Children are started with subprocess (vfork and exec: no CUDA context, no lock, no torch is inherited) by the slot threads,
because Linux kills a child with PR_SET_PDEATHSIG when the *thread* that started it ends, and those live as long as the pool.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.rewards import quick
from posttrain.rewards.child import CLOSED, STARTS, Child, KilledAtStart, Outcome
from posttrain.rewards.errors import RewardError
from posttrain.rewards.extract import MAX_ANSWER, find_answer, gold_text
from posttrain.rewards.policy import AnswerPolicy

PolicyLike = AnswerPolicy | Mapping[str, Any] | Any | None

_GOLD_CACHE = 50_000


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a verification found.

    Attributes:
        correct: None where the gold answer itself cannot be read: the sample must be left out, it is neither right nor wrong.
        reason: match | mismatch | no_answer | too_long | timeout | crash | unreadable_gold.
        seconds: wall-clock of the verification, without waiting for a free child or for one to start.
    """

    correct: bool | None
    reason: str
    seconds: float = 0.0


@dataclass
class Counters:
    """Totals since the pool was made.

    `fast`: verdicts that needed no child. `timeouts`, `crashes`: children killed past the limit, or dead by themselves (out of
    memory, stack overflow). `restarts`: children that were lost to either and replaced when next needed.
    """

    verified: int = 0
    fast: int = 0
    timeouts: int = 0
    crashes: int = 0
    unreadable_gold: int = 0
    restarts: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class VerifierPool:
    """Verifies (gold, output) pairs in `workers` child processes; `verify` may be called from any thread, several at once.

    Args:
        workers: child processes at most; they start when work needs them.
        timeout_s: wall-clock limit of one verification.
        memory_mb: what one verification may take beyond the child's own footprint.
        policy: where an answer stands and what equals it; an `AnswerPolicy`, a mapping of its fields, or the recipe's section.

    Use as a context manager or call `close()`; a pool that is dropped, or whose process ends in any way, takes its children
    along.
    """

    def __init__(self, workers: int = 2, timeout_s: float = 5.0, memory_mb: int = 1024, *, policy: PolicyLike = None):
        for name, value, least in (("workers", workers, 1), ("memory_mb", memory_mb, 16)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}, but it must be an integer of at least {least}")
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s={timeout_s!r}, but it must be a positive number of seconds")
        self.workers, self.timeout_s, self.memory_mb = workers, float(timeout_s), memory_mb
        self.policy = AnswerPolicy.of(policy)
        self.counters = Counters()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._state = _State(self.workers, self.timeout_s, self.memory_mb, self.counters)
        self._readable: dict[str, bool] = {}
        self._finalizer = weakref.finalize(self, _State.shut_down, self._state)

    def verify(
        self, pairs: Sequence[tuple[object, str]], *, policy: PolicyLike = None, prompts: Sequence[str | None] | None = None
    ) -> list[Verdict]:
        """One verdict a pair (gold answer, whole model output), in the order given.

        Args:
            policy: for this call; by default the pool's.
            prompts: one a pair, where an echo of it in the output is not to be read.

        Raises:
            RewardError: the pool is closed, or a child cannot be started at all.
        """
        if self._closed:
            raise RewardError("the verifier pool is closed; make a new one")
        if self._state.pid != os.getpid():
            self._start()  # this process was forked off the one that owned the threads and children
        chosen = self.policy if policy is None else AnswerPolicy.of(policy)
        if prompts is not None and len(prompts) != len(pairs):
            raise ValueError(f"{len(prompts)} prompts for {len(pairs)} pairs")
        verdicts: list[Verdict | None] = [None] * len(pairs)
        tasks = []
        batch = _Batch(verdicts)
        for index, (gold, output) in enumerate(pairs):
            if not isinstance(output, str):
                raise TypeError(f"pair {index}: the output must be a string, got {type(output).__name__}")
            decided = self._decide_here(gold, output, chosen, None if prompts is None else prompts[index])
            if isinstance(decided, Verdict):
                verdicts[index] = decided
            else:
                tasks.append(_Task(batch, index, *decided, chosen))
        if tasks:
            self._state.run(batch, tasks)
            self._remember(tasks, verdicts)
        return self._count(verdicts, len(tasks))

    def _decide_here(
        self, gold: object, output: str, policy: AnswerPolicy, prompt: str | None
    ) -> Verdict | tuple[str, str | None, str]:
        """The verdict where it is certain without sympy (`quick`), else (gold, answer, kind of answer) for a child."""
        text = gold_text(gold)
        if text is None:
            return Verdict(correct=None, reason="unreadable_gold")
        answer = find_answer(output, policy=policy, prompt=prompt)
        readable = quick.is_plain(text) or self._readable.get(text)
        if readable is False:
            return Verdict(correct=None, reason="unreadable_gold")
        if answer is None:
            return Verdict(correct=False, reason="no_answer") if readable else (text, None, "boxed")
        content = " ".join(answer.text.split())
        correct = None if answer.kind == "tail" else quick.same_number(text, content, policy)
        if correct is not None:
            return Verdict(correct=correct, reason="match" if correct else "mismatch")
        if len(content) > MAX_ANSWER:
            return Verdict(correct=False, reason="too_long") if readable else (text, None, "boxed")
        return text, answer.text if answer.kind == "tail" else content, answer.kind

    def _remember(self, tasks: list[_Task], verdicts: list[Verdict | None]) -> None:
        """Keep which golds could be read, so that an output without an answer needs no child."""
        if len(self._readable) > _GOLD_CACHE:
            self._readable.clear()
        for task in tasks:
            verdict = verdicts[task.index]
            if verdict is not None and verdict.reason in ("match", "mismatch", "no_answer", "unreadable_gold"):
                self._readable[task.gold] = verdict.correct is not None

    def _count(self, verdicts: list[Verdict | None], sent: int) -> list[Verdict]:
        done = [verdict for verdict in verdicts if verdict is not None]
        assert len(done) == len(verdicts), "a verification was lost"
        with self._state.lock:
            self.counters.verified += len(done)
            self.counters.fast += len(done) - sent
            self.counters.unreadable_gold += sum(verdict.correct is None for verdict in done)
        return done

    def close(self) -> None:
        """Kill the children and end the threads. A `verify` in progress elsewhere raises RewardError. May be called twice."""
        self._closed = True
        self._finalizer()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self):
        # sent to another process, the pool arrives with the same settings and children of its own
        return _rebuild, (self.workers, self.timeout_s, self.memory_mb, self.policy)


def _rebuild(workers: int, timeout_s: float, memory_mb: int, policy: AnswerPolicy) -> VerifierPool:
    return VerifierPool(workers, timeout_s, memory_mb, policy=policy)


class _Batch:
    """One call of `verify`: filled by slot threads, waited for by the caller."""

    def __init__(self, verdicts: list[Verdict | None]):
        self.verdicts = verdicts
        self.left = 0
        self.error: BaseException | None = None
        self.cancelled = False
        self.changed = threading.Condition()

    def put(self, index: int, verdict: Verdict) -> None:
        with self.changed:
            self.verdicts[index] = verdict
            self.left -= 1
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error, self.cancelled = error, True
            self.changed.notify_all()

    def wait(self) -> None:
        try:
            with self.changed:
                while self.left and self.error is None:
                    self.changed.wait()
        finally:
            self.cancelled = True  # after Ctrl-C the rest of the batch is dropped, not verified for nobody
        if self.error is not None:
            raise self.error


@dataclass
class _Task:
    batch: _Batch
    index: int
    gold: str
    answer: str | None
    kind: str
    policy: AnswerPolicy


class _State:
    """What the slot threads share. They hold no reference to the pool, so that a dropped pool is collected."""

    def __init__(self, workers: int, timeout_s: float, memory_mb: int, counters: Counters):
        self.limit, self.timeout_s, self.memory_mb, self.counters = workers, timeout_s, memory_mb, counters
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.children: weakref.WeakSet[Child] = weakref.WeakSet()
        self.closing = False

    def run(self, batch: _Batch, tasks: list[_Task]) -> None:
        batch.left = len(tasks)
        with self.lock:
            if self.closing:
                raise RewardError("the verifier pool is closed; make a new one")
            for task in tasks:
                self.tasks.put(task)
            while len(self.threads) < min(self.limit, self.tasks.qsize()):
                name = f"verifier-{len(self.threads)}"
                thread = threading.Thread(target=_serve_slot, args=(self,), name=name, daemon=True)
                self.threads.append(thread)
                thread.start()
        batch.wait()

    def admit(self, child: Child) -> None:
        with self.lock:
            self.children.add(child)
            closing = self.closing
        if closing:
            child.kill()

    def dismiss(self, child: Child) -> None:
        child.close()
        with self.lock:
            self.children.discard(child)

    def shut_down(self) -> None:
        if self.pid != os.getpid():
            return  # a forked copy: threads and children are its parent's
        with self.lock:
            self.closing = True
            children, threads = list(self.children), list(self.threads)
            for _ in threads:
                self.tasks.put(None)
        for child in children:
            child.kill()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)


def _serve_slot(state: _State) -> None:
    """Body of a slot thread: take a task, have the slot's child verify it, hand the verdict or the error to the caller."""
    child: Child | None = None
    try:
        while (task := state.tasks.get()) is not None:
            if task.batch.cancelled:
                continue
            if state.closing:
                task.batch.fail(RewardError(CLOSED))
                continue
            try:
                child, verdict = _verify_in_child(state, child, task)
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for this batch, which raises it
                if child is not None:
                    state.dismiss(child)
                    child = None
                task.batch.fail(error)
            else:
                task.batch.put(task.index, verdict)
    finally:
        if child is not None:
            state.dismiss(child)


def _start_child(state: _State) -> Child:
    for attempt in range(STARTS):
        try:
            return Child(state.timeout_s, state.memory_mb, state.admit)
        except KilledAtStart:
            with state.lock:
                state.counters.crashes += 1
                state.counters.restarts += 1
            if attempt == STARTS - 1:
                raise
    raise AssertionError("unreachable")


def _verify_in_child(state: _State, child: Child | None, task: _Task) -> tuple[Child | None, Verdict]:
    """Verify one task, on a fresh child once more where the first died; returns the child that is left, if any.

    A child that hangs or dies before it has read the gold condemns the gold (None); after that, the output (False). One that was
    killed from outside condemns nothing: the task is done again.
    """
    outcome = Outcome("crash", 0.0)
    crashes = kills = 0
    while crashes < 2 and kills < STARTS and outcome.kind != "timeout":
        if child is None:
            child = _start_child(state)
        outcome = child.verify(task.gold, task.answer, task.kind, task.policy)
        if outcome.kind == "done":
            if outcome.reply.get("retire"):
                state.dismiss(child)
                child = None
            return child, Verdict(correct=outcome.reply["correct"], reason=outcome.reply["reason"], seconds=outcome.seconds)
        state.dismiss(child)
        child = None
        if state.closing:
            raise RewardError(CLOSED)
        crashes += outcome.kind == "crash"
        kills += outcome.kind == "killed"
        with state.lock:
            state.counters.restarts += 1
            if outcome.kind == "timeout":
                state.counters.timeouts += 1
            else:
                state.counters.crashes += 1
    if kills == STARTS:
        raise RewardError(
            f"verifier processes are killed from outside one after the other ({STARTS} over one pair): out of memory?"
        )
    if not outcome.gold_read:
        return None, Verdict(correct=None, reason="unreadable_gold", seconds=outcome.seconds)
    return None, Verdict(correct=False, reason=outcome.kind, seconds=outcome.seconds)
