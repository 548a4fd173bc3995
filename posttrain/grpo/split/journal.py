"""The buffer's groups on disk: RUN/grpo/buffer/batch-XXXXXXXX.jsonl, one line a group, appended and flushed before it counts.

A process that is killed leaves whole lines and at most one torn one, which the next opening cuts off. Segments of batches that a
checkpoint contains are deleted. learner.jsonl says which learner is the living one and what it has acknowledged.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from posttrain.errors import RunFolderError
from posttrain.grpo.split.groups import RatedGroup, from_fields, to_line
from posttrain.run_folder import cut_torn_line, flush, is_disk_full

# A buffer that was killed may be writing its last line still.
LOCK_SECONDS = 60.0


class Journal:
    """Segments of one buffer, held by one process at a time.

    Raises:
        RunFolderError: another process holds it and does not let go.
    """

    def __init__(self, folder: Path, *, patience_s: float = LOCK_SECONDS) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder / "lock", patience_s)
        self._files: dict[Path, IO[bytes]] = {}

    def segment(self, batch: int) -> Path:
        return self.folder / f"batch-{batch:08d}.jsonl"

    def batches(self) -> list[int]:
        """Batches that have a segment, in order."""
        return sorted(int(path.stem.removeprefix("batch-")) for path in self.folder.glob("batch-*.jsonl"))

    def add(self, batch: int, group: RatedGroup) -> None:
        """Append a group; on the disk when this returns.

        Raises:
            RunFolderError: the disk is full; nothing of the group is in the journal then.
        """
        self._append(self.segment(batch), to_line(group))

    def drop(self, batch: int, slot: int) -> None:
        """Take a group out again: what was written for its slot before counts no more."""
        self._append(self.segment(batch), json.dumps({"drop": slot}).encode() + b"\n")

    def read(self, batch: int) -> dict[int, RatedGroup]:
        """The groups of a batch by slot; of two lines for a slot the first counts.

        Raises:
            RunFolderError: a line is damaged.
        """
        groups: dict[int, RatedGroup] = {}
        path = self.segment(batch)
        for number, fields in _lines(path):
            try:
                if "drop" in fields:
                    groups.pop(fields["drop"], None)
                else:
                    groups.setdefault(fields["slot"], from_fields(fields))
            except (ValueError, KeyError, TypeError) as error:
                raise _damaged(path, number, error) from error
        return groups

    def note(self, **fields: Any) -> None:
        """Append what the learner said."""
        self._append(self.folder / "learner.jsonl", json.dumps(fields).encode() + b"\n")

    def last_note(self) -> dict[str, Any]:
        """What it said last; empty where it never did."""
        fields: dict[str, Any] = {}
        for _, line in _lines(self.folder / "learner.jsonl"):
            fields = line
        return fields

    def forget(self, before: int) -> None:
        """Delete the segments of batches below `before`."""
        for batch in self.batches():
            if batch < before:
                path = self.segment(batch)
                if path in self._files:
                    self._files.pop(path).close()
                path.unlink()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._lock.close()

    def _append(self, path: Path, line: bytes) -> None:
        file = self._files.get(path)
        if file is None:
            # Unbuffered: a line that failed must not be written later, out of a buffer that nobody sees.
            file = self._files[path] = open(path, "ab", buffering=0)  # noqa: SIM115 - until forget() or close()
            with open(path, "rb+") as found:
                cut_torn_line(found)
            flush(self.folder)  # a new file's name has to outlast a power cut too
        end = path.stat().st_size
        try:
            written = 0
            while written < len(line):
                written += file.write(line[written:]) or 0
            os.fsync(file.fileno())
        except OSError as error:
            os.truncate(path, end)
            if is_disk_full(error):
                raise RunFolderError(
                    f"no space left on the disk while writing {path}; free some space and continue with --resume: "
                    "every group that was admitted is kept"
                ) from error
            raise


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, fields) of every whole line."""
    if not path.exists():
        return
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise _damaged(path, number, error) from error
            if not isinstance(fields, dict):
                raise _damaged(path, number, "no JSON object")
            yield number, fields


def _damaged(path: Path, number: int, why: object) -> RunFolderError:
    return RunFolderError(f"{path}:{number} is damaged ({why}); delete that line, and --resume makes its group again")


def _lock(path: Path, patience_s: float) -> IO[bytes]:
    file = open(path, "ab")  # noqa: SIM115 - held until close()
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                raise RunFolderError(
                    f"{path.parent} is held by another process, perhaps of a run that still goes on; stop it first"
                ) from None
            time.sleep(0.1)
