"""Any OpenAI-compatible server (vLLM, SGLang, llama.cpp, hosted ones) as a backend, over the chat or the completions route.

    prompts -> `concurrency` threads, one request a sample -> queue -> Texts in the order of arrival

A sample is a request of its own (n=1) with its own seed: a resumed run asks for exactly what is missing, a failure costs one
sample, and servers that know no `n` will do. What is temporary (429, 5xx, a lost connection, a timeout, an answer without JSON)
is tried again after a pause that doubles, with jitter, so that clients don't return all at once.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from posttrain.inference.post import Poster
from posttrain.inference.protocol import BackendError, FinishReason, Prompt, Text, sample_seed

logger = logging.getLogger(__name__)

# Those that HTTP calls temporary, and 529, with which some hosts say that they are overloaded.
TEMPORARY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# Without an answer for so long, whoever reads them is asked whether to go on.
IDLE_S = 1.0
FINISH: dict[Any, FinishReason] = {"stop": "stop", "length": "length", "eos": "stop", "stop_sequence": "stop"}
# Refusals that may be about one request alone, such as a prompt beyond the server's context.
OF_ONE_REQUEST = frozenset({400, 413, 422})
Job = tuple[Prompt, int]


class ServerBackend:
    """One model behind one address.

    Args:
        base_url: up to and with /v1.
        model: the name that the server knows the model by.
        api: "chat" sends messages; "completions" sends text.
        render: messages -> text for the completions route; by default their contents, joined by empty lines.
        api_key: sent as a bearer token; it never appears in a message or a log.
        concurrency: requests at once.
        timeout_s: longest time of a request, from its start to the last byte of the answer.
        retries: attempts after the first one.
        logprobs: ask for log-probabilities; given up for good when the server refuses them.
        token_limit: field of the request that holds the most tokens.
        extra_body: further fields of each request.
        keep_refusals: hand out a sample that is refused by itself (400, 413, 422) as "refused" instead of ending the call.
        first_pause_s: pause before the second attempt.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api: Literal["chat", "completions"] = "chat",
        render: Callable[[tuple[dict[str, str], ...]], str] | None = None,
        api_key: str | None = None,
        concurrency: int = 64,
        timeout_s: float = 1800.0,
        retries: int = 6,
        logprobs: bool = False,
        token_limit: str = "max_tokens",
        extra_body: dict[str, Any] | None = None,
        keep_refusals: bool = False,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.base_url, self.model, self.api = base_url.rstrip("/"), model, api
        self.concurrency, self.retries, self.first_pause_s = concurrency, retries, first_pause_s
        self.token_limit, self.extra_body = token_limit, dict(extra_body or {})
        self._asks_logprobs, self._keep_refusals = logprobs, keep_refusals
        # Called every second in which nothing arrives, with the latest failure or "": it may raise, which ends generate().
        self.idle: Callable[[str], None] | None = None
        self._trouble = ""
        self._render = render or (lambda messages: "\n\n".join(turn["content"] for turn in messages))
        self._secret = api_key
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._poster = Poster(headers=headers, timeout_s=timeout_s, connections=concurrency)

    def identity(self) -> dict[str, Any]:
        """Without the address: a server that comes back on another port serves the same model."""
        return {"kind": "openai", "model": self.model, "api": self.api, "extra_body": self.extra_body}

    def close(self) -> None:
        self._poster.close()

    def generate(self, prompts: Iterable[Prompt]) -> Iterator[Text]:
        """See `Backend.generate`. The order is that of arrival.

        Raises:
            BackendError: a request was refused, or failed `retries` + 1 times. The answers that had arrived are handed out first.
        """
        work = _Work(prompts)
        threads = [threading.Thread(target=self._serve, args=(work,), daemon=True) for _ in range(self.concurrency)]
        try:
            for thread in threads:
                thread.start()
            left = len(threads)
            while left:
                try:
                    text = work.done.get(timeout=IDLE_S)
                except queue.Empty:
                    if self.idle is not None:
                        self.idle(self._trouble)
                    continue
                if text is None:
                    left -= 1
                else:
                    self._trouble = ""
                    yield text
            if work.error is not None:
                raise work.error
        finally:
            work.stop.set()

    def _serve(self, work: _Work) -> None:
        """Body of a thread: take a sample, ask for it, hand it over; until there are none left, or one of the threads failed."""
        try:
            while not work.stop.is_set() and (job := work.take()) is not None:
                text = self._ask(*job, work.stop)
                if text is not None:
                    work.done.put(text)
        except BaseException as error:  # noqa: BLE001 - handed to the caller of generate(), who raises it
            work.fail(error)
        finally:
            work.done.put(None)

    def _ask(self, prompt: Prompt, sample: int, stop: threading.Event) -> Text | None:
        """One sample, tried until it is there; None where `stop` was set meanwhile."""
        name = f"sample {sample} of {prompt.id}"
        failure = Failure("")
        for attempt in range(self.retries + 1):
            if attempt and stop.wait(self._pause(attempt, failure.delay)):
                return None
            outcome = self._attempt(prompt, sample, name)
            if isinstance(outcome, Text):
                return outcome
            failure = outcome
            if stop.is_set():
                return None
            logger.warning("%s: attempt %d of %d failed: %s", name, attempt + 1, self.retries + 1, failure.reason)
            self._trouble = f"attempt {attempt + 1} of {self.retries + 1} failed: {failure.reason}"
        raise BackendError(
            f"the server {self._place()} failed {self.retries + 1} times on {name}, at last with: {failure.reason}. "
            "What arrived is kept; look at the server, then continue with --resume"
        )

    def _attempt(self, prompt: Prompt, sample: int, name: str) -> Text | Failure:
        asked = self._asks_logprobs
        try:
            answer = self._poster.post(f"{self.base_url}{self._route()}", self._body(prompt, sample, asked))
        except (
            httpx.RequestError,
            TimeoutError,
        ) as error:  # refused, lost, too slow, or a body that cannot be unpacked
            return Failure(f"{type(error).__name__}: {error}")
        if answer.status_code in TEMPORARY:
            return Failure(f"HTTP {answer.status_code}: {self._said(answer)}", _seconds(answer.headers.get("retry-after")))
        if answer.is_redirect:
            raise BackendError(
                f"the server {self._place()} sends {name} on to {answer.headers.get('location')!r} (HTTP {answer.status_code}); "
                "set base_url to where the API is, up to and with /v1"
            )
        if answer.status_code >= 400:
            if asked and "logprob" in answer.text.lower():
                self._without_logprobs(self._said(answer))
                return self._attempt(prompt, sample, name)
            if self._keep_refusals and answer.status_code in OF_ONE_REQUEST:
                said = f"HTTP {answer.status_code}: {self._said(answer)}"
                return Text(prompt_id=prompt.id, sample=sample, text=said, finish_reason="refused")
            raise BackendError(self._refusal(answer, name))
        try:
            return self._text(prompt, sample, answer.json())
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            return Failure(f"an answer that is not OpenAI's ({type(error).__name__}: {error}): {self._said(answer)}")

    def _route(self) -> str:
        return "/chat/completions" if self.api == "chat" else "/completions"

    def _body(self, prompt: Prompt, sample: int, logprobs: bool) -> dict[str, Any]:
        sampling = prompt.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self.token_limit: sampling.max_tokens,
            "seed": sample_seed(prompt.seed, sample),
            "n": 1,
        }
        # Not in OpenAI's own protocol: sent only where they say something.
        body |= {key: value for key, value in (("top_k", sampling.top_k), ("min_p", sampling.min_p)) if value}
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if self.api == "chat":
            body["messages"] = list(prompt.messages)
            body |= {"logprobs": True} if logprobs else {}
        else:
            body["prompt"] = self._render(prompt.messages)
            body |= {"logprobs": 1} if logprobs else {}
        return body | self.extra_body

    def _text(self, prompt: Prompt, sample: int, answer: dict[str, Any]) -> Text:
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        listed: Any
        if self.api == "chat":
            message = choice["message"]
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            text = with_reasoning(_written(reasoning), _written(message.get("content")))
            entries = (choice.get("logprobs") or {}).get("content") or []
            listed = [entry["logprob"] for entry in entries]
        else:
            text = _written(choice["text"])
            # the first entry of an echoed prompt has none
            listed = [value for value in (choice.get("logprobs") or {}).get("token_logprobs") or [] if value is not None]
        # NaN, which some servers send, is no JSON: it would make the line on disk unreadable to others
        usable = all(isinstance(value, int | float) and math.isfinite(value) for value in listed)
        logprobs = tuple(map(float, listed)) if usable else ()
        tokens = _whole(usage.get("completion_tokens"))
        return Text(
            prompt_id=prompt.id,
            sample=sample,
            text=text,
            finish_reason=FINISH.get(choice.get("finish_reason"), "abort"),
            tokens=len(logprobs) or None if tokens is None else tokens,
            prompt_tokens=_whole(usage.get("prompt_tokens")),
            mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
            logprobs=logprobs or None,
        )

    def _without_logprobs(self, said: str) -> None:
        logger.warning("the server %s gives no log-probabilities (%s): going on without them", self._place(), said)
        self._asks_logprobs = False

    def _pause(self, attempt: int, asked: float | None) -> float:
        """Seconds before an attempt: what the server asked for, else doubling with jitter (half to all of the pause)."""
        longest = min(LONGEST_PAUSE_S, self.first_pause_s * 2 ** (attempt - 1))
        return min(asked, LONGEST_PAUSE_S) if asked is not None else longest * random.uniform(0.5, 1.0)

    def _refusal(self, answer: httpx.Response, name: str) -> str:
        said = f"the server {self._place()} refused {name} (HTTP {answer.status_code}): {self._said(answer)}"
        hints = {
            401: "; the key in the variable named by api_key_env is missing or wrong",
            403: "; the key in the variable named by api_key_env may not use this model",
            404: f"; is {self.model!r} the name that the server lists under {self.base_url}/models?",
            413: "; lower max_tokens",
        }
        return said + hints.get(answer.status_code, "")

    def _said(self, answer: httpx.Response) -> str:
        """The server's own words, short, without the key: some servers repeat it in their error."""
        said = answer.text
        with suppress(ValueError, AttributeError, TypeError, RecursionError):
            content = json.loads(said)
            error = content.get("error", content)
            said = str(error.get("message", error) if isinstance(error, dict) else error)
        if self._secret:
            said = said.replace(self._secret, "***")
        said = "".join(letter if letter.isprintable() else " " for letter in said[:2000])
        return " ".join(said.split())[:300] or "(no text)"

    def _place(self) -> str:
        return urlsplit(self.base_url).netloc


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed, and the pause in seconds that the server asked for, if any."""

    reason: str
    delay: float | None = None


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After as seconds; None where it is absent or a date (our own pause will do)."""
    try:
        return max(0.0, float(retry_after or ""))
    except ValueError:
        return None


def _written(content: Any) -> str:
    """A message's content as text that a file can hold: a string, or a list of text blocks; half a surrogate pair is replaced.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(content, list):
        content = "".join(block["text"] for block in content if block.get("type", "text") == "text")
    if content is not None and not isinstance(content, str):
        raise TypeError(f"the content is of type {type(content).__name__}")
    return (content or "").encode("utf-8", "replace").decode("utf-8")


def _whole(count: Any) -> int | None:
    """A count of tokens; None where the server gives none, or something else."""
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None


def with_reasoning(reasoning: str | None, content: str | None) -> str:
    """Reasoning that the server parsed out goes back in front, so that what is counted and verified is all that was written."""
    if not reasoning:
        return content or ""
    return f"<think>\n{reasoning}\n</think>\n\n{content}" if content else f"<think>\n{reasoning}"


class _Work:
    """What the threads of one `generate` share: samples to ask for, answers, and the first error."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._jobs = ((prompt, sample) for prompt in prompts for sample in prompt.samples)
        self._lock = threading.Lock()
        self.done: queue.SimpleQueue[Text | None] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.error: BaseException | None = None

    def take(self) -> Job | None:
        with self._lock:
            return next(self._jobs, None)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
        self.stop.set()
