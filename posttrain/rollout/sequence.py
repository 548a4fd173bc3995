"""A request on its way through the engine: a Group holds the request, a Sequence each of its started samples.

    waiting Group -> prefill (once) -> Group with its parent slot -> fork -> n running Sequences -> n Completions

Both are mutable bookkeeping of the engine; what leaves it are `StreamedToken` and `Completion`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from posttrain.rollout.random import stream_key
from posttrain.rollout.sampling import Limits
from posttrain.rollout.stop import StopMatcher
from posttrain.types import Completion, FinishReason, Request


@dataclass(frozen=True, kw_only=True)
class StreamedToken:
    """One token as it is sampled. `index` counts within the completion; a restart begins again at 0.

    logprob, plain_logprob: under the distribution that it was drawn from, and under the model's own softmax.
    `finish_reason` is set on the last token of a completion.
    """

    request_id: str
    sample: int
    index: int
    token_id: int
    logprob: float
    plain_logprob: float
    version: int
    finish_reason: FinishReason | None


def check_prompt(request: Request, *, vocab_size: int, max_length: int) -> None:
    """Raises ValueError where the prompt leaves no room for a token or holds an id outside the vocabulary."""
    length = len(request.prompt_ids)
    if length > max_length - 1:
        raise ValueError(
            f"request {request.id}: the prompt has {length} tokens, but max_length={max_length} leaves at most "
            f"{max_length - 1} for it; shorten the prompt or raise max_length"
        )
    lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"request {request.id}: token id {wrong} is outside the vocabulary, 0 to {vocab_size - 1}")


OnToken = Callable[[StreamedToken], None]


@dataclass(eq=False, kw_only=True)
class Group:
    """A request and what is left of it.

    Attributes:
        limit: tokens that a completion may have: max_tokens, or what the context leaves.
        limits: of the request's sampling.
        pending: samples that have no token yet, in order.
        started: unfinished samples that have (or, restored, wait for a slot).
        prefilled: prompt tokens whose state is in `slot`, the parent's slot; both mean nothing while the group waits.
        logits: [vocab] after the prompt's last token, from which every sample draws its first token.
    """

    request: Request
    limit: int
    limits: Limits
    stop: StopMatcher | None
    pending: deque[int]
    started: dict[int, Sequence] = field(default_factory=dict)
    prefilled: int = 0
    slot: int | None = None
    logits: Tensor | None = None

    @property
    def finished(self) -> bool:
        return not self.pending and not self.started


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One started sample. `slot` is None while one waits to go on; its cache then lies in `cached`, or, where that is None, is
    computed again from its tokens.

    in_flight: tokens that were drawn on the device and have not been read yet: 0 or 1 between steps.
    """

    group: Group
    sample: int
    key: int
    slot: int | None = None
    cached: dict[str, Any] | None = None
    in_flight: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    plain_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, group: Group, sample: int) -> Sequence:
        return cls(group=group, sample=sample, key=stream_key(group.request.seed, sample))

    @property
    def drawn(self) -> int:
        """Tokens sampled so far, read or not: the counter of the next random number."""
        return len(self.token_ids) + self.in_flight

    @property
    def inputs(self) -> int:
        """Tokens that the model has seen: the last sampled one has not been an input yet."""
        return len(self.group.request.prompt_ids) + max(0, len(self.token_ids) - 1)

    @property
    def input_ids(self) -> list[int]:
        """Those tokens, [inputs]."""
        return [*self.group.request.prompt_ids, *self.token_ids[:-1]]

    def append(self, token: int, logprob: float, plain_logprob: float, version: int) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.plain_logprobs.append(plain_logprob)
        self.versions.append(version)

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the newest token ends this sample, or None. The end token wins over the length."""
        if self.token_ids[-1] in eos_token_ids:
            return "stop"
        if self.group.stop is not None and self.group.stop.ends(self.token_ids):
            return "stop"
        return "length" if len(self.token_ids) >= self.group.limit else None

    def streamed(self, reason: FinishReason | None) -> StreamedToken:
        """The newest token as an event."""
        return StreamedToken(
            request_id=self.group.request.id,
            sample=self.sample,
            index=len(self.token_ids) - 1,
            token_id=self.token_ids[-1],
            logprob=self.logprobs[-1],
            plain_logprob=self.plain_logprobs[-1],
            version=self.versions[-1],
            finish_reason=reason,
        )

    def completion(self, reason: FinishReason, router_indices: Tensor | None) -> Completion:
        return Completion(
            request_id=self.group.request.id,
            sample=self.sample,
            prompt_ids=self.group.request.prompt_ids,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            plain_logprobs=self.plain_logprobs,
            versions=self.versions,
            finish_reason=reason,
            router_indices=router_indices,
        )
