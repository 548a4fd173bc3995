"""A small OpenAI-compatible server for tests: a function decides what each request gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DIE = "die"
DRIP = "drip"


@dataclass
class Served:
    """What a server saw: bodies and headers in order, and how many requests were open at once at most."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0
    lock: Any = field(default_factory=threading.Lock)


Answer = Callable[[dict[str, Any], int], Any]


@contextmanager
def serving(answer: Answer) -> Iterator[Served]:
    """Serve on a free port of this machine.

    Args:
        answer: (body, number of the request) -> a dict (status 200), (status, dict or text), (status, dict, headers),
            DIE, which closes the connection without a word, or DRIP, which sends a space now and then and never ends.
    """
    served = Served()
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with served.lock:
                number = len(served.bodies)
                served.bodies.append(body)
                served.paths.append(self.path)
                served.keys.append(self.headers.get("authorization"))
                served.open_now += 1
                served.most_open = max(served.most_open, served.open_now)
            try:
                given = answer(body, number)
            finally:
                with served.lock:
                    served.open_now -= 1
            if given == DIE:
                self.close_connection = True
                return
            if given == DRIP:
                self._drip()
                return
            status, content, *headers = given if isinstance(given, tuple) else (200, given)
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            for name, value in (headers[0] if headers else {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _drip(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "1000000")
            self.end_headers()
            with suppress(OSError):  # until the client has gone
                while not ended.wait(0.02):
                    self.wfile.write(b" ")
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield served
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


def chat(text: str | None, *, tokens: int | None = 3, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """A chat completion as servers send it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
    return {"id": "x", "object": "chat.completion", "choices": [choice], **usage}
