"""The child process of the verifier pool: `python -m posttrain.rewards.worker FD MEMORY_MB TIMEOUT_S`.

It serves one verification at a time over a socket that it inherits as FD, and is made to be killed: by its parent past the
time limit, by the kernel when its parent dies, by its own limits on memory and CPU time. It never imports torch.

Frames are a 4-byte length and JSON. In: {"gold", "answer", "kind", "policy"}. Out: {"ready"} once, then for each verification
{"gold_read": true} before the output is looked at, so that the parent knows whose fault a hang is, and {"correct", "reason"}.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import socket
import struct
import sys
import traceback

_HEADER = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def send_frame(sock: socket.socket, message: dict) -> None:
    data = json.dumps(message).encode()
    sock.sendall(_HEADER.pack(len(data)) + data)


def receive_frame(sock: socket.socket, deadline=None) -> dict | None:
    """One message, or None at the end of the stream. `deadline(sock)` is called before every read to set its time limit."""
    header = _receive_exactly(sock, _HEADER.size, deadline)
    if header is None:
        return None
    data = _receive_exactly(sock, _HEADER.unpack(header)[0], deadline)
    return None if data is None else json.loads(data)


def _receive_exactly(sock: socket.socket, size: int, deadline) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        if deadline is not None:
            deadline(sock)
        data = sock.recv(size - len(parts))
        if not data:
            return None
        parts += data
    return bytes(parts)


def _die_with_parent() -> None:
    """Linux: SIGKILL when the thread that started this process ends. Elsewhere the closed socket and RLIMIT_CPU must do."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


def _limit_memory(memory_mb: int) -> None:
    """Allow `memory_mb` beyond what the interpreter and sympy have mapped already."""
    mapped = 0
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit = mapped + memory_mb * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ValueError, OSError):
        if sys.platform == "linux":
            raise  # macOS refuses RLIMIT_AS; there the time limit alone bounds a verification


def _limit_cpu(seconds: float) -> None:
    """Let the kernel end this process should nobody be left to do it: CPU time of one verification, with room."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + 2 * seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def serve(sock: socket.socket, memory_mb: int, timeout_s: float) -> None:
    """Answer requests until the parent closes its end, or memory use calls for a fresh process."""
    from posttrain.rewards import compare  # a second of sympy, before the limits and before "ready"
    from posttrain.rewards.policy import AnswerPolicy

    logging.disable(logging.CRITICAL)  # math-verify warns that its own time limit is off; ours is the pool's
    compare.warm_up()
    _limit_memory(memory_mb)
    base = _peak_mb()
    send_frame(sock, {"ready": True})
    while (request := receive_frame(sock)) is not None:
        _limit_cpu(timeout_s)
        try:
            gold = compare.read_gold(request["gold"])
            if gold is None:
                reply: dict = {"correct": None, "reason": "unreadable_gold"}
            elif request["answer"] is None:
                reply = {"correct": False, "reason": "no_answer"}
            else:
                send_frame(sock, {"gold_read": True})
                correct = compare.matches(gold, request["answer"], request["kind"], AnswerPolicy(**request["policy"]))
                reply = {"correct": correct, "reason": "match" if correct else "mismatch"}
        except (MemoryError, RecursionError):
            os._exit(3)  # caches may be half written; the parent counts a crash and starts afresh
        reply["retire"] = _peak_mb() - base > memory_mb / 2
        send_frame(sock, reply)


def main(arguments: list[str]) -> None:
    fd, memory_mb, timeout_s = int(arguments[0]), int(arguments[1]), float(arguments[2])
    _die_with_parent()
    sock = socket.socket(fileno=fd)
    try:
        serve(sock, memory_mb, timeout_s)
    except OSError:
        return  # the parent closed its end
    except Exception:
        send_frame(sock, {"error": traceback.format_exc(limit=-8)})
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
