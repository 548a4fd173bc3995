"""scripts/check_golden.py: every golden file matches, and a wrong one fails the run."""

import runpy
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture
def check(root, monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["check_golden.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(root / "scripts/check_golden.py"), run_name="__main__")
        return stopped.value.code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_golden_files_match(check, shared, backend):
    code, out = check(shared / "golden", "--backend", backend)
    rows = [line.split() for line in out.splitlines()]
    assert code == 0, out
    assert rows[-1] == [str(len(list((shared / "golden").glob("*sse_*.safetensors")))), "passed,", "0", "failed"]
    assert sum(row[0] == "skip" for row in rows) == len(list((shared / "golden").glob("sdm_*.safetensors")))


def test_a_wrong_gradient_fails(check, shared, tmp_path):
    source = sorted((shared / "golden").glob("sse_gla_*.safetensors"))
    shutil.copy(source[0], tmp_path)
    tensors = load_file(source[-1])
    tensors["grad.k2"] = tensors["grad.k2"] + 1e-3 * tensors["grad.k2"].abs().max() * torch.ones(())
    save_file(tensors, tmp_path / "sse_gla_wrong.safetensors")
    (tmp_path / "sse_gdn_broken.safetensors").write_bytes(b"no tensors here")
    code, out = check(tmp_path)
    assert code == 1
    assert out.splitlines()[-1] == "1 passed, 2 failed"
    assert "dk2 1e-03" in out and "SafetensorError" in out


def test_a_backend_that_refuses_the_inputs_fails(check, shared, monkeypatch):
    launch = pytest.importorskip("posttrain.kernels.triton_launch")
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    code, out = check(shared / "golden", "--backend", "triton")
    assert code == 1
    assert "the inputs are on cpu; Triton kernels need a CUDA device" in out
    assert out.splitlines()[-1].startswith("0 passed")


@pytest.mark.slow
def test_triton_matches_golden_files(check, shared, tmp_path):
    """On a GPU every file of GLA, interpreted the two quickest: one sequence, and two of strong decay."""
    pytest.importorskip("triton")
    names = ["*sse_gla_*"] if torch.cuda.is_available() else ["sse_gla_T70_*", "sse_gla_*_strong"]
    files = [f for name in names for f in (shared / "golden").glob(f"{name}.safetensors")]
    assert len(files) >= 2
    for file in files:
        shutil.copy(file, tmp_path)
    code, out = check(tmp_path, "--backend", "triton", "--device", "cuda" if torch.cuda.is_available() else "cpu")
    assert code == 0, out
    assert out.splitlines()[-1] == f"{len(files)} passed, 0 failed"


def test_an_empty_folder_fails(check, tmp_path):
    assert check(tmp_path)[0] == 1
