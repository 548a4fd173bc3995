"""Row-invariant building blocks: on CPU a token's bits do not depend on how many other tokens share the call.

Two things break that invariance in PyTorch's CPU kernels, and both are avoided here.
- A matrix product with few rows takes another code path (a matrix-vector kernel, or a split of the inner dimension across
  threads). `Linear` pads such inputs with zero rows.
- Elementwise kernels handle the end of a thread's range with scalar `exp`, whose last bit can differ from the vector one's:
  `posttrain.kernels.elementwise`.
GPU kernels are called as they are, and what is bound by memory there is fused (`posttrain.kernels`); in strict mode
(`posttrain.models.exact`) products have kernels of ours there, with the same promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.kernels.backend import takes_triton
from posttrain.kernels.batch_invariant import MOST_ROWS, exact_linear, few_row_products
from posttrain.kernels.elementwise import elementwise, silu
from posttrain.kernels.rms_norm import add_rms_norm, rms_norm
from posttrain.kernels.swiglu import swiglu

__all__ = [
    "MIN_ROWS",
    "AddRMSNorm",
    "Linear",
    "RMSNorm",
    "SwiGLU",
    "elementwise",
    "few_rows",
    "has_hooks",
    "is_plain",
    "joint_linear",
    "silu",
    "take_few",
]

# Fewest rows whose product has the bits that it has among more rows; measured on AVX-512 and AVX2, 1 to 4 threads.
MIN_ROWS = 16
# Rows up to which two wide products in one launch beat cuBLAS, one after another, on an H200. Several narrower ones always do.
FEW_WIDE = 64
# Rows of a joint weight come in eights: 16-byte alignment of half-precision columns, which the fast products ask for.
_ALIGN = 8


class Linear(nn.Linear):
    """`nn.Linear` whose output row depends on its input row alone, bit for bit, on CPU. x [..., in] -> [..., out].

    `zero_init` asks the model's initialisation for a zero weight.

    Attributes:
        exact: strict mode: the promise holds on a GPU too; exact_dtype: of the result then, by default that of x.
    """

    exact = False
    exact_dtype: torch.dtype | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, zero_init: bool = False, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, bias=bias, **kwargs)
        self.zero_init = zero_init

    def forward(self, x: Tensor) -> Tensor:
        if self.exact:
            return exact_linear(x, self.weight, self.bias, out_dtype=self.exact_dtype)
        if x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        if rows < MIN_ROWS:
            flat = F.pad(flat, (0, 0, 0, MIN_ROWS - rows))
            out = F.linear(flat, self.weight, self.bias)[:rows]
        else:
            out = F.linear(flat, self.weight, self.bias)
        return out.view(*x.shape[:-1], out.shape[-1])


def has_hooks(module: nn.Module) -> bool:
    """Whether something waits for the module to be called: a hook, or another `forward` on the instance (Accelerate's hooks)."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def is_plain(layer: object, *, bias: bool = False) -> bool:
    """Whether a layer is a `Linear` (bias-free unless `bias`) whose weight may be used without calling it: nothing wraps it
    (PEFT), watches it (hooks) or shards its weight (FSDP, ZeRO-3)."""
    if type(layer) is not Linear or (layer.bias is not None and not bias):
        return False
    return not has_hooks(layer) and type(layer.weight) in (nn.Parameter, Tensor) and not hasattr(layer.weight, "ds_id")


def take_few(layers: Sequence[nn.Module], x: Tensor, most: int = MOST_ROWS) -> bool:
    """Whether `few_rows` makes the products of these layers on rows like those of x in one launch."""
    if torch.is_grad_enabled() or not takes_triton(x, None) or torch.is_autocast_enabled(x.device.type):
        return False
    if x.is_cuda and x.dtype == torch.float32:
        return False
    if all(getattr(layer, "exact", False) for layer in layers):
        most = MOST_ROWS
    return 0 < x.shape[0] <= most and all(is_plain(layer, bias=True) and layer.weight.dtype == x.dtype for layer in layers)


def few_rows(layers: Sequence[nn.Module], xs: Sequence[Tensor], most: int = MOST_ROWS) -> list[Tensor]:
    """`[layer(x) for layer, x in zip(layers, xs)]`, x [T, in_i]; of up to `most` rows on a GPU in one launch, without gradients.
    Strict mode, whose bits it has, takes it for more."""
    if not take_few(layers, xs[0], most):
        return [layer(x) for layer, x in zip(layers, xs, strict=True)]
    return few_row_products(xs, [layer.weight for layer in layers], [layer.bias for layer in layers])  # pyright: ignore


def joint_linear(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """`[layer(x) for layer in layers]`, on a GPU in one product: narrow layers are bound by reading x, and each reads it anew,
    in the backward pass three times over. x [T, in] -> [T, out_i]; views of one tensor where joint.

    Wrapped modules (hooks, PEFT, ZeRO-3) take separate products, whose last bits differ from the joint one's on a GPU, but not in
    strict mode."""
    if not x.is_cuda or not all(is_plain(layer) for layer in layers):
        return [layer(x) for layer in layers]
    widths = [layer.weight.shape[0] for layer in layers]
    padding = [-width % _ALIGN for width in widths]
    weights = [F.pad(layer.weight, (0, 0, 0, pad)) if pad else layer.weight for layer, pad in zip(layers, padding, strict=True)]
    product = exact_linear if all(layer.exact for layer in layers) else F.linear
    whole = product(x, torch.cat(weights))
    columns = whole.split([width + pad for width, pad in zip(widths, padding, strict=True)], dim=-1)
    return [part if part.shape[-1] == width else part[..., :width] for part, width in zip(columns, widths, strict=True)]


class RMSNorm(nn.Module):
    """x [..., D] / sqrt(mean(x^2) + eps) * weight [D], computed in fp32 and returned in the dtype of x."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """`gate`: shaped as x; the result is multiplied by silu(gate)."""
        return rms_norm(x, self.weight, self.eps, gate=gate)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class AddRMSNorm(RMSNorm):
    """(x, delta) -> (x + delta, RMSNorm of it); without a delta (x, RMSNorm of x). Each [..., D]."""

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return add_rms_norm(x, delta, self.weight, self.eps)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); x [T, hidden] -> [T, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(*few_rows((self.gate_proj, self.up_proj), (x, x), FEW_WIDE)))
