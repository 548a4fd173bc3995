"""The decode benchmark's arithmetic by hand, and a trial of the script."""

import json
import sys

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")


@pytest.fixture(scope="module", autouse=True)
def scripts(root):
    sys.path.insert(0, str(root / "scripts"))
    yield
    sys.path.remove(str(root / "scripts"))


def test_bytes_of_a_step_by_hand():
    from bench_decode import Shape

    shape = Shape(heads=3, dim=8, partitions=4, routed=1, chunk=4, dtype=torch.bfloat16)
    state, pending = 8 * 8 * 2, 1.5 * (16 + 16)
    token = 3 * 16 + 32 + 2 * 32 + 3 * 16 + 32 + 2 * 32
    fold = (2 * 64 * 4 + 4 * (16 + 16 + 32)) / 4
    assert shape.step_bytes(5) == 5 * 3 * (2 * (state + pending + token + fold) + 16)
    assert shape.state_bytes(5) == 5 * 2 * 3 * 64 * 4


def test_a_trial_on_the_cpu(tmp_path, monkeypatch, capsys):
    import bench_decode

    small = ["--heads", "1", "--dim", "16", "--chunk-size", "2", "--partitions", "2", "--dtype", "fp32", "--batch", "2"]
    arguments = ["--device", "cpu", *small, "--replays", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["somewhere/bench_decode.py", *arguments])
    assert bench_decode.main(arguments) == 0
    record = json.loads((tmp_path / "decode.json").read_text())
    assert record["check"]["error"] < 1e-6 and record["check"]["states_bitwise_prefill"]
    assert record["rows"][0]["step_us"] > 0 and record["rows"][0]["ratio_to_state_copy"] > 0
    assert "| 2 |" in (tmp_path / "decode.md").read_text()
    with pytest.raises(SystemExit):
        bench_decode.main(["--device", "cpu"])
    assert "give --out" in capsys.readouterr().err


def test_a_wrong_step_is_seen(monkeypatch):
    import bench_decode

    right = bench_decode.TritonChunkState.step
    monkeypatch.setattr(bench_decode.TritonChunkState, "step", lambda self, x, slots: 1.001 * right(self, x, slots))
    small = ["--heads", "1", "--dim", "16", "--chunk-size", "2", "--partitions", "2", "--dtype", "fp32", "--batch", "2"]
    assert bench_decode.main(["--device", "cpu", *small, "--check"]) == 1
