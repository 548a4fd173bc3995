"""`posttrain generate`: completions of a checkpoint as JSON lines.

{"id": "0", "sample": 0, "prompt": "...", "text": "...", "tokens": 12, "finish_reason": "stop", "logprob": -3.2, "seed": 0}
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from posttrain.config import DataConfig, ModelConfig
from posttrain.data.load import encodable, read_files
from posttrain.errors import DataError, PosttrainError
from posttrain.types import Completion, Request


def generate_command(args: argparse.Namespace) -> int:
    """Run the command; a prompt's completions are written as soon as all of them are there.

    Raises:
        PosttrainError: a checkpoint, tokenizer, prompt file or option that cannot be used.
    """
    if args.max_sequences < 1:
        raise PosttrainError(f"--max-sequences {args.max_sequences}: at least 1 is needed")
    if not all(args.stop):
        raise PosttrainError("--stop '': a stop string needs at least one character")
    prompts = read_prompts(args)
    with _output(args.output) as out:
        import transformers

        from posttrain.data.tokenizer import eos_token_ids, load_tokenizer
        from posttrain.models.loading import load_model
        from posttrain.rollout import Generator

        transformers.utils.logging.disable_progress_bar()
        device = _device(args.device)
        model = load_model(args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code, device=device)
        section = ModelConfig(path=args.model, tokenizer=args.tokenizer, trust_remote_code=args.trust_remote_code)
        tokenizer = load_tokenizer(section, vocab_size=model.config.vocab_size)
        requests = [_request(args, tokenizer, prompt) for prompt in prompts]
        limit = model.config.max_position_embeddings
        for request, prompt in zip(requests, prompts, strict=True):
            if len(request.prompt_ids) + request.max_tokens > limit:
                raise DataError(
                    f"prompt {prompt['id']}: its {len(request.prompt_ids)} tokens and --max-tokens {args.max_tokens} exceed "
                    f"the model's context of {limit}; lower --max-tokens or shorten the prompt"
                )
        generator = Generator(
            model,
            eos_token_ids=eos_token_ids(tokenizer, model),
            tokenizer=tokenizer,
            max_sequences=min(args.max_sequences, sum(request.n for request in requests)),
            max_length=max(len(request.prompt_ids) + request.max_tokens for request in requests),
        )
        by_id = {request.id: (request, prompt) for request, prompt in zip(requests, prompts, strict=True)}
        for completions in _groups(generator, requests):
            request, prompt = by_id[completions[0].request_id]
            for completion in completions:
                out.write(json.dumps(_record(completion, request, prompt, tokenizer), ensure_ascii=False) + "\n")
            out.flush()
    return 0


def read_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prompts as {id, text, seed}, from --prompt or --file.

    Raises:
        DataError: the file is missing or empty, or a line has no `problem` and no `prompt`.
    """
    if args.prompt:
        return [{"id": str(i), "text": text, "seed": args.seed} for i, text in enumerate(args.prompt)]
    path = Path(args.file)
    if not path.is_file():
        raise DataError(f"{path}: no such file; --file takes JSON lines with `problem` or `prompt`")
    prompts = []
    for where, row in read_files(path):
        text = row.get("prompt", row.get("problem"))
        if not isinstance(text, str) or not text:
            raise DataError(f"{where}: no text under `prompt` or `problem`")
        seed = row.get("seed", args.seed)
        if not isinstance(seed, int):
            raise DataError(f"{where}: seed is {seed!r}, but it must be a whole number")
        line = int(where.rpartition(":")[2])
        prompts.append({"id": str(row.get("id", line - 1)), "text": text, "seed": seed})
    if not prompts:
        raise DataError(f"{path}: holds no prompt")
    return prompts


def _request(args: argparse.Namespace, tokenizer: Any, prompt: dict[str, Any]) -> Request:
    if not encodable(prompt["text"] + (args.system or "")):
        raise DataError(f"prompt {prompt['id']}: it holds characters that are no text (half a surrogate pair, or no UTF-8)")
    if args.raw:
        ids = list(tokenizer(prompt["text"], add_special_tokens=False)["input_ids"])
    else:
        from posttrain.data.chat import prompt_ids

        # The limit is checked against the context instead.
        config = DataConfig(system_prompt=args.system, max_prompt_length=10**9)
        ids = prompt_ids(tokenizer, {"id": prompt["id"], "problem": prompt["text"]}, config)
    try:
        return Request(
            prompt_ids=ids,
            n=args.n,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            max_tokens=args.max_tokens,
            stop=tuple(args.stop),
            seed=prompt["seed"],
        )
    except ValueError as error:
        raise PosttrainError(str(error).partition(": ")[2] or str(error)) from None


def _groups(generator: Any, requests: list[Request]) -> Iterator[list[Completion]]:
    """All completions of a request together, in the order in which requests finish."""
    waiting: dict[str, list[Completion]] = {request.id: [] for request in requests}
    sizes = {request.id: request.n for request in requests}
    for request in requests:
        generator.submit(request)
    while waiting:
        for completion in generator.step():
            group = waiting[completion.request_id]
            group.append(completion)
            if len(group) == sizes[completion.request_id]:
                yield sorted(waiting.pop(completion.request_id), key=lambda completion: completion.sample)


def _record(completion: Completion, request: Request, prompt: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    return {
        "id": prompt["id"],
        "sample": completion.sample,
        "prompt": prompt["text"],
        "text": tokenizer.decode(completion.token_ids, skip_special_tokens=True),
        "tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "logprob": sum(completion.logprobs),
        "seed": request.seed,
    }


def _device(given: str | None) -> str:
    import torch

    device = given or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        known = torch.device(device).type in ("cpu", "cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PosttrainError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if not known:
        raise PosttrainError(f"--device {device}: it must be cpu or cuda")
    return device


@contextlib.contextmanager
def _output(path: str | None) -> Iterator[IO[str]]:
    """The file, opened before anything is loaded, or standard output."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise PosttrainError(f"--output {path}: {error.strerror}") from None
    with file:
        yield file
