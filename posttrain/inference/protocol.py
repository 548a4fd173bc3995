"""What evaluation and distillation ask of whatever writes completions: our engine, vLLM, or a server.

    prompts = [Prompt(id="aime24-3", messages=({"role": "user", "content": "..."},), samples=(0, 1, 2), seed=71)]
    for text in backend.generate(prompts):      # in the order in which they finish
        text.prompt_id, text.sample, text.text, text.finish_reason

A sample's random numbers come from (`Prompt.seed`, sample index) alone, never from its place in a batch: a caller that has some
of the samples already asks for the missing ones by their indices and gets what it would have got.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from posttrain.errors import PosttrainError

# "refused": the server takes everything but this request; only from a backend that was asked to keep refusals.
FinishReason = Literal["stop", "length", "abort", "refused"]


class BackendError(PosttrainError):
    """A backend that cannot go on: what it finished has been handed out, and asking for the rest later is safe."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How completions are drawn; 1.0, 0 and 0.0 switch `top_p`, `top_k` and `min_p` off, temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation to continue, and which of its samples to draw.

    Attributes:
        id: name of the prompt, unique in a call.
        messages: {"role", "content"} turns; the backend applies the chat template (its tokenizer's, or the server's own).
        samples: indices of the samples to draw, each from random numbers of its own.
        seed: of the prompt, in [0, 2**63); see `prompt_seed`.
    """

    id: str
    messages: tuple[dict[str, str], ...]
    samples: tuple[int, ...] = (0,)
    seed: int = 0
    sampling: SamplingOptions = SamplingOptions()

    def __post_init__(self) -> None:
        if not self.samples or len(set(self.samples)) != len(self.samples) or min(self.samples) < 0:
            raise ValueError(f"prompt {self.id}: samples={self.samples!r}, but they must be different indices, at least one")


@dataclass(frozen=True, kw_only=True)
class Text:
    """One completion as text.

    Attributes:
        text: without special tokens; a reasoning part that a server returns beside the answer stands in front, in <think> tags.
            Of a refused sample: the server's reason.
        tokens: completion tokens, the end token included where it is known; None where the server doesn't say.
        mean_logprob: mean log-probability of the tokens under the model's own softmax; None where there are none.
        token_ids, logprobs: one entry a token, where the backend has them.
    """

    prompt_id: str
    sample: int
    text: str
    finish_reason: FinishReason
    tokens: int | None = None
    prompt_tokens: int | None = None
    mean_logprob: float | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None


class Backend(Protocol):
    """Writes completions of one model."""

    def generate(self, prompts: Iterable[Prompt]) -> Iterator[Text]:
        """Draws every sample of every prompt and hands each out as it finishes, in any order, exactly once.

        `prompts` is read lazily, no further than the backend has room for: several backends may share one queue.
        Leaving the iterator early drops what is unfinished.

        Raises:
            BackendError: the server or engine cannot go on; what was handed out before stays valid.
            DataError: a prompt that this model cannot take (too long, special tokens in it), named.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """What the samples depend on besides the prompt: kind, model, revision or weights' stamp. JSON values, no secrets."""
        ...

    def close(self) -> None:
        """Frees memory, connections and processes; may be called twice."""
        ...


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A prompt's own seed in [0, 2**63), from the run's seed and its name: independent of the order and of the other prompts."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=8).digest(), "big") >> 1


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one sample in [0, 2**31), for engines and servers that take one number a request (OpenAI's `seed`, vLLM's)."""
    return int.from_bytes(hashlib.blake2b(f"{seed}#{sample}".encode(), digest_size=8).digest(), "big") >> 33


def weights_stamp(path: str) -> list[list[Any]]:
    """Names, sizes and times of the weight files: changes when a checkpoint is written again; empty for hub ids."""
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(Path(path).glob("*.safetensors"))]


def local_identity(kind: str, path: str, dtype: str, revision: str | None) -> dict[str, Any]:
    """`Backend.identity` of an engine that loads the weights itself; `revision` only where one is named."""
    named = {} if revision is None else {"revision": revision}
    return {"kind": kind, "model": path, **named, "weights": weights_stamp(path), "dtype": dtype}
