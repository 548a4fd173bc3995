"""The parent's end of one verifier process: start, one request at a time, kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from posttrain.rewards.errors import RewardError
from posttrain.rewards.policy import DEFAULT, AnswerPolicy
from posttrain.rewards.worker import receive_frame, send_frame

CLOSED = "the verifier pool was closed during a verification"
STARTS = 5  # processes that somebody else may kill one after the other, at their start or over one pair, before it is an error
_START_LIMIT_S = 120.0  # importing sympy takes about a second; a loaded machine may need many


@dataclass(frozen=True)
class Outcome:
    """How a verification ended; `gold_read`: the gold had been parsed by then.

    "done" with a reply, "timeout", "crash" (the child died of the verification: out of memory, stack overflow), or "killed" (by
    somebody else's SIGKILL, for which the pair is not to blame).
    """

    kind: Literal["done", "timeout", "crash", "killed"]
    seconds: float
    gold_read: bool = False
    reply: dict = field(default_factory=dict)


class KilledAtStart(RewardError):
    """Somebody else ended the process before it could verify, as the kernel does where memory is short; another may live."""


class Child:
    """A running worker process and our end of its socket."""

    def __init__(self, timeout_s: float, memory_mb: int, started: Callable[[Child], None]):
        """Start one and wait until it can verify; `started` gets it at once, so that it can be killed while it starts."""
        self.timeout_s = timeout_s
        self.killed = False
        self._lock = threading.Lock()
        self.sock, theirs = socket.socketpair()
        with theirs:
            arguments = ["-m", "posttrain.rewards.worker", str(theirs.fileno()), str(memory_mb), str(timeout_s)]
            self.process = subprocess.Popen(
                [sys.executable, "-P", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_child_environment(),
                start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
            )
        self.ready = False
        started(self)
        self._await_ready()
        self.ready = True

    def _await_ready(self) -> None:
        try:
            reply = receive_frame(self.sock, _deadline(time.monotonic() + _START_LIMIT_S))
        except OSError as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        if reply is None or "ready" not in reply:
            killed = self.killed
            self.close()
            if killed:
                raise RewardError(CLOSED)
            if reply is None and self.process.returncode < 0:
                raise KilledAtStart(f"a verifier process was killed by signal {-self.process.returncode} while it started")
            detail = reply["error"] if reply else f"it ended with exit code {self.process.returncode}"
            raise RewardError(f"a verifier process could not start (is math-verify installed?): {detail}")

    def verify(self, gold: str, answer: str | None, kind: str, policy: AnswerPolicy = DEFAULT) -> Outcome:
        """One verification; after any outcome but "done" the child must be killed."""
        started = time.monotonic()
        deadline = _deadline(started + self.timeout_s)
        gold_read = False
        try:
            deadline(self.sock)
            send_frame(self.sock, {"gold": gold, "answer": answer, "kind": kind, "policy": policy.as_dict()})
            while True:
                reply = receive_frame(self.sock, deadline)
                seconds = time.monotonic() - started
                if reply is None:
                    return self._died(seconds, gold_read)
                if "error" in reply:
                    raise RewardError(f"the verifier failed on gold {gold!r}, answer {answer!r}:\n{reply['error']}")
                if "correct" in reply:
                    return Outcome("done", seconds, gold_read, reply)
                gold_read = True
        except TimeoutError:
            return Outcome("timeout", time.monotonic() - started, gold_read)
        except OSError:  # the child died while we wrote to it
            return self._died(time.monotonic() - started, gold_read)

    def _died(self, seconds: float, gold_read: bool) -> Outcome:
        try:
            code = self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            code = None  # the stream ended and the process lives: its own doing
        return Outcome("killed" if code == -signal.SIGKILL and not self.killed else "crash", seconds, gold_read)

    def kill(self) -> None:
        """End it, from any thread. A thread that waits for its answer sees the stream end."""
        self.killed = True
        self.process.kill()
        with self._lock:  # wait() of two threads at once would leave one of them polling
            self.process.wait()

    def close(self) -> None:
        """End it and give back the socket: for the thread that uses it."""
        self.kill()
        self.sock.close()


def _deadline(at: float):
    """A function that gives a socket the time left until `at`, or raises TimeoutError where there is none."""

    def apply(sock: socket.socket) -> None:
        left = at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)

    return apply


def _child_environment() -> dict[str, str]:
    """The parent's import path, so that a plain checkout and a Ray working_dir work; one thread; no GPU; fixed hash order."""
    root = str(Path(__file__).absolute().parents[2])  # holds posttrain/rewards/; not resolved, posttrain/rewards may be a link
    paths = dict.fromkeys([root, *(os.path.abspath(entry) for entry in sys.path)])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
