"""The samples of one suite on disk: one JSON line a sample, appended as they are graded, read back to resume.

    settings.json   {"protocol": ..., "model": ..., "seed": ..., "verifier": ...}
    samples.jsonl   {"problem_id": "aime24-3", "sample": 0, "correct": true, ...}

A sample is known by (problem, index), and its random numbers come from that pair: whatever is missing can be drawn later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import RunFolderError
from posttrain.run_folder import append_whole, write_text_atomically

Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One graded completion.

    Attributes:
        correct: the verdict; None where the gold answer could not be read (listed, not scored).
        reason: why the verifier said so ("match", "timeout", ...).
        answer: what was extracted from the completion, or None.
        length: completion tokens; None where a server doesn't say.
        mean_logprob: of the completion's tokens under the model; None where there are none.
    """

    problem_id: str
    sample: int
    correct: bool | None
    reason: str
    gold: str
    answer: str | None
    length: int | None
    finish_reason: str
    mean_logprob: float | None
    problem: str
    text: str


class SampleFile:
    """`samples.jsonl` of one (model, suite), with the settings that it was drawn under in `settings.json`.

    Opening it with other settings (or none that are known) sets the old file aside as `samples.stale-N.jsonl`: samples of two
    protocols never mix. How many samples of how many problems is no such setting: more can be drawn beside those that are there.

    Attributes:
        regrade: the samples may stay, but were graded by another verifier.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings_path = folder / "samples.jsonl", folder / "settings.json"
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        folder.mkdir(parents=True, exist_ok=True)
        before = self._before()
        if self.path.exists() and (before is None or _drawn_under(before) != _drawn_under(self.settings)):
            self._set_aside()
        self.regrade = before is not None and before.get("verifier") != self.settings.get("verifier")
        if not self.regrade:
            self.confirm()

    def confirm(self) -> None:
        """Write the settings: what the file holds was drawn and graded under them."""
        write_text_atomically(self.settings_path, json.dumps(self.settings, indent=2, sort_keys=True))

    def _before(self) -> dict[str, Any] | None:
        try:
            before = json.loads(self.settings_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunFolderError(f"{self.settings_path} is damaged ({error}); delete it to draw the samples again") from None
        return before if isinstance(before, dict) else None

    def _set_aside(self) -> None:
        number = 1 + sum(1 for _ in self.path.parent.glob("samples.stale-*.jsonl"))
        self.path.rename(self.path.with_name(f"samples.stale-{number}.jsonl"))

    def read(self, problems: Mapping[str, str], samples_each: int) -> dict[Key, Sample]:
        """Samples 0 to `samples_each` - 1 of the given problems (id -> text), each once; the file keeps all others too.

        A last line that was torn by a kill is cut off. A sample of a problem whose text has changed since is dropped.

        Raises:
            RunFolderError: a line in the middle is damaged, named.
        """
        found: dict[Key, Sample] = {}
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n") if self.path.exists() else [""]
        for number, line in enumerate(lines[:-1], 1):
            sample = self._parse(line, number)
            if problems.get(sample.problem_id, sample.problem) == sample.problem:
                found.setdefault((sample.problem_id, sample.sample), sample)
        if len(found) != len(lines) - 1 or lines[-1]:
            self.rewrite(found.values())
        return {key: sample for key, sample in found.items() if key[0] in problems and key[1] < samples_each}

    def _parse(self, line: str, number: int) -> Sample:
        try:
            return Sample(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise RunFolderError(
                f"{self.path}:{number}: not a sample ({error}); delete the line to draw it again, or the file to draw them all"
            ) from None

    def rewrite(self, samples: Iterable[Sample]) -> None:
        """Replace the file, whole or not at all."""
        write_text_atomically(self.path, "".join(_line(sample) for sample in samples))

    def append(self, samples: Iterable[Sample]) -> None:
        """Add graded samples, all or none; they are in the operating system's hands when this returns."""
        with self.path.open("ab", buffering=0) as file:
            append_whole(file, "".join(_line(sample) for sample in samples).encode())


def _drawn_under(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that don't change a sample."""
    protocol = {key: value for key, value in settings.get("protocol", {}).items() if key not in ("samples", "problems")}
    return {**{key: value for key, value in settings.items() if key != "verifier"}, "protocol": protocol}


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"
