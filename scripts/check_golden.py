"""Compares the operators with every golden file of a folder: `python scripts/check_golden.py DIR [--backend ...] [--device ...]`.

A golden file is float64 truth for one call, stored as float32 safetensors: `in.*`, `out.*`, `grad_out.*` (upstream gradients of o
and of the final state) and `grad.*` (of sum(o * grad_out.o) + sum(final * grad_out.final_state) + balance loss). Its name says
what it is: `sse_gla_*`, `sse_gdn_*` an operator call; `layer_sse_gla_*`, `layer_sse_gdn_*` a whole layer with its state dict in
`param.*`. One row a file with the worst relative error, |found - truth| / max |truth|, by tensor. Exit code 1 when a file fails
or none was found. Files of operators that do not exist here are rows of their own, and neither pass nor fail.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from posttrain.kernels.sse import balance_loss, route, sse, sse_gdn, use_backend

# fp32 rounding of a few hundred recurrent steps is about 1e-6 of a tensor's largest value; a wrong term is above 1e-3.
TOLERANCE = 2e-5
UNSUPPORTED = {"sdm_": "no Sparse Delta Memory operator yet"}


def check_operator(tensors: dict[str, Tensor], *, is_gdn: bool) -> dict[str, float]:
    """Errors by tensor: outputs by name, gradients as d<name>."""
    names = ["q1", "k1", "g1", "b1", "q2", "k2", "g2", "b2", "v"] if is_gdn else ["q1", "k1", "g1", "q2", "k2", "g2", "v"]
    optional = ["state"] if "in.state" in tensors else []
    x = {n: tensors[f"in.{n}"].clone().requires_grad_() for n in [*names, "logits", *optional]}
    index = tensors["in.index"].long()
    probs, weight, chosen = route(x["logits"], index.shape[1])
    if not torch.equal(chosen.sort(1).values, index.sort(1).values):
        return {"index": float("inf")}
    operator = sse_gdn if is_gdn else sse
    o, final = operator(
        *(x[n] for n in names), weight, chosen, cu_seqlens=tensors["in.cu_seqlens"].cpu(), num_partitions=probs.shape[1],
        initial_state=x.get("state"),
    )  # fmt: skip
    loss = balance_loss(probs, chosen)
    found = {"o": o, "final_state": final, "weight": weight, "balance_loss": loss.reshape(1)}
    errors = {name: _error(a, tensors[f"out.{name}"]) for name, a in found.items() if f"out.{name}" in tensors}
    total = (o * tensors["grad_out.o"]).sum() + (final * tensors["grad_out.final_state"]).sum() + loss
    grads = torch.autograd.grad(total, list(x.values()))
    return errors | {f"d{n}": _error(g, tensors[f"grad.{n}"]) for n, g in zip(x, grads, strict=True)}


def check_layer(tensors: dict[str, Tensor], *, is_gdn: bool, name: str) -> dict[str, float]:
    """Errors of a whole layer, built from its published state dict; sizes come from the file's name."""
    from posttrain.models.packing import Part
    from posttrain.models.sse_h.configuration import SSEHConfig
    from posttrain.models.sse_h.mixer_sse import make_sse_mixer

    sizes = {k: int(re.search(rf"_{k}(\d+)", name)[1]) for k in ("hidden", "H", "D", "N", "R")}  # type: ignore[index]
    state = {k.removeprefix("param."): a for k, a in tensors.items() if k.startswith("param.")}
    kind = "sse_gdn" if is_gdn else "sse"
    config = SSEHConfig(
        vocab_size=8, hidden_size=sizes["hidden"], intermediate_size=8, num_hidden_layers=1, num_attention_heads=sizes["H"],
        head_dim=sizes["D"], layer_types=[kind], num_partitions=sizes["N"], num_selected=sizes["R"],
        adapter_rank=state["lora_q_proj.0.weight"].shape[0], use_output_gate="g_proj.0.weight" in state,
        router_gate="pre_norm" if is_gdn else "both", rms_norm_eps=1e-5,
    )  # fmt: skip
    layer = make_sse_mixer(config, kind).to(tensors["in.x"].device)
    layer.load_state_dict(state)
    layer.eval()
    with torch.no_grad():
        out = layer(tensors["in.x"], parts=[Part(cu_seqlens=tensors["in.cu_seqlens"].cpu())])
    return {"o": _error(out.o, tensors["out.o"]), "y": _error(out.y, tensors["out.y"])}


def _error(found: Tensor, truth: Tensor) -> float:
    if found.shape != truth.shape or not torch.isfinite(found).all():
        return float("inf")
    return ((found.double() - truth.double()).abs().max() / truth.double().abs().max().clamp_min(1e-30)).item()


def check_file(path: Path, device: str) -> dict[str, float] | str:
    """Errors by tensor, or why the file is skipped."""
    for prefix, reason in UNSUPPORTED.items():
        if path.name.startswith(prefix):
            return reason
    known = re.match(r"(layer_)?sse_(gla|gdn)_", path.name)
    if known is None:
        return "no check is known for a file of this name"
    tensors = {name: a.to(device) for name, a in load_file(path).items()}
    is_gdn = known[2] == "gdn"
    return check_layer(tensors, is_gdn=is_gdn, name=path.stem) if known[1] else check_operator(tensors, is_gdn=is_gdn)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of golden .safetensors files")
    parser.add_argument("--backend", choices=("reference", "torch", "triton"), default=None, help="default: the best one here")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device that PyTorch can use")
    files = sorted(args.folder.glob("*.safetensors"))
    if not files:
        print(f"no .safetensors file in {args.folder}", file=sys.stderr)
        return 1
    passed = failed = skipped = 0
    width = max(len(f.stem) for f in files)
    for path in files:
        try:
            with use_backend(args.backend):
                result = check_file(path, args.device)
        except (
            ValueError,
            KeyError,
            SafetensorError,
        ) as error:  # a backend that refuses, or a file that is not what its name says
            failed += 1
            print(f"FAIL  {path.stem:{width}}  {type(error).__name__}: {error}")
            continue
        if isinstance(result, str):
            skipped += 1
            print(f"skip  {path.stem:{width}}  {result}")
            continue
        good = all(error <= TOLERANCE for error in result.values())
        passed, failed = passed + good, failed + (not good)
        row = " ".join(f"{name} {error:.0e}" for name, error in result.items())
        print(f"{'ok  ' if good else 'FAIL'}  {path.stem:{width}}  {row}")
    if skipped:
        print(f"{skipped} not supported")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
