"""The script that runs labelled cases."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("math_verify")


def run(root, *arguments):
    done = subprocess.run(
        [sys.executable, "scripts/check_verifier.py", *arguments], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_table_and_last_line(root, tmp_path):
    cases = [
        {"id": "1", "kind": "x", "gold": "1/2", "output": r"\boxed{0.5}", "expected": True, "scope": "output", "tags": []},
        {"id": "2", "kind": "x", "gold": "1/2", "output": "1/3", "expected": True, "scope": "pair", "tags": []},
        {
            "id": "3",
            "kind": "y",
            "gold": "7",
            "output_parts": [[r"\boxed{", 1], ["7", 3], ["}", 1]],
            "expected": False,
            "tags": [],
        },
        {"id": "4", "kind": "y", "gold": "7", "output": "8", "expected": True, "scope": "pair", "tags": ["convention"]},
    ]
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(json.dumps(case) for case in cases))
    lines = run(root, str(path), "--show")
    assert lines[-1] == "untagged 2/3 agree, 0 wrong acceptances, 1 wrong rejections, 0 over time"
    assert any(line.startswith("2 ") and "mismatch" in line for line in lines)


def test_real_outputs(root, shared):
    lines = run(root, str(shared / "cases" / "real_outputs_gsm8k.jsonl.gz"))
    agree, total = map(int, lines[-1].split()[1].split("/"))
    assert total > 5000 and agree == total


@pytest.mark.slow
def test_verifier_cases(root, shared):
    lines = run(root, str(shared / "cases" / "verifier.jsonl"))
    agree, total = map(int, lines[-1].split()[1].split("/"))
    assert "0 wrong acceptances" in lines[-1] and "0 over time" in lines[-1]
    assert total - agree <= 3
