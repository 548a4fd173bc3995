"""Run the answer verifier over labelled cases: `python scripts/check_verifier.py CASES.jsonl[.gz] [--show] [--tags]`.

A case is a JSON line with `gold`, `output` and `expected` (bool), and optionally `id`, `kind`, `tags`, `scope` ("pair": the
output is a bare answer) and `gold_parts` / `output_parts` ([[text, count], ...]). Prints a table by kind and ends with
`untagged A/B agree, W wrong acceptances, R wrong rejections, O over time`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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


def print_table(rows: dict[str, dict[str, int]]) -> None:
    print(f"{'kind':<18}{'agree':>11}{'wrong acc.':>12}{'wrong rej.':>12}{'gold unread':>13}{'over time':>11}")
    for kind, row in sorted(rows.items()):
        counts = f"{row['accepted']:>12}{row['rejected']:>12}{row['unread']:>13}{row['over']:>11}"
        print(f"{kind:<18}{row['agree']:>6}/{row['cases']:<4}{counts}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--memory-mb", type=int, default=1024)
    parser.add_argument("--boxed-only", action="store_true", help="without a box there is no answer")
    parser.add_argument("--show", action="store_true", help="print every disagreement")
    parser.add_argument("--tags", action="store_true", help="show and tabulate tagged cases too")
    options = parser.parse_args(arguments)

    cases = read_cases(options.cases)
    started = time.monotonic()
    with VerifierPool(options.workers, options.timeout, options.memory_mb, unboxed_fallback=not options.boxed_only) as pool:
        verdicts = pool.verify([(case["gold"], output_of(case)) for case in cases])
        counters = pool.counters.as_dict()
    seconds = time.monotonic() - started

    judged = [(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if options.tags or not case.get("tags")]
    if options.show:
        for case, verdict in judged:
            if bool(verdict.correct) != bool(case["expected"]):
                name, gold, output = case.get("id", "?"), case["gold"][:80], output_of(case)[-100:]
                tags = ",".join(case.get("tags") or ())
                print(f"{name} {tags} want {case['expected']}, {verdict.reason}: gold {gold!r} output {output!r}")
    print_table(tally([case for case, _ in judged], [verdict for _, verdict in judged], options.timeout))
    slowest = max(verdict.seconds for verdict in verdicts)
    print(
        f"{len(cases)} verified in {seconds:.1f} s, the slowest {slowest:.2f} s; "
        + ", ".join(f"{k} {v}" for k, v in counters.items())
    )
    plain = [(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if not case.get("tags")]
    rows = tally([case for case, _ in plain], [verdict for _, verdict in plain], options.timeout).values()
    agree, count, accepted, rejected, over = (
        sum(row[k] for row in rows) for k in ("agree", "cases", "accepted", "rejected", "over")
    )
    print(f"untagged {agree}/{count} agree, {accepted} wrong acceptances, {rejected} wrong rejections, {over} over time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
