"""Logits -> token and its log-probabilities, for rows that each have their own parameters.

    temperature -> top_k -> top_p -> min_p -> softmax -> inverse CDF by one uniform number a row

Why the inverse CDF is taken in fixed point: a float cumulative sum depends on the order of its additions, and GPU scans choose
that order by the shape of the batch. Probabilities are therefore rounded to multiples of 2^-46 and summed as int64, which is
exact in any order; a row's token depends on that row alone. Truncation is by rank in a stable descending sort, so that ties go to
the lowest id.

Two log-probabilities come back: under the distribution that the token was really drawn from, and under the model's own softmax.
Greedy rows (temperature below 1e-5, as in vLLM) draw from a point mass: log-probability 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.models.linear import elementwise
from posttrain.models.paged import upload
from posttrain.rollout.random import uniform

GREEDY_BELOW = 1e-5
_FIXED_POINT = 2.0**46  # a row's sum stays below 2^47: exact in int64 and in float64
_BLOCK = 2**24  # logits handled at once; bounds the int64 temporaries (128 MB each)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of B rows, on the device of the logits; make it with `SamplingParams.build`.

    Attributes:
        keys: int64 [B], `stream_key` of each row.
        temperature: float32 [B], 1 in greedy rows.
        greedy: bool [B], or None where no row is greedy.
        cut_rows, cut: rows that are truncated, on the host and as int64 [B'] (None where none is);
            top_k int64, top_p float64 and log_min_p float32, each [B', 1], are theirs.
        plain: True where every row samples from the model's own softmax, so that both log-probabilities are one.
    """

    keys: Tensor
    temperature: Tensor
    greedy: Tensor | None
    cut_rows: tuple[int, ...]
    cut: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    log_min_p: Tensor | None
    all_greedy: bool
    plain: bool

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
        greedy = [value < GREEDY_BELOW for value in temperature]
        scale = [1.0 if is_greedy else value for is_greedy, value in zip(greedy, temperature, strict=True)]
        cut = [
            row
            for row, (is_greedy, k, p, least) in enumerate(zip(greedy, top_k, top_p, min_p, strict=True))
            if not is_greedy and (k > 0 or p < 1.0 or least > 0.0)
        ]
        unlimited = torch.iinfo(torch.int64).max

        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor | None:
            return upload(values, dtype, device)[:, None] if cut else None

        least_p = column([min_p[row] for row in cut], torch.float32)
        return cls(
            keys=upload(list(keys), torch.int64, device),
            temperature=upload(scale, torch.float32, device),
            greedy=upload(greedy, torch.bool, device) if any(greedy) else None,
            cut_rows=tuple(cut),
            cut=upload(cut, torch.int64, device) if cut else None,
            top_k=column([top_k[row] or unlimited for row in cut], torch.int64),
            top_p=column([top_p[row] for row in cut], torch.float64),
            log_min_p=None if least_p is None else least_p.log(),
            all_greedy=all(greedy),
            plain=not cut and not any(greedy) and all(value == 1.0 for value in temperature),
        )

    def rows(self, start: int, stop: int) -> SamplingParams:
        """The parameters of rows [start, stop), without a copy to the host: `cut_rows` is known there."""
        low, high = bisect_left(self.cut_rows, start), bisect_left(self.cut_rows, stop)
        some = high > low

        def part(column: Tensor | None) -> Tensor | None:
            return column[low:high] if some and column is not None else None

        return SamplingParams(
            keys=self.keys[start:stop],
            temperature=self.temperature[start:stop],
            greedy=None if self.greedy is None else self.greedy[start:stop],
            cut_rows=tuple(row - start for row in self.cut_rows[low:high]),
            cut=self.cut[low:high] - start if some and self.cut is not None else None,
            top_k=part(self.top_k),
            top_p=part(self.top_p),
            log_min_p=part(self.log_min_p),
            all_greedy=self.all_greedy,
            plain=self.plain,
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

    def start_reading(self) -> Reading:
        """Begins the one transfer to the host, behind the work that is queued; float64 holds a token id and a float32 exactly."""
        fields = (self.token, self.logprob, self.plain_logprob, self.broken)
        table = torch.stack([field.double() for field in fields], dim=1)
        if not table.is_cuda:
            return Reading(table, None)
        host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
        host.copy_(table, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(table.device))
        return Reading(host, done)

    def to_host(self) -> list[list[float]]:
        """The rows as `Reading.rows` has them, at once."""
        return self.start_reading().rows()


class Reading:
    """A draw on its way to the host."""

    def __init__(self, table: Tensor, done: torch.cuda.Event | None) -> None:
        self._table, self._done = table, done

    def rows(self) -> list[list[float]]:
        """Rows [token, logprob, plain_logprob, broken]; waits until they have arrived."""
        if self._done is not None:
            self._done.synchronize()
        return self._table.tolist()


def _fixed_point(logprobs: Tensor) -> Tensor:
    """Probabilities as int64 multiples of 2^-46.

    Scaling by a power of two is exact, so only the floor rounds; `elementwise` keeps the bits of exp from depending on the shape.
    """
    return (elementwise(torch.exp, logprobs) * _FIXED_POINT).to(torch.int64)


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
    mass = _fixed_point(torch.log_softmax(ordered, dim=-1))
    cumulative = mass.cumsum(dim=-1)
    before = (cumulative - mass).double()
    outside = (before >= top_p * cumulative[:, -1:]) & (top_p < 1.0) & (rank > 0)
    unlikely = ordered < ordered[:, :1] + log_min_p
    ordered = ordered.masked_fill(outside | unlikely, float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, order, ordered)


def _inverse_cdf(logprobs: Tensor, numbers: Tensor) -> Tensor:
    """Token of each row at `numbers` (float64 [B] in (0, 1)) along the cumulative distribution in the order of token ids."""
    cumulative = _fixed_point(logprobs).cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum((numbers * total.double()).to(torch.int64), total - 1)
    token = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return token.clamp_(0, logprobs.shape[-1] - 1)  # only a broken row can fall outside


def _sample_block(logits: Tensor, params: SamplingParams, positions: Tensor) -> Draw:
    logits = logits.float()
    highest, likeliest = logits.max(dim=-1)
    plain = torch.log_softmax(logits, dim=-1)
    if params.all_greedy:
        token = likeliest
        logprob = torch.zeros_like(highest)
    else:
        if params.plain:
            drawn_from = plain
        else:
            scaled = logits / params.temperature[:, None]
            if params.cut is not None:
                assert params.top_k is not None and params.top_p is not None and params.log_min_p is not None
                limits = params.top_k, params.top_p, params.log_min_p
                if len(params.cut_rows) == len(scaled):
                    scaled = truncate(scaled, *limits)
                else:
                    scaled[params.cut] = truncate(scaled[params.cut], *limits)
            drawn_from = torch.log_softmax(scaled, dim=-1)
        token = _inverse_cdf(drawn_from, uniform(params.keys, positions))
        logprob = drawn_from.gather(-1, token[:, None])[:, 0]
        if params.greedy is not None:
            token = torch.where(params.greedy, likeliest, token)
            logprob = logprob.masked_fill(params.greedy, 0.0)
    plain_logprob = plain.gather(-1, token[:, None])[:, 0]
    return Draw(token=token, logprob=logprob, plain_logprob=plain_logprob, broken=~highest.isfinite())


def sample(logits: Tensor, params: SamplingParams, positions: Tensor) -> Draw:
    """Draws one token a row.

    Args:
        logits: [B, vocab], any float type; the arithmetic is float32.
        params: parameters of the B rows.
        positions: int64 [B], index of the token within its completion: the counter of the random number.
    """
    rows, vocab = logits.shape
    block = max(1, _BLOCK // vocab)
    if rows <= block:
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
