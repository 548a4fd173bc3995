"""An OpenAI-compatible server on the loopback address whose answers a test decides, recipes that ask it, and what they leave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from posttrain.config import Recipe, recipe_from_dict
from posttrain.distill import stage
from posttrain.distill.problems import prepare
from posttrain.run_folder import RunFolder
from posttrain.runtime.worker import WorkerContext

Answer = dict[str, Any]


class FakeTeacher:
    """`answer(problem, seed) -> {"text", "finish_reason"?, "status"?, "reasoning"?}`; `requests` keeps every body."""

    def __init__(self, answer: Callable[[str, int], Answer], *, logprobs: bool = True) -> None:
        self.answer, self.logprobs = answer, logprobs
        self.requests: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"teacher": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.requests.append(body)
        if body.get("logprobs") and not self.logprobs:
            return 400, {"error": {"message": "logprobs are not supported by this model"}}
        answer = self.answer(body["messages"][-1]["content"], body["seed"])
        if answer.get("status", 200) != 200:
            return answer["status"], {"error": {"message": "broken"}}
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": answer["text"]},
            "finish_reason": answer.get("finish_reason", "stop"),
        }
        if "reasoning" in answer:
            choice["message"]["reasoning_content"] = answer["reasoning"]
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}
        return 200, {"choices": [choice], "usage": {"completion_tokens": 2, "prompt_tokens": 5}}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    teacher: FakeTeacher
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: in two, the second waits 40 ms for the client's delayed acknowledgement

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.teacher.reply(body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Keep the test's output clean."""


@contextmanager
def serving(answer: Callable[[str, int], Answer], **options: Any) -> Iterator[FakeTeacher]:
    teacher = FakeTeacher(answer, **options)
    try:
        yield teacher
    finally:
        teacher.close()


def write_problems(path: Path, count: int) -> Path:
    """`count` sums n + n, whose answers are 2n."""
    rows = [{"id": f"sum-{n}", "problem": f"What is {n} plus {n} ?", "answer": str(2 * n)} for n in range(1, count + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(problem: str) -> int:
    """The n of a problem of `write_problems`."""
    return int(problem.split()[2])


def right(problem: str) -> str:
    n = asked(problem)
    return f"Adding {n} to {n} gives {2 * n}, so the answer is \\boxed{{{2 * n}}}."


def make_recipe(folder: Path, url: str, *, count: int = 6, stages: tuple[str, ...] = ("distill",), **distill: Any) -> Recipe:
    """A recipe of the stage distill with the fake teacher; `distill` adds to its section, `teacher` in it to the teacher's."""
    teacher = {"model": "fake", "base_url": url, "concurrency": 4, "retries": 1, **distill.pop("teacher", {})}
    problems = distill.pop("problems", None) or {"path": str(write_problems(folder / "problems.jsonl", count))}
    return recipe_from_dict(
        {
            "name": "teach",
            "run_dir": str(folder / "run"),
            "stages": list(stages),
            "model": {
                "tokenizer": "arithmetic",
                "init": {
                    "layer_types": ["sse"], "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64,
                    "num_attention_heads": 2, "adapter_rank": 4, "gate_rank": 4, "chunk_size": 16,
                },
            },
            "data": {"prompt_suffix": " Answer in a box.", **distill.pop("data", {})},
            "reward": {"workers": 1},
            "ray": {"object_store_memory_mb": 100},
            "trainer": {"max_steps": 1, "per_device_train_batch_size": 1},
            "distill": {"teacher": teacher, "problems": problems, "samples": 2, "max_tokens": 64, **distill},
        }
    )  # fmt: skip


def run(recipe: Recipe, context: WorkerContext | None = None) -> dict[str, Any]:
    """The stage as its worker runs it, without Ray."""
    folder = RunFolder(recipe.run_dir)
    folder.path.mkdir(exist_ok=True)
    prepare(recipe, folder)
    stage.distill(recipe, folder.path, context or WorkerContext(stage="distill", run_path=folder.path))
    account: dict[str, Any] = json.loads((folder.path / "distill" / "final" / "report.json").read_text())
    return account


def journal(recipe: Recipe) -> list[dict[str, Any]]:
    """The graded traces on disk."""
    return [json.loads(line) for line in (Path(recipe.run_dir) / "distill" / "traces.jsonl").read_text().splitlines()]


def rows(recipe: Recipe) -> list[dict[str, Any]]:
    """The set that SFT reads."""
    return [
        row
        for file in sorted(Path(recipe.run_dir, "distill", "final").glob("*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]
