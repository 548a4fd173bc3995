"""The learner's side of a broadcast of weights."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from posttrain.grpo.split.transfer.buckets import (
    BUCKET_BYTES,
    Entry,
    WeightError,
    checksum,
    fill,
    gather,
    is_sharded,
    plan_buckets,
)
from posttrain.grpo.split.transfer.group import (
    ANSWER_LIMIT_S,
    BUSY_S,
    HAVE,
    TRANSFER_LIMIT_S,
    Broken,
    Group,
    as_broken,
    device_id,
    finish,
    serve,
    synchronize,
    wait_key,
)

logger = logging.getLogger(__name__)

# A transfer that broke is tried again with those that still answer; so many in a row are no accident.
FAILURES_IN_A_ROW = 3
# Some have got all of a transfer that broke, and are about to say so.
LAST_WORD_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Member:
    """A generator, and the GPU that it runs on (see `device_id`)."""

    name: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a publication took: `wait_s` until all had answered, `transfer_s` for buckets, broadcast and checksums."""

    receivers: int
    nbytes: int
    wait_s: float
    transfer_s: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / max(self.transfer_s, 1e-9) / 1e9


@dataclass(frozen=True, kw_only=True)
class _Go:
    """A publication that was agreed on: `members` get it by broadcast in group `group`, `mapped` copy from our buckets."""

    number: int
    group: int
    members: list[int]
    mapped: list[int]


class CollectiveSender:
    """Publishes by broadcast; see `WeightSender`.

    Args:
        host: address of this machine that the generators reach; the store listens there, and nowhere else.
        device: where the weights are.
        lend: takes a number and (function, arguments) that give a bucket to a process on the same GPU.
        same_device: generators on this device (see `device_id`) copy from our buckets; by default on `device`, where it is a GPU.
    """

    def __init__(
        self,
        host: str,
        device: torch.device | str = "cpu",
        *,
        bucket_bytes: int = BUCKET_BYTES,
        answer_limit_s: float = ANSWER_LIMIT_S,
        transfer_limit_s: float = TRANSFER_LIMIT_S,
        lend: Callable[[int, Any], None] | None = None,
        same_device: str | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._bucket_bytes, self._answer_s, self._transfer_s = bucket_bytes, answer_limit_s, transfer_limit_s
        self._lend, self._lent, self._first_slot = lend, False, 0
        self._same_device = device_id(self._device) if same_device is None else same_device
        self._store, self.address = serve(host)
        self._group = Group(self._store, host, self._device)
        self._members: dict[int, Member] = {}
        self._has: dict[int, int] = {}
        self._dead: set[str] = set()
        self._number, self._content, self._failures = 0, 0, 0
        self._buckets: list[Tensor] = []
        self._version = -1
        self._tensors: Mapping[str, Tensor] = {}
        self._whole: dict[str, Tensor] = {}
        self.last: Transfer | None = None

    def publish(self, version: int, named_tensors: Mapping[str, Tensor]) -> None:
        """Send the tensors to every generator there is. Those that join later get them by `ensure`, while they are unchanged.

        Under ZeRO-3 the other ranks call `gather(named_tensors, None)` at the same time.

        Raises:
            WeightError: a generator needs other names or shapes, got other bytes than were sent, or transfers keep failing.
        """
        if is_sharded(named_tensors):
            gather(named_tensors, self._whole, self._bucket_bytes)
            named_tensors = self._whole
        self._version, self._tensors = version, named_tensors
        self._content += 1
        self._has.clear()
        self._send(self._living())

    def ensure(self) -> None:
        """Send the last version to those that have joined or missed it since; the tensors must not have changed."""
        if self._version >= 0:
            self._send([i for i in self._living() if self._has.get(i) != self._version])

    def forget(self, name: str) -> None:
        """A generator is dead: nobody waits for it any more."""
        self._dead.add(name)

    def close(self) -> None:
        self._group.close()

    # -- an agreement -------------------------------------------------------------------------------------------------

    def _living(self) -> list[int]:
        # One that died between its two words has a number, and no name ever.
        for i in range(self._store.add("joined", 0)):
            if i not in self._members and self._store.check([f"member/{i}"]):
                self._members[i] = Member(**json.loads(self._store.get(f"member/{i}")))
        return [i for i in self._members if not self._is_dead(i)]

    def _is_dead(self, member: int) -> bool:
        return self._members[member].name in self._dead

    def _send(self, members: list[int]) -> None:
        """One publication; repeated with those that still answer, where it broke."""
        while members:
            begun = time.perf_counter()
            entries, sizes = plan_buckets(self._tensors, self._bucket_bytes)
            go = self._agree(members, entries, sizes)
            agreed = time.perf_counter()
            try:
                self._transfer(go, entries, sizes)
            except Broken as broken:
                logger.warning("version %d: %s", self._version, broken)
                self._group.close()
                self._failures += 1
                if self._failures >= FAILURES_IN_A_ROW:
                    raise WeightError(f"weights could not be sent {self._failures} times in a row; at last: {broken}") from broken
                members = [i for i in members if i in self._living() and i in go.members + go.mapped and i not in self._has]
                continue
            self._failures = 0
            receivers = len(go.members) + len(go.mapped)
            if receivers:
                seconds = {"wait_s": agreed - begun, "transfer_s": time.perf_counter() - agreed}
                self.last = Transfer(receivers=receivers, nbytes=sum(sizes), **seconds)
            return

    def _agree(self, members: list[int], entries: list[Entry], sizes: list[int]) -> _Go:
        """Offer a publication to all, and say who takes part: those of `members` that have answered."""
        number, self._number = self._number, self._number + 1
        manifest = json.dumps({"entries": [asdict(entry) for entry in entries], "sizes": sizes})
        digest = hashlib.sha256(manifest.encode()).hexdigest()[:16]
        if not self._store.check([f"manifest/{digest}"]):
            self._store.set(f"manifest/{digest}", manifest)
        offer = {"version": self._version, "manifest": digest, "content": self._content}
        self._store.set(f"publish/{number}", json.dumps(offer))
        self._store.add("published", 1)
        answers = self._answers(f"ready/{number}", members, self._answer_s)
        late = [i for i in members if i not in answers and not self._is_dead(i)]
        if late:
            logger.warning("version %d goes out without %s: no answer in time", self._version, self._names(late))
        self._has |= {i: self._version for i, text in answers.items() if text == HAVE}
        ready = [i for i in members if answers.get(i) == "ok"]
        mapped = [i for i in ready if self._same_device and self._members[i].device == self._same_device]
        group = [i for i in ready if i not in mapped]
        go = _Go(number=number, group=self._group.number(tuple(group)), members=group, mapped=mapped)
        self._store.set(f"go/{number}", json.dumps(asdict(go)))
        self._clean(number - 2)
        _raise_wrong(answers)
        return go

    def _answers(self, prefix: str, members: list[int], limit_s: float) -> dict[int, str]:
        """What they have said by the deadline."""
        deadline = time.monotonic() + limit_s
        answers: dict[int, str] = {}
        while (missing := [i for i in members if i not in answers and not self._is_dead(i)]) and time.monotonic() < deadline:
            for i in missing:
                if self._store.check([f"{prefix}/{i}"]):
                    answers[i] = self._store.get(f"{prefix}/{i}").decode()
            time.sleep(BUSY_S)
        return answers

    def _clean(self, number: int) -> None:
        """Forget an old publication's talk, which nobody reads any more."""
        if number >= 0:
            keys = [f"{name}/{number}" for name in ("publish", "go", "sums")]
            for key in keys + [f"{name}/{number}/{i}" for name in ("ready", "got") for i in self._members]:
                self._store.delete_key(key)

    def _names(self, members: list[int]) -> str:
        return ", ".join(self._members[i].name for i in members)

    # -- the bytes ----------------------------------------------------------------------------------------------------

    def _transfer(self, go: _Go, entries: list[Entry], sizes: list[int]) -> None:
        """Raises Broken where somebody fell out; WeightError where other bytes arrived than were sent."""
        deadline = time.monotonic() + self._transfer_s
        ready = go.members + go.mapped
        if not ready:
            return
        try:
            with as_broken(self._names(ready)):
                sums = self._send_buckets(go, entries, sizes, deadline)
        except Broken as broken:
            arrived = self._answers(f"got/{go.number}", ready, LAST_WORD_S)
            self._has |= {i: self._version for i, text in arrived.items() if text == "ok"}
            raise Broken(f"{broken}; no word of {self._names([i for i in ready if i not in arrived])}") from broken
        if go.mapped:
            self._store.set(f"sums/{go.number}", json.dumps(sums.tolist()))
        answers = self._answers(f"got/{go.number}", ready, max(1.0, deadline - time.monotonic()))
        for k in range(len(sizes) if go.mapped else 0):
            self._store.delete_key(f"full/{go.number}/{k}")
        self._has |= {i: self._version for i, text in answers.items() if text == "ok"}
        _raise_wrong(answers)
        late = [i for i in ready if i not in answers]
        if late:
            raise Broken(f"{self._names(late)} has not said that the weights arrived")

    def _send_buckets(self, go: _Go, entries: list[Entry], sizes: list[int], deadline: float) -> Tensor:
        """Returns the checksums [buckets]."""
        if go.members:
            self._group.open(go.group, 0, len(go.members) + 1, self._transfer_s)
        buckets = self._own_buckets(sizes, lent=bool(go.mapped))
        works: dict[int, Any] = {}
        lost = lambda: any(map(self._is_dead, go.members))  # noqa: E731
        sums = torch.zeros(len(sizes), dtype=torch.int64, device=self._device)
        for k, size in enumerate(sizes):
            slot = k % len(buckets)
            if slot in works and self._device.type == "cuda":
                works.pop(slot).wait()  # which only puts the streams in order
            elif slot in works:
                finish([works.pop(slot)], self._device, deadline, lost)
            if k >= len(buckets):
                self._wait_for_copies(go, k - len(buckets), deadline)
            bucket = buckets[slot][:size]
            fill([entry for entry in entries if entry.bucket == k], self._tensors, bucket)
            sums[k] = checksum(bucket)
            if go.members:
                works[slot] = self._group.broadcast(bucket)
            if go.mapped:
                synchronize(self._device)
                self._store.set(f"full/{go.number}/{k}", str(self._first_slot + slot))
        if go.members:
            works[-1] = self._group.broadcast(sums)
        finish(list(works.values()), self._device, deadline, lost)
        for k in range(max(0, len(sizes) - len(buckets)), len(sizes)):
            self._wait_for_copies(go, k, deadline)
        return sums

    def _own_buckets(self, sizes: list[int], *, lent: bool) -> list[Tensor]:
        """Two buckets: one is filled while the other travels."""
        size, count = max(sizes, default=0), min(2, len(sizes))
        if len(self._buckets) != count or any(bucket.numel() < size for bucket in self._buckets):
            self._buckets = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(count)]
            self._lent, self._first_slot = False, self._first_slot + count
        if lent and not self._lent:
            assert self._lend is not None, "a sender whose generators share its device is given `lend`"
            for slot, bucket in enumerate(self._buckets):
                self._lend(self._first_slot + slot, reduce_tensor(bucket))
            self._lent = True
        return self._buckets

    def _wait_for_copies(self, go: _Go, k: int, deadline: float) -> None:
        """Wait until those that map our buckets have copied bucket k."""
        for i in go.mapped:
            key = f"taken/{go.number}/{k}/{i}"
            late = f"{self._members[i].name} has not copied bucket {k}"
            wait_key(self._store, key, deadline, late, lost=partial(self._is_dead, i))
            self._store.delete_key(key)


def _raise_wrong(answers: dict[int, str]) -> None:
    wrong = [text for text in answers.values() if text not in ("ok", HAVE)]
    if wrong:
        raise WeightError(wrong[0])
