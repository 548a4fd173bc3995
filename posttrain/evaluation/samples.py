"""The samples of one suite on disk: one JSON line a sample, appended as problems finish, read back to resume."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.run_folder import write_text_atomically


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One graded completion.

    Attributes:
        correct: the verdict; None where the gold answer could not be read (listed, not scored).
        reason: why the verifier said so ("equal", "timeout", ...).
        answer: what was extracted from the completion, or None.
        length: completion tokens.
    """

    problem_id: str
    sample: int
    correct: bool | None
    reason: str
    gold: str
    answer: str | None
    length: int
    finish_reason: str
    mean_logprob: float
    problem: str
    text: str


class SampleFile:
    """`samples.jsonl` of one (model, suite), with the settings that it was drawn under in `settings.json`.

    Opening it with other settings sets the old file aside as `samples.stale-N.jsonl`: samples of two protocols never mix.
    """

    def __init__(self, folder: Path, settings: dict) -> None:
        self.path = folder / "samples.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._settle(folder / "settings.json", json.loads(json.dumps(settings)))

    def _settle(self, path: Path, settings: dict) -> None:
        if path.exists() and self.path.exists() and json.loads(path.read_text()) != settings:
            number = 1 + sum(1 for _ in path.parent.glob("samples.stale-*.jsonl"))
            self.path.rename(self.path.with_name(f"samples.stale-{number}.jsonl"))
        write_text_atomically(path, json.dumps(settings, indent=2, sort_keys=True))

    def read(self, samples_each: int) -> dict[str, list[Sample]]:
        """Problems with all their samples; lines of other problems, and a torn last line, are dropped from the file."""
        problems: dict[str, dict[int, Sample]] = {}
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").split("\n")
            # What follows the last newline was torn by a kill in the middle of a write.
            for line in lines[:-1]:
                sample = Sample(**json.loads(line))
                problems.setdefault(sample.problem_id, {})[sample.sample] = sample
        done = {name: [group[i] for i in sorted(group)] for name, group in problems.items() if len(group) == samples_each}
        self._rewrite(done)
        return done

    def _rewrite(self, done: dict[str, list[Sample]]) -> None:
        write_text_atomically(self.path, "".join(_line(sample) for group in done.values() for sample in group))

    def append(self, samples: Iterable[Sample]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(_line(sample) for sample in samples))


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"
