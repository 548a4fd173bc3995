"""The generator: continuous batching over slots, one prefill a prompt, one packed forward a decoded token.

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
from typing import Any, Literal, get_args

from torch import Tensor, nn

from posttrain.errors import PosttrainError
from posttrain.models.exact import make_exact
from posttrain.rollout.loop import Loop
from posttrain.rollout.memory import MEMORY_FRACTION, plan_memory
from posttrain.rollout.runner import Runner, config_of
from posttrain.rollout.sampling import Limits
from posttrain.rollout.scheduler import Scheduler
from posttrain.rollout.sequence import Group, OnToken, Sequence, check_prompt
from posttrain.rollout.snapshot import fill_group, request_of, to_snapshot
from posttrain.rollout.stop import StopMatcher
from posttrain.rollout.weights import copy_weights, generating
from posttrain.types import Completion, Request

logger = logging.getLogger(__name__)
Unfinished = Literal["continue", "recompute", "restart", "finish"]
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
        unfinished: what happens to samples that have begun at an update of the weights, where that does not say
            (`update_weights`).
        return_router_indices: completions carry the router's choices, [layers, T, R] over all tokens but the last
            (None from a model without routers).
        on_token: called with a `StreamedToken` for each token, within a step: it may submit, restore and abort, no more.
        memory_fraction: part of a GPU's free memory that states, keys and values may take. Where not all sequences fit at
            max_length, the youngest wait in host memory when it runs short.
        kv_tokens: tokens of keys and values in all, in place of what memory allows.
        exact: strict mode (`posttrain.models.exact`): log-probabilities are bitwise those of the model's packed forward.
        cuda_graphs: whether a GPU's decode steps may be CUDA graphs.
        read_late: whether a step's tokens are read after the next one was launched; by default on a GPU.

    Attributes:
        memory: the `MemoryPlan`.

    Raises:
        ValueError: sizes below what a single sequence needs or above what memory holds, or a model of another family, or one
            that strict mode cannot hold for.
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
        unfinished: Unfinished = "continue",
        return_router_indices: bool = False,
        on_token: OnToken | None = None,
        memory_fraction: float = MEMORY_FRACTION,
        kv_tokens: int | None = None,
        exact: bool = False,
        cuda_graphs: bool = True,
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
        self.max_length = max_length
        self.unfinished = _known(unfinished)
        config = config_of(model)
        parameter = next(model.parameters())
        self._vocab_size = config.vocab_size
        routed = return_router_indices and bool(config.sse_layers)
        self.memory = plan_memory(
            config, max_sequences=max_sequences, max_length=max_length, device=parameter.device, dtype=parameter.dtype,
            kv_tokens=kv_tokens, memory_fraction=memory_fraction, router=routed, max_prefill_tokens=max_prefill_tokens,
        )  # fmt: skip
        if exact:
            make_exact(model)
        logger.info(self.memory.describe())
        self._runner = Runner(model, config, self.memory, ends=eos_token_ids, router=routed, graphs=cuda_graphs)
        self._scheduler = Scheduler(max_sequences, max_prefill_tokens, self._runner)
        late = parameter.device.type == "cuda" if read_late is None else read_late
        self._loop = Loop(
            self._runner, self._scheduler, end_tokens=frozenset(eos_token_ids), read_late=late, version=version
        )  # fmt: skip
        self._loop.on_token = on_token
        self._texts: dict[int, str] = {}
        self._in_generate = False

    @property
    def version(self) -> int:
        """Policy version of the tokens to come."""
        return self._loop.version

    @property
    def on_token(self) -> OnToken | None:
        return self._loop.on_token

    @on_token.setter
    def on_token(self, listener: OnToken | None) -> None:
        self._loop.on_token = listener

    @property
    def counts(self) -> dict[str, int]:
        """Since the start: tokens generated, prefilled, and computed again after an update; sequences that were moved to the host
        for want of memory."""
        loop = self._loop
        return {
            "generated": loop.generated_tokens, "prefilled": loop.prefilled_tokens, "recomputed": loop.recomputed_tokens,
            "retracted": loop.retracted,
        }  # fmt: skip

    @property
    def generated_tokens(self) -> int:
        return self._loop.generated_tokens

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
        limits = Limits.of(
            temperature=request.temperature, top_k=request.top_k, top_p=request.top_p, min_p=request.min_p
        )  # fmt: skip
        limit = min(request.max_tokens, self.max_length - len(request.prompt_ids))
        return Group(request=request, limit=limit, limits=limits, stop=stop, pending=deque(range(request.n)))

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has anything left to do or to hand out."""
        return bool(self._scheduler.groups or self._loop.done or self._loop.broken)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_begun(self) -> int:
        """Samples that have tokens and are not finished."""
        return sum(len(group.started) for group in self._scheduler.groups.values())

    def abort(self, request_id: str) -> bool:
        """Ends a request; the next step() returns its samples with the tokens that were read, finish_reason "abort". False where
        none has the id."""
        group = self._scheduler.groups.get(request_id)
        if group is None:
            return False
        samples = [*group.started.values(), *(Sequence.start(group, index) for index in group.pending)]
        for sequence in sorted(samples, key=lambda sequence: sequence.sample):
            self._loop.done.append(self._loop.completion(sequence, "abort"))
        self._scheduler.remove(group)
        return True

    def step(self) -> list[Completion]:
        """Moves every running sequence by one token and returns the completions that are done.

        Raises:
            PosttrainError: the model gave logits that cannot be sampled (NaN, infinity). The requests it happened to are named
                and dropped; all others go on with the next step.
        """
        loop = self._loop
        if self._scheduler.groups:
            with nullcontext() if self._in_generate else self._generating():
                loop.step()
        loop.rest()
        if loop.broken:
            broken, loop.broken = loop.broken, []
            raise PosttrainError(
                f"the model (version {self.version}) gave logits that are NaN, infinite or all -inf for request(s) "
                f"{', '.join(broken)}; they were dropped. Look at the weights: a diverged training step or an overflow in half "
                "precision is the usual cause"
            )
        done, loop.done = loop.done, []
        return done

    def _generating(self) -> AbstractContextManager[None]:
        self._runner.weights_may_have_moved()
        return generating(self.model)

    def generate(self, requests: list[Request], on_progress: OnProgress | None = None) -> list[list[Completion]]:
        """Submits all, runs to the end, and returns the completions of each request in the order of its samples.

        Args:
            on_progress: called after every step with (completions done, completions in all, tokens generated by this call).

        Completions of requests submitted before come out of the next step(). On an error these requests are aborted.
        """
        wanted: dict[str, list[Completion]] = {}
        total = sum(request.n for request in requests)
        before, done, others = self._loop.generated_tokens, 0, []
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
                        on_progress(done, total, self._loop.generated_tokens - before)
        except BaseException:
            for request_id in wanted:
                if request_id in self._scheduler.groups:
                    self._scheduler.remove(self._scheduler.groups[request_id])
            self._loop.done = [completion for completion in self._loop.done if completion.request_id not in wanted]
            raise
        finally:
            self._in_generate = False
            self._loop.done = others + self._loop.done
        return [sorted(wanted[request.id], key=lambda completion: completion.sample) for request in requests]

    # -- weights and state --------------------------------------------------------------------------------------------

    def update_weights(
        self, version: int, state_dict: Mapping[str, Tensor] | None = None, *, unfinished: Unfinished | None = None
    ) -> None:
        """Makes `version` the policy of the tokens to come.

        Args:
            state_dict: every tensor of the model, copied in place; None where the model's own have already changed (colocated).
            unfinished: what happens to samples that have begun; by default what the generator was made with. "continue": they
                go on from the state that the old weights left; "recompute": they go on with their tokens, but their state is
                made anew by the new weights, as if those had read them (and so are router_indices); "restart": they begin again
                from the prompt; "finish": the update is refused while there are any. Prompts without a sampled token are
                prefilled again in every case.

        Raises:
            ValueError: names missing or unexpected or shapes that differ; nothing is changed then.
            PosttrainError: unfinished="finish" while samples are unfinished.
        """
        policy = _known(self.unfinished if unfinished is None else unfinished)
        self._drain()
        if policy == "finish" and self.num_begun:
            raise PosttrainError(
                f"{self.num_begun} samples are unfinished; call step() until none is left, or update with another policy"
            )
        if state_dict is not None:
            copy_weights(self.model, state_dict)
        self._runner.weights_may_have_moved()
        self._loop.version = version
        self._scheduler.requeue("continue" if policy == "finish" else policy)

    def _drain(self) -> None:
        with nullcontext() if self._loop.flight is None or self._in_generate else self._generating():
            self._loop.drain()

    def snapshot(self, request_id: str) -> dict[str, Any]:
        """The state of an unfinished request: lists and CPU tensors that can be pickled, or written by `save_snapshot`. The
        request itself goes on; abort it to move it. Samples that were already returned are not in it.

        Raises:
            ValueError: no unfinished request has this id.
        """
        self._drain()
        group = self._scheduler.groups.get(request_id)
        if group is None:
            raise ValueError(f"request {request_id}: not an unfinished request of this generator")
        return to_snapshot(group, self._loop.export, self._loop.router_indices, layout=self._runner.layout())

    def restore(self, snapshot: dict[str, Any], *, recompute: bool = False) -> str:
        """Continues a request from `snapshot`, on this or another generator; returns its id. It queues if no slot is free.

        Args:
            recompute: leave the saved state alone and compute it from the tokens: for a snapshot of other weights, or from
                another kind of device.

        Raises:
            ValueError: as submit(), or a snapshot of another format or that does not fit this generator.
        """
        group = self._group(request_of(snapshot))
        fill_group(
            group, snapshot, layout=self._runner.layout(), vocab_size=self._vocab_size,
            needs_router=self._runner.router is not None, recompute=recompute,
        )  # fmt: skip
        self._scheduler.add(group)
        return group.request.id


def _known(policy: str) -> Any:
    if policy not in get_args(Unfinished):
        raise ValueError(f"unfinished={policy!r}, but it must be one of {', '.join(get_args(Unfinished))}")
    return policy
