"""A process group of the learner and some generators, beside any other that their processes have."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.grpo.split.transfer.buckets import WeightError

# Its type stubs leave out the classes of which the groups that everybody uses are made.
c10d: Any = dist
# While idle a generator looks this often for a publication; in the middle of one, both sides look this often.
IDLE_S, BUSY_S = 0.01, 0.0005
# A generator that compiles or swaps may be silent for this long before a publication goes on without it.
ANSWER_LIMIT_S = 30.0
TRANSFER_LIMIT_S = 120.0
# What a generator answers to the offer of weights that it has got already.
HAVE = "have"


class Broken(Exception):
    """A transfer that failed because of the network, or of a process that died: it can be tried again."""


class Group:
    """The process group of one set of members, kept until they change.

    Args:
        store: where the members find each other.
        host: address of this machine that the others reach.
    """

    def __init__(self, store: Any, host: str, device: torch.device) -> None:
        self._store, self._host, self._device = store, host, device
        self._members: tuple[int, ...] = ()
        self._number, self._opened = 0, 0
        self._group: Any = None

    def number(self, members: tuple[int, ...]) -> int:
        """Of the group of these members: a new one where they changed, or where the last one broke."""
        if members and (members != self._members or self._group is None):
            self._members, self._number = members, self._number + 1
        return self._number

    def open(self, number: int, rank: int, size: int, limit_s: float) -> None:
        """Make the group anew, unless it is the one that is open. All its members call this."""
        if self._group is not None and self._opened == number:
            return
        self.close()
        store = c10d.PrefixStore(f"group/{number}", self._store)
        if self._device.type == "cuda":
            if self._host.startswith("127."):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            options: Any = c10d.ProcessGroupNCCL.Options()
            # Our own deadline ends the wait first: NCCL's watchdog would end the process.
            options._timeout = timedelta(seconds=10 * limit_s)
            self._group = c10d.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=limit_s)
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=self._host)]
            self._group = c10d.ProcessGroupGloo(store, rank, size, options)
        self._opened = number

    def broadcast(self, tensor: Tensor) -> Any:
        """The learner's tensor, to all of the open group; returns the work to wait for."""
        return self._group.broadcast(tensor, 0)

    def close(self) -> None:
        """End it at once, whatever it is waiting for."""
        if self._group is None:
            return
        old = [self._group]
        self._group.abort()
        self._group = None
        if self._device.type == "cpu":
            # Gloo's operations cannot be aborted: its destructor waits until they time out, and nobody should wait with it. (Nor
            # should anybody else hold the group: the frames of an error's traceback would drop it last.)
            threading.Thread(target=old.clear, name="old group", daemon=True).start()


def device_id(device: torch.device) -> str:
    """The GPU that a process sees as `device`, whatever its number there; "" for a CPU."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def connect(address: tuple[str, int]) -> Any:
    """A client of the store at `address`."""
    return c10d.TCPStore(address[0], address[1], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))


def serve(host: str) -> tuple[Any, tuple[str, int]]:
    """A store that listens at `host` alone (of itself it would listen everywhere), and its address."""
    listener = socket.create_server((host, 0))
    address = (host, int(listener.getsockname()[1]))
    store = c10d.TCPStore(
        address[0],
        address[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    return store, address


def finish(works: list[Any], device: torch.device, deadline: float, lost: Callable[[], bool]) -> None:
    """Wait for broadcasts, on a GPU too, without holding Python's lock. `lost`: whether it is in vain.

    Raises:
        TimeoutError: `deadline` (of time.monotonic) has come, or the other side is lost.
    """
    if device.type == "cuda":
        for work in works:
            work.wait()  # between GPUs this only puts the streams in order
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        ended = event.query
    else:
        ended = lambda: all(work.is_completed() for work in works)  # noqa: E731
    while not ended():
        if time.monotonic() > deadline:
            raise TimeoutError("the broadcast has not ended in time")
        if lost():
            raise TimeoutError("somebody who took part in the broadcast is gone")
        time.sleep(BUSY_S)
    if device.type != "cuda":
        for work in works:
            work.wait()  # raises what went wrong


def wait_key(store: Any, key: str, deadline: float, late: str, lost: Callable[[], bool] = lambda: False) -> None:
    """Wait until the store has `key`. `lost`: whether it is in vain.

    Raises:
        TimeoutError: `deadline` has come, or the other side is lost; `late` is its message.
    """
    while not store.check([key]):
        if time.monotonic() > deadline or lost():
            raise TimeoutError(late)
        time.sleep(BUSY_S)


@contextlib.contextmanager
def as_broken(who: str) -> Iterator[None]:
    """Errors of torch.distributed (gloo's have no class of their own) and missed deadlines as Broken."""
    try:
        yield
    except WeightError:
        raise
    except (RuntimeError, TimeoutError) as error:
        # Gloo goes on to guess at reasons.
        reason = str(error).splitlines()[0].partition(". This is")[0]
        raise Broken(f"the transfer with {who} failed: {reason}") from error


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
