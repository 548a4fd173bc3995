"""The section that says what writes the completions of an evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Section

Positive = Annotated[int, Field(ge=1)]


class BackendConfig(Section):
    """Our engine, vLLM in this run's processes, or a server that speaks OpenAI's protocol."""

    kind: Literal["engine", "vllm", "openai"] = "engine"
    """engine: posttrain's generator, for the SSE-H family; vllm: any model that vLLM runs; openai: a server."""

    engines: Positive = 1
    """Copies of the model, over which problems are spread; more than 1 run as Ray actors with a worker's cores and GPUs each."""

    max_failures: Annotated[int, Field(ge=0)] = 3
    """Engines that may die and be started anew before the stage gives up; their unfinished samples go to the others."""

    vllm: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's engine beside those that the recipe says elsewhere, such as tensor_parallel_size (vllm)."""

    base_url: str = ""
    """Address of the server up to and with /v1 (openai)."""

    model: str | None = None
    """Name that the server knows the model by; by default the evaluated model's own (openai)."""

    api: Literal["chat", "completions"] = "chat"
    """chat: the server applies its template; completions: the prompt is text, by model.tokenizer's template if one is named."""

    api_key_env: str | None = None
    """Environment variable that holds the server's key; a recipe never holds the key itself (openai)."""

    concurrency: Positive = 64
    """Requests at the server at once (openai)."""

    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time of one request, up to the last byte of its answer; 32K tokens take many minutes (openai)."""

    retries: Annotated[int, Field(ge=0)] = 6
    """Attempts after the first failed one, each after about twice the pause of the one before (openai)."""

    logprobs: bool = False
    """Ask for log-probabilities; a server that has none is asked without them from then on (openai)."""

    token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The server's name for the most tokens of a completion; OpenAI's own reasoning models know the second only (openai)."""

    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, such as chat_template_kwargs (openai)."""

    @model_validator(mode="after")
    def _address(self) -> BackendConfig:
        if self.kind != "openai":
            return self
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url: got {self.base_url!r}; kind: openai needs the server's address, such as http://localhost:8000/v1"
            )
        if "@" in self.base_url.split("://", 1)[1].split("/", 1)[0] or "?" in self.base_url:
            raise ValueError("base_url: holds a password or a query; name the key's environment variable in api_key_env instead")
        if self.engines > 1:
            raise ValueError("engines: one connection serves them all; a server's load is set by `concurrency`")
        return self
