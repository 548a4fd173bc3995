"""Answers as JSON: whole ones and the chunks of a stream, for both routes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.rollout import StreamedToken
from posttrain.serve.engine_thread import Job
from posttrain.serve.errors import ApiError
from posttrain.serve.text import TextStream, final_text, token_text
from posttrain.types import Completion, FinishReason

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all answers to one request have in common.

    Attributes:
        chat: which of the two routes' forms.
        logprobs: whether tokens come with log-probabilities, those of the model's own softmax.
        stop: the request's stop strings.
        include_usage: whether a stream ends with a count of tokens.
    """

    chat: bool
    id: str
    created: int
    model: str
    tokenizer: Any
    logprobs: bool
    stop: tuple[str, ...]
    include_usage: bool = False

    def whole(self, job: Job, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer to a request that does not stream; `completions` are all of the job's, in any order."""
        choices = [self._whole_choice(job.choice(one), one) for one in sorted(completions, key=job.choice)]
        content = self._envelope("chat.completion" if self.chat else "text_completion", choices)
        return content | {"usage": usage(job, sum(len(one.token_ids) for one in completions))}

    def _whole_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        text = final_text(self.tokenizer, completion.token_ids, self.stop, completion.finish_reason)
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        logprobs = self._logprobs(completion.token_ids, completion.plain_logprobs, self._offsets(completion))
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    def _offsets(self, completion: Completion) -> list[int]:
        """Where each token's text begins; asked for by the completions route alone."""
        if self.chat or not self.logprobs:
            return []
        stream, offsets = TextStream(self.tokenizer, self.stop), []
        for token in completion.token_ids:
            offsets.append(len(stream.text))
            stream.feed(token)
        return offsets

    def chunk(self, choices: list[dict[str, Any]], counted: dict[str, int] | None = None) -> str:
        """A server-sent event."""
        content = self._envelope("chat.completion.chunk" if self.chat else "text_completion", choices)
        return event(content | ({"usage": counted} if self.include_usage else {}))

    def piece(
        self,
        index: int,
        text: str,
        *,
        first: bool,
        token: tuple[int, float, int] | None,
        finish_reason: FinishReason | None = None,
    ) -> str:
        """A chunk of one choice; `token` is its id, its log-probability and where its text begins."""
        said: dict[str, Any] = {"text": text}
        if self.chat:
            delta = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
            said = {"delta": delta}
        logprobs = None
        if token is not None:
            token_id, logprob, offset = token
            logprobs = self._logprobs([token_id], [logprob], [offset])
        return self.chunk([{"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}])

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, ids: Sequence[int], values: Sequence[float], offsets: Sequence[int]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        texts = [token_text(self.tokenizer, token) for token in ids]
        if not self.chat:
            return {"tokens": texts, "token_logprobs": list(values), "top_logprobs": None, "text_offset": list(offsets)}
        entries = [
            # A lone token may be part of a character: its bytes are not known then.
            {"token": text, "logprob": value, "bytes": None if "\ufffd" in text else list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, values, strict=True)
        ]
        return {"content": entries, "refusal": None}


@dataclass(eq=False)
class _Choice:
    stream: TextStream
    begun: bool = field(default=False)


async def stream(form: Form, job: Job) -> AsyncIterator[str]:
    """The events of a job as server-sent events, to the last one; an error ends them."""
    choices = {i: _Choice(TextStream(form.tokenizer, form.stop)) for i in range(len(job.requests) * job.requests[0].n)}
    left, tokens = len(choices), 0
    while left:
        happened = await job.events.get()
        if isinstance(happened, ApiError):
            yield event(happened.content())
            return
        index = job.choice(happened)
        choice = choices[index]
        first, offset = not choice.begun, len(choice.stream.text)
        if isinstance(happened, StreamedToken):
            text = choice.stream.feed(happened.token_id)
            token = (happened.token_id, happened.plain_logprob, offset) if form.logprobs else None
            if not (text or first or form.logprobs):
                continue
            chunk = form.piece(index, text, first=first, token=token)
        else:
            left, tokens = left - 1, tokens + len(happened.token_ids)
            rest = choice.stream.finish(happened.token_ids, happened.finish_reason)
            token = (happened.token_ids[-1], happened.plain_logprobs[-1], offset) if form.logprobs else None
            chunk = form.piece(index, rest, first=first, token=token, finish_reason=happened.finish_reason)
        choice.begun = True
        yield chunk
    if form.include_usage:
        yield form.chunk([], usage(job, tokens))
    yield DONE


async def completions(job: Job) -> list[Completion]:
    """All completions of a job, in the order in which they finish.

    Raises:
        ApiError: the engine gave the job up.
    """
    found: list[Completion] = []
    while len(found) < len(job.requests) * job.requests[0].n:
        happened = await job.events.get()
        if isinstance(happened, ApiError):
            raise happened
        if isinstance(happened, Completion):
            found.append(happened)
    return found


def usage(job: Job, completion_tokens: int) -> dict[str, int]:
    """Tokens of every prompt once, and of all its samples."""
    prompts = sum(len(request.prompt_ids) for request in job.requests)
    return {"prompt_tokens": prompts, "completion_tokens": completion_tokens, "total_tokens": prompts + completion_tokens}


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
