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


def test_a_backend_that_is_not_built_fails(check, shared):
    code, out = check(shared / "golden", "--backend", "triton")
    assert code == 1 and "not built yet" in out and out.splitlines()[-1].startswith("0 passed")


def test_an_empty_folder_fails(check, tmp_path):
    assert check(tmp_path)[0] == 1
