"""From a recipe's sections to a backend that is ready."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from posttrain.config.backend import BackendConfig
from posttrain.config.data import ModelConfig
from posttrain.errors import ConfigError
from posttrain.inference.protocol import Backend, local_identity


def open_backend(
    config: BackendConfig,
    model: ModelConfig,
    *,
    max_prompt_length: int,
    max_tokens: int,
    max_sequences: int,
    engine_options: Mapping[str, Any] | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    keep_refusals: bool = False,
) -> Backend:
    """The backend of `config` for the checkpoint (or served model) `model.path`.

    Args:
        max_prompt_length, max_tokens: the longest prompt and completion that will be asked for.
        max_sequences: sequences that an engine decodes at once.
        engine_options: further arguments of posttrain's own generator.
        num_cpus, num_gpus: what each of several engines holds.
        keep_refusals: a server's refusal of one request is a sample like others, not an error; see `ServerBackend`.

    Raises:
        ConfigError: the key's variable is not set, vLLM is missing, or the cluster is too small for the engines.
        CheckpointError: the model cannot be loaded.
    """
    if config.kind == "openai":
        return _server(config, model, keep_refusals)
    make = partial(_local, config, model, max_prompt_length, max_tokens, max_sequences, dict(engine_options or {}))
    if config.engines == 1:
        return make()
    return _cluster(config, model, make, num_cpus, num_gpus)


def identity_of(config: BackendConfig, model: ModelConfig) -> dict[str, Any]:
    """What `Backend.identity` will say, without opening it."""
    path = str(model.path)
    if config.kind == "openai":
        return {"kind": "openai", "model": config.model or path, "api": config.api, "extra_body": config.extra_body}
    return local_identity(config.kind, path, model.dtype, model.revision)


def api_key(config: BackendConfig) -> str | None:
    """The server's key from the environment.

    Raises:
        ConfigError: the variable that the recipe names is not set.
    """
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"backend.api_key_env: the environment variable {config.api_key_env} is not set; export the server's key there "
            "(on a cluster that runs already: on its nodes, before Ray starts)"
        )
    return key


def _server(config: BackendConfig, model: ModelConfig, keep_refusals: bool) -> Backend:
    from posttrain.inference.server import ServerBackend

    render = None
    if config.api == "completions" and model.tokenizer is not None:
        render = _renderer(model)
    return ServerBackend(
        base_url=config.base_url,
        model=config.model or str(model.path),
        api=config.api,
        render=render,
        api_key=api_key(config),
        concurrency=config.concurrency,
        timeout_s=config.timeout_s,
        retries=config.retries,
        logprobs=config.logprobs,
        token_limit=config.token_limit,
        extra_body=config.extra_body,
        keep_refusals=keep_refusals,
    )


def _renderer(model: ModelConfig) -> Callable[[tuple[dict[str, str], ...]], str]:
    from posttrain.data.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(model)
    return lambda messages: str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def _local(
    config: BackendConfig,
    model: ModelConfig,
    max_prompt_length: int,
    max_tokens: int,
    max_sequences: int,
    engine_options: dict[str, Any],
) -> Backend:
    if config.kind == "vllm":
        from posttrain.inference.vllm_engine import VllmBackend

        return VllmBackend(
            model,
            max_prompt_length=max_prompt_length,
            max_length=max_prompt_length + max_tokens,
            max_sequences=max_sequences,
            arguments=config.vllm,
        )
    from posttrain.inference.engine import EngineBackend

    return EngineBackend(model, max_prompt_length=max_prompt_length, max_sequences=max_sequences, options=engine_options)


def _cluster(config: BackendConfig, model: ModelConfig, make: Callable[[], Backend], num_cpus: float, num_gpus: float) -> Backend:
    import ray

    from posttrain.inference.cluster import ClusterBackend

    offered = ray.cluster_resources()
    for kind, each in (("CPU", num_cpus), ("GPU", num_gpus)):
        if each * config.engines > offered.get(kind, 0):
            raise ConfigError(
                f"backend.engines: {config.engines} engines ask for {each * config.engines:g} {kind}s, and the cluster has "
                f"{offered.get(kind, 0):g}; lower it, or ray.cpus_per_worker or ray.gpus_per_worker, or add machines "
                "(ray.num_cpus says what a cluster that is started here offers)"
            )
    return ClusterBackend(
        make,
        identity_of(config, model),
        engines=config.engines,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_failures=config.max_failures,
    )
