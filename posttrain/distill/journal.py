"""Every trace of a run on disk: one JSON line a trace in distill/traces.jsonl, appended when it is graded, never changed.

A process that is killed leaves whole lines and at most one torn one, which the next opening cuts off: its trace is drawn again,
from the same seed. (problem, sample) is the key; what is there is not asked for again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from posttrain.errors import RunFolderError
from posttrain.file_lock import PATIENCE_S, lock
from posttrain.run_folder import append_whole, cut_torn_line, write_text_atomically

Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One graded trace.

    Attributes:
        problem, sample: its key.
        text: as SFT will read it, thinking block in <think> tags.
        finish_reason: stop | length | abort | refused (the text is the server's reason then).
        tokens: by the teacher's count (None where it gives none); student_tokens: by the student's tokenizer, where that is used.
        seed: that the sample was drawn from.
        reward: total of the recipe's rewards; None where the trace was not graded (empty or unfinished) or cannot be.
        parts: each reward's own value.
        repetition: share of its 20-word sequences that came before; scripts: {latin | han | cyrillic: share of its letters}. Both
            None where nobody looked (an unfinished trace). Measured once, here: 25 ms a trace add up over 300,000.
        special: whether the text holds a special token of the student's tokenizer.
        written: when, ISO 8601 in UTC.
    """

    problem: str
    sample: int
    text: str
    finish_reason: str
    seed: int
    tokens: int | None = None
    student_tokens: int | None = None
    mean_logprob: float | None = None
    reward: float | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    repetition: float | None = None
    scripts: dict[str, float] | None = None
    special: bool = False
    written: str = ""

    @property
    def key(self) -> Key:
        return self.problem, self.sample


class Journal:
    """The traces of one run. `open` holds it for one process; `read` may be used beside that."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "traces.jsonl"
        self._file: IO[bytes] | None = None

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any], *, patience_s: float = PATIENCE_S) -> Self:
        """Take the journal over, cut off a torn last line, and refuse traces of another teacher.

        Args:
            settings: what a trace depends on; must equal what the journal was begun with.

        Raises:
            RunFolderError: another process holds it, or its traces come from other settings.
        """
        journal = cls(folder)
        journal.folder.mkdir(parents=True, exist_ok=True)
        file = open(journal.path, "a+b", buffering=0)  # noqa: SIM115 - held until close()
        try:
            lock(file, journal.path, patience_s)
            journal._settle(json.loads(json.dumps(settings)))
            cut_torn_line(file)
        except BaseException:
            file.close()
            raise
        journal._file = file
        return journal

    def _settle(self, settings: dict[str, Any]) -> None:
        path = self.folder / "settings.json"
        before = self.settings()
        if before is not None and self.path.stat().st_size:
            differing = [key for key in dict.fromkeys([*before, *settings]) if before.get(key) != settings.get(key)]
            if differing:
                shown = "\n".join(f"  {key}: {before.get(key)!r} there, {settings.get(key)!r} now" for key in differing)
                raise RunFolderError(
                    f"{self.path} holds traces written under other settings:\n{shown}\n"
                    "traces of two teachers do not mix: choose another folder with run_dir=PATH, or put the settings back"
                )
        write_text_atomically(path, json.dumps(settings, indent=2, sort_keys=True) + "\n")

    def settings(self) -> dict[str, Any] | None:
        """What the journal was begun with; None before it was.

        Raises:
            RunFolderError: the file is damaged.
        """
        path = self.folder / "settings.json"
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(settings, dict):
                raise ValueError(f"an object was expected, got {type(settings).__name__}")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunFolderError(
                f"{path} is damaged ({error}); it says which teacher wrote {self.path.name}: restore it, delete it if teacher, "
                "sampling and prompt are what they were, or choose another folder with run_dir=PATH"
            ) from None
        return settings

    def append(self, traces: Iterable[Trace]) -> None:
        """Write traces, flushed to the disk before the call returns."""
        assert self._file is not None, "open() the journal to write"
        data = "".join(json.dumps(asdict(trace), ensure_ascii=False) + "\n" for trace in traces)
        append_whole(self._file, data.encode())
        os.fsync(self._file.fileno())

    def read(self) -> Iterator[Trace]:
        """Every whole line in order, the first of each key.

        Raises:
            RunFolderError: a line that is damaged, named.
        """
        seen: set[Key] = set()
        if not self.path.exists():
            return
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    trace = Trace(**json.loads(line))
                except (ValueError, TypeError) as error:
                    raise RunFolderError(
                        f"{self.path}:{number} is damaged ({error}); delete that line, and --resume draws its trace again"
                    ) from None
                if trace.key not in seen:
                    seen.add(trace.key)
                    yield trace

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
