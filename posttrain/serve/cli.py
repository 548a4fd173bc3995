"""`posttrain serve`: from the command line to a server that runs until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import sys
from typing import Any

from posttrain.config import ModelConfig
from posttrain.errors import PosttrainError

logger = logging.getLogger(__name__)
FAILED = 1


def serve_command(args: argparse.Namespace) -> int:
    """Serve until told to stop; 0 then, 1 if the engine failed.

    Raises:
        PosttrainError: the extra is missing, or an option, address, key or checkpoint that cannot be used.
    """
    _check_extra()
    for name, given, least in (("max-sequences", args.max_sequences, 1), ("max-queue", args.max_queue, 0)):
        if given < least:
            raise PosttrainError(f"--{name} {given}: at least {least} is needed")
    key = read_key(args.api_key_env)
    # Bound first: an address in use is known before the model is loaded.
    with bind(args.host, args.port) as listening:
        if key is None and not _is_loopback(args.host):
            print(f"posttrain: {args.host} can be reached by others and no --api-key-env is given", file=sys.stderr)
        service = load_service(args, key)
        return run(service, listening, args.shutdown_timeout)


def run(service: Any, listening: socket.socket, shutdown_timeout: int) -> int:
    """Answer requests on a bound socket. The first signal lets running requests end, for `shutdown_timeout` seconds at most."""
    import uvicorn

    from posttrain.serve.app import create_app

    config = uvicorn.Config(
        create_app(service),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=shutdown_timeout,
    )
    server = uvicorn.Server(config)
    service.engine.on_failure = lambda: setattr(server, "should_exit", True)
    host, port = listening.getsockname()[:2]
    print(f"serving {service.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1 (Ctrl-C stops)", flush=True)
    # uvicorn raises the signal once more after it has stopped, for whoever had it before: that would be an error exit.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listening])
    finally:
        service.engine.stop()  # a second Ctrl-C ends the server without its lifespan
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if service.engine.failure is None and server.started else FAILED


def load_service(args: argparse.Namespace, key: str | None) -> Any:
    """Checkpoint, tokenizer and engine behind one `Service`."""
    import torch
    import transformers

    from posttrain.data.tokenizer import eos_token_ids, load_tokenizer
    from posttrain.models.loading import load_model
    from posttrain.rollout import Generator
    from posttrain.serve.app import Service
    from posttrain.serve.engine_thread import EngineThread

    transformers.utils.logging.disable_progress_bar()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not torch.cuda.is_available():
        raise PosttrainError(f"--device {device}: this machine, or this build of torch, has no CUDA device")
    model: Any = load_model(args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code, device=device)
    section = ModelConfig(
        path=args.model, tokenizer=args.tokenizer, chat_template=args.chat_template, trust_remote_code=args.trust_remote_code
    )
    tokenizer = load_tokenizer(section, vocab_size=model.config.vocab_size)
    context = model.config.max_position_embeddings
    if args.max_length is not None and not 2 <= args.max_length <= context:
        raise PosttrainError(f"--max-length {args.max_length}: it must be from 2 to the model's context, {context}")
    max_length = args.max_length or context
    try:
        generator = Generator(
            model,
            eos_token_ids=eos_token_ids(tokenizer, model),
            tokenizer=tokenizer,
            max_sequences=args.max_sequences,
            max_length=max_length,
            memory_fraction=args.memory_fraction,
            cuda_graphs=args.cuda_graphs,
        )
    except ValueError as error:  # what does not fit into memory
        raise PosttrainError(f"{error} (--max-sequences, --max-length, --memory-fraction)") from None
    engine = EngineThread(generator, max_sequences=args.max_sequences, max_queue=args.max_queue)
    return Service(engine, tokenizer, name=args.served_model_name or args.model, max_length=max_length, api_key=key)


def read_key(variable: str | None) -> str | None:
    """The bearer token from the environment; None where no variable is named."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii():
        raise PosttrainError(f"--api-key-env {variable}: that variable must hold the key, in ASCII; export it before serving")
    return key


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address that does not listen yet; port 0 takes a free one."""
    if not 0 <= port <= 65535:
        raise PosttrainError(f"--port {port}: it must be from 0 (a free one) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or error
        raise PosttrainError(f"--host {host} --port {port}: {said}; choose another address, or port 0 for a free one") from None
    return bound


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_extra() -> None:
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise PosttrainError(f"{' and '.join(missing)} not installed; serving needs the extra: pip install -e '.[serve]'")
