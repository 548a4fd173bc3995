"""Strict mode's kernels compiled for Hopper, which needs no GPU: they fit, and what must add up alike has the same layout."""

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Triton under a driver that names a device and never launches: calls compile their kernels, and leave their outputs unwritten.
PROGRAM = """
import json, re, sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


driver.set_active(Hopper())
run, compiled = JITFunction.run, []


def compile_only(self, *args, grid, warmup, **options):
    compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))


JITFunction.run = compile_only
half = torch.bfloat16


def linear():
    from posttrain.kernels.batch_invariant.triton_linear import TILES, launch_linear
    from posttrain.kernels.batch_invariant.triton_logprobs import launch_entropies, launch_gradient, launch_logprobs

    x, w = torch.empty(300, 2304, dtype=half), torch.empty(2304, 2304, dtype=half)
    for tile in TILES:
        launch_linear(x, w, None, half, tile)
        launch_linear(x[:, :16], w[:70, :16], w[0, :70], torch.float32, tile)
    logits, heat, targets = torch.empty(4, 151936), torch.ones(4), torch.zeros(4, dtype=torch.int64)
    logprob, total = launch_logprobs(logits, targets, heat)
    entropy = launch_entropies(logits, heat, total)
    launch_gradient(logits, targets, heat, total, entropy, logprob, logprob, half)


def attention():
    from posttrain.kernels.paged_attention.triton_exact import launch_packed, launch_paged

    for heads, dim, window in ((18, 128, None), (2, 64, 100), (6, 72, None)):
        q, k = torch.empty(1500, heads, dim, dtype=half), torch.empty(1500, 2, dim, dtype=half)
        pages, table = torch.empty(20, 2, 64, dim, dtype=half), torch.zeros(4, 32, dtype=torch.int32)
        where = torch.zeros(8, dtype=torch.int64)
        launch_paged(q[:8], pages, pages, table, where, where, window=window, scale=1.0)
        launch_packed(q, k, k, [1500], [1500], [1500], window=window, scale=1.0)


def sse():
    from posttrain.kernels.sse import triton_exact
    from posttrain.kernels.sse.cases import Case, make_case
    from posttrain.kernels.sse.checks import check_inputs
    from posttrain.kernels.sse.triton_decode_pool import TritonChunkState

    for width, chunk in ((128, 64), (64, 16), (96, 128)):
        case = Case(lengths=(130, 70), key_dim=width, value_dim=width, chunk_size=chunk, heads=2, initial=False)
        tensors, options = make_case(case, dtype=half)
        order = ("q1", "k1", "g1", None, "q2", "k2", "g2", None, "v")

        def inputs(tokens, bounds):
            rows = [n and tensors[n][:tokens].to(torch.float32 if n[0] == "g" else half) for n in order]
            return check_inputs(
                *rows, tensors["weight"][:tokens].float(), tensors["index"][:tokens], v2=None, initial_state=None, is_gdn=False,
                **{**options, "cu_seqlens": torch.tensor(bounds)},
            )

        triton_exact._launches(inputs(200, [0, 130, 200]))
        state = TritonChunkState.allocate(3, case.partitions, case.heads, width, width, chunk, dtype=half)
        state.step(inputs(2, [0, 1, 2]), torch.tensor([0, 1]))


def described(name, kernel):
    text = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\\w+) = (.*)$", text, re.M))
    sums = []
    pattern = r"tt.reduce.*?axis = (\\d).*?\\}\\) : \\(tensor<([\\dx]+)xf32, ([^>]*)>\\)"
    for axis, shape, layout in re.findall(pattern, text, re.S):
        sums.append([int(axis), shape, layouts.get(layout.strip(), layout)])
    products = re.findall(r"(wgmma\\.mma_async|mma\\.sync)\\S*\\.(m\\d+n\\d+k\\d+)", kernel.asm["ptx"])
    warps = re.findall(r"nvidia_mma<\\{.*?warpsPerCTA = \\[(\\d+), (\\d+)\\]", text)
    products = sorted(set(map(tuple, products)))
    return {"name": name, "shared": kernel.metadata.shared, "sums": sums, "products": products, "warps": warps}


globals()[sys.argv[1]]()
print(json.dumps([described(*found) for found in compiled]))
"""
SHARED_MEMORY = 232_448  # bytes a program may have on an H100 or H200


def compiled(part: str, root, folder) -> list[dict]:
    environment = {n: value for n, value in os.environ.items() if n != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, part], cwd=root, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(k["name"], k["shared"]) for k in found if k["shared"] > SHARED_MEMORY] == []
    return found


@pytest.mark.slow
def test_products_go_to_one_kind_of_instruction(root, tmp_path):
    """Sixteen numbers along K a step and 64 rows of the weight, whatever the tile: its width is that of the rows of x."""
    found = [k for k in compiled("linear", root, tmp_path) if k["name"] == "linear_kernel"]
    shapes = {tuple(p) for k in found for p in k["products"]}
    assert {kind for kind, _ in shapes} == {"wgmma.mma_async"}
    assert {re.sub(r"n\d+", "", shape) for _, shape in shapes} == {"m64k16"} and len(shapes) >= 5
    assert all(across == "1" for k in found for _, across in k["warps"])


@pytest.mark.slow
def test_attention_sums_a_row_within_a_warp(root, tmp_path):
    found = compiled("attention", root, tmp_path)
    kinds = [k for k in found if k["name"] != "exact_merge_kernel"]
    decoding, packed = ([k for k in kinds if k["name"] == name] for name in ("exact_decode_kernel", "exact_packed_kernel"))
    assert len(decoding) == len(packed) == 3
    for one, whole in zip(decoding, packed, strict=True):
        assert one["products"] == whole["products"] and {kind for kind, _ in one["products"]} == {"wgmma.mma_async"}
        assert {across for k in (one, whole) for _, across in k["warps"]} == {"1"}


@pytest.mark.slow
def test_rows_of_sse_are_summed_in_the_layouts_of_decoding(root, tmp_path):
    found = compiled("sse", root, tmp_path)
    decoding = [k["sums"] for k in found if k["name"] == "gla_decode_kernel"]
    exact = [k["sums"] for k in found if k["name"] == "gla_exact_kernel"]
    assert len(decoding) == 3 and len(exact) == 6  # the shared partition and the routed ones
    for n, sums in enumerate(decoding):
        assert len(sums) >= 6, "the state, pending rows twice, rows of strong decay, the row itself and the decay's minimum"
        assert sorted(map(str, sums)) == sorted(map(str, exact[2 * n])) == sorted(map(str, exact[2 * n + 1]))
