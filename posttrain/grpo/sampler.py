"""The order of the prompts: a function of (seed, pass), not of how often somebody iterated.

TRL's `RepeatSampler` advances a generator at every epoch, so a run resumed in its second epoch would see the first epoch's order
again. Here the whole run is one epoch of the Hugging Face loop, and pass `k` over the prompts is shuffled with its own seed:
skipping the batches that were trained is then an exact resume, in any pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler


def derived_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from what it must depend on; the same on every machine."""
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class PromptSampler(Sampler[int]):
    """Yields prompt indices for `num_batches` generation batches.

    A generation batch holds `prompts_per_batch` distinct prompts, each repeated `num_generations` times in a row, and the whole
    batch is repeated `repeat_count` times (once a micro-step: TRL's trainer generates on the first and reads its buffer on the
    others). The prompts left over at the end of a pass wait for the next pass's shuffle.

    Example: 4 prompts, 2 a batch, 2 generations, no shuffle: 0 0 1 1 | 2 2 3 3 | 0 0 1 1 | ...

    Raises:
        ValueError: fewer prompts than a batch needs.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        prompts_per_batch: int,
        num_generations: int,
        repeat_count: int,
        num_batches: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        if num_prompts < prompts_per_batch:
            raise ValueError(
                f"{num_prompts} prompts, but one generation batch needs {prompts_per_batch} different ones: "
                "give more prompts, or lower grpo.per_device_train_batch_size or grpo.gradient_accumulation_steps"
            )
        self._num_prompts = num_prompts
        self._prompts_per_batch = prompts_per_batch
        self._num_generations = num_generations
        self._repeat_count = repeat_count
        self._num_batches = num_batches
        self._shuffle = shuffle
        self._seed = seed

    def __len__(self) -> int:
        return self._num_batches * self._repeat_count * self._prompts_per_batch * self._num_generations

    def batch(self, number: int) -> list[int]:
        """The distinct prompts of generation batch `number`, in order."""
        a_pass, position = divmod(number, self._num_prompts // self._prompts_per_batch)
        order = self._order(a_pass)
        return order[position * self._prompts_per_batch : (position + 1) * self._prompts_per_batch]

    def extra(self, number: int, place: int, own: Sequence[int] | None = None) -> int:
        """The prompt of extra candidate `place` of generation batch `number` (see `posttrain.grpo.dynamic`): the prompts that
        are not in the batch (`own`, where it is not this sampler's), in an order of its own, over and over."""
        own = self.batch(number) if own is None else own
        taken = set(own)
        generator = torch.Generator().manual_seed(derived_seed("extra prompts", self._seed, number))
        order = [prompt for prompt in torch.randperm(self._num_prompts, generator=generator).tolist() if prompt not in taken]
        # A batch may hold every prompt there is.
        order = order or list(own)
        return order[place % len(order)]

    def _order(self, a_pass: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_prompts))
        generator = torch.Generator().manual_seed(derived_seed("prompts", self._seed, a_pass))
        return torch.randperm(self._num_prompts, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        for number in range(self._num_batches):
            repeated = [index for index in self.batch(number) for _ in range(self._num_generations)]
            for _ in range(self._repeat_count):
                yield from repeated
