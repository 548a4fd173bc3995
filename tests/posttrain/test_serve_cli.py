"""`posttrain serve`: the command, its mistakes, its key, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from posttrain import cli
from posttrain.serve import cli as serve_cli
from tests.posttrain.serving import wait_for, write_checkpoint


@pytest.fixture
def extra() -> None:
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason="posttrain serve needs its extra: pip install -e '.[serve]'")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra were there: the mistakes below are found before it is used."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["serve", "model"]) == 2
    assert "pip install -e '.[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-sequences", "0"], "at least 1"),
        (["--max-queue", "-1"], "at least 0"),
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["--host", "203.0.113.1"], "--host 203.0.113.1"),  # of a network for documentation, not this machine's
        (["--port", "99999"], "--port 99999"),
        (["--port", "-1"], "--port -1"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_mistakes_are_one_message(options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(tmp_path), "--port", "0", *options]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


@pytest.mark.usefixtures("installed")
def test_an_address_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["serve", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "port 0" in capsys.readouterr().err


def test_this_machine_alone_by_default() -> None:
    args = cli.build_parser().parse_args(["serve", "model"])
    with serve_cli.bind(args.host, 0) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


@pytest.mark.usefixtures("extra")
def test_others_without_a_key_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "--api-key-env" in error and "config.json is missing" in error


@pytest.mark.slow
@pytest.mark.usefixtures("extra")
def test_a_key_a_stream_and_a_signal(root: Path, tmp_path: Path) -> None:
    """The real process: the key is asked for and never shown; SIGTERM lets a running stream end and exits with 0."""
    checkpoint, key = write_checkpoint(tmp_path / "checkpoint"), "a-secret-key"
    environment = os.environ | {"SERVE_KEY": key, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "posttrain", "serve", str(checkpoint), "--port", "0", "--api-key-env", "SERVE_KEY"]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "serving" in log.read_text() or process.poll() is not None, "the server", 60)
        found = re.search(r"at (http://127\.0\.0\.1:\d+)/v1", log.read_text())
        assert found is not None, log.read_text()
        _ask_with_keys(found[1], key)
        body = {"prompt": [40, 50, 60], "max_tokens": 300, "temperature": 0, "stream": True}
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.stream("POST", f"{found[1]}/v1/completions", json=body, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert key not in log.read_text()


def _ask_with_keys(url: str, key: str) -> None:
    wait_for(lambda: _answers(url), "an answer")
    for given in (None, "Bearer wrong", f"Basic {key}", key, b"Bearer \xff", f"Bearer {key}x"):
        for route, body in (("models", None), ("completions", {"prompt": [40]}), ("chat/completions", {"messages": []})):
            headers = {} if given is None else {"Authorization": given}
            answer = httpx.request("GET" if body is None else "POST", f"{url}/v1/{route}", json=body, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer" and key not in answer.text
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def _answers(url: str) -> bool:
    """Whether /health, which needs no key, answers: the address is printed shortly before it listens."""
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
