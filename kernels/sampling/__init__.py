"""What sampling does for each row once its distribution is known: a counted random number, a token, an entry brought forward.

A token is where the number falls in the cumulative distribution, in fixed point: a float sum depends on the order of its
additions, and scans choose that order by the shape of the batch. Probabilities are rounded to multiples of 2^-46 and summed as
int64, which is exact in any order, so a row's token depends on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.kernels.backend import FusedBackend, on_device_of, takes_triton
from posttrain.kernels.sampling.reference import advance_reference, draw_reference, fixed_point, random_bits, uniform

__all__ = ["advance", "draw", "fixed_point", "random_bits", "uniform"]


def draw(logprobs: Tensor, keys: Tensor, counters: Tensor, *, backend: FusedBackend | None = None) -> tuple[Tensor, Tensor]:
    """One token a row by inverse CDF in the order of token ids.

    Args:
        logprobs: [B, vocab] fp32, normalised.
        keys, counters: int64 [B], see `uniform`.
        backend: "torch", "triton", or None for the best one here.

    Returns:
        token int64 [B] and its log-probability fp32 [B]. A row that holds NaN gets some token.

    Raises:
        ValueError: shapes or types do not fit; the backend cannot take logprobs.
    """
    if logprobs.ndim != 2 or logprobs.dtype != torch.float32 or not logprobs.shape[1]:
        raise ValueError(f"logprobs must be [B, vocab] in float32, got {list(logprobs.shape)} in {logprobs.dtype}")
    _check_rows(logprobs.shape[0], keys=keys, counters=counters)
    if takes_triton(logprobs, backend) and logprobs.shape[0]:
        from posttrain.kernels.sampling.triton_sampling import triton_draw

        with on_device_of(logprobs):
            return triton_draw(logprobs, keys, counters)
    return draw_reference(logprobs, keys, counters)


def advance(
    integers: Tensor,
    finished: Tensor,
    ends: Tensor,
    rows: Tensor,
    token: Tensor,
    logprob: Tensor,
    plain_logprob: Tensor,
    broken: Tensor,
    *,
    backend: FusedBackend | None = None,
) -> Tensor:
    """Brings the entries of B sequences forward by the tokens that they drew, those that have finished excepted.

    Args:
        integers: int64 [C, places], changed in place: the newest token, its position, the tokens drawn so far; then, unchanged,
            how many there may be. Further columns are not looked at.
        finished: bool [places], changed in place: set where the token is one of `ends` (int64 [E]), where no more may be drawn,
            and where the row is broken.
        rows: int64 [B], places of the sequences; those of finished ones may repeat.
        token: int64 [B]. logprob, plain_logprob: fp32 [B]. broken: bool [B].

    Returns:
        float64 [B, 5] for the host: token, logprob, plain_logprob, broken, whether this token ends the sequence.

    Raises:
        ValueError: shapes do not fit; the backend cannot take logprob.
    """
    _check_rows(rows.shape[0], token=token, logprob=logprob, plain_logprob=plain_logprob, broken=broken)
    if integers.ndim != 2 or integers.shape[0] < 4 or finished.shape != integers.shape[1:]:
        raise ValueError(
            f"integers must be [4 or more, places] and finished [places], got {list(integers.shape)}, {list(finished.shape)}"
        )
    if takes_triton(logprob, backend) and rows.numel():
        from posttrain.kernels.sampling.triton_sampling import triton_advance

        with on_device_of(logprob):
            return triton_advance(integers, finished, ends, rows, token, logprob, plain_logprob, broken)
    return advance_reference(integers, finished, ends, rows, token, logprob, plain_logprob, broken)


def _check_rows(count: int, **columns: Tensor) -> None:
    for name, column in columns.items():
        if column.shape != (count,):
            raise ValueError(f"{name} must be [{count}], one entry a row, got {list(column.shape)}")
