"""The OpenAI-compatible server over a tiny checkpoint: a real server, real sockets, the same tokens as the engine alone."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="posttrain serve needs its extra: pip install -e '.[serve]'")
pytest.importorskip("uvicorn", reason="posttrain serve needs its extra: pip install -e '.[serve]'")

import torch

from posttrain import cli
from posttrain.data.chat import conversation_ids
from posttrain.rollout import Generator
from posttrain.serve.cli import load_service
from posttrain.types import Completion, Request
from tests.posttrain.serving import CONTEXT, Running, serving, write_checkpoint

PROMPT = [40, 50, 60, 70, 80]
QUESTION = [{"role": "user", "content": "12+30="}]
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "top_k": 60, "min_p": 0.001}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Any:
    args = cli.build_parser().parse_args(["serve", str(checkpoint), "--served-model-name", "tiny", "--max-sequences", "8"])
    service = load_service(args, key=None)
    with serving(service) as running:
        yield running


@pytest.fixture(scope="module")
def direct(checkpoint: Path) -> Any:
    """request -> its completions from an engine of its own."""
    from posttrain.models.loading import load_model

    model: Any = load_model(checkpoint)
    generator = Generator(model, eos_token_ids=[model.config.eos_token_id], max_sequences=8, max_length=CONTEXT)
    return lambda **fields: generator.generate([Request(**fields)])[0]


def text_of(server: Running, completion: Completion) -> str:
    return server.service.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def test_the_model_is_listed(server: Running) -> None:
    listed = server.client.get(f"{server.url}/v1/models").json()
    assert [(card["id"], card["object"], card["max_model_len"]) for card in listed["data"]] == [("tiny", "model", CONTEXT)]
    assert server.client.get(f"{server.url}/v1/models/tiny").json()["id"] == "tiny"
    assert error_of(server.client.get(f"{server.url}/v1/models/large"), 404)["code"] == "model_not_found"
    assert server.health() == {"status": "ok", "running": 0, "open": 0, "limit": 8 + 1024}


def test_completions_are_the_engines(server: Running, direct: Any) -> None:
    wanted = direct(prompt_ids=PROMPT, n=3, seed=11, max_tokens=24, **SAMPLING)
    given = server.post("completions", model="tiny", prompt=PROMPT, n=3, seed=11, max_tokens=24, logprobs=1, **SAMPLING).json()
    assert given["object"] == "text_completion" and given["model"] == "tiny"
    assert len({tuple(one.token_ids) for one in wanted}) == 3, "samples that are all alike would show nothing"
    for i, (choice, completion) in enumerate(zip(given["choices"], wanted, strict=True)):
        assert (choice["index"], choice["text"], choice["finish_reason"]) == (
            i, text_of(server, completion), completion.finish_reason,
        )  # fmt: skip
        listed = choice["logprobs"]
        assert listed["token_logprobs"] == completion.plain_logprobs, "the model's own, whatever the sampling"
        assert listed["top_logprobs"] is None
        # This tokenizer's tokens are whole characters: a token's text stands where its offset says, if it is no special one.
        special = server.service.tokenizer.all_special_tokens
        for token, offset in zip(listed["tokens"], listed["text_offset"], strict=True):
            assert token in special or choice["text"][offset:].startswith(token)
    tokens = sum(len(one.token_ids) for one in wanted)
    assert given["usage"] == {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}


def test_the_end_token_counts_and_is_not_text(server: Running, direct: Any) -> None:
    fields: dict[str, Any] = {"temperature": 3.0, "max_tokens": 20, "n": 8}
    runs = ((seed, direct(prompt_ids=PROMPT, seed=seed, **fields)) for seed in range(100))
    seed, wanted = next((seed, run) for seed, run in runs if any(one.finish_reason == "stop" for one in run))
    given = server.post("completions", prompt=PROMPT, seed=seed, **fields).json()
    assert [choice["finish_reason"] for choice in given["choices"]] == [one.finish_reason for one in wanted]
    assert [choice["text"] for choice in given["choices"]] == [text_of(server, one) for one in wanted]
    assert "<|end|>" not in str(given["choices"])
    assert given["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in wanted)


def test_chats_go_through_the_template(server: Running, direct: Any) -> None:
    ids = conversation_ids(server.service.tokenizer, [{"role": "system", "content": "add"}, *QUESTION], name="q")
    [wanted] = direct(prompt_ids=ids, seed=4, max_tokens=16)
    # OpenAI's two ways to write the same turns: "developer", and a content in parts.
    parts = [{"type": "text", "text": "12+"}, {"type": "text", "text": "30="}]
    turns = [{"role": "developer", "content": "add"}, {"role": "user", "content": parts}]
    given = server.post("chat/completions", messages=turns, seed=4, max_completion_tokens=16, logprobs=True).json()
    [choice] = given["choices"]
    assert choice["message"] == {"role": "assistant", "content": text_of(server, wanted), "refusal": None}
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == wanted.plain_logprobs
    entry = choice["logprobs"]["content"][0]
    assert bytes(entry["bytes"]).decode() == entry["token"] and entry["top_logprobs"] == []
    assert given["usage"]["prompt_tokens"] == len(ids) and given["object"] == "chat.completion"


def test_several_prompts_count_through(server: Running, direct: Any) -> None:
    tokenizer = server.service.tokenizer
    given = server.post("completions", prompt=["1+2=", "30+4="], n=2, seed=5, max_tokens=6).json()
    ids = [tokenizer(text)["input_ids"] for text in ("1+2=", "30+4=")]
    wanted = [text_of(server, one) for prompt in ids for one in direct(prompt_ids=prompt, n=2, seed=5, max_tokens=6)]
    assert [(choice["index"], choice["text"]) for choice in given["choices"]] == list(enumerate(wanted))
    assert given["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_without_a_seed_samples_differ_and_without_a_limit_there_is_one(server: Running) -> None:
    given = [server.post("completions", prompt=PROMPT).json() for _ in range(3)]
    assert len({one["choices"][0]["text"] for one in given}) == 3
    assert all(one["usage"]["completion_tokens"] <= 16 for one in given)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_stream_adds_up_to_the_whole_answer(server: Running, route: str) -> None:
    body: dict[str, Any] = {"prompt": PROMPT} if route == "completions" else {"messages": QUESTION}
    body |= {"n": 2, "seed": 8, "max_tokens": 40, "temperature": 0.9}
    plain = server.post(route, **body).json()["choices"]
    texts = [choice["text"] if route == "completions" else choice["message"]["content"] for choice in plain]
    # A stop string of three characters in the middle of the first sample: no token of this tokenizer is as long.
    stop = texts[0][9:12]
    body |= {"stop": [stop, "never said"], "logprobs": 0 if route == "completions" else True}
    whole = server.post(route, **body).json()
    first = whole["choices"][0]
    assert (first.get("text") or first["message"]["content"]) == texts[0][: texts[0].index(stop)]
    assert first["finish_reason"] == "stop"

    chunks = server.chunks(route, **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]} and all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        if route == "completions":
            assert "".join(piece["text"] for piece in mine) == choice["text"]
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [value for piece in mine for value in piece["logprobs"][name]] == choice["logprobs"][name]
        else:
            assert mine[0]["delta"]["role"] == "assistant" and all("role" not in piece["delta"] for piece in mine[1:])
            assert "".join(piece["delta"].get("content", "") for piece in mine) == choice["message"]["content"]
            assert [entry for piece in mine for entry in piece["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_eight_at_once_get_what_each_gets_alone(server: Running) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": f"{i}+{i}="}], "seed": i, "max_tokens": 16, "temperature": 0.5 + i / 10}
        for i in range(8)
    ]

    def ask(body: dict[str, Any]) -> str:
        if body["seed"] % 2:
            pieces = server.chunks("chat/completions", **body)
            return "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
        return server.post("chat/completions", **body).json()["choices"][0]["message"]["content"]

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, bodies)) == alone
    assert len(set(alone)) == 8
    assert server.health()["open"] == 0
    assert not server.service.engine._jobs, "what is finished is forgotten"


LONG = {"prompt": PROMPT, "temperature": 0, "max_tokens": 3000}  # seconds of work


def test_a_client_that_goes_frees_its_slots(server: Running) -> None:
    generator = server.service.engine.generator
    before = generator.generated_tokens
    with server.client.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True, "n": 2}) as answer:
        lines = answer.iter_lines()  # kept: an iterator that is dropped closes the connection
        next(lines)
        assert server.health()["open"] == 2
    server.wait_until(running=0, open=0)
    streamed = generator.generated_tokens
    assert 0 < streamed - before < 2 * 3000, "what nobody waits for is not finished"
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(f"{server.url}/v1/completions", json=LONG | {"n": 3}, timeout=0.3)
    server.wait_until(running=0, open=0)
    assert generator.generated_tokens - streamed < 3 * 3000
    assert not generator.has_unfinished
    assert server.post("completions", prompt=PROMPT, max_tokens=2).status_code == 200


def test_a_full_queue_says_when_to_come_back(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.engine, "capacity", 3)
    with server.client.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True, "n": 2}) as answer:
        lines = answer.iter_lines()
        next(lines)
        refused = server.post("completions", prompt=PROMPT, n=2)
        error = error_of(refused, 429)
        assert error["code"] == "queue_full" and "limit of 3" in error["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert server.post("completions", prompt=PROMPT, max_tokens=1).status_code == 200, "one more fits"
    server.wait_until(open=0)
    assert "at most 3" in error_of(server.post("completions", prompt=PROMPT, n=4), 400)["message"], "this could never fit"


BAD = [  # body beside the prompt, field to blame, a word of the reason
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "at least one"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [1, "a"]}, "prompt", "token ids"),
    ({"prompt": [True]}, "prompt", "token ids"),
    ({"prompt": [10**6]}, "prompt", "outside the vocabulary"),
    ({"prompt": [-1]}, "prompt", "outside the vocabulary"),
    ({"prompt": [5] * CONTEXT}, "prompt", "no room"),
    ({"prompt": "7 " * 10**6}, "prompt", "2,000,000 characters"),
    ({"max_tokens": CONTEXT}, "max_tokens", str(CONTEXT)),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": "9"}, "max_tokens", "integer"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "disagree"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 1.5}, "n", "integer"),
    ({"temperature": -1}, "temperature", "0 (greedy)"),
    ({"temperature": 10**400}, "temperature", ""),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_k": -2}, "top_k", "0 (off)"),
    ({"min_p": 1}, "min_p", "[0, 1)"),
    ({"seed": -1}, "seed", "2**63"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": [1]}, "stop", "strings"),
    ({"logprobs": 2}, "logprobs", "sampled token alone"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown"),
    ({"echo": True}, "echo", "prompt"),
    ({"best_of": 4}, "best_of", "every sample"),
    ({"logit_bias": {"5": 100}}, "logit_bias", "own logits"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "penalties"),
    ({"temprature": 0.5}, "temprature", "did you mean temperature"),
]


@pytest.mark.parametrize(("fields", "param", "word"), BAD, ids=lambda value: str(value)[:40])
def test_bad_completions_get_a_reason(server: Running, fields: dict[str, Any], param: str, word: str) -> None:
    error = error_of(server.post("completions", **({"prompt": PROMPT} | fields)), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert word in error["message"]


BAD_CHATS = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hello"}, "messages", "list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tools"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "parts of type text"),
    ({"messages": [{"role": "user", "content": "a<|end|>b"}]}, "messages", "special token"),
    ({"messages": [{"role": "user", "content": "half \ud800"}]}, "messages", "no text"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages", "only role and content"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "sampled token alone"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "constrain"),
    ({"half \ud800": 1}, None, "half \\ud800"),
]


@pytest.mark.parametrize(("fields", "param", "word"), BAD_CHATS, ids=lambda value: ascii(value)[:40])
def test_bad_chats_get_a_reason(server: Running, fields: dict[str, Any], param: str | None, word: str) -> None:
    body = json.dumps({"messages": QUESTION} | fields)  # ASCII: httpx's own would refuse half a surrogate pair
    headers = {"content-type": "application/json"}
    error = error_of(server.client.post(f"{server.url}/v1/chat/completions", content=body, headers=headers), 400)
    assert error["param"] == param and word in error["message"]


def test_bad_http_gets_a_reason(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{server.url}/v1/completions"
    as_json = {"content-type": "application/json"}
    for content in (b"{", b"\xff", b'{"temperature": NaN}', b"[" * 100_000):
        assert "no JSON" in error_of(server.client.post(url, content=content, headers=as_json), 400)["message"]
    assert "object" in error_of(server.client.post(url, content=b"[]", headers=as_json), 400)["message"]
    for kind in ("text/plain", ""):
        answer = server.client.post(url, content=b"{}", headers={"content-type": kind})
        assert "application/json" in error_of(answer, 415)["message"]
    assert error_of(server.post("completions", prompt=PROMPT, model="gpt"), 404)["code"] == "model_not_found"
    assert "/v1/completions" in error_of(server.client.get(f"{server.url}/v2"), 404)["message"]
    assert error_of(server.client.get(url), 405)
    monkeypatch.setattr("posttrain.serve.app.MAX_BODY_BYTES", 1000)
    assert "1,000 bytes" in error_of(server.post("completions", prompt=[5] * 600), 413)["message"]


def test_fields_that_change_nothing_are_passed_over(server: Running) -> None:
    plain = server.post("completions", prompt=PROMPT, seed=1).json()["choices"]
    extra = {"user": "me", "metadata": {"a": "b"}, "store": True, "frequency_penalty": 0, "logit_bias": {}, "echo": False}
    off = {"best_of": 1, "suffix": None, "stop": None, "top_k": -1, "max_tokens": None, "presence_penalty": 0.0}
    assert server.post("completions", prompt=PROMPT, seed=1, **extra, **off).json()["choices"] == plain


@pytest.fixture
def broken_id(server: Running) -> Any:
    """A token whose embedding is NaN meanwhile."""
    weight = server.service.engine.generator.model.get_input_embeddings().weight.data
    token, row = 30, weight[30].clone()
    weight[token] = torch.nan
    yield token
    weight[token] = row


def test_broken_logits_end_their_own_request_alone(server: Running, broken_id: int) -> None:
    good = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60}
    wanted = server.post("completions", **good).json()["choices"]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: server.post("completions", **good).json()["choices"])
        error = error_of(server.post("completions", prompt=[broken_id], n=2), 500)
        assert (error["type"], "logits" in error["message"]) == ("server_error", True)
        assert beside.result(60) == wanted
    with server.client.stream("POST", f"{server.url}/v1/completions", json={"prompt": [broken_id], "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert "logits" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"], "a stream says it in its last event"
    server.wait_until(running=0, open=0)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_our_own_evaluation_backend_gets_the_engines_samples(server: Running, direct: Any, checkpoint: Path, api: str) -> None:
    from posttrain.config import ModelConfig
    from posttrain.config.backend import BackendConfig
    from posttrain.inference import Prompt, SamplingOptions, open_backend, sample_seed

    address = f"{server.url}/v1"
    config = BackendConfig(kind="openai", base_url=address, model="tiny", api=api, logprobs=True, concurrency=4, retries=0)
    section = ModelConfig(path=str(checkpoint), tokenizer=str(checkpoint))
    options = SamplingOptions(temperature=0.8, top_k=30, min_p=0.01, max_tokens=12, stop=("7",))
    prompts = [
        Prompt(id=f"p{i}", messages=({"role": "user", "content": f"{i}*2="},), samples=(0, 2), seed=i, sampling=options)
        for i in range(3)
    ]
    backend = open_backend(config, section, max_prompt_length=100, max_tokens=12, max_sequences=4)
    try:
        texts = {(text.prompt_id, text.sample): text for text in backend.generate(prompts)}
    finally:
        backend.close()
    assert set(texts) == {(f"p{i}", sample) for i in range(3) for sample in (0, 2)}
    for prompt in prompts:
        ids = conversation_ids(server.service.tokenizer, prompt.messages, name=prompt.id)
        for sample in prompt.samples:
            text = texts[prompt.id, sample]
            [wanted] = direct(
                prompt_ids=ids, temperature=0.8, top_k=30, min_p=0.01, max_tokens=12, seed=sample_seed(prompt.seed, sample)
            )
            tokens = len(text.logprobs)
            assert text.logprobs == tuple(wanted.plain_logprobs[:tokens]) and text.tokens == tokens
            whole = text_of(server, wanted)
            assert text.text == whole.partition("7")[0]
            assert text.finish_reason == ("stop" if "7" in whole else wanted.finish_reason)


class Failing:
    """A generator whose device breaks at the second step."""

    has_unfinished, num_running, steps, on_token = False, 0, 0, None

    def submit(self, request: Request) -> str:
        self.has_unfinished = True
        return request.id

    def abort(self, request_id: str) -> bool:
        return True

    def step(self) -> list[Completion]:
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("the device is gone")
        return []


class NoTokenizer:
    all_special_tokens = ()

    def get_vocab(self) -> dict[str, int]:
        return {}


def failing_service() -> Any:
    from posttrain.serve.app import Service
    from posttrain.serve.engine_thread import EngineThread

    generator: Any = Failing()
    return Service(EngineThread(generator, max_sequences=1, max_queue=8), NoTokenizer(), name="m", max_length=100)


def test_a_failed_engine_tells_everyone() -> None:
    with serving(failing_service()) as running:
        for _ in range(2):
            assert "RuntimeError" in error_of(running.post("completions", prompt=[1]), 503)["message"]
        answer = running.client.get(f"{running.url}/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "failed")


def test_a_failed_engine_ends_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    from posttrain.serve.cli import bind, run

    before = signal.getsignal(signal.SIGTERM)
    with bind("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as pool:
        listening.listen()  # so that the request may come before the server does
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
        answer = pool.submit(httpx.post, url, json={"prompt": [1], "stream": True}, timeout=30)
        assert run(failing_service(), listening, shutdown_timeout=5) == 1
        assert "RuntimeError" in answer.result(30).text
    assert "serving m at http://127.0.0.1:" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
