"""Sample, verify and score: every model of a recipe on every suite.

    suite -> problems -> one Request a problem (n samples) -> Generator -> VerifierPool -> samples.jsonl -> Row

A problem's seed is a hash of the evaluation seed and the problem's name, and the generator's samples do not depend on what
else is in the batch: the same seed gives the same table, whatever `max_sequences`, the order, or how often the run was resumed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.config import Recipe, SuiteConfig
from posttrain.errors import CheckpointError, ConfigError, DataError
from posttrain.evaluation.samples import Sample, SampleFile
from posttrain.evaluation.suites import load_problems
from posttrain.evaluation.table import Row, score
from posttrain.rewards.extract import find_answer
from posttrain.rewards.pool import VerifierPool
from posttrain.run_folder import write_text_atomically
from posttrain.runtime.worker import StageStopped, WorkerContext
from posttrain.types import Completion, Request

logger = logging.getLogger(__name__)

STAGE_FOLDERS = {"base": "base", "sft": "sft/final", "grpo": "grpo/final"}


def evaluate(recipe: Recipe, run_path: Path, context: WorkerContext) -> list[Row]:
    """Evaluate what the recipe names; results go to `eval/<model>/<suite>/samples.jsonl` and `eval/results.json`.

    Raises:
        ConfigError: no suites, or nothing to evaluate.
        CheckpointError: a model that cannot be loaded.
        DataError: a suite that cannot be read, or a prompt that does not fit.
        StageStopped: the user asked to stop; finished problems are kept.
    """
    if not recipe.eval.suites:
        raise ConfigError("eval.suites is empty; name at least one suite, for example `suites: [math500]`")
    checkpoints = find_checkpoints(recipe, run_path)
    suites = {name: load_problems(name, suite) for name, suite in recipe.eval.suites.items()}
    total = len(checkpoints) * sum(len(problems) for problems in suites.values())
    rows: list[Row] = []
    done = 0
    with VerifierPool(recipe.reward.workers, recipe.reward.timeout_s, recipe.reward.memory_mb) as pool:
        for model_name, checkpoint in checkpoints.items():
            sampler = ModelSampler(recipe, checkpoint, pool)
            for suite_name, problems in suites.items():
                folder = Path(run_path) / "eval" / _folder_name(model_name) / suite_name

                def progress(
                    finished: int, model_name: str = model_name, suite_name: str = suite_name, before: int = done
                ) -> None:
                    context.report(before + finished, total, note=f"{model_name} on {suite_name}")
                    if context.stop_requested():
                        raise StageStopped(f"evaluation of {model_name} on {suite_name} stopped after {finished} problems")

                samples = sampler.run(problems, recipe.eval.suites[suite_name], folder, progress)
                rows.append(score(model_name, suite_name, samples, seed=recipe.eval.seed))
                done += len(problems)
                results = json.dumps([row.as_dict() for row in rows], indent=2)
                write_text_atomically(Path(run_path) / "eval" / "results.json", results)
    return rows


def find_checkpoints(recipe: Recipe, run_path: Path) -> dict[str, str]:
    """Model name -> folder or hub id. Without names: every model that this run's stages have made, else `model.path`.

    Raises:
        CheckpointError: a stage is named whose model does not exist yet, or no stage has run.
    """
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


class ModelSampler:
    """One model, loaded once, that samples suites. `run` resumes where the suite's file ends."""

    def __init__(self, recipe: Recipe, checkpoint: str, pool: VerifierPool) -> None:
        import torch

        from posttrain.data.tokenizer import load_tokenizer
        from posttrain.models.loading import load_model

        self.recipe, self.checkpoint, self.pool = recipe, checkpoint, pool
        model_config = recipe.model.model_copy(
            update={"path": checkpoint, "init": None, "tokenizer": recipe.model.tokenizer or checkpoint}
        )
        if Path(checkpoint, "tokenizer_config.json").exists():
            model_config = model_config.model_copy(update={"tokenizer": checkpoint})
        self.tokenizer = load_tokenizer(model_config)
        self.model = load_model(
            checkpoint,
            dtype=recipe.model.dtype,
            trust_remote_code=recipe.model.trust_remote_code,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )

    def run(
        self, problems: list[dict[str, Any]], suite: SuiteConfig, folder: Path, progress: Callable[[int], None]
    ) -> list[Sample]:
        """All samples of a suite, in the order of its problems."""
        file = SampleFile(folder, self._settings(suite))
        done = file.read(suite.samples or 1)
        names = [row["id"] for row in problems]
        done = {name: done[name] for name in names if name in done}
        progress(len(done))
        waiting = {row["id"]: row for row in problems if row["id"] not in done}
        if waiting:
            self._sample(waiting, suite, done, file, progress)
        return [sample for name in names for sample in done[name]]

    def _sample(self, waiting: dict, suite: SuiteConfig, done: dict, file: SampleFile, progress: Callable[[int], None]) -> None:
        requests = [self._request(row, suite) for row in waiting.values()]
        generator = self._generator(requests)
        for request in requests:
            generator.submit(request)
        arrived: dict[str, list[Completion]] = {}
        while len(arrived) < len(requests) or any(len(group) < (suite.samples or 1) for group in arrived.values()):
            ready = []
            for completion in generator.step():
                group = arrived.setdefault(completion.request_id, [])
                group.append(completion)
                if len(group) == (suite.samples or 1):
                    ready.append(completion.request_id)
            if not ready:
                continue
            graded = self._grade([(waiting[name], completion) for name in ready for completion in arrived[name]])
            file.append(graded)
            for sample in graded:
                done.setdefault(sample.problem_id, []).append(sample)
            progress(len(done))

    def _request(self, row: dict[str, Any], suite: SuiteConfig) -> Request:
        from posttrain.data.chat import prompt_ids

        return Request(
            id=row["id"],
            prompt_ids=prompt_ids(self.tokenizer, row, self.recipe.data),
            n=suite.samples or 1,
            temperature=1.0 if suite.temperature is None else suite.temperature,
            top_p=suite.top_p or 1.0,
            max_tokens=suite.max_tokens or 1,
            stop=tuple(self.recipe.rollout.stop),
            seed=problem_seed(self.recipe.eval.seed, row["id"]),
        )

    def _generator(self, requests: list[Request]):
        from posttrain.data.tokenizer import eos_token_ids
        from posttrain.rollout import Generator

        most = max(requests, key=lambda request: len(request.prompt_ids) + request.max_tokens)
        longest = len(most.prompt_ids) + most.max_tokens
        context = getattr(self.model.config, "max_position_embeddings", None)
        if context is not None and longest > context:
            raise DataError(
                f"row {most.id}: its prompt of {len(most.prompt_ids)} tokens and max_tokens {most.max_tokens} make {longest}, "
                f"above the model's context of {context} (max_position_embeddings); lower eval.max_tokens"
            )
        return Generator(
            self.model,
            eos_token_ids=eos_token_ids(self.tokenizer, self.model),
            tokenizer=self.tokenizer,
            max_sequences=self.recipe.eval.max_sequences or self.recipe.rollout.max_sequences,
            max_length=longest,
            max_prefill_tokens=self.recipe.rollout.max_prefill_tokens,
        )

    def _grade(self, pairs: list[tuple[dict[str, Any], Completion]]) -> list[Sample]:
        texts = [str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)) for _, completion in pairs]
        verdicts = self.pool.verify([(row["answer"], text) for (row, _), text in zip(pairs, texts, strict=True)])
        graded = []
        for (row, completion), text, verdict in zip(pairs, texts, verdicts, strict=True):
            answer = find_answer(text)
            graded.append(
                Sample(
                    problem_id=row["id"],
                    sample=completion.sample,
                    correct=verdict.correct,
                    reason=verdict.reason,
                    gold=str(row["answer"]),
                    # A tail is where math-verify looked for an answer, not an answer: it cannot be counted as a vote.
                    answer=" ".join(answer.text.split()) if answer is not None and answer.kind != "tail" else None,
                    length=len(completion.token_ids),
                    finish_reason=completion.finish_reason,
                    mean_logprob=sum(completion.plain_logprobs) / max(1, len(completion.plain_logprobs)),
                    problem=row["problem"],
                    text=text,
                )
            )
        return sorted(graded, key=lambda sample: (sample.problem_id, sample.sample))

    def _settings(self, suite: SuiteConfig) -> dict[str, Any]:
        """What a sample depends on; samples drawn under anything else are not reused."""
        return {
            "checkpoint": self.checkpoint,
            "weights": _weights_stamp(self.checkpoint),
            "dtype": self.recipe.model.dtype,
            "suite": suite.model_dump(mode="json", exclude={"limit"}),
            "seed": self.recipe.eval.seed,
            "stop": self.recipe.rollout.stop,
            "system_prompt": self.recipe.data.system_prompt,
            "prompt_suffix": self.recipe.data.prompt_suffix,
        }


def problem_seed(seed: int, problem_id: str) -> int:
    """A problem's own seed in [0, 2**63), from the evaluation seed and its name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{problem_id}".encode(), digest_size=8).digest(), "big") >> 1


def _weights_stamp(checkpoint: str) -> list[list[Any]]:
    """Names, sizes and times of the weight files: changes when a checkpoint is written again; empty for hub ids."""
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(Path(checkpoint).glob("*.safetensors"))]


def _folder_name(model: str) -> str:
    """A model's name as one folder; paths and hub ids carry a short hash, since their last parts may coincide."""
    if model in STAGE_FOLDERS:
        return model
    return f"{Path(model).name}-{hashlib.blake2b(model.encode(), digest_size=4).hexdigest()}"
