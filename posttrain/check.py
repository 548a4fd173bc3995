"""`posttrain check`: the recipe resolved, and what it would cost in memory and tokens. Nothing is started or downloaded.

parameters     from the fields of the model (posttrain.models.sizes)
training       weights, gradients, AdamW and activations of one process, by dtype and ZeRO stage
generation     state, unfinished chunks and keys/values a sequence, as a GPU keeps them
tokens         a step, a stage, the run; upper bounds, since completions and samples end before their limits
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.config import SUITES, DataSource, Recipe, dump_recipe
from posttrain.config.consistency import grpo_processes
from posttrain.errors import CheckpointError, DataError
from posttrain.models.hub import check_path
from posttrain.models.sizes import DEFAULTS, PAPER_SIZES, SSE_LAYER_TYPES, parameter_counts, resolve, state_bytes

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The arithmetic tokenizer has fewer ids than this (posttrain.data.tokenizer).
ARITHMETIC_IDS = 256
# Qwen's vocabulary, which the papers' totals fit.
PAPER_VOCABULARY = 151_936
# Optimizer state a parameter, in float32 numbers; AdamW keeps two moments.
OPTIMIZER_NUMBERS = {"sgd": 0, "rmsprop": 1, "adagrad": 1, "lion": 1, "adafactor": 0.1}
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
DEFAULT_ARITHMETIC_ROWS = 10_000
CHECKPOINT_KEYS = ("model=", "model.path=", "distill.teacher.model=")


@dataclass(kw_only=True)
class Estimate:
    """Lines to print, by heading, and the numbers behind them (`numbers["sft.memory"]` in bytes, ...)."""

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def add(self, section: str, label: str, text: str) -> None:
        self.sections.setdefault(section, []).append((label, text))

    def text(self) -> str:
        lines = []
        for section, rows in self.sections.items():
            lines += [section, *(f"  {label:<24} {text}" for label, text in rows)]
        return "\n".join(lines)


def check(recipe: Recipe, overrides: Sequence[str] = ()) -> int:
    """Print the resolved recipe and its estimate; 0, or an error that says what is missing.

    A checkpoint that the recipe itself names may be made later; one that an override names must be there.

    Raises:
        CheckpointError: a checkpoint among the overrides is neither a folder nor a hub id, or one has no usable config.json.
        DataError: a local data file is missing, or its first row lacks a column.
    """
    given = {text.partition("=")[2].strip() for text in overrides if text.startswith(CHECKPOINT_KEYS)}
    result = estimate(recipe)
    for name in _checkpoints(recipe):
        try:
            check_path(name)
        except CheckpointError as error:
            if name in given:
                raise
            result.add("model", "not there yet", str(error))
    print(dump_recipe(recipe))
    print(result.text())
    return 0


def _checkpoints(recipe: Recipe) -> list[str]:
    """Folders and hub ids that the stages would load; not the names that a server knows its models by."""
    stages, names = set(recipe.stages), []
    evaluates = "eval" in stages and recipe.eval.backend.kind != "openai"
    starts = bool({"sft", "grpo"} & stages) or (evaluates and not recipe.eval.models)
    if recipe.model.path is not None and starts and not (Path(recipe.run_dir) / "base").is_dir():
        names.append(recipe.model.path)
    if evaluates:
        names += [name for name in recipe.eval.models if name not in ("base", "sft", "grpo")]
    teacher = recipe.distill.teacher
    if "distill" in stages and teacher is not None and teacher.kind != "openai":
        names.append(str(teacher.model))
    return names


def estimate(recipe: Recipe) -> Estimate:
    """Sizes of the run; see `check` for what it raises."""
    result = Estimate()
    fields = model_fields(recipe)
    if fields is None:
        result.add(
            "model",
            "parameters",
            f"unknown: {recipe.model.path} is not on this machine; give model.size for an estimate of memory",
        )
    else:
        counts = parameter_counts(fields)
        result.numbers["parameters"] = counts["total"]
        result.add("model", "parameters", f"{count(counts['total'])}: {count(counts['embeddings'])} in embeddings, "
                   f"{count(counts['body'])} outside")  # fmt: skip
        if recipe.model.init is None and not Path(recipe.model.path or "").is_dir():
            result.add("model", "assumed", f"{recipe.model.size}, for {recipe.model.path} is not on this machine")
        if "vocab_size" not in fields:
            result.add("model", "vocabulary", f"unknown: {DEFAULTS['vocab_size']:,} assumed for {recipe.model.tokenizer}")
        result.add("model", "layers", _layers(resolve(fields)["layer_types"]))
    if "distill" in recipe.stages:
        _distill(recipe, result)
    if "sft" in recipe.stages:
        _sft(recipe, fields, result)
    if "grpo" in recipe.stages:
        _grpo(recipe, fields, result)
    if "eval" in recipe.stages:
        _eval(recipe, fields, result)
    total = sum(value for name, value in result.numbers.items() if name.endswith(".tokens"))
    result.add("run", "tokens", f"at most {count(total)}" if total else "unknown")
    return result


def model_fields(recipe: Recipe) -> dict[str, Any] | None:
    """Fields of the model's configuration; None where the checkpoint is not on this machine and no `model.size` is given.

    Raises:
        CheckpointError: the folder has no readable config.json.
    """
    if recipe.model.init is not None:
        fields = dict(recipe.model.init)
        ids = ARITHMETIC_IDS if recipe.model.tokenizer == "arithmetic" else tokenizer_size(Path(recipe.model.tokenizer or ""))
        return fields if ids is None else {"vocab_size": ids, **fields}
    folder = Path(recipe.model.path or "")
    if not folder.is_dir():
        return None if recipe.model.size is None else {**PAPER_SIZES[recipe.model.size], "vocab_size": PAPER_VOCABULARY}
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no config.json; a checkpoint folder in Hugging Face format is needed") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json cannot be read: {error}") from None
    try:
        fields = {name: config[name] for name in DEFAULTS if config.get(name) is not None}
        if config.get("model_type") != "sse_h":
            # Another family: priced as a Transformer of its shape.
            fields["layer_types"] = ["full_attention"] * config.get("num_hidden_layers", DEFAULTS["num_hidden_layers"])
        resolve(fields)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json is no model's configuration: {error}") from None
    return fields


def tokenizer_size(folder: Path) -> int | None:
    """Tokens of a tokenizer folder, those that its configuration adds included: what a new model's vocabulary will be.

    None where there is no tokenizer.json (a hub id, or a tokenizer of another format).

    Raises:
        CheckpointError: one of its files is not what transformers writes.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        # Unigram lists [piece, score]; every other model maps a piece to its id.
        tokens = set(vocabulary) if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
        tokens |= {token["content"] for token in content.get("added_tokens") or []}
        path = folder / "tokenizer_config.json"
        if path.is_file():
            tokens |= _configured_tokens(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as a tokenizer's: {type(error).__name__}: {error}") from None
    return len(tokens)


def _configured_tokens(config: dict[str, Any]) -> set[str]:
    """Tokens of tokenizer_config.json, which transformers adds to the vocabulary where they are missing from it."""
    extra = [config.get(name) or [] for name in ("additional_special_tokens", "extra_special_tokens")]
    given = [*(config.get("added_tokens_decoder") or {}).values(), *(config.get(name) for name in SPECIAL_TOKENS)]
    for tokens in extra:
        given += tokens.values() if isinstance(tokens, dict) else tokens
    return {token["content"] if isinstance(token, dict) else token for token in given if token}


def training_memory(recipe: Recipe, fields: dict[str, Any], section: str, tokens: int) -> dict[str, float]:
    """Bytes of one training process for a microbatch of `tokens` tokens: weights, gradients, optimizer, activations."""
    parameters, element = parameter_counts(fields)["total"], BYTES[recipe.model.dtype]
    deepspeed, world = recipe.deepspeed, grpo_processes(recipe) if section == "grpo" else recipe.ray.num_workers
    stage = deepspeed.stage if deepspeed else 0
    arguments = recipe.trainer if section == "trainer" else recipe.grpo.arguments
    optimizer = recipe.argument(section, "optim")  # type: ignore[arg-type]
    numbers = next((n for name, n in OPTIMIZER_NUMBERS.items() if name in optimizer), 2)
    # Torch's optimizers keep their moments in the weights' type; DeepSpeed keeps fp32 moments and an fp32 copy of bf16 weights.
    optimizer_bytes = parameters * (4 * (numbers + (element == 2)) if deepspeed else element * numbers)
    if "8bit" in optimizer:
        optimizer_bytes = parameters * numbers
    compute = 2 if arguments.get("bf16") or arguments.get("fp16") else element
    checkpointing = bool(recipe.argument(section, "gradient_checkpointing"))  # type: ignore[arg-type]
    given = recipe.argument(section, "gradient_checkpointing_kwargs")  # type: ignore[arg-type]
    keeps = not isinstance(given, dict) or (given.get("keep_mixers", True) and not given.get("use_reentrant"))
    return {
        "weights": parameters * element / (world if stage == 3 else 1),
        "gradients": parameters * element / (world if stage >= 2 else 1),
        "optimizer": 0.0 if deepspeed and deepspeed.offload_optimizer else optimizer_bytes / (world if stage >= 1 else 1),
        "activations": activation_bytes(fields, tokens, element=compute, checkpointing=checkpointing, keep_mixers=keeps),
    }


def activation_bytes(
    fields: dict[str, Any], tokens: int, *, element: int, checkpointing: bool, keep_mixers: bool = True
) -> float:
    """What backward needs of a packed microbatch; logits are never whole in memory and are not counted.

    A layer keeps its input, two norms and the residual (4 hidden), the MLP's gate, up and product (3 intermediate), the mixer's
    q, k, v, output and projected output (5 widths); an SSE layer also the second q and k, two fp32 log decays, and the
    boundary states of the shared and the selected partitions. With checkpointing: a layer's input each, what its SSE mixer keeps
    (its output and those states, as numbers of the compute type), and one layer whole.
    """
    shape = resolve(fields)
    hidden, width = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    layers, kept = [], 0.0
    for kind in shape["layer_types"]:
        numbers = 4 * hidden + 3 * shape["intermediate_size"] + 5 * width
        size = numbers * element
        if kind in SSE_LAYER_TYPES:
            touched = shape["num_selected"] + int(shape["shared_partition"])
            size += 2 * width * element + 2 * width * 4
            states = touched * width * shape["head_dim"] / shape["chunk_size"]
            size += 4 * states
            kept += (width + states) * element
        layers.append(size)
    if checkpointing:
        return tokens * (len(layers) * hidden * element + max(layers) + (kept if keep_mixers else 0.0))
    return tokens * sum(layers)


def _distill(recipe: Recipe, result: Estimate) -> None:
    config = recipe.distill
    assert config.problems is not None and config.teacher is not None, "checked by the recipe"
    problems = source_rows(config.problems)
    if problems is None:
        result.add("distill", "traces", f"{config.samples} a problem of {config.problems.path}: its size is known after download")
        return
    traces = problems * config.samples
    result.numbers["distill.tokens"] = traces * config.max_tokens
    result.add(
        "distill",
        "tokens",
        f"at most {count(traces * config.max_tokens)} by the teacher {config.teacher.model}: {problems:,} problems x "
        f"{config.samples} traces",
    )


def _sft(recipe: Recipe, fields: dict[str, Any] | None, result: Estimate) -> None:
    row = recipe.data.max_length
    micro = recipe.argument("trainer", "per_device_train_batch_size") * row
    step = micro * recipe.argument("trainer", "gradient_accumulation_steps") * recipe.ray.num_workers
    _memory(recipe, fields, "trainer", "sft", micro, result)
    result.add("sft", "tokens a step", f"{count(step)}: {step // row} packed rows of {row:,}")
    steps, epochs = recipe.argument("trainer", "max_steps"), recipe.argument("trainer", "num_train_epochs")
    source = recipe.data.train or recipe.distill.problems
    assert source is not None, "checked by the recipe"
    rows = source_rows(source)
    if recipe.data.train is None:
        most, each = recipe.distill.balance.rows, recipe.distill.balance.per_problem
        rows = most if rows is None or (most is not None and most < rows * each) else rows * each
    if steps > 0:
        result.numbers["sft.tokens"] = steps * step
        result.add("sft", "steps", f"{steps:,}: {count(steps * step)} tokens")
    elif rows is not None:
        result.numbers["sft.tokens"] = rows * row * epochs
        result.add(
            "sft", "tokens", f"at most {count(rows * row * epochs)}: {rows:,} samples, {epochs:g} epochs, {row:,} tokens each"
        )
    else:
        result.add("sft", "tokens", f"{epochs:g} epochs of {source.path}, whose size is known after download")


def _grpo(recipe: Recipe, fields: dict[str, Any] | None, result: Estimate) -> None:
    prompt, completion = recipe.data.max_prompt_length, recipe.argument("grpo", "max_completion_length")
    per_device, workers = recipe.argument("grpo", "per_device_train_batch_size"), grpo_processes(recipe)
    generations = recipe.argument("grpo", "num_generations")
    batch = per_device * workers * recipe.argument("grpo", "gradient_accumulation_steps")
    _memory(recipe, fields, "grpo", "grpo", per_device * (prompt + completion), result)
    _rollout(recipe, fields, "grpo", prompt + completion, recipe.rollout.max_sequences, result)
    step = batch * (prompt + completion)
    result.add(
        "grpo", "tokens a step", f"at most {count(step)}: {batch} completions ({batch / generations:g} prompts of {generations})"
    )
    steps, epochs = recipe.argument("grpo", "max_steps"), recipe.argument("grpo", "num_train_epochs")
    source = recipe.data.prompts or recipe.data.train
    rows = source_rows(source) if source is not None else None
    if steps <= 0 and rows is not None:
        steps = int(rows * generations * epochs // batch) * recipe.argument("grpo", "num_iterations")
    if steps > 0:
        result.numbers["grpo.tokens"] = steps * step
        result.add("grpo", "steps", f"{steps:,}: at most {count(steps * step)} tokens")


def _eval(recipe: Recipe, fields: dict[str, Any] | None, result: Estimate) -> None:
    models = len(recipe.eval.models) or 1 + len({"sft", "grpo"} & set(recipe.stages))
    total, longest = 0, 0
    for name, suite in recipe.eval.suites.items():
        assert suite.samples is not None and suite.max_tokens is not None, "resolved by the config"
        longest = max(longest, suite.max_tokens)
        known = SUITES.get(name)
        problems = known.problems if known and suite.hub == known.hub else source_rows(suite.source())
        if problems is None:
            result.add("eval", name, f"{suite.samples} samples a problem of {suite.hub}")
            continue
        problems = min(problems, suite.limit or problems)
        tokens = models * problems * suite.samples * suite.max_tokens
        total += tokens
        result.add(
            "eval", name, f"{problems:,} problems x {suite.samples} samples x {models} model(s): at most {count(tokens)} tokens"
        )
    result.numbers["eval.tokens"] = total
    sequences = recipe.eval.max_sequences or recipe.rollout.max_sequences
    _rollout(recipe, fields, "eval", recipe.data.max_prompt_length + longest, sequences, result)


def _memory(recipe: Recipe, fields: dict[str, Any] | None, section: str, stage: str, tokens: int, result: Estimate) -> None:
    if fields is None:
        return
    parts = training_memory(recipe, fields, section, tokens)
    if stage == "grpo" and recipe.argument("grpo", "beta"):
        parts["reference model"] = parameter_counts(fields)["total"] * BYTES[recipe.model.dtype]
    result.numbers[f"{stage}.memory"] = sum(parts.values())
    shown = ", ".join(f"{name} {size(value)}" for name, value in parts.items())
    result.add(stage, "memory a process", f"{size(sum(parts.values()))}: {shown}")
    processes = grpo_processes(recipe) if stage == "grpo" else recipe.ray.num_workers
    zero = f"ZeRO {recipe.deepspeed.stage}" if recipe.deepspeed else "no DeepSpeed"
    result.add(stage, "processes", f"{processes} ({zero}), {tokens:,} tokens a microbatch")


def _rollout(recipe: Recipe, fields: dict[str, Any] | None, stage: str, length: int, sequences: int, result: Estimate) -> None:
    if fields is None:
        return
    one = state_bytes(fields, length, element_size=BYTES[recipe.model.dtype])
    result.numbers[f"{stage}.rollout"] = one["total"] * sequences
    result.add(stage, "generation memory", f"{size(one['total'] * sequences)}: {sequences} sequences of {length:,} tokens, each "
               f"{size(one['state'])} state and unfinished chunks + {size(one['kv'])} keys and values")  # fmt: skip


def source_rows(source: DataSource) -> int | None:
    """Rows of a source at most; None for a hub data set without a limit.

    Raises:
        DataError: a local file is missing, or its first row is not JSON or lacks the problem or the answer.
    """
    if source.kind == "arithmetic":
        return source.limit or DEFAULT_ARITHMETIC_ROWS
    if source.kind == "hub":
        return source.limit
    path = Path(source.path or "")
    if path.is_dir() or path.suffix == ".parquet":
        return source.limit
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    rows = 0
    try:
        encoding = "utf-8-sig"  # as `load_source` reads them
        with gzip.open(path, "rt", encoding=encoding) if path.suffix == ".gz" else open(path, encoding=encoding) as lines:
            for line in lines:
                if rows == 0 and line.strip():
                    _check_first(json.loads(line), source, path)
                rows += bool(line.strip())
    except (OSError, ValueError, EOFError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON lines: {error}") from None
    return min(rows, source.limit or rows)


def _check_first(row: Any, source: DataSource, path: Path) -> None:
    needed = (source.columns.problem, source.columns.answer)
    missing = [column for column in needed if not isinstance(row, dict) or column not in row]
    if missing:
        has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"{path}: no column {', '.join(missing)}; its first row has: {has}. "
            "Map it with columns: {problem: ..., answer: ...}"
        )


def _layers(kinds: list[str]) -> str:
    return f"{len(kinds)}: " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def count(number: float) -> str:
    """1234567 -> 1.23M."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:g}"


def size(number: float) -> str:
    """Bytes in binary units."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g} B"
