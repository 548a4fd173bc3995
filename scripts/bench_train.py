"""A whole training step of SSE-H beside the Transformer of the same shape, on one GPU: speed, memory, utilisation, time by kind.

    python scripts/bench_train.py --profile --out benchmarks
    python scripts/bench_train.py --device cpu --tiny            a dry run

A step is forward, cross-entropy without [tokens, vocabulary] logits (`posttrain.kernels.linear_cross_entropy`, the same for
every model), backward with gradient checkpointing of every layer (SSE layers keep what their operators returned), and AdamW.
`--precision bf16` (the default) is what the SFT recipes of this size do: bf16 weights and gradients, fp32 master weights and
moments in the optimiser. `autocast` is fp32 weights under bf16 autocast, the SFT trainer's way without DeepSpeed. The SFT
trainer takes its loss from TRL's fused head, which computes the logits twice; ours is timed here. No data parallelism, no
gradient accumulation; weights and tokens are random.

Models: SSE-H and Transformer of `posttrain.models` with the published sizes, and as an outside peer transformers' Llama with the
Transformer's sizes, with scaled_dot_product_attention as PyTorch picks it and with cuDNN's preferred. `--unfused` adds SSE-H with
the small fused operators (norms, SwiGLU, key maps, rotary, cross-entropy's softmax) in plain PyTorch.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_tools import Timing, attempt, describe, environment, kernel_times, release, say, table, time_call, write_results

from posttrain.kernels.backend import use_fused_backend
from posttrain.kernels.linear_cross_entropy import linear_cross_entropy
from posttrain.models.sizes import PAPER_SIZES, SSE_LAYER_TYPES, hybrid_layer_types, parameter_counts, resolve
from posttrain.models.sse_h import SSEHConfig, SSEHForCausalLM

# Dense bf16 of an H100 or H200 by its datasheet; a large product reaches about 700 to 790 there.
PEAK_FLOPS = 989e12
ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 151_936
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 6, "adapter_rank": 8}
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Kinds of kernels by their names, the first that matches; the operators' own kernels come before these.
KINDS = (
    ("optimiser", r"multi_tensor|adam"),
    ("softmax attention", r"flash|fmha|sdpa|mem_eff|attention"),
    ("cross-entropy", r"cross_entropy|nll_loss|LogSoftMax"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|wgmma|splitK|cublas|gemv"),
    ("elementwise and copies", r"elementwise|reduce|Mem(cpy|set)|copy|fill|CatArray|index|gather|scatter|sort|scan|SoftMax|pad"),
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """name; fields of SSEHConfig; which class runs them; what the whole step runs under."""

    name: str
    fields: dict[str, Any]
    peer: bool = False
    around: Callable[[], Any] = nullcontext


@dataclass(kw_only=True)
class Run:
    """One variant at one length; `failed` says why there is no timing."""

    name: str
    tokens: int
    sequences: int
    model_flops: float
    timing: Timing | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    balance: float | None = None
    failed: str | None = None
    kinds: dict[str, float] = field(default_factory=dict)
    kernels: list[tuple[str, float, int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.timing.ms * 1e3 if self.timing else None

    @property
    def utilisation(self) -> float | None:
        return self.model_flops / self.timing.ms * 1e3 / PEAK_FLOPS if self.timing else None


def model_flops(fields: dict[str, Any], tokens: int, sequences: int) -> float:
    """Floating-point operations that one training step of `tokens` in `sequences` equal sequences needs; recomputation in the
    backward pass, the router's sort, norms and other elementwise work do not count.

        6 (P - E) T          P - E: all parameters but the input embedding, so with the output projection; forward 2, backward 4
        3 * 2 n^2 H D S      each softmax attention layer: q k^T and its product with v, forward, halved for causality, for S
                             sequences of n tokens, H heads of D; the backward twice that
        3 * 4 T H D^2 (1+R)  each SSE layer, by the recurrence: writing k^T v to and reading q S from a D x D state, for the
                             shared partition and R routed ones (the chunked form does more)
    """
    f = resolve(fields)
    heads, dim, n = f["num_attention_heads"], f["head_dim"], tokens // sequences
    parameters = parameter_counts(f)["body"] + f["vocab_size"] * f["hidden_size"]
    total = 6.0 * parameters * tokens
    for kind in f["layer_types"]:
        if kind in SSE_LAYER_TYPES:
            total += 3 * 4.0 * tokens * heads * dim**2 * (f["shared_partition"] + f["num_selected"])
        else:
            total += 3 * 2.0 * n**2 * heads * dim * sequences
    return total


def variants(args: argparse.Namespace) -> list[Variant]:
    def sized(name: str) -> dict[str, Any]:
        if not args.tiny:
            return {**PAPER_SIZES[name], "vocab_size": VOCABULARY}
        kinds = hybrid_layer_types(6) if name.startswith("sse") else ["full_attention"] * 6
        return {**TINY, "layer_types": kinds, "vocab_size": 512}

    def cudnn_first() -> Any:
        return sdpa_kernel(CUDNN_FIRST, set_priority=True)

    hybrid, transformer = sized("sse-h-2b"), sized("transformer-2b")
    found = [
        Variant(name="SSE-H-2B", fields=hybrid),
        Variant(name="Transformer-2B", fields=transformer),
        Variant(name="Transformer-2B, Llama of transformers", fields=transformer, peer=True),
        Variant(name="Transformer-2B, Llama of transformers, cuDNN attention", fields=transformer, peer=True, around=cudnn_first),
    ]
    if args.unfused:
        found.append(Variant(name="SSE-H-2B, unfused", fields=hybrid, around=lambda: use_fused_backend("torch")))
    wanted = [part.lower() for part in args.only or [""]]
    exact = {v.name.lower() for v in found}
    return [v for v in found if any(part == v.name.lower() if part in exact else part in v.name.lower() for part in wanted)]


def build(variant: Variant, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """A random model in training mode, with gradient checkpointing, made on the device."""
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    torch.manual_seed(0)
    longest = max(args.tokens)
    with device:
        if variant.peer:
            from transformers import LlamaConfig, LlamaForCausalLM

            names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            sizes = {name: variant.fields[name] for name in names}
            config = LlamaConfig(**sizes, max_position_embeddings=longest, tie_word_embeddings=False, use_cache=False)
            model: nn.Module = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
        else:
            model = SSEHForCausalLM(SSEHConfig(**variant.fields, max_position_embeddings=longest))
            model = nn.Module.to(model, device=device, dtype=dtype)
    arguments = {"use_reentrant": False}
    if args.compute_mixers_again and not variant.peer:
        arguments["keep_mixers"] = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments, every_n_layers=args.every_n_layers)
    return model.train()


class Optimizer:
    """AdamW on fp32 weights: the model's own, or a master copy of half-precision ones."""

    def __init__(self, parameters: list[nn.Parameter], *, fused: bool) -> None:
        self.parameters = parameters
        half = parameters[0].dtype != torch.float32
        self.masters = [p.detach().float() for p in parameters] if half else None
        # A step so small that routing stays that of the random weights.
        self.adamw = torch.optim.AdamW(self.masters or parameters, lr=1e-6, weight_decay=0.0, fused=fused)

    def step(self) -> None:
        if self.masters is not None:
            for master, p in zip(self.masters, self.parameters, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
                p.grad = None
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self.masters is not None:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)


def peer_loss(model: Any, ids: Tensor, half: bool) -> Tensor:
    """Mean cross-entropy of a transformers model on ids [S, n], through the head that ours use."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].reshape(-1, model.config.hidden_size)
    weight, targets = model.lm_head.weight, ids[:, 1:].reshape(-1)
    dtype = torch.bfloat16 if half else torch.float32
    return linear_cross_entropy(hidden.to(dtype), weight.to(dtype), targets) / targets.numel()


@contextmanager
def training_step(
    variant: Variant, args: argparse.Namespace, tokens: int, device: torch.device, notes: dict[str, Tensor]
) -> Iterator[Callable[[], None]]:
    """A function that trains one step; `notes` takes the last loss and balance loss, on the device."""
    model: Any = build(variant, args, device)
    optimizer = Optimizer(list(model.parameters()), fused=device.type == "cuda")
    length = tokens // args.sequences
    ids = torch.randint(variant.fields["vocab_size"], (args.sequences, length), device=device)
    bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32)

    def loss() -> Tensor:
        if variant.peer:
            return peer_loss(model, ids, half=device.type == "cuda")
        packed = ids.view(1, -1)
        out = model(input_ids=packed, labels=packed, cu_seq_lens_q=bounds)
        if out.balance_loss is not None:
            notes["balance"] = out.balance_loss.detach() / len(model.config.sse_layers)
        return out.loss

    def step() -> None:
        autocast = torch.autocast(device.type, torch.bfloat16) if args.precision == "autocast" else nullcontext()
        with autocast:
            value = loss()
        value.backward()
        optimizer.step()
        notes["loss"] = value.detach()

    with variant.around():
        yield step


def own_kernels() -> dict[str, str]:
    """Kind of each of our Triton kernels by its function's name: "sse kernels", or "fused elementwise"."""
    kinds = {}
    for path in (ROOT / "kernels").glob("*/triton_*.py"):
        kind = "sse kernels" if path.parent.name == "sse" else "fused elementwise"
        for name in re.findall(r"@triton\.jit.*?\ndef (\w+)", path.read_text(encoding="utf-8")):
            kinds[name] = kind
    kinds["cross_entropy_kernel"] = "cross-entropy"
    return kinds


def by_kind(kernels: list[tuple[str, float, int]]) -> dict[str, float]:
    """Milliseconds a step by kind. A product by cuBLAS counts as "matmul" wherever it comes from, the head's too."""
    own, total = own_kernels(), {}
    for name, microseconds, _ in kernels:
        if name.startswith(("Optimizer.", "ProfilerStep", "## ")):  # ranges over other kernels
            continue
        kind = own.get(name)
        if kind is None:
            kind = next((k for k, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")
        total[kind] = total.get(kind, 0.0) + microseconds / 1e3
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def measure(variant: Variant, args: argparse.Namespace, tokens: int, device: torch.device) -> Run:
    run = Run(
        name=variant.name,
        tokens=tokens,
        sequences=args.sequences,
        model_flops=model_flops(variant.fields, tokens, args.sequences),
    )
    notes: dict[str, Tensor] = {}

    def work() -> None:
        with ExitStack() as stack:
            step = stack.enter_context(training_step(variant, args, tokens, device, notes))
            say(f"{variant.name}, {tokens} tokens: built")
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            run.timing = time_call(step, device, budget_s=args.seconds, least=args.repeats, most=50)
            if device.type == "cuda":
                run.peak_bytes = torch.cuda.max_memory_allocated(device)
            run.loss = notes["loss"].item()
            run.balance = notes["balance"].item() if "balance" in notes else None
            if args.profile and device.type == "cuda":
                found = attempt(f"{variant.name}: profile", lambda: kernel_times(step, calls=2))
                if not isinstance(found, str):
                    run.kernels, run.kinds = found, by_kind(found)
                    run.kinds["nothing (gaps)"] = max(0.0, run.timing.ms - sum(run.kinds.values()))

    failed = attempt(f"{variant.name}, {tokens} tokens", work)
    if isinstance(failed, str):
        run.failed, run.timing = failed, None
    release(device)
    if run.timing is not None:
        say(
            f"{run.name}, {tokens} tokens: {run.timing.ms:.1f} ms ({run.timing.low_ms:.1f} to {run.timing.high_ms:.1f}), "
            f"{run.tokens_per_second:,.0f} tokens/s, utilisation {run.utilisation:.1%}, loss {run.loss:.3f}, "
            f"first step {run.timing.first_s:.1f} s"
        )
    return run


def ratios(run: Run, runs: list[Run]) -> tuple[str | None, str | None]:
    """Tokens/s over those of our Transformer, and over the best Transformer of any kind, at the same length."""
    if run.tokens_per_second is None:
        return None, None
    speed = {r.name: r.tokens_per_second for r in runs if r.tokens == run.tokens and r.tokens_per_second}
    ours = speed.get("Transformer-2B")
    best = max((s for name, s in speed.items() if name.startswith("Transformer")), default=None)
    return f"{run.tokens_per_second / ours:.2f}" if ours else None, f"{run.tokens_per_second / best:.2f}" if best else None


def report(runs: list[Run], args: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    where = environment(device)
    lines = ["# A training step of SSE-H-2B beside Transformer-2B", "", *describe(where)]
    layers = "every layer" if args.every_n_layers == 1 else f"one layer in {args.every_n_layers}"
    mixers = "computed again" if args.compute_mixers_again else "kept"
    lines += [f"Precision {args.precision}, gradient checkpointing of {layers}, results of SSE operators {mixers}, "
              f"sequences a batch: {args.sequences}. "
              f"Utilisation: model FLOPs over {PEAK_FLOPS / 1e12:.0f} TFLOP/s, recomputation not counted. "
              "Times are medians, with the least and the most.", ""]  # fmt: skip
    rows = []
    for run in runs:
        t = run.timing
        rows.append([
            run.name, f"{run.tokens:,}",
            f"{t.ms:.1f} ({t.low_ms:.1f} to {t.high_ms:.1f})" if t else run.failed,
            f"{run.tokens_per_second:,.0f}" if t else None,
            f"{run.utilisation:.1%}" if t else None,
            f"{run.peak_bytes / 2**30:.1f}" if run.peak_bytes else None,
            *ratios(run, runs),
            f"{run.balance:.2f}" if run.balance is not None else None,
        ])  # fmt: skip
    header = ["model", "tokens", "ms a step", "tokens/s", "utilisation", "peak GiB", "speed / our Transformer",
              "speed / best Transformer", "balance loss a layer (1 is even)"]  # fmt: skip
    lines += table(header, rows)
    for run in runs:
        if run.kinds:
            total = run.timing.ms if run.timing else sum(run.kinds.values())
            lines += [f"## {run.name}, {run.tokens:,} tokens: time by kind of kernel", ""]
            lines += table(["kind", "ms a step", "share"], [[k, f"{ms:.1f}", f"{ms / total:.1%}"] for k, ms in run.kinds.items()])
            top = [[name[:110], f"{us / 1e3:.2f}", count] for name, us, count in run.kernels[:20]]
            lines += table(["kernel", "ms a step", "launches"], top)
    record = {
        "environment": where, "precision": args.precision, "peak_flops": PEAK_FLOPS,
        "every_n_layers": args.every_n_layers, "keep_mixers": not args.compute_mixers_again,
    }  # fmt: skip
    record["runs"] = [
        {
            **{k: v for k, v in vars(run).items() if k not in ("timing", "kernels")},
            "ms": vars(run.timing) if run.timing else None,
            "tokens_per_second": run.tokens_per_second,
            "utilisation": run.utilisation,
            "kernels": [list(k) for k in run.kernels[:60]],
        }
        for run in runs
    ]
    return record, lines


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="packed tokens a step (default: 8192 32768)")
    parser.add_argument("--sequences", type=int, default=1, help="equal sequences that the tokens are cut into (default: 1)")
    parser.add_argument("--precision", choices=["bf16", "autocast"], default="bf16")
    parser.add_argument("--only", nargs="+", help="variants of these names, or whose names contain these")
    parser.add_argument("--unfused", action="store_true", help="also SSE-H without the small fused operators")
    parser.add_argument("--profile", action="store_true", help="time by kind of kernel (GPU only)")
    parser.add_argument("--every-n-layers", type=int, default=1, help="checkpoint one layer in so many (default: 1)")
    parser.add_argument("--compute-mixers-again", action="store_true", help="checkpointing without keep_mixers")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps at least (default: 5)")
    parser.add_argument("--seconds", type=float, default=4.0, help="more steps as long as they fit (default: 4)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a model of a few thousand weights")
    parser.add_argument(
        "--out", type=Path, help="folder of train_step.md and .json (default: benchmarks; with --tiny, a new one)"
    )
    args = parser.parse_args(argv)
    args.out = args.out or (Path(tempfile.mkdtemp()) if args.tiny else ROOT / "benchmarks")
    args.tokens = args.tokens or ([64, 128] if args.tiny else [8192, 32768])
    for tokens in args.tokens:
        if args.sequences < 1 or tokens % args.sequences:
            parser.error(f"{tokens} tokens cannot be cut into {args.sequences} equal sequences")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    runs: list[Run] = []
    # The longest first: what runs out of memory shows early.
    for tokens in sorted(args.tokens, reverse=True):
        for variant in variants(args):
            runs.append(measure(variant, args, tokens, device))
            record, lines = report(runs, args, device)
            write_results(args.out, "train_step", record, lines)
    print("\n" + "\n".join(lines[: 6 + 4 + len(runs)]), flush=True)
    return 1 if any(run.failed for run in runs if not run.name.startswith("Transformer-2B, Llama")) else 0


if __name__ == "__main__":
    sys.exit(main())
