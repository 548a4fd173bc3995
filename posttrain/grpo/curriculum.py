"""A curriculum by measured pass rate: prompts that are sometimes solved come more often than those that always or never are.

The run is cut into rounds of batches. The prompts of a round are drawn without replacement with weights max(floor, 4 p (1 - p)),
where p is the prompt's pass rate as measured by the end of the last round but one, and 1 where it was never measured: 4 p (1 - p)
is the variance of a right-or-wrong reward, to which the size of GRPO's gradient is bound. That a whole round lies between
measurement and draw lets generators run ahead, and makes the order a function of (seed, measurements) alone: a resumed run, which
has the measurements in its checkpoint, draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from posttrain.grpo.sampler import PromptSampler, derived_seed

Answers = list[tuple[int, int, int]]


def weight(rate: float | None, floor: float) -> float:
    """Of a prompt with this pass rate (None: not measured)."""
    return 1.0 if rate is None else max(floor, 4.0 * rate * (1.0 - rate))


class Curriculum:
    """The order of prompts, once `record` has been told of every batch before.

    Args:
        sampler: the run's order without a curriculum; of it the sizes and the extra prompts are taken.
        num_prompts: of the data set.
        every_batches: batches of a round; fewer where the data set has not so many prompts.
        floor: weight of a prompt that is always or never solved; one solved half of the time has 1.
        memory: share of the old pass rate in the new one when a prompt is measured again.
    """

    def __init__(
        self,
        sampler: PromptSampler,
        *,
        num_prompts: int,
        prompts_per_batch: int,
        every_batches: int,
        floor: float,
        memory: float,
        seed: int,
    ) -> None:
        self._sampler, self._num_prompts, self._prompts_per_batch = sampler, num_prompts, prompts_per_batch
        self.every_batches = max(1, min(every_batches, num_prompts // prompts_per_batch))
        self._floor, self._memory, self._seed = floor, memory, seed
        self._rates: dict[int, float] = {}
        self._folded = -1  # rounds that are in the rates
        self._measured: dict[int, Answers] = {}
        self._orders: dict[int, list[int]] = {}

    def record(self, batch: int, answers: Iterable[tuple[int, int, int]]) -> None:
        """(prompt, right answers, judged answers) of every group that was sampled for a batch; told again, it counts once."""
        self._measured[batch] = list(answers)
        self._fold(batch // self.every_batches - 2)

    def batch(self, number: int) -> list[int]:
        """The prompts of a batch.

        Raises:
            ValueError: the round before the last is not measured yet.
        """
        a_round, place = divmod(number, self.every_batches)
        if a_round not in self._orders:
            self._orders[a_round] = self._draw(a_round)
            for old in [one for one in self._orders if one < a_round - 1]:
                del self._orders[old]
        return self._orders[a_round][place * self._prompts_per_batch : (place + 1) * self._prompts_per_batch]

    def extra(self, number: int, place: int) -> int:
        """See `PromptSampler.extra`."""
        return self._sampler.extra(number, place, own=self.batch(number))

    def rates(self, through: int) -> dict[int, float]:
        """Pass rates by prompt as measured in rounds 0 to `through`."""
        rates = dict(self._rates)
        for batch in sorted(self._measured):
            if self._folded < batch // self.every_batches <= through:
                for prompt, right, judged in self._measured[batch]:
                    if judged:
                        rate = right / judged
                        rates[prompt] = self._memory * rates.get(prompt, rate) + (1 - self._memory) * rate
        return rates

    def state(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "folded": self._folded,
            "rates": [[prompt, rate] for prompt, rate in sorted(self._rates.items())],
            "measured": [[batch, answers] for batch, answers in sorted(self._measured.items())],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self._folded = state["folded"]
        self._rates = dict(state["rates"])
        self._measured = {batch: [(p, r, j) for p, r, j in answers] for batch, answers in state["measured"]}
        self._orders = {}

    def _fold(self, through: int) -> None:
        """Rounds that no draw to come looks at one by one are kept as rates alone."""
        if through > self._folded:
            self._rates = self.rates(through)
            self._folded = through
            self._measured = {batch: found for batch, found in self._measured.items() if batch // self.every_batches > through}

    def _draw(self, a_round: int) -> list[int]:
        needed = max(-1, a_round - 2)
        missing = [
            batch
            for batch in range((self._folded + 1) * self.every_batches, (needed + 1) * self.every_batches)
            if batch not in self._measured
        ]
        if missing or self._folded > needed:
            raise ValueError(f"prompts of round {a_round} were asked for, but those of batches {missing[:4]} are not measured")
        rates = self.rates(needed)
        every = range(self._num_prompts)
        weights = torch.tensor([weight(rates.get(prompt), self._floor) for prompt in every], dtype=torch.float64)
        generator = torch.Generator().manual_seed(derived_seed("curriculum", self._seed, a_round))
        # The smallest of exponential variables with these rates: a draw without replacement (Efraimidis and Spirakis 2006).
        keys = -torch.log(1.0 - torch.rand(self._num_prompts, generator=generator, dtype=torch.float64)) / weights
        drawn = keys.argsort(stable=True)[: self.every_batches * self._prompts_per_batch]
        # Heavy prompts come first among the keys: they are to be spread over the round.
        return drawn[torch.randperm(len(drawn), generator=generator)].tolist()
