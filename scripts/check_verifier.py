"""Run the answer verifier over labelled cases: `python scripts/check_verifier.py CASES.jsonl[.gz] [--policy KEY=VALUE ...]`.

A case is a JSON line with `gold`, `output` and `expected` (bool), and optionally `id`, `kind`, `tags`, `scope` ("pair": the
output is a bare answer) and `gold_parts` / `output_parts` ([[text, count], ...]). Prints a table by kind and ends with
`untagged A/B agree, W wrong acceptances, R wrong rejections, O over time`.

`--policy units=ignore tolerance=1e-3` changes fields of the answer policy (docs/rewards.md). `--compare` runs math-verify with
its own defaults over the same cases, in a process that is killed where it hangs past its own limits, and adds its columns.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from posttrain.rewards.errors import RewardError
from posttrain.rewards.policy import AnswerPolicy
from posttrain.rewards.pool import Verdict, VerifierPool


def read_cases(path: Path) -> list[dict]:
    """The cases of a file, long strings put together."""
    opener = gzip.open if path.suffix == ".gz" else open
    cases = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            case = json.loads(line)
            for name in ("gold", "output"):
                if f"{name}_parts" in case:
                    case[name] = "".join(part * count for part, count in case[f"{name}_parts"])
                if name not in case:
                    raise ValueError(f"{path}:{number}: a case needs `{name}` or `{name}_parts`")
            cases.append(case)
    if not cases:
        raise ValueError(f"{path} holds no cases")
    return cases


def output_of(case: dict) -> str:
    return rf"\boxed{{ {case['output']} }}" if case.get("scope") == "pair" else case["output"]


def tally(cases: list[dict], verdicts: list[Verdict], timeout_s: float) -> dict[str, dict[str, int]]:
    """Counts by kind of: cases, agree, accepted (wrongly), rejected (wrongly), unread (gold), over (the time limit)."""
    rows: dict[str, dict[str, int]] = defaultdict(
        lambda: dict.fromkeys(("cases", "agree", "accepted", "rejected", "unread", "over"), 0)
    )
    for case, verdict in zip(cases, verdicts, strict=True):
        row = rows[case.get("kind", "all")]
        expected = bool(case["expected"])
        row["cases"] += 1
        row["unread"] += verdict.correct is None
        # an unreadable gold rewards nobody: it agrees with an expected refusal
        row["agree"] += bool(verdict.correct) == expected
        row["accepted"] += bool(verdict.correct) and not expected
        row["rejected"] += not verdict.correct and expected
        row["over"] += verdict.seconds > timeout_s + 1
    return dict(rows)


def print_table(rows: dict[str, dict[str, int]], plain: dict[str, dict[str, int]] | None) -> None:
    header = f"{'kind':<18}{'agree':>11}{'wrong acc.':>12}{'wrong rej.':>12}{'gold unread':>13}{'over time':>11}"
    print(header + (f"{'math-verify':>15}{'wrong acc.':>12}{'over time':>11}" if plain else ""))
    for kind, row in sorted(rows.items()):
        counts = f"{row['accepted']:>12}{row['rejected']:>12}{row['unread']:>13}{row['over']:>11}"
        other = plain[kind] if plain else {}
        beside = f"{other['agree']:>10}/{other['cases']:<4}{other['accepted']:>12}{other['over']:>11}" if plain else ""
        print(f"{kind:<18}{row['agree']:>6}/{row['cases']:<4}{counts}{beside}")


def summary(rows: dict[str, dict[str, int]]) -> str:
    agree, count, accepted, rejected, over = (
        sum(row[k] for row in rows.values()) for k in ("agree", "cases", "accepted", "rejected", "over")
    )
    return f"untagged {agree}/{count} agree, {accepted} wrong acceptances, {rejected} wrong rejections, {over} over time"


def math_verify_alone(pairs: list[tuple[str, str]], timeout_s: float) -> list[Verdict]:
    """math-verify as its README calls it, one pair after the other in a process that is killed past `timeout_s` + 1 s."""
    context = multiprocessing.get_context("spawn")
    verdicts: list[Verdict] = []
    while len(verdicts) < len(pairs):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve_math_verify, args=(theirs, pairs[len(verdicts) :]), daemon=True)
        process.start()
        ours.recv()
        while len(verdicts) < len(pairs):
            if not ours.poll(timeout_s + 1.0):
                verdicts.append(Verdict(correct=False, reason="timeout", seconds=timeout_s + 1.01))
                break
            correct, seconds = ours.recv()
            verdicts.append(Verdict(correct=correct, reason="match" if correct else "mismatch", seconds=seconds))
        process.kill()
        process.join()
    return verdicts


def _serve_math_verify(connection: Any, pairs: list[tuple[str, str]]) -> None:
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    connection.send("ready")
    for gold, output in pairs:
        started = time.monotonic()
        correct = verify(parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$"), parse(output))
        connection.send((bool(correct), time.monotonic() - started))


def read_policy(assignments: list[str]) -> AnswerPolicy:
    """`["units=ignore", "unboxed_fallback=false"]` -> the policy."""
    given: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise RewardError(f"--policy {assignment}: write KEY=VALUE")
        default = getattr(AnswerPolicy(), key, None)
        if isinstance(default, bool) and value.lower() not in ("true", "false"):
            raise RewardError(f"--policy {assignment}: {key} is true or false")
        given[key] = (
            value.lower() == "true" if isinstance(default, bool) else float(value) if isinstance(default, float) else value
        )
    return AnswerPolicy.of(given)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--policy", nargs="+", default=[], metavar="KEY=VALUE", help="fields of the answer policy to change")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--memory-mb", type=int, default=1024)
    parser.add_argument("--show", action="store_true", help="print every disagreement")
    parser.add_argument("--tags", action="store_true", help="show and tabulate tagged cases too")
    parser.add_argument("--compare", action="store_true", help="run plain math-verify over the same cases too")
    options = parser.parse_args(arguments)
    try:
        policy = read_policy(options.policy)
    except (RewardError, ValueError) as error:
        parser.error(str(error))

    cases = read_cases(options.cases)
    pairs = [(case["gold"], output_of(case)) for case in cases]
    started = time.monotonic()
    with VerifierPool(options.workers, options.timeout, options.memory_mb, policy=policy) as pool:
        verdicts = pool.verify(pairs)
        counters = pool.counters.as_dict()
    seconds = time.monotonic() - started
    alone = math_verify_alone(pairs, options.timeout) if options.compare else None

    def rows(given: list[Verdict], *, tagged: bool) -> dict[str, dict[str, int]]:
        chosen = [(case, verdict) for case, verdict in zip(cases, given, strict=True) if tagged or not case.get("tags")]
        return tally([case for case, _ in chosen], [verdict for _, verdict in chosen], options.timeout)

    if options.show:
        show([pair for pair in zip(cases, verdicts, strict=True) if options.tags or not pair[0].get("tags")])
    print_table(rows(verdicts, tagged=options.tags), rows(alone, tagged=options.tags) if alone else None)
    slowest = max(verdict.seconds for verdict in verdicts)
    print(
        f"{len(cases)} verified in {seconds:.1f} s, the slowest {slowest:.2f} s; "
        + ", ".join(f"{k} {v}" for k, v in counters.items())
    )
    if alone:
        print(f"math-verify {version('math-verify')} alone: {summary(rows(alone, tagged=False))}")
    print(summary(rows(verdicts, tagged=False)))
    return 0


def show(judged: list[tuple[dict, Verdict]]) -> None:
    """Print every disagreement."""
    for case, verdict in judged:
        if bool(verdict.correct) != bool(case["expected"]):
            name, gold, output = case.get("id", "?"), case["gold"][:80], output_of(case)[-100:]
            tags = ",".join(case.get("tags") or ())
            print(f"{name} {tags} want {case['expected']}, {verdict.reason}: gold {gold!r} output {output!r}")


if __name__ == "__main__":
    sys.exit(main())
