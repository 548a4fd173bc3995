"""Launches that cost the host little.

`kernel[grid](...)` binds, specialises and looks up every argument again at each launch, 70 microseconds for the kernels here on
a slow host; a layer's forward and backward has two dozen of them. `Launch` does that once for a set of constants and dtypes and
then calls the compiled kernel. It reaches into Triton 3.6's compiled kernels; other versions launch the ordinary way.

Compiling them one after another takes half a minute: `compiled_together` runs a function first with launches that compile, side
by side, and then for real.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

MAX_COMPILERS = 16
Result = TypeVar("Result")
_KNOWN = triton.__version__.startswith("3.6.")
_compiling_only = ContextVar("compiling_only", default=False)
_compiled: set[tuple[Hashable, ...]] = set()


class Launch:
    """A kernel whose parameters are tensors, then integers and floats that it does not specialise on, then constants.

    `launch(grid, tensors, numbers, constants)`: tensors begin at multiples of 16 bytes (fresh ones do, `aligned` sees to others);
    constants come in one order always, launch options such as num_warps among them.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple, tuple[Any, tuple, Callable]] = {}

    def __call__(
        self, grid: tuple[int, ...], tensors: tuple[Tensor, ...], numbers: tuple[int | float, ...], constants: dict[str, Any]
    ) -> None:
        if 0 in grid:
            return
        if torch.compiler.is_compiling():  # which sees through ordinary launches
            self.kernel[grid](*tensors, *numbers, **constants)
            return
        if _compiling_only.get():
            self.kernel.warmup(*tensors, *numbers, grid=grid, **constants)
            return
        device = tensors[0].device
        if not _KNOWN or device.type != "cuda" or interpreted() or _hooked():
            self.kernel[grid](*tensors, *numbers, **constants)
            return
        long = tuple(n >= 2**31 for n in numbers)  # another type to the kernel
        key = (device.index, *constants.values(), *[a.dtype for a in tensors], long)
        found = self._compiled.get(key)
        if found is None:
            self._check(len(tensors), numbers)
            compiled = self.kernel[grid](*tensors, *numbers, **constants)
            names = self.kernel.arg_names[len(tensors) + len(numbers) :]
            self._compiled[key] = compiled, tuple(constants[n] for n in names), compiled.run
            return
        compiled, values, run = found
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        # Addresses: of a tensor the launcher asks the driver, each time, whether it is on the device.
        pointers = [a.data_ptr() if a.is_cuda else _refuse(a) for a in tensors]
        run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *numbers, *values)

    def _check(self, first: int, numbers: tuple[int | float, ...]) -> None:
        """An integer that Triton specialises on would let other values run this value's kernel."""
        names = self.kernel.arg_names[first : first + len(numbers)]
        free = {p.name for p in self.kernel.params if p.do_not_specialize}
        special = [n for n, value in zip(names, numbers, strict=True) if isinstance(value, int) and n not in free]
        assert not special, f"{special} must be in the kernel's do_not_specialize"


def _refuse(a: Tensor) -> int:
    raise ValueError(f"a tensor {list(a.shape)} is on {a.device}, and others of this kernel on a GPU")


def compiled_together(run: Callable[..., Result], *arguments: Any, key: tuple[Hashable, ...]) -> Result:
    """run(*arguments), whose kernels are compiled side by side the first time that the process meets `key`, which must hold
    whatever their constants depend on. `run` is called twice then: it may allocate and launch, and do nothing else."""
    if key not in _compiled and not interpreted():
        mark = _compiling_only.set(True)
        try:
            with ThreadPoolExecutor(min(MAX_COMPILERS, os.cpu_count() or 1)) as pool, triton.AsyncCompileMode(pool):
                run(*arguments)
        finally:
            _compiling_only.reset(mark)
        _compiled.add(key)
    return run(*arguments)


def aligned(a: Tensor) -> Tensor:
    """a, contiguous and at a multiple of 16 bytes, which compiled kernels rely on."""
    a = a.contiguous()
    return a.clone() if not torch.compiler.is_compiling() and a.data_ptr() % 16 else a


def cdiv(a: int, b: int) -> int:
    """`triton.cdiv` without the 7 microseconds that its use inside kernels costs it outside of them."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _hooked() -> bool:
    """Whether a profiler of Triton's own wants to see launches."""
    for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


@cache
def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)
