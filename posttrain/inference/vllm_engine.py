"""vLLM in this process as a backend, for public Transformers (and whatever else vLLM runs). vLLM is imported when one is made.

Each sample is a request of its own with its own seed, so that it does not depend on n or on which samples are asked for; vLLM's
prefix cache computes their prompt once. vLLM promises the same text for the same seed only where the batch does not change its
arithmetic, which on a GPU it does: tables of two runs agree statistically, not to the sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from posttrain.config.data import ModelConfig
from posttrain.errors import CheckpointError, ConfigError, DataError
from posttrain.inference.protocol import FinishReason, Prompt, Text, local_identity, sample_seed


class VllmBackend:
    """A checkpoint in vLLM's engine.

    Args:
        model: `path` is a folder or a hub id; the chat template is the recipe's, else the tokenizer's own.
        max_prompt_length: longest prompt in tokens.
        max_length: context, prompt and completion together; None takes the model's own.
        max_sequences: sequences decoded at once.
        arguments: further arguments of `vllm.LLM`, such as tensor_parallel_size; they win over the ones above.

    Raises:
        ConfigError: vLLM is not installed, or refuses an argument.
        CheckpointError: it cannot load the model.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        max_prompt_length: int | None = None,
        max_length: int | None = None,
        max_sequences: int = 256,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        try:
            import vllm
        except ImportError as error:
            raise ConfigError(
                f"the backend vllm needs vLLM, which cannot be imported here ({error}); install posttrain[vllm] in an "
                "environment of its own, or serve the model with `vllm serve` and use kind: openai"
            ) from error
        from posttrain.data.tokenizer import load_tokenizer
        from posttrain.vllm_plugin import register

        register()  # SSE-H; vLLM finds it by itself only where posttrain is installed
        self._model_config, self.max_prompt_length, self.max_sequences = model, max_prompt_length, max_sequences
        self._tokenizer = load_tokenizer(model)
        self._sampling_params: Any = vllm.SamplingParams
        self._final_only: Any = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        given = {
            "model": model.path,
            "revision": model.revision,
            "tokenizer": model.tokenizer or model.path,
            "tokenizer_revision": model.revision if model.tokenizer in (None, model.path) else None,
            "dtype": model.dtype,
            "trust_remote_code": model.trust_remote_code,
            "max_num_seqs": max_sequences,
            "max_model_len": max_length,
        }
        try:
            self._llm: Any = vllm.LLM(**{**given, **(arguments or {})})
        except TypeError as error:
            raise ConfigError(f"vllm: an argument that vLLM does not take: {error}") from error
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{model.path}: vLLM cannot load it: {error}") from error
        self._version = str(vllm.__version__)

    def identity(self) -> dict[str, Any]:
        model = self._model_config
        return local_identity("vllm", str(model.path), model.dtype, model.revision)

    def close(self) -> None:
        self._llm = None

    def generate(self, prompts: Iterable[Prompt]) -> Iterator[Text]:
        """See `Backend.generate`; a prompt is read ahead only while fewer samples are open than fit.

        Raises:
            DataError: a prompt that is too long.
        """
        engine = self._llm.llm_engine
        source, more = iter(prompts), True
        opened: dict[str, tuple[Prompt, int]] = {}
        try:
            while more or opened:
                while more and len(opened) <= self.max_sequences:
                    prompt = next(source, None)
                    more = prompt is not None
                    if prompt is not None:
                        opened |= self._submit(engine, prompt)
                for output in engine.step() if opened else ():
                    if output.finished and output.request_id in opened:
                        prompt, sample = opened.pop(output.request_id)
                        yield self._text(prompt, sample, output)
        finally:
            if opened:
                engine.abort_request(list(opened))

    def _submit(self, engine: Any, prompt: Prompt) -> dict[str, tuple[Prompt, int]]:
        from posttrain.data.chat import conversation_ids

        ids = conversation_ids(self._tokenizer, prompt.messages, name=prompt.id, max_prompt_length=self.max_prompt_length)
        sampling = prompt.sampling
        requests = {}
        for sample in prompt.samples:
            params = self._sampling_params(
                n=1,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                min_p=sampling.min_p,
                max_tokens=sampling.max_tokens,
                stop=list(sampling.stop) or None,
                include_stop_str_in_output=True,
                seed=sample_seed(prompt.seed, sample),
                logprobs=0,
                output_kind=self._final_only,
            )
            name = f"{prompt.id}#{sample}"
            try:
                engine.add_request(name, {"prompt_token_ids": ids}, params)
            except ValueError as error:  # longer than max_model_len, or a parameter out of its range
                raise DataError(f"row {prompt.id}: vLLM refuses it: {error}") from error
            requests[name] = (prompt, sample)
        return requests

    @staticmethod
    def _text(prompt: Prompt, sample: int, output: Any) -> Text:
        completion = output.outputs[0]
        ids = tuple(int(token) for token in completion.token_ids)
        listed = completion.logprobs or []
        logprobs = tuple(float(entry[token].logprob) for entry, token in zip(listed, ids, strict=True)) if listed else ()
        reasons: dict[Any, FinishReason] = {"stop": "stop", "length": "length"}
        return Text(
            prompt_id=prompt.id,
            sample=sample,
            text=completion.text,
            finish_reason=reasons.get(completion.finish_reason, "abort"),
            tokens=len(ids),
            prompt_tokens=len(output.prompt_token_ids or ()),
            mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
            token_ids=ids,
            logprobs=logprobs or None,
        )
