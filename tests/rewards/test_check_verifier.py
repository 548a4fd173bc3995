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


def made_to_hang(case):
    return case["kind"].startswith("hang") or "any" in case["tags"]


@pytest.mark.slow
@pytest.mark.parametrize(("hangs", "timeout"), [(False, "10"), (True, "1")])
def test_verifier_cases(root, shared, tmp_path, hangs, timeout):
    """Those that are made to hang under a short limit, for they are waited for; the others with room for a loaded machine."""
    with open(shared / "cases" / "verifier.jsonl", encoding="utf-8") as file:
        lines = [line for line in file if made_to_hang(json.loads(line)) is hangs]
    (tmp_path / "some.jsonl").write_text("".join(lines), encoding="utf-8")
    lines = run(root, str(tmp_path / "some.jsonl"), "--timeout", timeout)
    agree, total = map(int, lines[-1].split()[1].split("/"))
    assert total > (10 if hangs else 480)
    assert "0 wrong acceptances" in lines[-1] and "0 over time" in lines[-1]
    assert total - agree <= (0 if hangs else 3)
