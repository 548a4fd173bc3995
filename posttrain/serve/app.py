"""The routes: /v1/completions, /v1/chat/completions, /v1/models, /health."""

from __future__ import annotations

import asyncio
import copy
import hmac
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from posttrain.data.chat import conversation_ids, special_tokens
from posttrain.errors import PosttrainError
from posttrain.serve.answers import Form, completions, stream
from posttrain.serve.body import Body, ChatBody, CompletionBody, read
from posttrain.serve.engine_thread import EngineThread, Job, reason
from posttrain.serve.errors import ApiError, bad_request
from posttrain.types import Request

MAX_BODY_BYTES = 16 * 2**20
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for the completions route; a chat's default is what the context leaves
CLIENT_GONE = 499  # nginx's number; nobody reads it


class Service:
    """What the routes share.

    Args:
        engine: not started yet.
        tokenizer: with a chat template.
        name: by which clients ask for the model.
        max_length: prompt and completion tokens together.
        api_key: bearer token to ask for, or None.
    """

    def __init__(self, engine: EngineThread, tokenizer: Any, *, name: str, max_length: int, api_key: str | None = None) -> None:
        self.engine, self.tokenizer, self.name, self.max_length = engine, tokenizer, name, max_length
        self.created = int(time.time())
        self._api_key = api_key
        # Encoding may set options inside a tokenizer while others decode with it: it has its own, and one thread.
        self._encoding = copy.deepcopy(tokenizer)
        self._special = special_tokens(tokenizer)
        # No text of more characters can be a prompt that fits, with room for what a normaliser takes out.
        self._longest_text = 4 * max_length * max(map(len, tokenizer.get_vocab()), default=1)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="posttrain-encode")

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.engine.stop)
            self._encoder.shutdown(cancel_futures=True)

    async def authorise(self, http: HttpRequest) -> None:
        """Raises ApiError 401 where a key is asked for and another one, or none, was given."""
        if self._api_key is None:
            return
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        # latin-1 is how headers are decoded; the comparison takes as long wherever they differ.
        same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._api_key.encode())
        if scheme.lower() != "bearer" or not same:
            message = "the key is missing or wrong; send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    # -- routes -------------------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        engine = self.engine
        state = {"status": "ok" if engine.failure is None else "failed"}
        running = engine.generator.num_running
        counts = {"running": running, "open": engine.open_samples, "limit": engine.capacity}
        return JSONResponse(state | counts, 200 if engine.failure is None else 503)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._card())

    async def completions(self, http: HttpRequest) -> Response:
        body = read(CompletionBody, await json_body(http))
        self._check_model(body.model)
        prompts = body.prompts()
        self.engine.check_fits(len(prompts) * body.n)  # before any of them is encoded
        self._check_length((one for one in prompts if isinstance(one, str)), "prompt")
        encoded = [await self._encode(self._text_ids, one, body) if isinstance(one, str) else one for one in prompts]
        return await self._answer(http, body, encoded, default_limit=DEFAULT_COMPLETION_TOKENS)

    async def chat(self, http: HttpRequest) -> Response:
        body = read(ChatBody, await json_body(http))
        self._check_model(body.model)
        turns = body.turns()
        self._check_length(["".join(turn["content"] for turn in turns)], "messages")
        ids = await self._encode(self._chat_ids, turns)
        return await self._answer(http, body, [ids], default_limit=None)

    # -- from a body to an answer -------------------------------------------------------------------------------------

    async def _answer(
        self, http: HttpRequest, body: CompletionBody | ChatBody, prompts: list[list[int]], default_limit: int | None
    ) -> Response:
        chat = isinstance(body, ChatBody)
        form = Form(
            chat=chat,
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.name,
            tokenizer=self.tokenizer,
            logprobs=body.wants_logprobs(),
            stop=body.stops(),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
        )
        job = await self.engine.submit([self._request(body, ids, default_limit) for ids in prompts], stream=body.stream)
        if body.stream:
            return EventStream(stream(form, job), lambda: self.engine.close(job))
        found = await self._collected(http, job)
        if found is None:
            return Response(status_code=CLIENT_GONE)
        # In a thread: decoding a long answer would hold up everybody's tokens.
        return JSONResponse(await asyncio.to_thread(form.whole, job, found))

    async def _collected(self, http: HttpRequest, job: Job) -> list[Any] | None:
        """All completions of a job; None where the client has gone, and the job with it."""
        work, gone = asyncio.ensure_future(completions(job)), asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            work.cancel()
            gone.cancel()
            self.engine.close(job)

    def _request(self, body: Body, ids: list[int], default_limit: int | None) -> Request:
        """Raises ApiError 400 where a parameter is out of its range, or prompt and completion exceed the context."""
        room = self.max_length - len(ids)
        limit = body.limit()
        if room < 1 or (limit is not None and limit > room):
            asked = f"and max_tokens={limit} make {len(ids) + limit}" if limit is not None else "leave no room for an answer"
            raise bad_request(
                f"the prompt's {len(ids)} tokens {asked}, but at most {self.max_length} fit; shorten it or lower max_tokens",
                "prompt" if room < 1 else "max_tokens",
                "context_length_exceeded",
            )
        try:
            return Request(
                prompt_ids=ids,
                n=body.n,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=0 if body.top_k == -1 else body.top_k,
                min_p=body.min_p,
                max_tokens=limit if limit is not None else min(room, default_limit or room),
                stop=body.stops(),
                seed=secrets.randbits(63) if body.seed is None else body.seed,
            )
        except ValueError as error:
            said = reason(error)
            name = said.partition("=")[0]
            raise bad_request(said, name if name in Body.model_fields else "prompt") from None

    def _check_length(self, texts: Iterable[str], param: str) -> None:
        """Before any is encoded: that takes a second for every few megabytes, and other requests would wait for it."""
        longest = max(map(len, texts), default=0)
        if longest > self._longest_text:
            raise bad_request(
                f"the prompt has {longest:,} characters, but no text of more than {self._longest_text:,} fits into the model's "
                f"{self.max_length} tokens; shorten it",
                param,
                "context_length_exceeded",
            )

    async def _encode(self, function: Callable[..., list[int]], *arguments: Any) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._encoder, function, *arguments)

    def _text_ids(self, text: str, body: CompletionBody) -> list[int]:
        return list(self._encoding(text, add_special_tokens=body.add_special_tokens)["input_ids"])

    def _chat_ids(self, turns: list[dict[str, str]]) -> list[int]:
        for i, turn in enumerate(turns):
            found = [token for token in self._special if turn["role"] == "user" and token in turn["content"]]
            if found:
                raise bad_request(
                    f"messages[{i}].content holds {found[0]!r}, a special token of this model, which would end or forge a turn; "
                    "take it out of the text",
                    "messages",
                )
        try:
            return conversation_ids(self._encoding, turns, name="messages")
        except PosttrainError as error:  # a template may refuse roles or their order
            raise bad_request(f"messages: {error}", "messages") from None

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise ApiError(404, f"model={name!r} is not served here; it is {self.name!r}", param="model", code="model_not_found")

    def _card(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "posttrain"}
        return card | {"max_model_len": self.max_length}


class EventStream(StreamingResponse):
    """Server-sent events; `on_close` is called however they end: at the end, by an error, or because the client has gone."""

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def create_app(service: Service) -> FastAPI:
    """The application; its lifespan starts and stops the engine."""
    app = FastAPI(title="posttrain", lifespan=service.lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    routes = APIRouter(prefix="/v1", dependencies=[Depends(service.authorise)])
    options: dict[str, Any] = {"response_model": None}
    routes.add_api_route("/completions", service.completions, methods=["POST"], **options)
    routes.add_api_route("/chat/completions", service.chat, methods=["POST"], **options)
    routes.add_api_route("/models", service.models, methods=["GET"], **options)
    routes.add_api_route("/models/{name:path}", service.model, methods=["GET"], **options)
    app.include_router(routes)
    app.add_api_route("/health", service.health, methods=["GET"], **options)
    app.add_exception_handler(ApiError, _refusal)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(ClientDisconnect, _nobody)
    app.add_exception_handler(Exception, _mistake)
    return app


async def _refusal(_: HttpRequest, error: Any) -> Response:
    return JSONResponse(error.content(), error.status, headers=error.headers)


async def _no_such_route(http: HttpRequest, error: Any) -> Response:
    routes = "the routes are /v1/completions, /v1/chat/completions, /v1/models and /health"
    said = f"{http.method} {http.url.path}: {error.detail}; {routes}"
    return await _refusal(http, ApiError(error.status_code, said, headers=error.headers))


async def _nobody(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _mistake(http: HttpRequest, error: Exception) -> Response:
    """A bug of ours; the server logs it with its traceback."""
    return await _refusal(http, ApiError(500, f"{type(error).__name__} in the server; look at its log"))


async def json_body(http: HttpRequest) -> Any:
    """The parsed body.

    Raises:
        ApiError: another content type (which also keeps web pages from posting here without asking), too long, or no JSON.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type is {kind or 'missing'}, but it must be application/json")
    data = bytearray()
    async for chunk in http.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES:,} bytes; send fewer prompts at once")
    try:
        return json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is no JSON: {str(error)[:200]}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
