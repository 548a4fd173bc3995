"""The OpenAI-compatible backend against a server that answers, refuses, stumbles and dies."""

import logging
import threading

import pytest

from posttrain.inference import BackendError, Prompt, SamplingOptions, prompt_seed, sample_seed
from posttrain.inference.server import ServerBackend
from tests.posttrain.openai_server import DIE, DRIP, chat, serving


def prompts(count: int = 3, each: int = 2, **sampling) -> list[Prompt]:
    return [
        Prompt(
            id=f"p{i}",
            messages=({"role": "user", "content": f"problem {i}"},),
            samples=tuple(range(each)),
            seed=prompt_seed(7, f"p{i}"),
            sampling=SamplingOptions(**sampling),
        )
        for i in range(count)
    ]


def backend(served, **options) -> ServerBackend:
    return ServerBackend(**{"base_url": served.url, "model": "m", "first_pause_s": 0.001, "concurrency": 4, **options})


def names(texts) -> list[tuple[str, int]]:
    return sorted((text.prompt_id, text.sample) for text in texts)


WANTED = [(f"p{i}", j) for i in range(3) for j in range(2)]


def test_each_sample_is_a_request_with_its_own_seed():
    def answer(body, _):
        return chat(f"{body['messages'][-1]['content']} with {body['seed']}")

    with serving(answer) as served:
        asked = prompts(temperature=0.6, top_p=0.95, max_tokens=50, stop=("END",))
        texts = list(backend(served).generate(asked))
    assert names(texts) == WANTED
    assert {text.text for text in texts} == {
        f"problem {i} with {sample_seed(prompt_seed(7, f'p{i}'), j)}" for i in range(3) for j in range(2)
    }
    assert len({body["seed"] for body in served.bodies}) == 6
    assert all(0 <= body["seed"] < 2**31 for body in served.bodies), "servers keep it in 32 bits"
    body = served.bodies[0]
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"], body["n"]) == ("m", 0.6, 0.95, 50, 1)
    assert body["stop"] == ["END"]
    assert not body.keys() & {"top_k", "min_p", "logprobs"}, "what OpenAI's own servers would refuse is not sent"
    assert set(served.paths) == {"/v1/chat/completions"}
    assert {(text.tokens, text.prompt_tokens, text.finish_reason, text.mean_logprob) for text in texts} == {(3, 5, "stop", None)}


def test_the_completions_route_sends_text():
    reply = {
        "choices": [{"text": "4", "finish_reason": "length", "logprobs": {"token_logprobs": [-0.5, -1.5]}}],
        "usage": {"completion_tokens": 2},
    }
    with serving(lambda *_: reply) as served:
        given = backend(served, api="completions", logprobs=True, render=lambda turns: f"<{turns[-1]['content']}>")
        [text] = given.generate(prompts(1, 1))
    assert served.paths == ["/v1/completions"]
    assert (served.bodies[0]["prompt"], served.bodies[0]["logprobs"]) == ("<problem 0>", 1)
    assert (text.text, text.finish_reason, text.mean_logprob, text.logprobs) == ("4", "length", -1.0, (-0.5, -1.5))


def test_reasoning_that_the_server_parsed_out_comes_back_in_front():
    replies = [
        chat("4", reasoning_content="two and two"),
        chat(None, reasoning="cut off", finish="length"),
        chat(None, finish="content_filter", tokens=None),
    ]
    with serving(lambda _, number: replies[number]) as served:
        done = backend(served, concurrency=1).generate(prompts(3, 1))
        texts = [(text.text, text.finish_reason, text.tokens) for text in done]
    assert texts == [("<think>\ntwo and two\n</think>\n\n4", "stop", 3), ("<think>\ncut off", "length", 3), ("", "abort", None)]


@pytest.mark.parametrize(
    "stumble",
    [
        (500, {"error": {"message": "oops"}}),
        (503, "<html>busy</html>"),
        (429, {}, {"retry-after": "0"}),
        DIE,
        "no json",
        {"choices": []},
        {"error": {"message": "overloaded"}},
        [1, 2],
        {"choices": [{"message": {"content": 7}, "finish_reason": "stop"}]},
        (200, "<html>log in</html>"),
        (200, "x", {"content-encoding": "gzip"}),
    ],
    ids=[
        "500",
        "503",
        "429",
        "connection lost",
        "no JSON",
        "no choice",
        "an error with status 200",
        "a list",
        "a number as content",
        "a page",
        "a body that cannot be unpacked",
    ],
)
def test_what_is_temporary_is_tried_again_and_counted_once(stumble):
    lock, failed = threading.Lock(), set()

    def answer(body, _):
        with lock:
            first = body["seed"] not in failed
            failed.add(body["seed"])
        return stumble if first else chat("fine")

    with serving(answer) as served:
        texts = list(backend(served, retries=1).generate(prompts()))
    assert names(texts) == WANTED
    assert len(served.bodies) == 12, "every sample failed once and was asked for again"


def test_what_is_odd_beside_a_good_answer_costs_nothing():
    odd = [
        {**chat("fine"), "usage": {"completion_tokens": "three"}},
        {**chat("fine"), "usage": {"completion_tokens": True, "prompt_tokens": 1.5}},
        chat([{"type": "text", "text": "fi"}, {"type": "image_url"}, {"type": "text", "text": "ne"}]),  # type: ignore[arg-type]
        chat("fine", finish=None),  # type: ignore[arg-type]
    ]
    odd[0]["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": None}]}
    with serving(lambda _, number: odd[number]) as served:
        texts = list(backend(served, concurrency=1, retries=0, logprobs=True).generate(prompts(4, 1)))
    assert [text.text for text in texts] == ["fine"] * 4
    assert [(text.tokens, text.prompt_tokens) for text in texts] == [(None, None), (None, None), (3, 5), (3, 5)]
    assert [text.finish_reason for text in texts] == ["stop", "stop", "stop", "abort"]
    assert {text.mean_logprob for text in texts} == {None}


def test_numbers_that_are_none_are_left_out():
    """NaN and infinity are no JSON, and a negative count is no count."""
    content = [{"token": "a", "logprob": float("nan")}, {"token": "b", "logprob": float("-inf")}]
    answer = chat("good", tokens=-3)
    answer["choices"][0]["logprobs"] = {"content": content}
    with serving(lambda *_: answer) as served:
        [text] = backend(served, logprobs=True).generate(prompts(1, 1))
    assert (text.text, text.tokens, text.mean_logprob, text.logprobs) == ("good", None, None, None)


def test_brackets_without_end_are_an_answer_that_is_not_openais():
    with serving(lambda *_: (200, "[" * 100_000)) as served, pytest.raises(BackendError, match=r"failed 2 times.*not OpenAI's"):
        list(backend(served, retries=1).generate(prompts(1, 1)))


def test_half_a_surrogate_pair_can_be_written_to_a_file():
    with serving(lambda *_: chat("so \\boxed{4} \ud83d", reasoning_content="\udc00")) as served:
        [text] = backend(served).generate(prompts(1, 1))
    assert text.text == "<think>\n?\n</think>\n\nso \\boxed{4} ?"
    assert text.text.encode()


def test_a_redirection_is_an_address_to_mend():
    sent_on = pytest.raises(BackendError, match=r"on to 'http://elsewhere/' \(HTTP 301\); set base_url")
    with serving(lambda *_: (301, "", {"location": "http://elsewhere/"})) as served, sent_on:
        list(backend(served, concurrency=1).generate(prompts(1, 1)))
    assert len(served.bodies) == 1


def test_a_refused_request_can_be_kept_as_a_sample():
    def answer(body, _):
        too_long = body["messages"][-1]["content"] == "problem 1"
        return (400, {"error": {"message": "maximum context length is 10"}}) if too_long else chat("fine")

    with serving(answer) as served:
        texts = list(backend(served, keep_refusals=True).generate(prompts()))
    assert names(texts) == WANTED
    refused = {(text.prompt_id, text.text) for text in texts if text.finish_reason == "refused"}
    assert refused == {("p1", "HTTP 400: maximum context length is 10")}
    with serving(answer) as served, pytest.raises(BackendError, match="refused sample 0 of p1"):
        list(backend(served, concurrency=1).generate(prompts()))


def test_a_server_that_dies_half_way_keeps_what_it_gave():
    with serving(lambda _, number: chat("early") if number < 3 else DIE) as served:
        given = backend(served, retries=2, concurrency=1)
        kept = []
        with pytest.raises(BackendError, match=r"failed 3 times on sample 1 of p1.*What arrived is kept.*--resume"):
            kept.extend(text for text in iter_into(kept, given.generate(prompts())))
    assert names(kept) == WANTED[:3]
    assert len(served.bodies) == 3 + 3


def iter_into(kept, texts):
    """Keep each text as it comes, so that an error later does not lose it."""
    for text in texts:
        kept.append(text)
    return ()


def test_a_server_that_is_not_there():
    with serving(lambda *_: chat("x")) as served:
        pass
    with pytest.raises(BackendError, match="ConnectError"):
        list(backend(served, retries=1).generate(prompts()))


def test_a_server_that_says_nothing():
    release = threading.Event()
    with serving(lambda *_: release.wait(5) and chat("late")) as served:
        with pytest.raises(BackendError, match="no whole answer within 0.1 s"):
            list(backend(served, retries=0, timeout_s=0.1, concurrency=1).generate(prompts(1, 1)))
        release.set()


def test_a_refusal_is_not_tried_again_and_the_key_is_not_shown(caplog):
    refusal = (401, {"error": {"message": "Incorrect API key provided: sk-secret."}})
    caught = pytest.raises(BackendError, match=r"refused sample 0 of p0 \(HTTP 401\).*api_key_env")
    with serving(lambda *_: refusal) as served, caplog.at_level(logging.DEBUG), caught as error:
        list(backend(served, api_key="sk-secret", concurrency=1).generate(prompts()))
    assert served.keys == ["Bearer sk-secret"]
    assert "sk-secret" not in str(error.value) + caplog.text + repr(error.value)


def test_an_unknown_model_is_named():
    refused = pytest.raises(BackendError, match="is 'm' the name that the server lists")
    with serving(lambda *_: (404, {"error": {"message": "no such model"}})) as served, refused:
        list(backend(served, concurrency=1).generate(prompts(1, 1)))


def test_a_server_without_logprobs_is_asked_without():
    def answer(body, _):
        return (400, {"error": {"message": "logprobs is not supported"}}) if body.get("logprobs") else chat("fine")

    with serving(answer) as served:
        given = backend(served, logprobs=True, concurrency=1)
        texts = list(given.generate(prompts()))
    assert names(texts) == WANTED
    assert {text.mean_logprob for text in texts} == {None}
    assert len(served.bodies) == 7, "one refusal, then never again"


def test_logprobs_of_a_chat():
    reply = chat("ab")
    reply["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -3.0}]}
    with serving(lambda *_: reply) as served:
        [text] = backend(served, logprobs=True).generate(prompts(1, 1))
    assert served.bodies[0]["logprobs"] is True
    assert text.mean_logprob == -2.0


def test_no_more_requests_at_once_than_allowed():
    barrier = threading.Barrier(3)

    def answer(*_):
        barrier.wait(10)  # passes only when three are here together
        return chat("x")

    with serving(answer) as served:
        assert len(list(backend(served, concurrency=3).generate(prompts(3, 3)))) == 9
    assert served.most_open == 3


def test_prompts_are_read_only_as_fast_as_they_are_asked():
    read, release = [], threading.Event()

    def lazily():
        for prompt in prompts(50, 1):
            read.append(prompt.id)
            yield prompt

    with serving(lambda _, number: chat("x") if number < 2 or release.wait(10) else DIE) as served:
        texts = backend(served, concurrency=2).generate(lazily())
        assert [next(texts).text, next(texts).text] == ["x", "x"]
        assert len(read) <= 4, "two that were answered, two that wait at the server"
        texts.close()
        release.set()


def test_indices_of_samples_must_differ():
    with pytest.raises(ValueError, match="different indices"):
        Prompt(id="p", messages=(), samples=(1, 1))


def test_a_server_that_drips_for_ever_meets_the_time_limit():
    """Each byte ends the silence, so that a limit on silence alone would wait for ever."""
    with serving(lambda _, number: DRIP if number < 2 else chat("fine")) as served:
        given = backend(served, timeout_s=0.3, concurrency=1, retries=2)
        [text] = given.generate(prompts(1, 1))
    assert (text.text, len(served.bodies)) == ("fine", 3)


def test_what_is_over_its_time_says_so_and_closes_its_connection():
    with serving(lambda *_: DRIP) as served:
        given = backend(served, timeout_s=0.2, retries=1)
        message = r"failed 2 times on sample 0 of p0.*no whole answer within 0\.2 s \(timeout_s\).*--resume"
        with pytest.raises(BackendError, match=message):
            list(given.generate(prompts(1, 1)))
        given.close()
        given.close()
        with pytest.raises(RuntimeError, match="closed"):
            list(given.generate(prompts(1, 1)))
    assert len(served.bodies) == 2


def test_the_pauses_double_and_a_server_that_names_one_is_obeyed():
    pauses: list[float | None] = []

    class Stop(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return False

    with serving(lambda _, number: (429, {}, {"retry-after": "7"}) if number == 3 else (500, {})) as served:
        given = backend(served, retries=5, first_pause_s=1.0)
        with pytest.raises(BackendError, match="failed 6 times"):
            given._ask(prompts(1, 1)[0], 0, Stop())
    assert len(served.bodies) == 6
    assert pauses.pop(3) == 7.0
    for pause, longest in zip(pauses, (1, 2, 4, 16), strict=True):
        assert pause is not None
        assert longest / 2 <= pause <= longest, "not all at once: from half of it"
