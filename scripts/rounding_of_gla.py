"""Which bf16 roundings of the GLA kernels cost how much: one sequence in float64, each rounding of `kernels/sse/triton_gla.py`
put in alone, then all, then all but some. `python scripts/rounding_of_gla.py [--tokens N] [--without NAME ...]`

Roundings: S, D (start states, gradients of end states), qs, ks (factors of the scores), A (scores), qg, kd (queries from the
chunk's start, keys to its end), ks2 (keys that gradients of scores meet), out (results). The row "coarse" has those too that the
kernels spare, since they cost most: Av (scores in the gradient of the values), dA (gradients of scores), qs2 (queries that these
meet); there the kernels take 16 bits. No GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from torch import Tensor

NAMES = ("S", "D", "qs", "ks", "A", "qg", "kd", "ks2", "out")
SPARED = ("Av", "dA", "qs2")
WIDTH, CHUNK = 128, 64


def bf16(a: Tensor) -> Tensor:
    return a.to(torch.bfloat16).double()


def draw(tokens: int) -> dict[str, Tensor]:
    """q, k, v, g, do [T, D] as a layer would make them, rounded to bf16 as the kernels receive them."""
    normal = torch.Generator().manual_seed(0)

    def rows() -> Tensor:
        return torch.randn(tokens, WIDTH, generator=normal, dtype=torch.float64)

    silu = torch.nn.functional.silu
    tensors = {"q": silu(rows()), "v": silu(rows()), "k": rows().softmax(-1), "do": rows()}
    tensors["g"] = torch.nn.functional.logsigmoid(rows()) / 16
    return {name: bf16(a) for name, a in tensors.items()}


def gla(x: dict[str, Tensor], rounded: Iterable[str]) -> dict[str, Tensor]:
    """o, dq, dk, dg, dv of one head, with the named roundings; formulas in `triton_gla.py`."""
    rounded = set(rounded)

    def r(name: str, a: Tensor) -> Tensor:
        return bf16(a) if name in rounded else a

    scale = WIDTH**-0.5
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    chunks = [{n: a[i : i + CHUNK] for n, a in x.items()} for i in range(0, len(x["q"]), CHUNK)]
    state, out = torch.zeros(WIDTH, WIDTH, dtype=torch.float64), []
    for c in chunks:
        c["q"], c["G"], c["S"] = c["q"] * scale, c["g"].cumsum(0), r("S", state)
        c["kd"] = c["k"] * torch.exp(c["G"][-1] - c["G"])
        state = torch.exp(c["G"][-1])[:, None] * state + r("kd", c["kd"]).T @ c["v"]
    dstate = torch.zeros_like(state)
    for c in reversed(chunks):
        q, k, v, do, G, S, D = *(c[n] for n in ("q", "k", "v", "do", "G", "S")), r("D", dstate)
        growth = torch.exp(G - G[CHUNK // 2])
        A = torch.where(lower, r("qs", q * growth) @ r("ks", k / growth).T, 0.0)
        dA = do @ v.T
        own, dA = dA.diagonal()[:, None], r("dA", torch.where(lower.tril(-1), dA, 0.0))
        from_state, to_state = (do @ S.T) * torch.exp(G), (v @ D.T) * torch.exp(G[-1] - G)
        qs, ks = r("qs2", q * growth), r("ks2", k / growth)
        sent, received = dA @ ks, dA.T @ qs
        flow = q * from_state + qs * sent - ks * received - k * to_state
        dg = flow.flip(0).cumsum(0).flip(0) + (k * to_state).sum(0) + torch.exp(G[-1]) * (S * D).sum(1)
        q_start = r("qg", q * torch.exp(G))
        out.append(
            {
                "o": q_start @ S + r("A", A) @ v,
                "dq": (from_state + sent * growth + own * k) * scale,
                "dk": to_state + received / growth + own * q,
                "dg": dg,
                "dv": r("Av", A).T @ do + r("kd", c["kd"]) @ D,
            }
        )
        dstate = torch.exp(G[-1])[:, None] * dstate + q_start.T @ do
    return {n: r("out", torch.cat([c[n] for c in reversed(out)])) for n in out[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--without", nargs="+", choices=NAMES, default=[], help="left out of one more row")
    args = parser.parse_args()
    if args.tokens < CHUNK or args.tokens % CHUNK:
        parser.error(f"--tokens must be a multiple of {CHUNK}, got {args.tokens}")
    x = draw(args.tokens)
    truth = gla(x, ())
    rows = [*((n, [n]) for n in (*NAMES, *SPARED)), ("all", NAMES), ("coarse", (*NAMES, *SPARED))]
    if args.without:
        rows.append((f"all but {' '.join(args.without)}", [n for n in NAMES if n not in args.without]))
    print(f"{'rounded':20}" + "".join(f"{n:>10}" for n in truth))
    for label, names in rows:
        found = gla(x, names)
        print(f"{label:20}" + "".join(f"{float((found[n] - truth[n]).norm() / truth[n].norm()):10.2e}" for n in truth))


if __name__ == "__main__":
    main()
