"""An engine without a model, for the actors around it: a token says which weights it was drawn under."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.grpo.sampler import PromptSampler
from posttrain.grpo.scoring import Scorer
from posttrain.grpo.split.generator import Workbench
from posttrain.grpo.split.plan import Plan
from posttrain.rewards.registry import Reward, RewardSet
from posttrain.types import Completion, Request

TOKENS = 6
STEP_S = 0.01


class ScriptedEngine:
    """A sample is TOKENS tokens, one a step; a token's id is the weight `w` then. Stuck while `folder/stuck` is there."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._version, self._weight = folder, -1, -1
        self._running: dict[str, tuple[Request, list[int], list[int]]] = {}

    def submit(self, request: Request) -> str:
        self._running[request.id] = (request, [], [])
        return request.id

    def abort(self, request_id: str) -> bool:
        return self._running.pop(request_id, None) is not None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def update_weights(self, version: int, state_dict: Any = None) -> None:
        self._version, self._weight = version, int(state_dict["w"])

    def step(self) -> list[Completion]:
        time.sleep(STEP_S)
        done: list[Completion] = []
        if (self._folder / "stuck").exists():
            return done
        for name, (request, tokens, versions) in list(self._running.items()):
            tokens.append(self._weight)
            versions.append(self._version)
            if len(tokens) == TOKENS:
                del self._running[name]
                done += [self._completion(request, sample, tokens, versions) for sample in reversed(range(request.n))]
        return done

    @staticmethod
    def _completion(request: Request, sample: int, tokens: list[int], versions: list[int]) -> Completion:
        return Completion(
            request_id=request.id,
            sample=sample,
            prompt_ids=request.prompt_ids,
            token_ids=tokens,
            logprobs=[request.seed % 1000 / 1000] * TOKENS,
            plain_logprobs=[0.0] * TOKENS,
            versions=versions,
            finish_reason="stop",
        )


def open_scripted(folder: str, name: str) -> Workbench:
    return Workbench(engine=ScriptedEngine(Path(folder)), shapes={"w": ()}, max_sequences=4)


def answer_is_prompt(prompts: list[str], completions: list[str], *, answer: list[str], **_: Any) -> list[float | None]:
    return [float(gold == prompt) for gold, prompt in zip(answer, prompts, strict=True)]


def open_scripted_scorer(number: int) -> Scorer:
    return Scorer(
        RewardSet([Reward(name="same", function=answer_is_prompt)]), lambda ids: [" ".join(map(str, one)) for one in ids]
    )


def scripted_plan(batches: int) -> Plan:
    """Two groups of two a batch, of seven prompts in shuffled order."""
    prompts = [
        {"prompt_index": n, "prompt": f"p{n}", "prompt_ids": [n + 1], "answer": f"p{n}" if n % 2 else "other"} for n in range(7)
    ]
    sampler = PromptSampler(7, prompts_per_batch=2, num_generations=2, repeat_count=1, num_batches=batches, shuffle=True, seed=3)
    sampling = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=TOKENS, stop=(), run_seed=3)
    return Plan(prompts=prompts, sampler=sampler, groups_per_batch=2, num_batches=batches, num_generations=2, sampling=sampling)


def opener(folder: Path) -> Any:
    return partial(open_scripted, str(folder))


def hang(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    time.sleep(3600)
    return [None for _ in completions]


def hanging_scorer(number: int) -> Scorer:
    return Scorer(RewardSet([Reward(name="hang", function=hang)]), lambda ids: [" ".join(map(str, one)) for one in ids])
