"""Outputs made to hang, to fill the memory or to run code: every verification ends within its limits, and nothing is executed."""

import sys
import time

import pytest

pytest.importorskip("math_verify")

from posttrain.rewards.format import FormatReward, RepetitionPenalty
from posttrain.rewards.language import LanguageReward
from posttrain.rewards.pool import VerifierPool

BOMBS = {
    "tower": r"\boxed{9^{9^{9^9}}}",
    "tower inside a set": r"\boxed{\{1, 9^{9^{9^9}}\}}",
    "tower inside a matrix": r"\boxed{\begin{pmatrix}1\\9^{9^{9^9}}\end{pmatrix}}",
    "factorial": r"\boxed{(10^{10})!}",
    "double factorial tower": r"\boxed{((9!)!)!}",
    "binomial": r"\boxed{\binom{10^9}{5\cdot 10^8}}",
    "huge matrix": r"\boxed{\begin{pmatrix}" + r"\\".join("&".join("7" * 40) for _ in range(40)) + r"\end{pmatrix}^{99}}",
    "expansion": r"\boxed{(a+b+c+d+e)^{3000}}",
    "sum": r"\boxed{\sum_{k=1}^{10^{9}} \sin(k)}",
}
SIZES = {
    "braces": r"\boxed" + "{" * 200_000,
    "nested boxes": r"\boxed{" * 60_000 + "7" + "}" * 60_000,
    "open parentheses": r"\boxed{" + "(" * 3_900 + "}",
    "megabyte of letters": "a" * 1_000_000,
    "megabyte of digits in a box": r"\boxed{" + "7" * 1_000_000 + "}",
    "dollars": "$" * 300_000,
    "tags": "<answer>" * 100_000,
    "question marks": "\nQuestion:" * 50_000,
    "spaces": r"\boxed{" + " " * 300_000 + "8}",
    "spaces behind a box": r"\boxed{7}" + " " * 390_000,
    "dollars behind a box": r"\boxed{7}" + "$" * 390_000,
    "ands": (r"\boxed{7}" + "\n- " * 15) * 6_000,
}


@pytest.mark.slow
def test_bombs_end_within_time_and_memory():
    with VerifierPool(workers=2, timeout_s=1.0, memory_mb=256) as pool:
        pool.verify([("1/3", r"\boxed{\frac13}")] * 2)
        verdicts = pool.verify([("1/3", bomb) for bomb in BOMBS.values()])
        for name, verdict in zip(BOMBS, verdicts, strict=True):
            assert verdict.correct is False, name
            assert verdict.seconds < 1.0 + 3, name
        peaks = [_peak_mb(child.process.pid) for child in pool._state.children if child.process.poll() is None]
        assert all(peak < 256 + 400 for peak in peaks)
        assert pool.verify([("1/3", r"\boxed{\frac13}")])[0].correct is True


def _peak_mb(pid):
    if sys.platform != "linux":
        return 0
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def test_size_alone_costs_little():
    with VerifierPool(workers=2, timeout_s=2.0, memory_mb=512) as pool:
        started = time.process_time()
        verdicts = pool.verify([("9", output) for output in SIZES.values()])
        assert time.process_time() - started < 10, "the caller's own share, its extraction"
    assert [verdict.correct for verdict in verdicts] == [False] * len(SIZES)


def test_the_other_rewards_are_linear_too():
    outputs = [*SIZES.values(), r"\[" * 300_000, r"\(" * 300_000, "$$ " * 200_000, "<" * 500_000]
    started = time.process_time()
    for reward in (FormatReward(think=True), RepetitionPenalty(ngram=20), LanguageReward(language="en")):
        assert len(reward(prompts=[""] * len(outputs), completions=outputs)) == len(outputs)
    assert time.process_time() - started < 60


@pytest.mark.parametrize(
    "code",
    [
        r"\boxed{__import__('os').system('touch MARK')}",
        r"\boxed{open('MARK', 'w')}",
        r"\boxed{exec('import os; os.mknod(\"MARK\")')}",
        r"\boxed{(lambda: open('MARK','w'))()}",
        r"\boxed{().__class__.__bases__[0].__subclasses__()}",
        r"\boxed{\input{MARK}}",
        r"\boxed{\write18{touch MARK}}",
    ],
)
def test_nothing_is_executed(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "mark"
    with VerifierPool(workers=1, timeout_s=20.0) as pool:
        assert pool.verify([("42", code.replace("MARK", str(mark)))])[0].correct is False
    assert not mark.exists()
