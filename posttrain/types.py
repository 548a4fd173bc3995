"""What flows through the pipeline: Request -> Completion -> Group.

Every type is frozen and keyword-only. Token ids are plain lists of int: they are the truth from the generator to the loss,
and nothing is decoded and encoded again on the way.

    request    = Request(prompt_ids=[5, 9, 2], n=8, max_tokens=64, seed=17)
    completion = Completion(request_id=request.id, sample=0, prompt_ids=[5, 9, 2], token_ids=[7, 1], ...)
    group      = Group(prompt_ids=[5, 9, 2], completions=(completion, ...), rewards=(1.0, ...), advantages=(0.5, ...))
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
# Names of the rewards that say whether the answer is right.
CORRECTNESS = ("maths", "accuracy")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to sample `n` completions from.

    Attributes:
        prompt_ids: token ids of the prompt, at least one.
        n: completions to draw; the prompt is prefilled once and forked.
        temperature: 0 means greedy; otherwise logits are divided by it.
        top_p, top_k, min_p: usual truncations, in the order temperature, top_k, top_p, min_p; 1.0, 0, 0.0 switch them off.
        max_tokens: completion tokens at most.
        stop: strings that end a completion; the tokens that made up the string are kept.
        seed: with `sample` it keys the random numbers, so that a sample depends on (weights, prompt, seed, parameters) alone.
        id: name of the request, unique among unfinished ones.
    """

    prompt_ids: list[int]
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.id}: the prompt is empty; at least one token id is needed")
        checks = (
            ("n", self.n, self.n >= 1, "at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (greedy) or a finite number above it"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("min_p", self.min_p, 0 <= self.min_p < 1, "in [0, 1)"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "in [0, 2**63)"),
        )
        for name, given, ok, allowed in checks:
            if not ok:
                raise ValueError(f"request {self.id}: {name}={given!r}, but it must be {allowed}")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled continuation; the lists have one entry a token of `token_ids`.

    Attributes:
        sample: index among the `n` completions of its request.
        token_ids: sampled ids, the end-of-sequence token included where it was sampled.
        logprobs: log-probability of each token under the distribution it was drawn from (temperature and truncations applied).
        plain_logprobs: the same under the model's own softmax (temperature 1, nothing cut).
        versions: policy version that produced each token.
        router_indices: int tensor [layers, T, R] over prompt + completion (the last token was never an input), or None.
        finish_reason: "stop" (end token or stop string), "length" (max_tokens or context), "abort".
    """

    request_id: str
    sample: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    plain_logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    router_indices: Any = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True)
class Ratings:
    """What the rewards said of P groups of G: weighted sums `totals` [P][G], `parts` name -> [P][G], None where not judged;
    `flat` [P] marks groups that teach nothing, for no completion of them that is trained on has an advantage; `timeouts`
    verifications were killed. Penalties and advantages come later."""

    totals: list[list[float | None]]
    parts: dict[str, list[list[float | None]]]
    flat: list[bool]
    timeouts: int = 0


@dataclass(frozen=True, kw_only=True)
class Group:
    """All completions of one prompt with their rewards: admitted or refused as a whole, consumed exactly once.

    `rewards[i]` is None where the gold answer could not be read; such a group carries no advantage.
    """

    prompt_ids: list[int]
    completions: tuple[Completion, ...]
    rewards: tuple[float | None, ...]
    advantages: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = {len(self.completions), len(self.rewards), len(self.advantages)}
        if len(sizes) != 1:
            raise ValueError(f"a group needs one reward and one advantage a completion, got sizes {sorted(sizes)}")
