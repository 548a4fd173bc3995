"""posttrain's own generator as a backend: one model on one device, for the SSE-H family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.config.data import ModelConfig
from posttrain.errors import DataError
from posttrain.inference.protocol import Prompt, Text, local_identity
from posttrain.types import Completion, Request


class EngineBackend:
    """A checkpoint in a `Generator`.

    Args:
        model: `path` names the checkpoint; the tokenizer beside it goes before `tokenizer`, for that is what it was trained with.
        max_prompt_length: longest prompt in tokens; with `max_tokens` it sets the size of the caches.
        max_sequences: sequences decoded at once.
        options: further arguments of the generator (`RolloutConfig.engine_options`).

    Raises:
        CheckpointError, ConfigError: the checkpoint or its tokenizer cannot be used.
    """

    def __init__(
        self, model: ModelConfig, *, max_prompt_length: int, max_sequences: int, options: Mapping[str, Any] | None = None
    ) -> None:
        import torch

        from posttrain.data.tokenizer import eos_token_ids, load_tokenizer
        from posttrain.models.loading import load_model

        assert model.path is not None, "the caller names a checkpoint"
        self.path, self.dtype, self.revision = model.path, model.dtype, model.revision
        self.max_prompt_length, self.max_sequences, self.options = max_prompt_length, max_sequences, dict(options or {})
        self._tokenizer = load_tokenizer(with_own_tokenizer(model))
        self._model: Any = load_model(
            model.path,
            dtype=model.dtype,
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        self._ends = eos_token_ids(self._tokenizer, self._model)
        self._generator: Any = None

    def identity(self) -> dict[str, Any]:
        return local_identity("engine", self.path, self.dtype, self.revision)

    def close(self) -> None:
        self._generator = self._model = None

    def generate(self, prompts: Iterable[Prompt]) -> Iterator[Text]:
        """See `Backend.generate`; a prompt is read ahead only while fewer samples are open than fit.

        Raises:
            DataError: a prompt that is too long for `max_prompt_length`, or with its completion for the model's context.
            PosttrainError: the model gave logits that cannot be sampled.
        """
        source, opened, more = iter(prompts), {}, True
        try:
            while more or opened:
                while more and sum(opened.values()) <= self.max_sequences:
                    prompt = next(source, None)
                    more = prompt is not None
                    if prompt is not None:
                        self._submit(prompt)
                        opened[prompt.id] = len(prompt.samples)
                for completion in self._generator.step() if opened else ():
                    opened[completion.request_id] -= 1
                    if not opened[completion.request_id]:
                        del opened[completion.request_id]
                    yield self._text(completion)
        finally:
            for name in opened:  # the reader left early, or an error: the next call begins with an empty engine
                self._generator.abort(name)
            if opened:
                self._generator.step()

    def _submit(self, prompt: Prompt) -> None:
        from posttrain.data.chat import conversation_ids
        from posttrain.rollout.snapshot import pending_snapshot

        sampling = prompt.sampling
        ids = conversation_ids(self._tokenizer, prompt.messages, name=prompt.id, max_prompt_length=self.max_prompt_length)
        generator = self._generator_for(prompt.id, len(ids), sampling.max_tokens)
        request = Request(
            id=prompt.id,
            prompt_ids=ids,
            n=max(prompt.samples) + 1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            seed=prompt.seed,
        )
        if prompt.samples == tuple(range(request.n)):
            generator.submit(request)
        else:
            # Some of the samples were drawn before: a snapshot says which are left.
            generator.restore(pending_snapshot(request, prompt.samples))

    def _generator_for(self, name: str, prompt_tokens: int, max_tokens: int) -> Any:
        """The generator, made anew where its caches are too short for `max_tokens`."""
        context = self._model.config.max_position_embeddings
        if prompt_tokens + max_tokens > context:
            raise DataError(
                f"row {name}: its prompt of {prompt_tokens} tokens and max_tokens {max_tokens} make {prompt_tokens + max_tokens}"
                f", above the model's context of {context} (max_position_embeddings); lower max_tokens"
            )
        length = min(context, self.max_prompt_length + max_tokens)
        if self._generator is None or self._generator.max_length < length:
            from posttrain.rollout import Generator

            unfinished = self._generator is not None and self._generator.has_unfinished
            assert not unfinished, "prompts of one call have one max_tokens, or falling ones"
            self._generator = None  # its caches are freed before the next ones are made
            self._generator = Generator(
                self._model,
                eos_token_ids=self._ends,
                tokenizer=self._tokenizer,
                max_sequences=self.max_sequences,
                max_length=length,
                **self.options,
            )
        return self._generator

    def _text(self, completion: Completion) -> Text:
        logprobs = completion.plain_logprobs
        return Text(
            prompt_id=completion.request_id,
            sample=completion.sample,
            text=str(self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)),
            finish_reason=completion.finish_reason,
            tokens=len(completion.token_ids),
            prompt_tokens=len(completion.prompt_ids),
            mean_logprob=sum(logprobs) / max(1, len(logprobs)),
            token_ids=tuple(completion.token_ids),
            logprobs=tuple(logprobs),
        )


def with_own_tokenizer(model: ModelConfig) -> ModelConfig:
    """The section with the tokenizer that lies in the checkpoint's folder, where there is one."""
    path = str(model.path)
    own = Path(path, "tokenizer_config.json").exists()
    return model.model_copy(update={"init": None, "tokenizer": path if own else model.tokenizer or path})
