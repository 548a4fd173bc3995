"""A tiny checkpoint and a server of it in a thread, for the tests of `posttrain serve`."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

CONTEXT = 4096


def write_checkpoint(folder: Path) -> Path:
    """Random weights with the arithmetic tokenizer: a chat template, 4096 tokens of context, and no text that makes sense."""
    from posttrain.data.tokenizer import arithmetic_tokenizer
    from posttrain.models.loading import new_model, save_model

    tokenizer = arithmetic_tokenizer()
    model = new_model(
        {
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "layer_types": ["sse", "full_attention"],
            "num_attention_heads": 2,
            "adapter_rank": 4,
            "gate_rank": 4,
            "chunk_size": 16,
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
            "eos_token_id": tokenizer.eos_token_id,
        },
        seed=3,
    )
    # The end token's logit is always 0, which is never the greatest of 180: greedy samples run to their limit.
    model.lm_head.weight.data[tokenizer.eos_token_id] = 0
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Running:
    """A server; `service` is the object behind it."""

    url: str
    client: httpx.Client
    service: Any

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.client.post(f"{self.url}/v1/{route}", json=body)

    def health(self) -> dict[str, Any]:
        return self.client.get(f"{self.url}/health").json()

    def wait_until(self, **wanted: int) -> None:
        """Until /health says so."""
        wait_for(lambda: self.health().items() >= wanted.items(), f"{wanted} in /health")

    def chunks(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """All chunks of a stream, which must end with [DONE]."""
        with self.client.stream("POST", f"{self.url}/v1/{route}", json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def wait_for(condition: Any, what: str, limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s} s in vain for {what}"
        time.sleep(0.01)


@contextmanager
def serving(service: Any) -> Iterator[Running]:
    """Serve on a free port of this machine."""
    import uvicorn

    from posttrain.serve.app import create_app

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        with httpx.Client(timeout=60, trust_env=False) as client:
            yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", client, service)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
