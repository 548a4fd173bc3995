"""Logits -> token and its log-probabilities, for rows that each have their own parameters.

    temperature -> top_k -> top_p -> min_p -> softmax -> inverse CDF by one uniform number a row

The inverse CDF is taken in fixed point (`posttrain.kernels.sampling`), so a row's token depends on that row alone. Truncation is
by rank in a stable descending sort, so that ties go to the lowest id.

Two log-probabilities come back: under the distribution that the token was really drawn from, and under the model's own softmax.
Greedy rows (temperature below 1e-5, as in vLLM) draw from a point mass: log-probability 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from posttrain.kernels.sampling import draw, fixed_point
from posttrain.models.paged import upload

GREEDY_BELOW = 1e-5
NO_TOP_K = torch.iinfo(torch.int64).max
_BLOCK = 2**24  # logits handled at once; bounds the int64 temporaries (128 MB each)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a step over some rows has to compute, known on the host: a CUDA graph holds one kind. A row's numbers are the same
    under every kind that computes what it needs.

    Attributes:
        mode: "plain": every row samples from the model's own softmax, both log-probabilities are one; "greedy": none samples;
            "mixed": anything.
        cut: rows from the first on that are sorted and truncated; rows behind them have nothing to cut off.
    """

    mode: Literal["plain", "greedy", "mixed"]
    cut: int = 0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """One row's parameters as a step reads them; make it with `of`.

    Attributes:
        temperature: 0 where the row is greedy, and then nothing is cut off.
        top_k: NO_TOP_K where it is off.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Limits:
        """From the values of a `Request`."""
        if temperature < GREEDY_BELOW:
            return cls(temperature=0.0, top_k=NO_TOP_K, top_p=1.0, min_p=0.0)
        return cls(temperature=temperature, top_k=min(top_k or NO_TOP_K, NO_TOP_K), top_p=top_p, min_p=min_p)

    @property
    def cuts(self) -> bool:
        return self.top_k < NO_TOP_K or self.top_p < 1.0 or self.min_p > 0.0


def kind_of(rows: Sequence[Limits]) -> Kind:
    """The narrowest kind for these rows."""
    if all(row.temperature == 0.0 for row in rows):
        return Kind(mode="greedy")
    cut = max((number + 1 for number, row in enumerate(rows) if row.cuts), default=0)
    plain = not cut and all(row.temperature == 1.0 for row in rows)
    return Kind(mode="plain" if plain else "mixed", cut=cut)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of B rows, on the device of the logits.

    Attributes:
        kind: what is looked at.
        keys: int64 [B], `stream_key` of each row.
        temperature: float32 [B], 0 in greedy rows.
        top_k: int64 [B], NO_TOP_K is off; top_p: float64 [B]; log_min_p: float32 [B], -inf is off.
    """

    kind: Kind
    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    @classmethod
    def build(
        cls,
        *,
        keys: Sequence[int],
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        device: torch.device | str = "cpu",
    ) -> SamplingParams:
        """One entry a row; the values are those of `Request` (already checked there)."""
        rows = [
            Limits.of(temperature=t, top_k=k, top_p=p, min_p=m)
            for t, k, p, m in zip(temperature, top_k, top_p, min_p, strict=True)
        ]
        return cls(
            kind=kind_of(rows),
            keys=upload(list(keys), torch.int64, device),
            temperature=upload([row.temperature for row in rows], torch.float32, device),
            top_k=upload([row.top_k for row in rows], torch.int64, device),
            top_p=upload([row.top_p for row in rows], torch.float64, device),
            log_min_p=upload([row.min_p for row in rows], torch.float32, device).log(),
        )

    def rows(self, start: int, stop: int) -> SamplingParams:
        """The parameters of rows [start, stop)."""
        return SamplingParams(
            kind=replace(self.kind, cut=min(max(0, self.kind.cut - start), stop - start)),
            keys=self.keys[start:stop],
            temperature=self.temperature[start:stop],
            top_k=self.top_k[start:stop],
            top_p=self.top_p[start:stop],
            log_min_p=self.log_min_p[start:stop],
        )


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What was sampled in B rows: token int64 [B], logprob and plain_logprob float32 [B], broken bool [B].

    `broken` marks rows whose logits held NaN, +inf, or nothing but -inf; their other fields mean nothing.
    """

    token: Tensor
    logprob: Tensor
    plain_logprob: Tensor
    broken: Tensor


class Reading:
    """A table of `posttrain.kernels.sampling.advance` on its way to the host, behind the work that is queued."""

    def __init__(self, table: Tensor) -> None:
        self._table, self._done = table, None
        if table.is_cuda:
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(table.device))

    def rows(self) -> list[list[float]]:
        """Its rows: [token, logprob, plain_logprob, broken, ended]; waits until they have arrived."""
        if self._done is not None:
            self._done.synchronize()
        return self._table.tolist()


def truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """Sets what top_k, top_p and min_p cut off to -inf, in this order.

    Args:
        scaled: [B, vocab] float32 logits, already divided by the temperature.
        top_k: int64 [B, 1]; top_p: float64 [B, 1], 1 is off; log_min_p: float32 [B, 1], -inf is off.

    top_p keeps the smallest set of likeliest tokens whose mass, within what top_k left, reaches it. At least one token stays.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    mass = fixed_point(torch.log_softmax(ordered, dim=-1))
    cumulative = mass.cumsum(dim=-1)
    before = (cumulative - mass).double()
    outside = (before >= top_p * cumulative[:, -1:]) & (top_p < 1.0) & (rank > 0)
    unlikely = ordered < ordered[:, :1] + log_min_p
    ordered = ordered.masked_fill(outside | unlikely, float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, order, ordered)


def _sample_block(logits: Tensor, params: SamplingParams, positions: Tensor) -> Draw:
    mode, cut = params.kind.mode, params.kind.cut
    logits, truncated = logits.float(), None
    if cut:
        heat = params.temperature[:cut, None]
        scaled = logits[:cut] / heat.masked_fill(heat == 0, 1.0)
        truncated = truncate(scaled, *(column[:cut, None] for column in (params.top_k, params.top_p, params.log_min_p)))
    temperature = None if mode == "plain" else params.temperature if mode == "mixed" else logits.new_zeros(logits.shape[0])
    token, logprob, plain, broken = draw(logits, params.keys, positions, temperature=temperature, truncated=truncated)
    return Draw(token=token, logprob=logprob, plain_logprob=plain, broken=broken)


def sample(logits: Tensor, params: SamplingParams, positions: Tensor) -> Draw:
    """Draws one token a row.

    Args:
        logits: [B, vocab], any float type; the arithmetic is float32.
        params: parameters of the B rows.
        positions: int64 [B], index of the token within its completion: the counter of the random number.
    """
    rows, vocab = logits.shape
    block = max(1, _BLOCK // vocab)
    if rows <= block or (logits.is_cuda and not params.kind.cut):  # Triton needs no int64 temporaries
        return _sample_block(logits, params, positions)
    draws = [
        _sample_block(logits[start : start + block], params.rows(start, start + block), positions[start : start + block])
        for start in range(0, rows, block)
    ]
    return Draw(
        token=torch.cat([draw.token for draw in draws]),
        logprob=torch.cat([draw.logprob for draw in draws]),
        plain_logprob=torch.cat([draw.plain_logprob for draw in draws]),
        broken=torch.cat([draw.broken for draw in draws]),
    )
