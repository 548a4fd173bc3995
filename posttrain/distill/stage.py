"""The stage `distill`: ask the teacher for every trace that is missing, grade, and make the set once all are there.

problems -> prompts with missing samples -> Backend.generate -> [bounded queue] -> grade, journal -> distill/final
                                              main thread                          one thread
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config import Recipe
from posttrain.distill import dataset
from posttrain.distill.filters import REFUSED, needs_tokens, reason_against
from posttrain.distill.grade import Grader
from posttrain.distill.journal import Journal, Key, Trace
from posttrain.distill.problems import read_info, read_problems
from posttrain.distill.prompts import identity_of, prompt_of, trace_settings
from posttrain.distill.refusals import settled
from posttrain.distill.teacher import open_teacher
from posttrain.errors import DataError
from posttrain.inference import Backend, Prompt, Text
from posttrain.rewards.registry import build_rewards
from posttrain.run_folder import RunFolder
from posttrain.runtime.worker import StageStopped, WorkerContext

# Texts that wait to be graded: past it the teacher waits, so that a slow verification cannot fill the memory.
WAITING = 512
BATCH = 64


def distill(recipe: Recipe, run_path: Path, context: WorkerContext) -> None:
    """Write `distill/traces.jsonl` to its end, then `distill/final`.

    Raises:
        StageStopped: asked to; every trace that was graded is kept.
        BackendError: the teacher cannot go on; likewise.
        DataError: no problem is solved, or no trace passes.
    """
    run = RunFolder(run_path)
    problems = {row["id"]: row for row in read_problems(run)}
    folder = run.stage_dir("distill")
    before = Journal(folder).settings()
    teacher = None
    if before is None or "teacher" not in before or Writing(recipe, Journal(folder), problems, context).left():
        teacher = open_teacher(recipe)
        identity = identity_of(recipe, teacher)
    else:
        # Other filters or another balance ask for no trace: no teacher needs to be loaded, or to be up.
        identity = before["teacher"]
    try:
        settings = trace_settings(recipe, identity)
        with Journal.open(folder, settings) as journal:
            if teacher is not None:
                Writing(recipe, journal, problems, context).run(teacher)
            context.report(0, 0, note="writing the rows", force=True)
            origin = {**settings, "problems": read_info(run)["source"], "versions": dataset.versions()}
            account = dataset.finish(journal, recipe, problems, origin, run.final_checkpoint("distill"))
    finally:
        if teacher is not None:
            teacher.close()
    numbers = {key: value for key, value in account.items() if isinstance(value, int | float)}
    run.append_metrics("distill", account["traces"], numbers)
    context.report(account["traces"], account["traces"], note=dataset.summary(account), force=True)


class Writing:
    """Brings the journal to its end. `run` may be called on any journal of the same settings, however far it is."""

    def __init__(self, recipe: Recipe, journal: Journal, problems: dict[str, Any], context: WorkerContext) -> None:
        self._recipe, self._journal, self._problems, self._context = recipe, journal, problems, context
        self._samples = recipe.distill.samples
        self._total = len(problems) * self._samples
        self._answered: Counter[str] = Counter()
        self._right = 0
        self._reasons: Counter[str] = Counter()
        self._done: set[Key] = set()

    def run(self, teacher: Backend) -> None:
        """Ask for what is missing, until nothing is."""
        missing = self.left()
        self._report()
        if not missing:
            return
        seeds = {row["id"]: prompt_of(row, (0,), self._recipe).seed for row in missing}
        with build_rewards(self._recipe.reward) as rewards:
            grader = Grader(rewards, self._problems, seeds, self._tokenizer())
            with GradingThread(grader, self._journal, self._count) as grading:
                for text in settled(teacher.generate(self._prompts(missing)), answered=self._anything_answered()):
                    grading.put(text)
                    self._report()
                    self._check_stop()
        self._report()
        lost = sum(len(self._missing(name)) for name in self._problems)
        assert lost == 0, f"the teacher's backend left out {lost} traces"

    def left(self) -> list[dict[str, Any]]:
        """Read the journal; the problems that lack a trace."""
        for trace in self._journal.read():
            self._count(trace)
        return [row for row in self._problems.values() if self._missing(row["id"])]

    def _anything_answered(self) -> bool:
        return len(self._done) > self._reasons[REFUSED]

    def _prompts(self, missing: list[dict[str, Any]]) -> Iterator[Prompt]:
        for row in missing:
            yield prompt_of(row, self._missing(row["id"]), self._recipe)

    def _missing(self, problem: str) -> tuple[int, ...]:
        return tuple(sample for sample in range(self._samples) if (problem, sample) not in self._done)

    def _tokenizer(self) -> Any:
        """The student's, where a filter or a reward counts its tokens."""
        rewards = {function.name for function in self._recipe.reward.functions}
        if not needs_tokens(self._recipe.distill.filters) and "overlong" not in rewards:
            return None
        from posttrain.data.tokenizer import load_tokenizer

        return load_tokenizer(self._recipe.model)

    def _count(self, trace: Trace) -> None:
        if trace.problem not in self._problems or trace.sample >= self._samples:
            return
        self._done.add(trace.key)
        self._answered[trace.problem] += 1
        self._right += trace.reward is not None and trace.reward >= self._recipe.distill.filters.min_reward
        reason = reason_against(trace, self._recipe.distill.filters)
        self._reasons[reason or "right"] += 1

    def _report(self) -> None:
        share = self._right / max(1, len(self._done))
        self._context.report(len(self._done), self._total, note="traces", right=share)

    def _check_stop(self) -> None:
        limit = self._recipe.distill.give_up_after
        if limit is not None and not self._right and self._whole_problems() >= limit:
            counts = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common())
            raise DataError(
                f"distill: the teacher has solved none of {limit} problems ({counts}). Look at distill/traces.jsonl: the usual "
                "causes are a chat template or a prompt_suffix that asks for no \\boxed{}, too small a max_tokens, or gold "
                "answers of another form; distill.give_up_after: null goes on all the same"
            )
        if self._context.stop_requested():
            raise StageStopped(f"distillation stopped after {len(self._done)} traces")

    def _whole_problems(self) -> int:
        return sum(count >= self._samples for count in list(self._answered.values()))


class GradingThread:
    """Grades and journals texts beside the teacher, all that wait at once. Leaving the block grades what was put in, also after
    an error or a stop: those traces were paid for."""

    def __init__(self, grader: Grader, journal: Journal, counted: Any) -> None:
        self._grader, self._journal, self._counted = grader, journal, counted
        self._texts: queue.Queue[Text | None] = queue.Queue(maxsize=WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="grading", daemon=True)

    def __enter__(self) -> GradingThread:
        self._thread.start()
        return self

    def put(self, text: Text) -> None:
        """Hand a text over; waits where too many wait already. Raises what the thread met."""
        while True:
            self._raise()
            try:
                self._texts.put(text, timeout=1.0)
                return
            except queue.Full:
                continue

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        while self._thread.is_alive():
            try:
                self._texts.put(None, timeout=1.0)
                break
            except queue.Full:
                continue
        self._thread.join()
        if kind is None:
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while (text := self._texts.get()) is not None:
                batch = [text]
                while len(batch) < BATCH and not self._texts.empty():
                    following = self._texts.get()
                    if following is None:
                        self._write(batch)
                        return
                    batch.append(following)
                self._write(batch)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread by put() or at the end
            self._error = error

    def _write(self, batch: list[Text]) -> None:
        traces = self._grader.grade(batch)
        self._journal.append(traces)
        for trace in traces:
            self._counted(trace)
