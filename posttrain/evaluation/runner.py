"""Sample, verify and score: every model of a recipe on every suite.

    suite -> problems -> missing samples -> Backend -> Grader (verifier pool) -> samples.jsonl -> problems.jsonl, Row

A problem's seed is a hash of the evaluation seed and the problem's name, and a sample's random numbers come from that seed and
its index: the same seed gives the same table, whatever the batch, the order, the number of engines, or how often it was resumed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.config import Recipe, SuiteConfig
from posttrain.config.backend import BackendConfig
from posttrain.config.data import ModelConfig
from posttrain.data.chat import messages
from posttrain.errors import CheckpointError, ConfigError, DataError
from posttrain.evaluation.grading import Grader, regraded, same_answers, unreadable, verifier_identity, verifier_pool
from posttrain.evaluation.samples import Key, Sample, SampleFile
from posttrain.evaluation.scoring import ProblemScore, Row, score_problems, score_row
from posttrain.evaluation.suites import load_problems
from posttrain.evaluation.votes import vote_classes
from posttrain.file_lock import hold
from posttrain.inference import Backend, Prompt, SamplingOptions, open_backend, prompt_seed
from posttrain.inference.opening import identity_of
from posttrain.inference.server import ServerBackend
from posttrain.rewards.pool import VerifierPool
from posttrain.run_folder import write_text_atomically
from posttrain.runtime.worker import StageStopped, WorkerContext

logger = logging.getLogger(__name__)

STAGE_FOLDERS = {"base": "base", "sft": "sft/final", "grpo": "grpo/final"}
Problems = list[dict[str, Any]]


def evaluate(recipe: Recipe, run_path: Path, context: WorkerContext) -> list[Row]:
    """Evaluate what the recipe names; results go to `eval/<model>/<suite>/` and `eval/results.json`.

    Raises:
        ConfigError: no suites, or nothing to evaluate.
        CheckpointError: a model that cannot be loaded.
        DataError: a suite that cannot be read or scored, or a prompt that does not fit.
        BackendError: a server or engines that cannot go on; what was drawn is kept.
        RunFolderError: another process writes the samples of a suite, or what is on disk is damaged.
        StageStopped: the user asked to stop; what was drawn is kept.
    """
    if not recipe.eval.suites:
        raise ConfigError("eval.suites is empty; name at least one suite, for example `suites: [math500]`")
    models = find_models(recipe, run_path)
    suites = {name: load_problems(name, suite) for name, suite in recipe.eval.suites.items()}
    rows: list[Row] = []
    with verifier_pool(recipe.reward) as pool:
        left_out = {name: unreadable(pool, problems) for name, problems in suites.items()}
        scored = {name: _without(problems, left_out[name], name) for name, problems in suites.items()}
        each = {name: recipe.eval.suites[name].samples or 1 for name in suites}
        progress = Progress(context, len(models) * sum(len(scored[name]) * each[name] for name in suites))
        for model_name, path in models.items():
            with ExitStack() as stack:
                engine = LazyBackend(recipe, path, stack, progress.idle)
                for suite_name, problems in scored.items():
                    folder = Path(run_path) / "eval" / folder_name(model_name) / suite_name
                    progress.begin(model_name, suite_name)
                    # A worker that outlives its killed driver for a moment must not write among the samples of a resumed run.
                    with hold(folder):
                        run = SuiteRun(recipe, recipe.eval.suites[suite_name], problems, folder, engine.model, pool)
                        samples = run.draw(engine.get, progress)
                        rows.append(run.score(model_name, suite_name, samples, left_out[suite_name]))
                    results = json.dumps([row.as_dict() for row in rows], indent=2)
                    write_text_atomically(Path(run_path) / "eval" / "results.json", results)
    return rows


def find_models(recipe: Recipe, run_path: Path) -> dict[str, str]:
    """Model name -> folder, hub id, or the name that a server knows it by.

    Without names: every model that this run's stages have made, else `model.path`. A server serves no folder of this run: its
    models are `eval.models`, or `model.path`.

    Raises:
        CheckpointError: a stage is named whose model does not exist yet, or no stage has run.
        ConfigError: the backend is a server, and the recipe names no model of it.
    """
    if recipe.eval.backend.kind == "openai":
        default = recipe.eval.backend.model or recipe.model.path
        if not recipe.eval.models and not default:
            raise ConfigError("eval.models: the backend is a server; name the model that it serves")
        return {name: name for name in recipe.eval.models or [str(default)]}
    return find_checkpoints(recipe, run_path)


def find_checkpoints(recipe: Recipe, run_path: Path) -> dict[str, str]:
    """Model name -> folder or hub id; see `find_models`."""
    run_path = Path(run_path)
    existing = {name: str(run_path / folder) for name, folder in STAGE_FOLDERS.items() if (run_path / folder).is_dir()}
    if not recipe.eval.models:
        if not existing and recipe.model.path is not None:
            return {recipe.model.path: recipe.model.path}
        if not existing:
            raise CheckpointError(
                f"{run_path}: no stage has made a model yet; run sft or grpo first, or name a checkpoint (model=PATH)"
            )
        return existing
    found = {}
    for name in recipe.eval.models:
        if name in STAGE_FOLDERS and name not in existing:
            raise CheckpointError(
                f"eval.models names {name!r}, but {run_path / STAGE_FOLDERS[name]} does not exist; run that stage first"
            )
        found[name] = existing.get(name, name)
    return found


def served(recipe: Recipe) -> BackendConfig:
    """The backend's section without its own `model`, which `find_models` has read: several may be evaluated on one server."""
    return recipe.eval.backend.model_copy(update={"model": None})


def _without(problems: Problems, left_out: Problems, suite: str) -> Problems:
    names = {row["id"] for row in left_out}
    kept = [row for row in problems if row["id"] not in names]
    if not kept:
        raise DataError(
            f"suite {suite}: none of its {len(problems)} gold answers can be read, e.g. {str(problems[0]['answer'])[:60]!r} of "
            f"{problems[0]['id']}; is `columns.answer` (or `answer_after`) right?"
        )
    for row in left_out:
        logger.warning("suite %s: %s is not scored, for its gold answer %r cannot be read", suite, row["id"], row["answer"])
    return kept


class Progress:
    """Counts samples for the driver's bar, and passes its wish to stop on."""

    def __init__(self, context: WorkerContext, total: int) -> None:
        self.context, self.total, self.done, self.what = context, total, 0, ""

    def begin(self, model: str, suite: str) -> None:
        self.what = f"{model} on {suite}"

    def add(self, samples: int) -> None:
        """Raises StageStopped after Ctrl-C."""
        self.done += samples
        self._report(self.what)

    def idle(self, trouble: str) -> None:
        """While nothing arrives: says why, and raises as `add` does."""
        self._report(f"{self.what}; {trouble}" if trouble else self.what)

    def _report(self, note: str) -> None:
        self.context.report(self.done, self.total, note=note)
        if self.context.stop_requested():
            raise StageStopped(f"evaluation of {self.what} stopped after {self.done} of {self.total} samples")


class LazyBackend:
    """The backend of one model, opened when the first sample is missing; closed with `stack`."""

    def __init__(self, recipe: Recipe, path: str, stack: ExitStack, idle: Callable[[str], None]) -> None:
        self.recipe, self._stack, self._open, self._idle = recipe, stack, None, idle
        revision = recipe.model.revision if path == recipe.model.path else None
        self.model: ModelConfig = recipe.model.model_copy(update={"path": path, "revision": revision, "init": None})

    def get(self) -> Backend:
        if self._open is None:
            from posttrain.runtime.session import gpus_per_worker

            recipe, several = self.recipe, self.recipe.eval.backend.engines > 1
            self._open = open_backend(
                served(recipe),
                self.model,
                max_prompt_length=recipe.data.max_prompt_length,
                max_tokens=max(suite.max_tokens or 1 for suite in recipe.eval.suites.values()),
                max_sequences=recipe.eval.max_sequences or recipe.rollout.max_sequences,
                engine_options=recipe.rollout.engine_options(),
                num_cpus=recipe.ray.cpus_per_worker,
                num_gpus=gpus_per_worker(recipe.ray) if several else 0,
            )
            self._stack.enter_context(closing(self._open))
            if isinstance(self._open, ServerBackend):  # it may be silent for long; engines of ours are not
                self._open.idle = self._idle
        return self._open


class SuiteRun:
    """One model on one suite: what is on disk, what is missing, and the scores."""

    def __init__(
        self, recipe: Recipe, suite: SuiteConfig, problems: Problems, folder: Path, model: ModelConfig, pool: VerifierPool
    ) -> None:
        self.recipe, self.suite, self.pool, self.folder = recipe, suite, pool, folder
        self.rows = {row["id"]: row for row in problems}
        self.each = suite.samples or 1
        self.sampling = SamplingOptions(
            temperature=1.0 if suite.temperature is None else suite.temperature,
            top_p=suite.top_p or 1.0,
            max_tokens=suite.max_tokens or 1,
            stop=tuple(recipe.rollout.stop),
        )
        self.settings = {
            "protocol": self._protocol(),
            "model": {**identity_of(served(recipe), model), "chat_template": model.chat_template},
            "seed": recipe.eval.seed,
            "verifier": verifier_identity(pool),
        }
        self.file = SampleFile(folder, self.settings)

    def _protocol(self) -> dict[str, Any]:
        """What two runs must share to be compared."""
        content = sorted((row["id"], row["problem"], str(row["answer"])) for row in self.rows.values())
        return {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_tokens,
            "stop": list(self.sampling.stop),
            "system_prompt": self.recipe.data.system_prompt,
            "prompt_suffix": self.recipe.data.prompt_suffix,
            "samples": self.each,
            "problems": {
                "count": len(content),
                "digest": hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest(),
            },
        }

    def draw(self, backend: Callable[[], Backend], progress: Progress) -> list[Sample]:
        """All samples of the suite: those on disk, and the missing ones drawn now. In the order of problems and indices."""
        # It says that the suite is finished, under the settings of now.
        (self.folder / "problems.jsonl").unlink(missing_ok=True)
        have = self._read()
        progress.add(len(have))
        prompts = [prompt for row in self.rows.values() if (prompt := self._prompt(row, have)) is not None]
        if prompts:

            def keep(sample: Sample) -> None:
                have[sample.problem_id, sample.sample] = sample
                self.file.append([sample])

            grader = Grader(self.pool, keep, self.recipe.reward.workers)
            with grader, closing(_closable(backend().generate(prompts))) as texts:
                for text in texts:
                    grader.submit(self.rows[text.prompt_id], text)
                    progress.add(1)
        return [have[name, index] for name in self.rows for index in range(self.each)]

    def _read(self) -> dict[Key, Sample]:
        have = self.file.read({name: row["problem"] for name, row in self.rows.items()}, self.each)
        golds = {name: row["answer"] for name, row in self.rows.items()}
        old = [s for s in have.values() if self.file.regrade or s.gold != str(golds[s.problem_id])]
        if old:
            logger.info("%s: %d samples are graded again, for the verifier or their gold answers changed", self.folder, len(old))
            have |= {(sample.problem_id, sample.sample): sample for sample in regraded(self.pool, old, golds)}
            self.file.rewrite(have.values())
        self.file.confirm()
        return have

    def _prompt(self, row: dict[str, Any], have: dict[Key, Sample]) -> Prompt | None:
        missing = tuple(index for index in range(self.each) if (row["id"], index) not in have)
        if not missing:
            return None
        return Prompt(
            id=row["id"],
            messages=tuple(messages(row, self.recipe.data)),
            samples=missing,
            seed=prompt_seed(self.recipe.eval.seed, row["id"]),
            sampling=self.sampling,
        )

    def score(self, model: str, suite: str, samples: Sequence[Sample], left_out: Problems) -> Row:
        """The suite's row; a line a problem goes to problems.jsonl, which says that the suite is finished."""
        votes = partial(vote_classes, equal=partial(same_answers, self.pool))
        problems = score_problems(samples, self.rows, votes)
        self._write(problems)
        return score_row(
            model, suite, problems, seed=self.recipe.eval.seed, unreadable=left_out, protocol=self.settings["protocol"]
        )

    def _write(self, problems: Sequence[ProblemScore]) -> None:
        lines = [json.dumps(problem.as_dict(), ensure_ascii=False) + "\n" for problem in problems]
        write_text_atomically(self.folder / "problems.jsonl", "".join(lines))


def _closable(texts: Any) -> Any:
    """A backend's iterator with `close`; one that is no generator (a test's list) needs none."""
    return texts if hasattr(texts, "close") else (text for text in texts)


def folder_name(model: str) -> str:
    """A model's name as one folder; paths and hub ids carry a short hash, since their last parts may coincide."""
    if model in STAGE_FOLDERS:
        return model
    return f"{Path(model).name}-{hashlib.blake2b(model.encode(), digest_size=4).hexdigest()}"
