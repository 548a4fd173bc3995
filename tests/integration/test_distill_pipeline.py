"""A teacher behind a server, then SFT on what it wrote, as a user runs them: on Ray, killed in the middle, resumed."""

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from posttrain.config import dump_recipe
from posttrain.data.arithmetic import generate
from posttrain.data.load import load_source
from tests.posttrain.fake_teacher import make_recipe, serving


@pytest.mark.slow
def test_distill_then_sft_with_a_kill_between(tmp_path, root):
    golds = {row["problem"]: row["solution"] for row in generate(60, seed=5)}

    def answer(problem, seed):
        time.sleep(0.05)
        steps = golds[problem]
        return {"text": f"1+0=1\n{steps}" if seed % 2 else steps}

    with serving(answer) as teacher:
        recipe = make_recipe(
            tmp_path,
            teacher.url,
            stages=("distill", "sft"),
            problems={"kind": "arithmetic", "limit": 60, "seed": 5},
            data={"prompt_suffix": "", "max_length": 512},
        )
        (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "posttrain", "run", "recipe.yaml"]
        traces = tmp_path / "run" / "distill" / "traces.jsonl"
        with open(tmp_path / "first.log", "w") as log:
            driver = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=log)
            deadline = time.monotonic() + 120
            while not (traces.exists() and traces.read_bytes().count(b"\n") >= 20):
                assert driver.poll() is None, (tmp_path / "first.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        plain = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert plain.returncode == 2
        assert "holds an unfinished stage (distill)" in plain.stderr
        command.append("--resume")
        resumed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    lines = [json.loads(line) for line in traces.read_text().splitlines()]
    assert len(lines) == len({(line["problem"], line["sample"]) for line in lines}) == 120
    report = json.loads((tmp_path / "run" / "distill" / "final" / "report.json").read_text())
    assert (report["rows"], report["traces"], report["solved"]) == (60, 120, 60)
    rows = pq.read_table(tmp_path / "run" / "distill" / "final" / "part-00000.parquet").to_pylist()
    assert {row["solution"].removeprefix("1+0=1\n") for row in rows} == set(golds.values())
    info = json.loads((tmp_path / "run" / "data" / "sft" / "info.json").read_text())
    assert info["kept"] == 60
    assert (tmp_path / "run" / "sft" / "final" / "model.safetensors").is_file()
    assert "distill" in resumed.stderr
    assert load_source(type("Source", (), {"path": str(tmp_path / "run" / "distill" / "final")})(), needs_solution=True)
