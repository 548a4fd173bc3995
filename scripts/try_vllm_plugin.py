"""Tries the vLLM plugin where it has to work: SSE-H on a GPU, against this project's own forward pass.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python scripts/try_vllm_plugin.py                 # correctness, eager and CUDA graphs
    VLLM_ENABLE_V1_MULTIPROCESSING=0 python scripts/try_vllm_plugin.py --speed 1x2048 64x2048 256x2048

Correctness: vLLM samples greedily with random weights; the model's own forward (training kernels) then reads the same tokens and
says what it would have given them. In bf16 both differ by rounding, so greedy tokens may part at near-ties: what must hold is
that log-probabilities agree, and that where the forward's best token is another one, the two were nearly tied.
Speed: decoding of the 2B shape with dummy weights, prompts of the length given, prefill left out by a second run of one token.
Prints JSON lines; exits 1 where a check fails. Works on a CPU too (fp32, no graphs), slowly.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# One process: a failure is this script's own, and the plugin need not be installed.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LENGTHS = (1, 2, 31, 64, 65, 128, 200, 513, 700, 1000)
# Mean difference of log-probabilities, bf16: published stacks with two sets of kernels are at 0.01 to 0.02.
TOLERANCE = {"bfloat16": 0.05, "float32": 1e-4}
TIED = {"bfloat16": 0.5, "float32": 1e-3}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=6, help="of the model that is checked")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64, help="sampled a prompt")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), help="bfloat16 on a GPU, float32 on a CPU unless given")
    parser.add_argument("--layer", default="sse", choices=("sse", "sse_gdn"))
    parser.add_argument("--no-graphs", action="store_true", help="leave CUDA graphs out")
    parser.add_argument("--speed", nargs="*", default=[], metavar="BATCHxLENGTH", help="then time decoding of the 2B shape")
    parser.add_argument("--speed-tokens", type=int, default=129)
    return parser.parse_args(argv)


def make_checkpoint(args: argparse.Namespace, folder: str, device: str) -> str:
    """A small SSE-H in the paper's rhythm with weights that have opinions; returns its type."""
    import torch

    from posttrain.models.sse_h import SSEHConfig, SSEHForCausalLM

    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    torch.manual_seed(0)
    kinds = ["full_attention" if i % 6 == 5 else args.layer for i in range(args.layers)]
    if "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    width = args.heads * args.head_dim
    config = SSEHConfig(
        vocab_size=args.vocab, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, head_dim=args.head_dim, layer_types=kinds, max_position_embeddings=4096,
        initializer_range=0.06, eos_token_id=None, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = SSEHForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.06)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return dtype


def open_llm(folder: str, **options: Any) -> Any:
    import vllm

    common = {"skip_tokenizer_init": True, "max_model_len": 2048, "enable_prefix_caching": False, "seed": 0}
    return vllm.LLM(model=folder, **{**common, **options})


def sample(llm: Any, prompts: list[list[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities."""
    import vllm

    params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    found = []
    for output in outputs:
        ids = list(output.outputs[0].token_ids)
        found.append((ids, [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, ids, strict=True)]))
    return found


def compare(folder: str, dtype: str, device: str, prompts: list[list[int]], sampled: list[tuple[list[int], list[float]]]) -> dict:
    """What the model's own forward says about vLLM's tokens."""
    import torch

    from posttrain.models.loading import load_model

    model = load_model(folder, dtype=dtype, device=device).eval()
    differences, agreed, gap = [], 0, 0.0
    for prompt, (ids, logprobs) in zip(prompts, sampled, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids], device=device)).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own = logits.gather(1, torch.tensor(ids, device=device)[:, None])[:, 0]
        best = logits.max(-1)
        differences.append((own.cpu() - torch.tensor(logprobs)).abs())
        agreed += int((best.indices.cpu() == torch.tensor(ids)).sum())
        gap = max(gap, float((best.values - own).max()))
    all_of_them = torch.cat(differences)
    return {
        "tokens": all_of_them.numel(),
        "mean_difference": round(float(all_of_them.mean()), 6),
        "largest_difference": round(float(all_of_them.max()), 5),
        "argmax_agrees": round(agreed / all_of_them.numel(), 4),
        "largest_gap_where_not": round(gap, 5),
        "different_tokens": len({token for ids, _ in sampled for token in ids}),
    }


def check(args: argparse.Namespace, device: str) -> bool:
    """Eager, and with CUDA graphs of decoding; both against the forward, prompts chunked into 256 tokens a step."""
    good = True
    rng = random.Random(0)
    prompts = [[rng.randrange(args.vocab) for _ in range(length)] for length in LENGTHS]
    modes: dict[str, dict[str, Any]] = {"eager": {"enforce_eager": True}}
    if device == "cuda" and not args.no_graphs:
        # The model is not compiled; graphs of whole decode steps are all that there is to capture.
        modes["graphs"] = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    with tempfile.TemporaryDirectory() as folder:
        dtype = make_checkpoint(args, folder, device)
        for mode, options in modes.items():
            llm = open_llm(folder, dtype=dtype, max_num_seqs=8, max_num_batched_tokens=256, gpu_memory_utilization=0.4, **options)
            sampled = sample(llm, prompts, args.tokens)
            again = sample(llm, prompts[::-1], args.tokens)[::-1]  # in pages that were used before
            close(llm)
            del llm
            release()
            numbers = compare(folder, dtype, device, prompts, sampled)
            repeated = sum(a == b for (a, _), (b, _) in zip(sampled, again, strict=True))
            ok = numbers["mean_difference"] <= TOLERANCE[dtype] and numbers["largest_gap_where_not"] <= TIED[dtype]
            good &= ok
            say(check=mode, ok=ok, layer=args.layer, dtype=dtype, **numbers, same_again=f"{repeated}/{len(prompts)}")
    return good


def speed(args: argparse.Namespace, device: str) -> None:
    """Tokens a second while decoding, the 2B shape."""
    import vllm

    from posttrain.models.sizes import PAPER_SIZES
    from posttrain.models.sse_h import SSEHConfig

    shapes = [tuple(int(part) for part in text.split("x")) for text in args.speed]
    longest = max(length for _, length in shapes) + args.speed_tokens
    options: dict[str, Any] = {"enforce_eager": True}
    if device == "cuda" and not args.no_graphs:
        options = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    with tempfile.TemporaryDirectory() as folder:
        size = {**PAPER_SIZES["sse-h-2b"], "vocab_size": 151_936, "max_position_embeddings": 65_536}
        config = SSEHConfig(**size, architectures=["SSEHForCausalLM"])
        config.save_pretrained(folder)
        llm = open_llm(
            folder, dtype="bfloat16", load_format="dummy", max_model_len=longest + 1,
            max_num_seqs=max(batch for batch, _ in shapes), **options,
        )  # fmt: skip
        rng = random.Random(0)
        for batch, length in shapes:
            prompts = [{"prompt_token_ids": [rng.randrange(1000) for _ in range(length)]} for _ in range(batch)]
            seconds = []
            for tokens in (1, 1, args.speed_tokens):  # the first warms up
                params = vllm.SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                begin = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                seconds.append(time.perf_counter() - begin)
            decoding = seconds[2] - seconds[1]
            rate = batch * (args.speed_tokens - 1) / decoding
            prefill = batch * length / seconds[1]
            say(
                speed=f"{batch}x{length}",
                tokens_per_s=round(rate),
                prefill_tokens_per_s=round(prefill),
                eager="enforce_eager" in options,
            )
        close(llm)


def close(llm: Any) -> None:
    """End the engine; its memory is free once the caller has dropped it, too, and called `release`."""
    llm.llm_engine.engine_core.shutdown()


def release() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    import torch
    import vllm

    from posttrain.vllm_plugin import register

    register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    say(vllm=vllm.__version__, torch=torch.__version__, device=name)
    good = check(args, device)
    if args.speed:
        speed(args, device)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
