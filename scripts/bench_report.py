"""The kernel benchmark's record, and its tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_tools import Timing, describe, table, write_results

# Measured on one H200: a large device-to-device copy (bytes read plus written), and a bf16 matrix product on random data.
COPY_BYTES_PER_S = 4.27e12
BF16_FLOP_PER_S = 690e12

TITLES = {
    "attention": "cuDNN causal attention",
    "fla-gla": "fla `chunk_gla`",
    "composed-n4k1": "SSE-n4k1 from `chunk_gla`, varlen",
    "composed-n16k1": "n16k1, varlen",
    "masking-n4k1": "n4k1, masking",
    "sse-n4k1": "**ours** n4k1",
    "sse-n16k1": "**ours** n16k1",
    "sse-packed": "**ours** n4k1, sequences of 512",
    "sse-recompute": "**ours** n4k1, states recomputed",
    "sse-gdn": "**ours** SSE-GDN n4k1",
    "fla-gdn": "fla `chunk_gated_delta_rule` (past its refusal of Hopper)",
}
PASSES = {"both": "Forward and backward", "forward": "Forward"}
# What is divided by what, with the goal.
RATIOS = {
    "n4k1 / fla `chunk_gla`": ("sse-n4k1", "fla-gla"),
    "n4k1 / varlen": ("sse-n4k1", "composed-n4k1"),
    "n16k1 / n4k1": ("sse-n16k1", "sse-n4k1"),
    "packed / one": ("sse-packed", "sse-n4k1"),
    "GDN / fla": ("sse-gdn", "fla-gdn"),
}
GOALS = "Goals: n4k1 / fla at most 1.0, n16k1 / n4k1 at most 1.1, packed / one at most 1.3 (32,768), GDN / fla at most 1.5."


def floors_ms(
    tokens: int, heads: int, dim: int, *, states: int, chunk: int = 64, element: int = 2, g_element: int = 2
) -> dict[str, tuple]:
    """(bytes, FLOPs) floors in milliseconds by pass, for an SSE call whose tokens touch `states` states (1 + R).

    Bytes, each tensor once a pass. Forward: q1 k1 g1 q2 k2 g2 v in, o out; backward: those seven and do in, seven gradients out;
    that is 8 + 15 tensors of T H D. Router weights and indices add T R (4 + 8); states are left out, they can stay on the chip.

    FLOPs, per row (a token in one state) and head: scores and their product with v, half of a C x C matrix each, C (K + V);
    reading and writing the state 2 K V each. The backward has two such products for each of the forward's.
    """
    numbers, routing = tokens * heads * dim, tokens * (states - 1) * 12
    row = chunk * 2 * dim + 4 * dim * dim
    forward = ((6 * element + 2 * g_element) * numbers + routing, tokens * states * heads * row)
    backward = ((11 * element + 4 * g_element) * numbers + routing, 2 * forward[1])
    work = {"forward": forward, "both": (forward[0] + backward[0], forward[1] + backward[1])}
    return {name: (1e3 * b / COPY_BYTES_PER_S, 1e3 * f / BF16_FLOP_PER_S) for name, (b, f) in work.items()}


@dataclass
class Report:
    """Everything measured so far. timings[(variant, tokens, pass)] is a Timing or why there is none.

    errors[(case, who)] by tensor, or why there are none; bitwise[check] by tensor; memory[(variant, tokens)] in bytes.
    """

    environment: dict[str, str]
    settings: dict[str, Any]
    tokens: Sequence[int]
    timings: dict[tuple[str, int, str], Timing | str] = field(default_factory=dict)
    earlier: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[tuple[str, str], dict[str, float] | str] = field(default_factory=dict)
    bitwise: dict[str, dict[str, bool] | str] = field(default_factory=dict)
    memory: dict[tuple[str, int], int | str] = field(default_factory=dict)
    first_call_s: float | str | None = None
    kernels: dict[str, list[tuple[str, float, int]] | str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # by phase

    def add_timing(self, name: str, tokens: int, which: str, timing: Timing | str) -> None:
        """A variant timed again replaces its earlier time, which stays in the JSON: the spread between the two is noise."""
        before = self.timings.get((name, tokens, which))
        if isinstance(before, Timing):
            self.earlier.append(self._row(name, tokens, which, before))
        self.timings[name, tokens, which] = timing

    def ms(self, name: str, tokens: int, which: str) -> float | None:
        timing = self.timings.get((name, tokens, which))
        return timing.ms if isinstance(timing, Timing) else None

    def ratio(self, names: tuple[str, str], tokens: int, which: str) -> float | None:
        above, below = (self.ms(name, tokens, which) for name in names)
        return above / below if above is not None and below is not None else None

    def write(self, folder: Path) -> None:
        write_results(folder, "kernels", self.record(), self.markdown())

    @staticmethod
    def _row(name: str, tokens: int, which: str, timing: Timing | str) -> dict[str, Any]:
        numbers = asdict(timing) if isinstance(timing, Timing) else {"failed": timing}
        return {"variant": name, "tokens": tokens, "pass": which, **numbers}

    def record(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "settings": self.settings,
            "first_call_s": self.first_call_s,
            "timings": [self._row(*key, timing) for key, timing in self.timings.items()],
            "timings_before": self.earlier,
            "ratios": [
                {"ratio": title.replace("`", ""), "tokens": tokens, "pass": which, "value": value}
                for title, names in RATIOS.items() for tokens in self.tokens for which in PASSES
                if (value := self.ratio(names, tokens, which)) is not None
            ],
            "floors": self.floor_rows(),
            "errors": [{"case": case, "of": who, "errors": e} for (case, who), e in self.errors.items()],
            "bitwise": self.bitwise,
            "memory_bytes": [{"variant": n, "tokens": t, "peak": peak} for (n, t), peak in self.memory.items()],
            "kernels": self.kernels,
            "failures": self.failures,
        }  # fmt: skip

    def floor_rows(self) -> list[dict[str, Any]]:
        """Fractions of the two floors for every time of ours (GLA)."""
        rows = []
        for (name, tokens, which), timing in self.timings.items():
            if not name.startswith("sse-") or name == "sse-gdn" or not isinstance(timing, Timing):
                continue
            s, bytes_of = self.settings, {"bf16": 2, "fp32": 4}
            floors = floors_ms(
                tokens, s["heads"], s["dim"], states=2, chunk=s["chunk_size"], element=bytes_of[s["dtype"]],
                g_element=bytes_of[s["g_dtype"]],
            )  # fmt: skip
            by_bytes, by_flops = floors[which]
            rows.append(
                {"variant": name, "tokens": tokens, "pass": which, "ms": timing.ms, "bytes_ms": by_bytes, "flop_ms": by_flops,
                 "of_bytes": by_bytes / timing.ms, "of_flops": by_flops / timing.ms}
            )  # fmt: skip
        return rows

    def markdown(self) -> list[str]:
        s = self.settings
        lines = ["# SSE kernels beside their peers", "", *describe(self.environment)]
        lines += [
            f"One process, {s['heads']} heads of {s['dim']}, {s['dtype']} (decay {s['g_dtype']}), batch 1, one routed partition; "
            f"median milliseconds by device events. Ours: backend `{s['backend']}`, chunks of {s['chunk_size']}, no final "
            "states. A dash: not run.",
            "",
        ]
        for which in PASSES:
            lines += self._times(which)
        lines += [GOALS, ""] if self.timings else []
        return lines + self._floors() + self._errors() + self._rest() + self._kernels() + self._failed()

    def _times(self, which: str) -> list[str]:
        names = [n for n in TITLES if any(key[0] == n and key[2] == which for key in self.timings)]
        ratios = {title: pair for title, pair in RATIOS.items() if set(pair) <= set(names)}
        if not names:
            return []

        def cell(name: str, tokens: int) -> str | None:
            timing = self.timings.get((name, tokens, which))
            return None if timing is None else f"{timing.ms:.3g}" if isinstance(timing, Timing) else "failed"

        def quotient(pair: tuple[str, str], tokens: int) -> str | None:
            value = self.ratio(pair, tokens, which)
            return None if value is None else f"{value:.2f}"

        rows = [
            [f"{tokens:,}", *(cell(n, tokens) for n in names), *(quotient(pair, tokens) for pair in ratios.values())]
            for tokens in self.tokens
        ]
        return [f"## {PASSES[which]}", "", *table(("tokens", *(TITLES[n] for n in names), *ratios), rows)]

    def _floors(self) -> list[str]:
        def cell(milliseconds: float, share: float) -> str:
            return f"{milliseconds:.3g} ({share:.0%})"

        rows = []
        for r in self.floor_rows():
            floors = cell(r["bytes_ms"], r["of_bytes"]), cell(r["flop_ms"], r["of_flops"])
            rows.append((TITLES[r["variant"]], f"{r['tokens']:,}", PASSES[r["pass"]], f"{r['ms']:.3g}", *floors))
        if not rows:
            return []
        text = (
            f"Each input and output once a pass at {COPY_BYTES_PER_S / 1e12:.2f} TB/s, the products of chunks of "
            f"{self.settings['chunk_size']} at {BF16_FLOP_PER_S / 1e12:.0f} TFLOP/s (both measured on an H200); in parentheses "
            "the floor's share of the time."
        )
        header = ("variant", "tokens", "pass", "ms", "bytes floor", "FLOP floor")
        return ["## Floors", "", text, "", *table(header, rows)]

    def _errors(self) -> list[str]:
        """By case and tensor: ours, then the peers, each with ours over it."""
        lines = []
        for case in dict.fromkeys(case for case, _ in self.errors):
            columns = {who: e for (c, who), e in self.errors.items() if c == case}
            lines += [f"### {case}", "", *_error_table({who: e for who, e in columns.items() if not isinstance(e, str)})]
            lines += [line for who, e in columns.items() if isinstance(e, str) for line in (f"{who} failed: {e}", "")]
        text = (
            "‖found - truth‖ / ‖truth‖. A tensor that a peer has under another name (dq for dq1 and dq2) is compared with that."
        )
        return ["## Errors against float64", "", text, "", *lines] if lines else []

    def _rest(self) -> list[str]:
        lines = []
        if self.bitwise:
            rows = []
            for check, same in self.bitwise.items():
                wrong = same if isinstance(same, str) else ", ".join(n for n, equal in same.items() if not equal)
                rows.append((check, f"no: {wrong}" if wrong else "yes"))
            lines += ["## Bitwise", "", *table(("check", "equal"), rows)]
        if self.memory:
            rows = [
                (TITLES[n], f"{t:,}", f"{peak / 2**30:.2f} GiB" if isinstance(peak, int) else peak)
                for (n, t), peak in self.memory.items()
            ]
            lines += ["## Peak memory of one forward and backward", "", "Above the inputs; results and gradients count.", ""]
            lines += table(("variant", "tokens", "peak"), rows)
        if self.first_call_s is not None:
            cold = "with an empty compilation cache" if self.settings["cold"] else "with whatever the compilation cache held"
            value = f"{self.first_call_s:.1f} s" if isinstance(self.first_call_s, float) else self.first_call_s
            lines += [f"First call of ours (n4k1, forward and backward), {cold}: {value}.", ""]
        return lines

    def _kernels(self) -> list[str]:
        lines = []
        for name, rows in self.kernels.items():
            if isinstance(rows, str):
                lines += [f"## Kernels of {name}", "", rows, ""]
                continue
            total = sum(us for _, us, _ in rows) or 1.0
            cells = [(f"`{kernel[:90]}`", launches, f"{us:.1f}", f"{us / total:.1%}") for kernel, us, launches in rows[:20]]
            lines += [f"## Kernels of {name}, {total:.0f} us a call", "", *table(("kernel", "launches", "us", "share"), cells)]
        return lines

    def _failed(self) -> list[str]:
        """A row a variant and reason, with the sizes and passes that it held for."""
        where: dict[tuple[str, str], list[str]] = {}
        for (name, tokens, which), timing in self.timings.items():
            if isinstance(timing, str):
                where.setdefault((TITLES[name], timing), []).append(f"{tokens:,} {PASSES[which].lower()}")
        rows = [(title, "; ".join(places), reason) for (title, reason), places in where.items()]
        rows += [(phase, None, reason) for phase, reason in self.failures.items()]
        return ["## What did not run", "", *table(("variant", "where", "reason"), rows)] if rows else []


def _error_table(columns: dict[str, dict[str, float]]) -> list[str]:
    """A row a tensor of ours, or of the peers where ours are missing; then the largest ratio over each peer."""
    ours = columns.get("ours")
    peers = {who: errors for who, errors in columns.items() if who != "ours"}
    names = list(ours or dict.fromkeys(name for errors in peers.values() for name in errors))
    ratios: dict[str, dict[str, float]] = {who: {} for who in peers}
    rows = []
    for name in names:
        row = [name, f"{ours[name]:.2e}" if ours else None]
        for who, errors in peers.items():
            error = _like(name, errors)
            if ours and error:
                ratios[who][name] = ours[name] / error
            row += [None if error is None else f"{error:.2e}", f"{ratios[who][name]:.2f}" if name in ratios[who] else None]
        rows.append(row)
    lines = table(["tensor", "ours", *(h for who in peers for h in (who, "ours / it"))], rows)
    for who, found in ratios.items():
        if found:
            worst = max(found, key=lambda name: found[name])
            lines += [f"Largest ratio over {who}: {found[worst]:.2f} ({worst}).", ""]
    return lines


def _like(name: str, errors: dict[str, float]) -> float | None:
    """A peer's error for the tensor, or for the one of the same kind: plain attention has one q where SSE has q1 and q2."""
    return errors.get(name, errors.get(name.rstrip("12")))
