"""The kernels of a layer of the usual widths compile for Hopper, which needs no GPU, and fit its shared memory."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Triton under a driver that names a device and never launches: calls compile their kernels, and leave their outputs unwritten.
SETUP = """
import json, sys

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
"""
PROGRAM = """
from posttrain.kernels.sse import triton_gdn_ops, triton_gla_ops
from posttrain.kernels.sse.cases import Case, make_case
from posttrain.kernels.sse.checks import check_inputs

transition = sys.argv[1]
case = Case(lengths=(130, 70), key_dim=128, value_dim=128, chunk_size=64, heads=2, transition=transition)
tensors, options = make_case(case, dtype=torch.bfloat16)
gates = ("g1", "g2", "b1", "b2")
leaves = {n: tensors[n].to(torch.float32 if n in gates else torch.bfloat16).requires_grad_() for n in case.names}
weight = tensors["weight"].float().requires_grad_()
if transition == "gla":
    order = ("q1", "k1", "g1", None, "q2", "k2", "g2", None, "v")
else:
    order = ("q1", "k1", "g1", "b1", "q2", "k2", "g2", "b2", "v")
found = check_inputs(
    *(leaves[n] if n else None for n in order), weight, tensors["index"], v2=None, initial_state=None,
    is_gdn=transition == "gdn", **options,
)
operator = triton_gla_ops.run_triton_gla if transition == "gla" else triton_gdn_ops.run_triton_gdn
o, _ = operator(found, output_final_state=False)
torch.autograd.grad(o, [*leaves.values(), weight], torch.zeros_like(o))
print(json.dumps([(name, kernel.metadata.shared) for name, kernel in compiled]))
"""
SAMPLING = """
from posttrain.kernels.sampling import triton_sampling

logits, keys = torch.zeros(4, 151936), torch.zeros(4, dtype=torch.int64)
triton_sampling.triton_draw(logits, keys, keys, None, None)
triton_sampling.triton_draw(logits, keys, keys, logits[:, 0].contiguous(), logits[:2])
column, flags = torch.zeros(4), torch.zeros(4, dtype=torch.bool)
triton_sampling.triton_advance(torch.zeros(6, 4, dtype=torch.int64), flags, keys[:1], keys, keys, column, column, flags)
print(json.dumps([(name, kernel.metadata.shared) for name, kernel in compiled]))
"""
SHARED_MEMORY = 232_448  # bytes a program may have on an H100 or H200


@pytest.mark.slow
@pytest.mark.parametrize("transition", ["gla", "gdn"])
def test_compiles_for_hopper(transition, root, tmp_path):
    shared = compiled_by(PROGRAM, transition, root=root, cache=tmp_path)
    wanted = {f"{transition}_{name}_kernel" for name in ("gradient", "scan")}
    assert wanted <= {name for name, _ in shared}
    assert [(name, size) for name, size in shared if size > SHARED_MEMORY] == []


@pytest.mark.slow
def test_sampling_compiles_for_hopper(root, tmp_path):
    names = [name for name, _ in compiled_by(SAMPLING, root=root, cache=tmp_path)]
    assert names == ["mass_kernel", "draw_kernel", "mass_kernel", "draw_kernel", "advance_kernel"]


def compiled_by(program, *arguments, root, cache):
    """[(kernel, bytes of shared memory)]."""
    environment = {n: value for n, value in os.environ.items() if n != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SETUP + program, *arguments],
        cwd=root, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
