"""The verifier on labelled cases of our own: 43 kinds, both verdicts each, many of them answers that try to be right whatever the
gold is. `verifier_cases.jsonl` has the form that scripts/check_verifier.py reads."""

import json
import sys
from collections import Counter, defaultdict

import pytest

pytest.importorskip("math_verify")

from posttrain.rewards.pool import VerifierPool

# Other policies than the default decide these.
POLICIES = ("convention", "decimal_comma", "any")
HANGS = ("hang_exponent", "hang_factorial", "deep_nesting", "long_output")


@pytest.fixture(scope="module")
def cases(root):
    sys.path.insert(0, str(root / "scripts"))
    try:
        from check_verifier import output_of, read_cases
    finally:
        sys.path.pop(0)
    found = read_cases(root / "tests" / "rewards" / "verifier_cases.jsonl")
    return [{**case, "text": output_of(case)} for case in found]


def disagreements(cases, timeout_s):
    with VerifierPool(workers=2, timeout_s=timeout_s, memory_mb=1024) as pool:
        verdicts = pool.verify([(case["gold"], case["text"]) for case in cases])
    assert all(verdict.seconds < timeout_s + 3 for verdict in verdicts)
    return [
        (case["id"], case["gold"], case["text"][-80:], verdict.reason)
        for case, verdict in zip(cases, verdicts, strict=True)
        if not set(case["tags"]) & set(POLICIES) and bool(verdict.correct) != case["expected"]
    ]


def test_every_kind_has_cases_of_both_verdicts(cases):
    verdicts = defaultdict(Counter)
    for case in cases:
        verdicts[case["kind"]][case["expected"]] += 1
    assert len(verdicts) == 43
    assert min(sum(counts.values()) for counts in verdicts.values()) >= 10
    assert all(counts[True] and counts[False] for counts in verdicts.values())
    assert len({json.dumps([case["gold"], case["text"]]) for case in cases}) == len(cases)


def test_a_share_of_the_cases(cases):
    chosen = [case for case in cases if case["kind"] not in HANGS][::25]
    assert disagreements(chosen, timeout_s=20.0) == []


@pytest.mark.slow
def test_all_cases(cases):
    assert disagreements([case for case in cases if case["kind"] not in HANGS], timeout_s=20.0) == []


@pytest.mark.slow
def test_hanging_cases_end_and_are_not_accepted(cases):
    wrong = disagreements([case for case in cases if case["kind"] in HANGS][::2], timeout_s=0.5)
    assert [case for case in wrong if case[3] == "match"] == []
