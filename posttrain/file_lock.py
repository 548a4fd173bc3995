"""Locks on files that one process writes: given up by the kernel when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from posttrain.errors import RunFolderError

# A worker whose driver was killed may still be writing its last lines.
PATIENCE_S = 60.0


def lock(file: IO[Any], path: Path, patience_s: float = PATIENCE_S) -> None:
    """Lock an open file until it is closed.

    Args:
        path: what the lock protects, for the message.

    Raises:
        RunFolderError: another process has held it all the time.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise RunFolderError(f"{path} is being written by another process; wait for it or stop it") from None
            time.sleep(0.2)


@contextlib.contextmanager
def hold(folder: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold a folder, made if need be, by the file `.lock` in it; its other files may be replaced meanwhile.

    Raises:
        RunFolderError: another process has held it all the time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "ab") as file:
        lock(file, folder, patience_s)
        yield
