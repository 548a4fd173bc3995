"""Bodies of requests: what is read, what is passed over, what is refused and why.

A field that would change the text and that the engine does not have is refused unless its value says "off"; a field that cannot
change it is passed over; a name that is in neither list is refused too, since a typo would silently sample from something else.
"""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from posttrain.data.load import encodable
from posttrain.serve.errors import bad_request

# They name the user, the bill or the cache, and never change what is sampled.
IGNORED = {"metadata", "parallel_tool_calls", "priority", "prompt_cache_key", "prompt_cache_retention", "request_id"}
IGNORED |= {"safety_identifier", "service_tier", "store", "user"}
_NO_PENALTIES = "the engine has no penalties, which would change the distribution that log-probabilities are given for"
_NO_TOOLS = "tools and functions are not supported"
_NO_TEMPLATE_OPTIONS = "the chat template is used as it is"
# field: (values that switch it off, why others are refused)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((False,), "the engine keeps no text and no log-probabilities of the prompt"),
    "suffix": (("",), "the model continues a prompt and cannot fill a gap"),
    "best_of": ((1,), "every sample is returned; ask for n and choose"),
    "frequency_penalty": ((0,), _NO_PENALTIES),
    "presence_penalty": ((0,), _NO_PENALTIES),
    "repetition_penalty": ((1,), _NO_PENALTIES),
    "length_penalty": ((1,), _NO_PENALTIES),
    "logit_bias": (({},), "the engine samples from the model's own logits"),
    "min_tokens": ((0,), "the engine cannot forbid the end token"),
    "ignore_eos": ((False,), "the engine cannot forbid the end token"),
    "use_beam_search": ((False,), "the engine samples; it has no beams"),
    "prompt_logprobs": ((0, False), "the engine keeps no log-probabilities of the prompt"),
    "skip_special_tokens": ((True,), "texts come without special tokens"),
    "spaces_between_special_tokens": ((True, False), "texts come without special tokens"),
    "include_stop_str_in_output": ((False,), "texts end before the stop string"),
    "response_format": (({"type": "text"},), "the engine does not constrain what it samples"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "modalities": ((["text"],), "the model reads and writes text alone"),
    "audio": ((), "the model reads and writes text alone"),
    "prediction": ((), "the engine takes no drafts"),
    "reasoning_effort": ((), "how long a model reasons is not a setting here; set max_tokens"),
    "chat_template": ((), _NO_TEMPLATE_OPTIONS),
    "chat_template_kwargs": (({},), _NO_TEMPLATE_OPTIONS),
    "add_generation_prompt": ((True,), _NO_TEMPLATE_OPTIONS),
    "continue_final_message": ((False,), _NO_TEMPLATE_OPTIONS),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    """One more chunk at the end, without choices, counts the tokens."""


class Body(BaseModel):
    """What both routes take; ranges are checked by `posttrain.types.Request`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    """The served name; may be left out, since there is one model."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""

    min_p: float = 0.0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Another name of `max_tokens`, in both routes."""

    stop: Any = None
    """A string or several."""

    seed: int | None = None
    """The same seed, prompt, parameters and weights give the same samples, whatever else is served."""

    stream: bool = False
    stream_options: StreamOptions | None = None

    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        if not isinstance(given, list) or not all(isinstance(text, str) and text and encodable(text) for text in given):
            raise bad_request(f"stop={self.stop!r}, but it must be a string or a list of strings, none of them empty", "stop")
        return tuple(given)

    def limit(self) -> int | None:
        """Completion tokens at most, under either name."""
        names = self.max_tokens, self.max_completion_tokens
        if None not in names and names[0] != names[1]:
            raise bad_request(f"max_tokens={names[0]} and max_completion_tokens={names[1]} disagree; give one", "max_tokens")
        return names[0] if names[0] is not None else names[1]


class CompletionBody(Body):
    """Body of /v1/completions."""

    prompt: Any
    """A text, token ids, or a list of either."""

    add_special_tokens: bool = False
    """Whether the tokenizer puts its own begin token before a text; chat templates write theirs themselves."""

    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        given = self.prompt
        listed = [given] if isinstance(given, str) or (isinstance(given, list) and given and _is_ids(given)) else given
        if not isinstance(listed, list) or not all(isinstance(one, str) or _is_ids(one) for one in listed):
            raise bad_request("prompt must be a string, a list of token ids, or a list of strings or of such lists", "prompt")
        if not listed:
            raise bad_request("prompt=[]: there is nothing to continue; give at least one prompt", "prompt")
        if not all(encodable(one) for one in listed if isinstance(one, str)):
            raise bad_request("prompt: it holds characters that are no text (half a surrogate pair)", "prompt")
        return listed

    def wants_logprobs(self) -> bool:
        """0 and 1 both ask for the sampled token's: `top_logprobs` stays null, for the engine keeps no others."""
        if self.logprobs not in (None, 0, 1):
            raise bad_request(
                f"logprobs={self.logprobs}: the engine keeps the log-probability of the sampled token alone; ask for 0 or 1",
                "logprobs",
            )
        return self.logprobs is not None


class ChatBody(Body):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None

    def wants_logprobs(self) -> bool:
        if self.top_logprobs:
            raise bad_request(
                f"top_logprobs={self.top_logprobs}: the engine keeps the log-probability of the sampled token alone; "
                "leave top_logprobs out",
                "top_logprobs",
            )
        return self.logprobs

    def turns(self) -> list[dict[str, str]]:
        """Turns for the chat template. "developer" is OpenAI's later name of "system"; parts of a text are joined."""
        if not self.messages:
            raise bad_request("messages=[]: there is nothing to answer; give at least one message", "messages")
        turns = []
        for i, message in enumerate(self.messages):
            role = {"developer": "system"}.get(str(message.get("role")), message.get("role"))
            if role not in ("system", "user", "assistant"):
                raise bad_request(
                    f"messages[{i}].role={role!r}, but it must be system, developer, user or assistant ({_NO_TOOLS})", "messages"
                )
            if unknown := [key for key, value in message.items() if key not in ("role", "content", "name") and value]:
                raise bad_request(f"messages[{i}].{unknown[0]}: only role and content are read", "messages")
            turns.append({"role": str(role), "content": _content(message.get("content"), i)})
        return turns


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(token) is int for token in given)


def _content(content: Any, i: int) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad_request(f"messages[{i}].content: it must be a string, or a list of parts of type text", "messages")
    text = "".join(part["text"] for part in parts)
    if not encodable(text):
        raise bad_request(f"messages[{i}].content: it holds characters that are no text (half a surrogate pair)", "messages")
    return text


Kind = TypeVar("Kind", bound=Body)


def read(kind: type[Kind], given: Any) -> Kind:
    """A body from parsed JSON; null is the same as absent.

    Raises:
        ApiError: 400 with the field to blame.
    """
    if not isinstance(given, dict):
        raise bad_request(f"the body must be a JSON object, not {type(given).__name__}")
    if odd := [name for name in given if not encodable(name)]:
        raise bad_request(f"{odd[0]!r}: the name of a field must be text")
    fields = {name: value for name, value in given.items() if value is not None and name not in IGNORED}
    for name, (off, why) in REFUSED.items():
        if name in fields and name not in kind.model_fields:
            value = fields.pop(name)
            if value not in off and not (name == "best_of" and value == fields.get("n", 1)):
                allowed = f", so that only {' or '.join(map(repr, off))} is taken" if off else ""
                raise bad_request(f"{name}={value!r}: {why}{allowed}; leave the field out", name)
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _first(error, kind) from None
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only with stream=true", "stream_options")
    return body


def _first(error: ValidationError, kind: type[Body]) -> Exception:
    detail = error.errors(include_url=False)[0]
    name = ".".join(map(str, detail["loc"])) or "body"
    top = str(detail["loc"][0]) if detail["loc"] else None
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, kind.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(kind.model_fields)}"
        return bad_request(f"{name}: an unknown field, refused because it may be a typo; {hint}", top)
    if detail["type"] == "missing":
        return bad_request(f"{name} is missing", top)
    return bad_request(f"{name}={_short(detail['input'])}: {detail['msg']}", top)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
