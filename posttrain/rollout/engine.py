"""The generator: continuous batching over slots, one prefill a prompt, one packed forward a decoded token.

    step() = place restored -> prefill pieces -> fork -> decode (T = running) -> sample all rows at once -> append, finish

On a GPU the last arrow is one step late: a step is launched before the tokens of the one before are read, so that the device
never waits for the host. A sequence that ends runs one step more, whose token is dropped; a limit of tokens is known beforehand.

What a sample is depends on (weights, prompt, seed, parameters) alone: random numbers are counted, prompts are cut at fixed
places, sampling is row by row, and on a CPU the model gives a sequence the same bits alone or among others (a GPU's matrix
products may differ in the last bits, so a near-tie may fall the other way). Every step moves each running sequence by one token.

    generator = Generator(model, eos_token_ids=[2], max_sequences=64, max_length=512)
    completions = generator.generate([Request(prompt_ids=[5, 9, 2], n=8, max_tokens=64, seed=17)])[0]
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posttrain.errors import PosttrainError
from posttrain.models.sizes import state_bytes
from posttrain.rollout.decode_batch import DecodeBatch, Flight
from posttrain.rollout.memory import MEMORY_FRACTION, plan_memory
from posttrain.rollout.runner import Runner, config_of
from posttrain.rollout.sampling import sample
from posttrain.rollout.scheduler import Scheduler
from posttrain.rollout.sequence import Group, OnToken, Sequence, check_prompt
from posttrain.rollout.snapshot import fill_group, request_of, to_snapshot
from posttrain.rollout.stop import StopMatcher
from posttrain.rollout.weights import copy_weights, generating
from posttrain.types import Completion, Request

logger = logging.getLogger(__name__)
Unfinished = Literal["continue", "restart", "finish"]
OnProgress = Callable[[int, int, int], None]


class Generator:
    """Samples completions from a causal language model with a slot cache.

    Args:
        model: its forward takes packed input and a `SlotCache`; it may be the learner's own, in training mode.
        eos_token_ids: tokens that end a completion (and stay in it).
        tokenizer: needed for stop strings only.
        max_sequences: sequences that run at once; more just wait.
        max_length: prompt and completion tokens together.
        max_prefill_tokens: prompt tokens in one forward; longer prompts take several.
        version: policy version of the weights now in the model.
        return_router_indices: completions carry the router's choices, [layers, T, R] over all tokens but the last
            (None from a model without routers).
        on_token: called with a `StreamedToken` for each token.
        memory_fraction: part of a GPU's free memory that states, keys and values may take. Where not all sequences fit at
            max_length, the youngest wait in host memory when it runs short.
        kv_tokens: tokens of keys and values in all, in place of what memory allows.
        cuda_graphs: whether a GPU's decode steps may be CUDA graphs; off until they have passed their tests on one.
        read_late: whether a step's tokens are read after the next one was launched; by default on a GPU.

    Attributes:
        memory: the `MemoryPlan`; retracted: how many times a sequence was moved to the host for want of memory.

    Raises:
        ValueError: sizes below what a single sequence needs or above what memory holds, or a model of another family.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_token_ids: Collection[int],
        tokenizer: Any = None,
        max_sequences: int,
        max_length: int,
        max_prefill_tokens: int = 8192,
        version: int = 0,
        return_router_indices: bool = False,
        on_token: OnToken | None = None,
        memory_fraction: float = MEMORY_FRACTION,
        kv_tokens: int | None = None,
        cuda_graphs: bool = False,
        read_late: bool | None = None,
    ) -> None:
        for name, given, least in (
            ("max_sequences", max_sequences, 1),
            ("max_length", max_length, 2),
            ("max_prefill_tokens", max_prefill_tokens, 1),
        ):
            if given < least:
                raise ValueError(f"{name}={given}, but at least {least} is needed")
        self.model = model
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_length = max_length
        self.version = version
        self.on_token = on_token
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.retracted = 0
        config = config_of(model)
        parameter = next(model.parameters())
        self._vocab_size = config.vocab_size
        self._read_late = parameter.device.type == "cuda" if read_late is None else read_late
        routed = return_router_indices and bool(config.sse_layers)
        log_bytes = max_length * len(config.sse_layers) * config.num_selected if routed else 0
        self.memory = plan_memory(
            config, max_sequences=max_sequences, max_length=max_length, device=parameter.device, dtype=parameter.dtype,
            kv_tokens=kv_tokens, memory_fraction=memory_fraction, extra_slot_bytes=log_bytes,
        )  # fmt: skip
        logger.info(self.memory.describe())
        self._runner = Runner(model, config, self.memory, router=routed, graphs=cuda_graphs)
        self._cache = self._runner.cache
        self._scheduler = Scheduler(max_sequences, max_prefill_tokens, self._runner)
        self._texts: dict[int, str] = {}
        self._batch: DecodeBatch | None = None
        self._flight: Flight | None = None
        self._broken: list[str] = []
        self._done: list[Completion] = []
        self._in_generate = False

    @staticmethod
    def max_sequences_for(model: nn.Module, memory_bytes: int, length: int) -> int:
        """Sequences of `length` tokens whose caches fit into `memory_bytes`, the spare slot for a prompt not counted.

        Raises:
            ValueError: not even one fits.
        """
        itemsize = next(model.parameters()).dtype.itemsize
        each = state_bytes(config_of(model).to_dict(), length, element_size=itemsize)["total"]
        fitting = memory_bytes // each - 1
        if fitting < 1:
            raise ValueError(
                f"a sequence of {length} tokens takes {each:,} bytes of cache and a prompt as much again, "
                f"but memory_bytes={memory_bytes:,}; give more memory or a smaller length"
            )
        return fitting

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> str:
        """Queues a request and returns its id.

        Raises:
            ValueError: no room for a token after the prompt, a token outside the vocabulary, an id already in use,
                stop strings without a tokenizer.
        """
        self._scheduler.add(self._group(request))
        return request.id

    def _group(self, request: Request) -> Group:
        if request.id in self._scheduler.groups:
            raise ValueError(f"request {request.id}: an unfinished request already has this id")
        check_prompt(request, vocab_size=self._vocab_size, max_length=self.max_length)
        stop = StopMatcher(request.stop, self.tokenizer, request_id=request.id, texts=self._texts) if request.stop else None
        limit = min(request.max_tokens, self.max_length - len(request.prompt_ids))
        return Group(request=request, limit=limit, stop=stop, pending=deque(range(request.n)))

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has anything left to do or to hand out."""
        return bool(self._scheduler.groups or self._done or self._broken)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    def abort(self, request_id: str) -> bool:
        """Ends a request; the next step() returns its samples with the tokens that were read, finish_reason "abort". False where
        none has the id."""
        group = self._scheduler.groups.get(request_id)
        if group is None:
            return False
        samples = [*group.started.values(), *(Sequence.start(group, index) for index in group.pending)]
        for sequence in sorted(samples, key=lambda sequence: sequence.sample):
            self._done.append(sequence.completion("abort", self._router_indices(sequence)))
        self._scheduler.remove(group)
        return True

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Completion]:
        """Moves every running sequence by one token and returns the completions that are done.

        Raises:
            PosttrainError: the model gave logits that cannot be sampled (NaN, infinity). The requests it happened to are named
                and dropped; all others go on with the next step.
        """
        if self._scheduler.groups:
            try:
                with nullcontext() if self._in_generate else self._generating():
                    self._step()
            except BaseException:
                # Interrupted anywhere, states and tokens may disagree: begin again from the prompts, with the weights of now.
                self._flight = None
                self._scheduler.requeue(started=True)
                raise
        if self._broken:
            broken, self._broken = self._broken, []
            raise PosttrainError(
                f"the model (version {self.version}) gave logits that are NaN, infinite or all -inf for request(s) "
                f"{', '.join(broken)}; they were dropped. Look at the weights: a diverged training step or an overflow in half "
                "precision is the usual cause"
            )
        done, self._done = self._done, []
        return done

    def _generating(self) -> AbstractContextManager[None]:
        self._runner.weights_may_have_moved()
        return generating(self.model)

    def _step(self) -> None:
        self._place_restored()
        self._prefill()
        first_logits = self._fork()
        rows = self._with_memory()
        flight = self._launch(rows, first_logits) if rows else None
        if self._read_late:
            flight, self._flight = self._flight, flight
        if flight is not None:
            self._collect(flight)
        if not self._scheduler.groups:
            self._flight = None  # nothing but steps of sequences that had ended

    def _place_restored(self) -> None:
        while (sequence := self._scheduler.next_restored()) is not None:
            assert sequence.cached is not None and sequence.slot is not None
            self._runner.load(sequence.slot, sequence.cached, sequence.token_ids[-1])
            sequence.cached = None

    def _prefill(self) -> None:
        """Runs the next pieces of the prompts being read; a prompt that is through keeps its last logits in its group."""
        pieces, fresh = self._scheduler.plan_prefill()
        if not pieces:
            return
        if fresh:
            self._runner.start(fresh)
        slots = [piece.group.slot for piece in pieces if piece.group.slot is not None]
        tokens = [piece.group.request.prompt_ids[piece.start : piece.stop] for piece in pieces]
        through = [row for row, piece in enumerate(pieces) if piece.stop == len(piece.group.request.prompt_ids)]
        all_logits = self._runner.prefill(slots, [piece.start for piece in pieces], tokens, through)
        for piece in pieces:
            piece.group.prefilled = piece.stop
        for row, logits in zip(through, all_logits, strict=True):
            pieces[row].group.logits = logits
        self.prefilled_tokens += sum(map(len, tokens))

    def _fork(self) -> list[Tensor]:
        """Starts samples from prefilled prompts; the logits [samples, vocab] of their first tokens, in the order they joined."""
        logits = []
        for fork in self._scheduler.fork():
            group = fork.sequences[0].group
            if fork.copies:
                self._runner.fork(fork.source, fork.copies, len(group.request.prompt_ids))
            assert group.logits is not None
            logits.append(group.logits.expand(len(fork.sequences), -1))
            if not group.pending:
                group.logits = None
        return logits

    def _with_memory(self) -> list[Sequence]:
        """The rows of the next step: all that run but those whose last token is on its way, and but the youngest where there is
        no memory for a token more of each; these move to the host."""
        while True:
            rows = [sequence for sequence in self._scheduler.running if sequence.drawn < sequence.group.limit]
            decoding = [sequence for sequence in rows if sequence.drawn]
            if self._runner.has_next_pages([sequence.slot for sequence in decoding if sequence.slot is not None]):
                return rows
            if self._flight is not None:
                self._drain()  # a sequence may have ended; who is moved needs all its tokens
                continue
            victim = decoding[-1]
            victim.cached = {"cache": self._export(victim), "router_indices": self._router_indices(victim)}
            self._scheduler.retract(victim)
            self._batch = None  # the same rows may come back in other slots
            self.retracted += 1

    def _launch(self, rows: list[Sequence], first_logits: list[Tensor]) -> Flight:
        """One token of every row; those without one yet, the last of them, draw it from `first_logits`."""
        if self._batch is None or self._batch.sequences != rows:
            self._batch = DecodeBatch.build(rows, self._runner.newest)
        batch = self._batch
        decoding = sum(sequence.drawn > 0 for sequence in rows)
        logits = []
        if decoding:
            tokens, positions, slots = (column[:decoding] for column in (batch.tokens, batch.positions, batch.slots))
            logits = [self._runner.decode(tokens, positions, slots, batch.slot_list[:decoding])]
        draw = sample(torch.cat(logits + first_logits) if first_logits else logits[0], batch.params, batch.index)
        self._runner.newest.index_copy_(0, batch.slots, draw.token)
        batch.advance(draw.token)
        for sequence in rows:
            sequence.in_flight += 1
        return Flight(sequences=batch.sequences, reading=draw.start_reading(), version=self.version)

    def _drain(self) -> None:
        """Reads what is in flight: tokens and states then belong together."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._collect(flight)

    def _collect(self, flight: Flight) -> None:
        """Appends what was drawn, takes the finished samples out, drops the requests that drew from broken logits."""
        broken: dict[str, Group] = {}
        for sequence, (token, logprob, plain_logprob, is_broken) in zip(flight.sequences, flight.reading.rows(), strict=True):
            if sequence.slot is None:  # ended or aborted since
                continue
            sequence.in_flight -= 1
            if is_broken:
                broken[sequence.group.request.id] = sequence.group
                continue
            sequence.append(int(token), logprob, plain_logprob, flight.version)
            self.generated_tokens += 1
            reason = sequence.finish_reason(self.eos_token_ids)
            if reason is not None:
                self._done.append(sequence.completion(reason, self._router_indices(sequence)))
                self._scheduler.finish(sequence)
            if self.on_token is not None:
                self.on_token(sequence.streamed(reason))
        self._scheduler.keep_running()
        for group in broken.values():
            self._cache.reset(self._scheduler.slots_of(group))  # attention multiplies a slot's stale rows by 0: no NaN may stay
            self._scheduler.remove(group)
        self._broken += broken

    def _router_indices(self, sequence: Sequence) -> Tensor | None:
        if sequence.slot is None:
            return sequence.cached["router_indices"] if sequence.cached else None
        return self._runner.router_indices(sequence.slot, sequence.inputs)

    def generate(self, requests: list[Request], on_progress: OnProgress | None = None) -> list[list[Completion]]:
        """Submits all, runs to the end, and returns the completions of each request in the order of its samples.

        Args:
            on_progress: called after every step with (completions done, completions in all, tokens generated by this call).

        Completions of requests submitted before come out of the next step(). On an error these requests are aborted.
        """
        wanted: dict[str, list[Completion]] = {}
        total = sum(request.n for request in requests)
        before, done, others = self.generated_tokens, 0, []
        try:
            for request in requests:
                wanted[self.submit(request)] = []
            with self._generating():
                self._in_generate = True
                while done < total:
                    for completion in self.step():
                        mine = wanted.get(completion.request_id)
                        (others if mine is None else mine).append(completion)
                        done += mine is not None
                    if on_progress is not None:
                        on_progress(done, total, self.generated_tokens - before)
        except BaseException:
            for request_id in wanted:
                if request_id in self._scheduler.groups:
                    self._scheduler.remove(self._scheduler.groups[request_id])
            self._done = [completion for completion in self._done if completion.request_id not in wanted]
            raise
        finally:
            self._in_generate = False
            self._done = others + self._done
        return [sorted(wanted[request.id], key=lambda completion: completion.sample) for request in requests]

    # -- weights and state --------------------------------------------------------------------------------------------

    def update_weights(
        self, version: int, state_dict: Mapping[str, Tensor] | None = None, *, unfinished: Unfinished = "continue"
    ) -> None:
        """Makes `version` the policy of the tokens to come.

        Args:
            state_dict: every tensor of the model, copied in place; None where the model's own have already changed (colocated).
            unfinished: what happens to samples that have begun. "continue": they go on from their old state; "restart": they
                begin again from the prompt; "finish": the update is refused while there are any. Prompts without a sampled
                token are prefilled again in every case.

        Raises:
            ValueError: names missing or unexpected or shapes that differ; nothing is changed then.
            PosttrainError: unfinished="finish" while samples are unfinished.
        """
        if unfinished not in ("continue", "restart", "finish"):
            raise ValueError(f'unfinished={unfinished!r}, but it must be "continue", "restart" or "finish"')
        with nullcontext() if self._flight is None else self._generating():
            self._drain()
        begun = sum(len(group.started) for group in self._scheduler.groups.values())
        if unfinished == "finish" and begun:
            raise PosttrainError(f"{begun} samples are unfinished; call step() until none is left, or update with another policy")
        if state_dict is not None:
            copy_weights(self.model, state_dict)
        self._runner.weights_may_have_moved()
        self.version = version
        self._scheduler.requeue(started=unfinished == "restart")

    def snapshot(self, request_id: str) -> dict[str, Any]:
        """The state of an unfinished request: lists and CPU tensors that can be pickled. The request itself goes on; abort it to
        move it. Samples that were already returned are not in it.

        Raises:
            ValueError: no unfinished request has this id.
        """
        self._drain()
        group = self._scheduler.groups.get(request_id)
        if group is None:
            raise ValueError(f"request {request_id}: not an unfinished request of this generator")
        return to_snapshot(group, self._export, self._router_indices)

    def _export(self, sequence: Sequence) -> dict[str, Any]:
        if sequence.slot is None:
            assert sequence.cached is not None
            return sequence.cached["cache"]
        return self._runner.export(sequence.slot)

    def restore(self, snapshot: dict[str, Any]) -> str:
        """Continues a request from `snapshot`, on this or another generator; returns its id. It queues if no slot is free.

        Raises:
            ValueError: as submit(), or a snapshot of another format or that does not fit this generator.
        """
        group = self._group(request_of(snapshot))
        fill_group(group, snapshot, needs_router=self._runner.router is not None)
        self._scheduler.add(group)
        return group.request.id
