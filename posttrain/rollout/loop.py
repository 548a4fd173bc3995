"""One step of the generator, from what waits to what is done.

    place what was set aside -> prefill pieces -> fork -> decode (one token of every row) -> first tokens -> append, finish

On a GPU the last arrow is one step late: a step is launched before the tokens of the one before are read, so that the device
never waits for the host. A sequence that ends runs one step more, whose token is dropped; a limit of tokens is known beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.errors import PosttrainError
from posttrain.rollout.decode_batch import DecodeBatch, Flight
from posttrain.rollout.runner import Runner
from posttrain.rollout.sampling import Reading, kind_of
from posttrain.rollout.scheduler import Scheduler
from posttrain.rollout.sequence import Group, OnToken, Sequence
from posttrain.types import Completion, FinishReason


class Loop:
    """Args:
    end_tokens: tokens that end a completion.
    read_late: whether a step's tokens are read after the next one was launched.

    Attributes:
        done: completions that nobody has fetched; broken: ids of requests dropped since their logits could not be sampled.
        flight: the step whose tokens have not been read.
        retracted: how many times a sequence was moved to the host for want of memory.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, *, end_tokens: frozenset[int], read_late: bool, version: int
    ) -> None:
        self.runner, self.scheduler, self.end_tokens, self.read_late = runner, scheduler, end_tokens, read_late
        self.version = version
        self.on_token: OnToken | None = None
        self.done: list[Completion] = []
        self.broken: list[str] = []
        self.flight: Flight | None = None
        self.generated_tokens = self.prefilled_tokens = self.recomputed_tokens = self.retracted = 0
        self._batch: DecodeBatch | None = None
        self._telling = False

    def step(self) -> None:
        """Moves every running sequence by one token.

        Raises:
            PosttrainError: called by a listener, within a step.
        """
        self._refuse_listener()
        try:
            self._step()
        except BaseException:
            # Interrupted anywhere, states and tokens may disagree: begin again from the prompts, with the weights of now.
            self.flight = None
            self.scheduler.requeue("restart")
            raise

    def _step(self) -> None:
        self._place()
        self._prefill()
        begun, first_logits = self._fork()
        rows = self._with_memory()
        flight = self._launch(rows, begun, first_logits) if rows else None
        if self.read_late:
            flight, self.flight = self.flight, flight
        if flight is not None:
            self._collect(flight)
        self.rest()

    def rest(self) -> None:
        """Where no request is left, neither is a step of sequences that had ended."""
        if not self.scheduler.groups:
            self.flight = self._batch = None

    # -- what begins, or goes on ----------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Gives slots to sequences that were set aside, as far as there are any."""
        placed, without_state = [], []
        while (sequence := self.scheduler.next_restored()) is not None:
            assert sequence.slot is not None
            placed.append(sequence)
            if sequence.cached is None:
                self.runner.reserve(sequence.slot, sequence.inputs)
                without_state.append(sequence)
            else:
                self.runner.load(sequence.slot, sequence.cached)
                sequence.cached = None
        if without_state:
            self._recompute(without_state)
        if placed:
            self.runner.state.begin(placed)
            self._batch = None  # the same sequences may have other slots

    def _recompute(self, sequences: list[Sequence]) -> None:
        """Reads the tokens that sequences have had, in pieces cut as those of prompts are, whatever the others are."""
        most = self.scheduler.max_prefill_tokens
        self.runner.start([sequence.slot for sequence in sequences if sequence.slot is not None])
        slots: list[int] = []
        starts: list[int] = []
        pieces: list[list[int]] = []
        room = most
        for sequence in sequences:
            assert sequence.slot is not None
            ids = sequence.input_ids
            for start in range(0, len(ids), most):
                piece = ids[start : start + most]
                if len(piece) > room:
                    self.runner.prefill(slots, starts, pieces, [])
                    slots, starts, pieces, room = [], [], [], most
                slots, starts, pieces = [*slots, sequence.slot], [*starts, start], [*pieces, piece]
                room -= len(piece)
            self.recomputed_tokens += len(ids)
        self.runner.prefill(slots, starts, pieces, [])

    def _prefill(self) -> None:
        """Runs the next pieces of the prompts being read; a prompt that is through keeps its last logits in its group."""
        pieces, fresh = self.scheduler.plan_prefill()
        if not pieces:
            return
        if fresh:
            self.runner.start(fresh)
        slots = [piece.group.slot for piece in pieces if piece.group.slot is not None]
        tokens = [piece.group.request.prompt_ids[piece.start : piece.stop] for piece in pieces]
        through = [row for row, piece in enumerate(pieces) if piece.stop == len(piece.group.request.prompt_ids)]
        all_logits = self.runner.prefill(slots, [piece.start for piece in pieces], tokens, through)
        for piece in pieces:
            piece.group.prefilled = piece.stop
        for row, logits in zip(through, all_logits, strict=True):
            pieces[row].group.logits = logits
        self.prefilled_tokens += sum(map(len, tokens))

    def _fork(self) -> tuple[list[Sequence], list[Tensor]]:
        """Starts samples from prefilled prompts; the logits [samples, vocab] of their first tokens, in the same order."""
        begun, logits = [], []
        for fork in self.scheduler.fork():
            group = fork.sequences[0].group
            if fork.copies:
                self.runner.fork(fork.source, fork.copies, len(group.request.prompt_ids))
            assert group.logits is not None
            begun += fork.sequences
            logits.append(group.logits.expand(len(fork.sequences), -1))
            if not group.pending:
                group.logits = None
        self.runner.state.begin(begun)
        return begun, logits

    def _with_memory(self) -> list[Sequence]:
        """Who takes part in the next step: all that run but those whose last token is on its way, and but the youngest where
        there is no memory for a token more of each; these move to the host."""
        while True:
            rows = [sequence for sequence in self.scheduler.running if sequence.drawn < sequence.group.limit]
            decoding = [sequence for sequence in rows if sequence.drawn]
            if self.runner.has_next_pages([sequence.slot for sequence in decoding if sequence.slot is not None]):
                return rows
            if self.flight is not None:
                self.drain()  # a sequence may have ended; who is moved needs all its tokens
                continue
            victim = decoding[-1]
            victim.cached = {"cache": self.export(victim), "router_indices": self.router_indices(victim)}
            self.scheduler.retract(victim)
            self.retracted += 1

    # -- the step itself ------------------------------------------------------------------------------------------------

    def _launch(self, rows: list[Sequence], begun: list[Sequence], first_logits: list[Tensor]) -> Flight:
        """One token of every row; those that have `begun` draw it from `first_logits`, the others from a forward."""
        decoding = [sequence for sequence in rows if sequence.drawn]
        tables, sequences = [], []
        if decoding:
            if self._batch is None or self._batch.running != decoding:
                self._batch = DecodeBatch.build(decoding, self.runner.device)
            tables.append(self.runner.decode(self._batch))
            sequences += self._batch.sequences
        slots = [sequence.slot for sequence in begun if sequence.slot is not None]
        if slots:
            logits = torch.cat(first_logits)
            if len(slots) < len(begun):  # tokens that were read meanwhile ended a whole request
                logits = logits[[row for row, sequence in enumerate(begun) if sequence.slot is not None]]
                begun = [sequence for sequence in begun if sequence.slot is not None]
            kind = kind_of([sequence.group.limits for sequence in begun])
            tables.append(self.runner.first(logits, slots, kind))
            sequences += begun
        for sequence in sequences:
            sequence.in_flight += 1
        return Flight(
            sequences=sequences, reading=Reading(torch.cat(tables) if len(tables) > 1 else tables[0]), version=self.version
        )  # fmt: skip

    def drain(self) -> None:
        """Reads what is in flight: tokens and states then belong together. Raises as `step` does."""
        self._refuse_listener()
        flight, self.flight = self.flight, None
        if flight is not None:
            self._collect(flight)

    def _collect(self, flight: Flight) -> None:
        """Appends what was drawn, takes the finished samples out, drops the requests that drew from broken logits."""
        broken: dict[str, Group] = {}
        for sequence, (token, logprob, plain, is_broken, ended) in zip(flight.sequences, flight.reading.rows(), strict=True):
            if sequence.slot is None:  # ended or aborted since
                continue
            sequence.in_flight -= 1
            if is_broken:
                broken[sequence.group.request.id] = sequence.group
                continue
            sequence.append(int(token), logprob, plain, flight.version)
            self.generated_tokens += 1
            reason = sequence.finish_reason(self.end_tokens) if ended or sequence.group.stop is not None else None
            if reason is not None:
                self.done.append(self.completion(sequence, reason))
                self.scheduler.finish(sequence)
            self._tell(sequence, reason)
        self.scheduler.keep_running()
        for group in broken.values():
            self.scheduler.remove(group)
        self.broken += broken

    def _tell(self, sequence: Sequence, reason: FinishReason | None) -> None:
        if self.on_token is None:
            return
        self._telling = True
        try:
            self.on_token(sequence.streamed(reason))
        finally:
            self._telling = False

    def _refuse_listener(self) -> None:
        # Half of a step's tokens are appended then, and a step more may be on its way.
        if self._telling:
            raise PosttrainError(
                "on_token called step(), generate(), snapshot() or update_weights(), but within a step only submit(), restore() "
                "and abort() are possible; do the others after step() has returned"
            )

    # -- what a sequence leaves with --------------------------------------------------------------------------------------

    def completion(self, sequence: Sequence, reason: FinishReason) -> Completion:
        return sequence.completion(reason, self.router_indices(sequence))

    def router_indices(self, sequence: Sequence) -> Tensor | None:
        """Partitions of the tokens that a sequence has had, on the host; None without a router, or until they are computed
        again."""
        if sequence.slot is None:
            return sequence.cached["router_indices"] if sequence.cached else None
        return self.runner.router_indices(sequence.slot, sequence.inputs)

    def export(self, sequence: Sequence) -> dict[str, Any] | None:
        """The cache of a started sequence as CPU tensors; None where it is to be computed again."""
        if sequence.slot is None:
            return sequence.cached["cache"] if sequence.cached else None
        return self.runner.export(sequence.slot)
