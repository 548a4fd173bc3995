"""Launches that skip Triton's specialisation rely on kernels that do not specialise on their integers."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from posttrain.kernels import triton_launch
from posttrain.kernels.pair_map import log_decay, pair_map
from posttrain.kernels.rms_norm import add_rms_norm, rms_norm
from posttrain.kernels.sse import sse, sse_gdn
from posttrain.kernels.sse.cases import Case, make_case
from posttrain.kernels.sse.triton_limits import block_of
from posttrain.kernels.swiglu import swiglu
from posttrain.kernels.triton_launch import Launch, aligned, compiled_together

CHECK = """
import importlib, json, sys
from posttrain.kernels.triton_launch import Launch
for module, name, tensors, numbers in json.loads(sys.argv[1]):
    Launch(getattr(importlib.import_module(module), name))._check(tensors, tuple(numbers))
print("checked")
"""


def test_no_kernel_specialises_on_its_integers(monkeypatch, root):
    """Interpreted kernels do not know their parameters, so the launches are recorded here and checked in another process."""
    seen = {}
    launch = Launch.__call__

    def record(self, grid, tensors, numbers, constants):
        function = self.kernel.fn
        seen[function.__name__] = (function.__module__, function.__name__, len(tensors), list(numbers))
        launch(self, grid, tensors, numbers, constants)

    monkeypatch.setattr(Launch, "__call__", record)
    for case in (Case(lengths=(20, 5), routed=2), Case(lengths=(20, 5), routed=2, transition="gdn")):
        tensors, options = make_case(case)
        leaves = [tensors[n].requires_grad_() for n in case.names]
        operator = sse if case.transition == "gla" else sse_gdn
        o, _ = operator(*leaves, tensors["weight"], tensors["index"], backend="triton", **options)
        o.sum().backward()
    x = torch.randn(6, 3, 8, requires_grad=True)
    normed = rms_norm(add_rms_norm(x, x, x[0, 0], 1e-6, backend="triton")[1], x[0, 0], 1e-6, gate=x, backend="triton")
    pairs = pair_map(normed, x, "softmax", backend="triton")
    (swiglu(*pairs, backend="triton") + log_decay(x, 16.0, backend="triton")).sum().backward()
    small = {f"{n}_{way}_kernel" for n in ("rms_norm", "pair_map", "swiglu", "log_decay") for way in ("forward", "backward")}
    assert small <= seen.keys()
    kernels = {f"gla_{n}_kernel" for n in ("decay", "edge", "scan", "mix", "score_gradient", "gradient")}
    kernels |= {f"gdn_{n}_kernel" for n in ("prepare", "scan", "output", "adjoint", "reverse", "gradient")}
    assert kernels | {"_place_kernel"} <= seen.keys()
    environment = {n: value for n, value in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, json.dumps(list(seen.values()))],
        cwd=root, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "checked", done.stderr[-2000:]


def test_a_tensor_off_the_16_byte_grid_is_copied():
    whole = torch.arange(9.0)
    view = whole[1:]
    assert aligned(whole) is whole
    assert torch.equal(aligned(view), view) and aligned(view).data_ptr() % 16 == 0
    assert aligned(whole.view(3, 3).T).is_contiguous()


@pytest.mark.parametrize(
    ("rows", "half", "size", "largest", "block"),
    [
        (64, True, 16, 128, 64),
        (64, True, 256, 128, 128),
        (64, False, 16, 64, 32),
        (32, True, 128, 128, 32),
        (16, False, 5, 64, 16),
    ],
)
def test_blocks_beside_warp_groups_are_wide(rows, half, size, largest, block):
    assert block_of(size, largest, rows=rows, half=half) == block


def test_kernels_compile_together_the_first_time(monkeypatch):
    class Kernel:
        """Notes what is asked of it."""

        def __init__(self):
            self.done = []

        def warmup(self, *arguments, grid, **constants):
            self.done.append("compiled")

        def __getitem__(self, grid):
            return lambda *arguments, **constants: self.done.append("launched")

    monkeypatch.setattr(triton_launch, "interpreted", lambda: False)
    kernel, tensor = Kernel(), torch.zeros(4)
    launch = Launch(kernel)

    def run(grid):
        launch((grid,), (tensor,), (), {})
        return grid

    assert compiled_together(run, 3, key=("a test", 1)) == 3
    assert kernel.done == ["compiled", "launched"]
    assert compiled_together(run, 5, key=("a test", 1)) == 5
    assert kernel.done == ["compiled", "launched", "launched"]
    compiled_together(run, 3, key=("a test", 2))
    assert kernel.done[3:] == ["compiled", "launched"]


def test_a_failed_compilation_leaves_launches_as_they_were(monkeypatch):
    monkeypatch.setattr(triton_launch, "interpreted", lambda: False)

    def fails():
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        compiled_together(fails, key=("a test", 3))
    assert not triton_launch._compiling_only.get()
    assert ("a test", 3) not in triton_launch._compiled
