"""Runs the SSE kernels over the small cases: `compute-sanitizer --tool memcheck python scripts/sanitize_kernels.py`.

Then the same with `--tool racecheck`. Forward and backward of every case by the triton backend on a CUDA device, new memory
filled with NaN, compared with float64 by the torch backend on the CPU. One row a case; exit code 1 when one is wrong.
A case that the backend refuses (a ValueError that says so) is a row of its own. With `PYTORCH_NO_CUDA_MEMORY_CACHING=1`
memcheck sees every tensor as an allocation of its own and finds accesses just past one.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_tools import attempt, poisoned_memory, relative_error, say
from torch import Tensor

from posttrain.kernels.sse import sse, sse_gdn
from posttrain.kernels.sse.cases import CASES, Case, make_case

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# The widths that models use, beside the shared cases' small ones.
WIDE = {
    "wide": Case(lengths=(150, 61, 1), key_dim=128, value_dim=128, chunk_size=64),
    "wide, two routes": Case(lengths=(130, 70), key_dim=128, value_dim=128, chunk_size=64, partitions=16, routed=2),
    "wide, short chunk": Case(lengths=(70, 33), key_dim=128, value_dim=128, chunk_size=32),
    "wide, longest chunk": Case(lengths=(130, 70), key_dim=96, value_dim=80, chunk_size=128),
    "wide, strong decay": Case(lengths=(130, 70), key_dim=128, value_dim=128, chunk_size=64, decay=-5.0),
}
# Operands rounded to bf16 (or tf32) give some 1e-3 to 1e-2; a wrong term is far above.
TOLERANCE = 3e-2


def run_case(case: Case, *, dtype: torch.dtype, device: str, backend: str, rounded: torch.dtype) -> dict[str, Tensor]:
    """o, the final state and every gradient; inputs and upstream gradients are those of `rounded`, computed with in `dtype`."""
    tensors, options = make_case(case, dtype=rounded, device=device)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for name, a in tensors.items():
        if a is not None and name != "index":
            kept = name in ("weight", "initial_state")  # fp32 beside half-precision projections
            tensors[name] = a.to(state_dtype if kept else dtype).requires_grad_()
    leaves = {n: a for n, a in tensors.items() if a is not None and a.requires_grad}
    operator = sse if case.transition == "gla" else sse_gdn
    positional = [tensors[n] for n in (*case.names, "weight", "index")]
    o, final = operator(*positional, v2=tensors["v2"], initial_state=tensors["initial_state"], backend=backend, **options)  # type: ignore[arg-type]
    assert final is not None
    draw = torch.Generator().manual_seed(case.seed + 1)
    ups = [torch.randn(a.shape, generator=draw).to(rounded).to(a) for a in (o, final)]
    grads = torch.autograd.grad([o, final], list(leaves.values()), ups, allow_unused=True)
    found = {f"d{n}": g for n, g in zip(leaves, grads) if g is not None}
    return {"o": o.detach(), "final_state": final.detach()} | found


def check_case(case: Case, dtype: torch.dtype, device: str, backend: str) -> dict[str, float] | str:
    """Errors by tensor, or why the backend refuses the case."""
    truth = run_case(case, dtype=torch.float64, device="cpu", backend="torch", rounded=dtype)
    try:
        with poisoned_memory():
            found = run_case(case, dtype=dtype, device=device, backend=backend, rounded=dtype)
            if device == "cuda":
                torch.cuda.synchronize()
    except ValueError as refused:
        return str(refused)
    missing = {name: float("inf") for name in truth if name not in found}
    return missing | {name: relative_error(a.cpu(), truth[name]) for name, a in found.items() if name in truth}


def main(arguments: list[str] | None = None) -> int:
    cases = CASES | WIDE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases), metavar="NAME", help=f"of: {'; '.join(cases)}")
    parser.add_argument("--transition", choices=("gla", "gdn", "both"), default="both")
    parser.add_argument("--dtype", choices=(*DTYPES, "both"), default="both")
    parser.add_argument("--backend", choices=("triton", "torch"), default="triton")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: under TRITON_INTERPRET=1")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device that PyTorch can use")
    counts = {"ok": 0, "refused": 0, "FAIL": 0}
    for transition in ("gla", "gdn") if args.transition == "both" else (args.transition,):
        for dtype in DTYPES if args.dtype == "both" else (args.dtype,):
            for name in args.cases:
                case = replace(cases[name], transition=transition)
                done = attempt(name, lambda case=case, dtype=dtype: [check_case(case, DTYPES[dtype], args.device, args.backend)])
                result = done if isinstance(done, str) else done[0]
                if isinstance(result, str):
                    verdict, text = "FAIL" if isinstance(done, str) else "refused", result
                else:
                    worst = max(result.items(), key=lambda item: item[1])
                    verdict = "ok" if worst[1] <= TOLERANCE else "FAIL"
                    text = f"worst {worst[0]} {worst[1]:.1e}"
                counts[verdict] += 1
                say(f"{verdict:7} {transition} {dtype} {name}: {text}")
    say(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts["FAIL"] or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
