"""What sampling does for each row of logits: a counted random number, a token, an entry brought forward.

A token is where the number falls in the cumulative distribution, in fixed point: a float sum depends on the order of its
additions, and scans choose that order by the shape of the batch. Within blocks of `BLOCK` tokens probabilities relative to the
block's largest are rounded to multiples of 2^-42 and summed as int64, which is exact in any order, and so are the blocks' masses
after they were brought to one scale; so a row's token and log-probabilities depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.kernels.backend import FusedBackend, on_device_of, takes_triton
from posttrain.kernels.sampling.reference import advance_reference, draw_reference, fixed_point, random_bits, uniform

__all__ = ["advance", "draw", "fixed_point", "random_bits", "uniform"]

# Sums of masses are below 2^53 a block: this many blocks fit int64.
MAX_VOCABULARY = 2**20


def draw(
    logits: Tensor,
    keys: Tensor,
    counters: Tensor,
    *,
    temperature: Tensor | None = None,
    truncated: Tensor | None = None,
    backend: FusedBackend | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token a row from softmax(logits / temperature), by inverse CDF in the order of token ids.

    Args:
        logits: [B, vocab] fp32.
        keys, counters: int64 [B], see `uniform`.
        temperature: fp32 [B]; 0: the lowest of the likeliest tokens, whose log-probability is 0. None: 1 everywhere.
        truncated: fp32 [C, vocab], what the first C rows draw from instead: logits / temperature with -inf where nothing may be
            drawn. Needs a temperature, which still says what is greedy.
        backend: "torch", "triton", or None for the best one here.

    Returns:
        token int64 [B], its log-probability where it was drawn from and under softmax(logits), both fp32 [B], and broken bool
        [B]: logits that hold NaN or +inf, or nothing but -inf. A broken row gets some token.

    Raises:
        ValueError: shapes or types do not fit; the backend cannot take logits.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or not 0 < logits.shape[1] <= MAX_VOCABULARY:
        raise ValueError(
            f"logits must be [B, vocab] in float32, vocab 1 to {MAX_VOCABULARY}, got {list(logits.shape)} in {logits.dtype}"
        )
    _check_rows(logits.shape[0], keys=keys, counters=counters)
    if temperature is not None:
        _check_rows(logits.shape[0], temperature=temperature)
    if truncated is not None:
        fits = truncated.ndim == 2 and truncated.shape[1] == logits.shape[1] and truncated.shape[0] <= logits.shape[0]
        if temperature is None or truncated.dtype != torch.float32 or not fits:
            raise ValueError(
                f"truncated must be [at most B, vocab] in float32, with a temperature, got {list(truncated.shape)} in "
                f"{truncated.dtype} beside logits {list(logits.shape)}"
            )
    if takes_triton(logits, backend) and logits.shape[0]:
        from posttrain.kernels.sampling.triton_sampling import triton_draw

        with on_device_of(logits):
            return triton_draw(logits, keys, counters, temperature, truncated)
    return draw_reference(logits, keys, counters, temperature, truncated)


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
