"""The arithmetic tokenizer, a trainer for byte-level BPE, and loading of any tokenizer with checks that fail early."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data import arithmetic, templates
from posttrain.errors import CheckpointError, ConfigError, PosttrainError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ARITHMETIC = "arithmetic"
PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = (PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END)
# Chat lengths are the recipe's business; without a limit transformers warns about none.
NO_LIMIT = int(1e9)


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of the procedural task: digits and operators one token each, so are `\\boxed{` and the templates' words.

    Every other ASCII character is a token of its own, so that any ASCII text survives decode(encode(text)) unchanged; other
    characters become `<|unk|>`. Special tokens: pad, unk, system, user, assistant, end (the end of sequence). Fewer than 256 ids.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = _template_words()
    pieces = [*SPECIAL, "\\boxed{", *words, *(chr(code) for code in range(128))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    # Longest first: " times" must not be cut at " time". A word counts only as a whole word.
    alternatives = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    pattern = rf"\\boxed\{{|(?:{alternatives})(?![A-Za-z])|[\s\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer)


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the tagged chat template, trained on `texts`. Digits stay single; any text survives a round trip.

    Raises:
        ValueError: `vocab_size` leaves no room beside the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [token for token in SPECIAL if token != UNKNOWN]
    least = 256 + len(special)
    if vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size}, but bytes and special tokens alone take {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def load_tokenizer(model: Any, *, vocab_size: int | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a model section, checked.

    Args:
        model: attributes `tokenizer` (a path, a hub id, "arithmetic", or None: the one beside `path`), `path`, `init`,
            `revision` (of `path`), `chat_template` (a Jinja file, its text, or one of simple, chatml, tagged),
            `trust_remote_code`.
        vocab_size: the model's; taken from `init` or the checkpoint's config.json where not given.

    Returns:
        a tokenizer with an EOS, a padding token (the EOS where it has none) and a chat template.

    Raises:
        CheckpointError: nothing loadable there, no EOS, or ids that the model has no embedding for.
        ConfigError: no chat template anywhere, or a named one that this tokenizer cannot speak.
    """
    name = getattr(model, "tokenizer", None) or getattr(model, "path", None)
    if not name:
        raise ConfigError('model.tokenizer is missing: give a path, a hub id, or "arithmetic"')
    tokenizer = arithmetic_tokenizer() if name == ARITHMETIC else _from_pretrained(str(name), model)
    if tokenizer.eos_token_id is None:
        raise CheckpointError(
            f"tokenizer {name}: it has no end-of-sequence token, so no completion could end; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        # Packed batches hold no padding; Trainers still ask for the id. Labels never depend on it.
        tokenizer.pad_token = tokenizer.eos_token
    _set_template(tokenizer, name, getattr(model, "chat_template", None))
    size = vocab_size if vocab_size is not None else _model_vocab_size(model)
    largest = max(tokenizer.get_vocab().values())
    if size is not None and largest >= size:
        raise CheckpointError(
            f"tokenizer {name}: its largest id is {largest}, but the model's vocab_size is {size}; "
            f"use the model's own tokenizer, or vocab_size {largest + 1} or more"
        )
    return tokenizer


def eos_token_ids(tokenizer: Any, model: Any) -> list[int]:
    """Tokens that end a completion: the tokenizer's end of sequence, and those that the checkpoint's configuration names."""
    named = model.config.eos_token_id
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, list | tuple) else [named])]
    return list(dict.fromkeys(token for token in ends if token is not None))


def resolve_template(given: str) -> tuple[str, tuple[str, ...]]:
    """A chat template by name, as a Jinja file or as text, with the tokens it needs in the vocabulary."""
    if given in templates.BUILTIN:
        return templates.BUILTIN[given]
    if "{" in given:
        return given, ()
    if Path(given).is_file():
        return Path(given).read_text(encoding="utf-8"), ()
    names = ", ".join(sorted(templates.BUILTIN))
    raise ConfigError(f"model.chat_template: {given!r} is neither a file, nor a template, nor the name of one ({names})")


def _set_template(tokenizer: Any, name: str, given: str | None) -> None:
    if not given:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"tokenizer {name}: it has no chat template and the recipe gives none; "
                f"set model.chat_template to a Jinja file or one of {', '.join(sorted(templates.BUILTIN))}"
            )
        return
    template, needed = resolve_template(given)
    missing = sorted(set(needed) - set(tokenizer.get_vocab()))
    if missing:
        raise ConfigError(
            f"chat_template {given!r} needs the tokens {', '.join(missing)}, which tokenizer {name} does not have; "
            'use "simple", which needs none'
        )
    tokenizer.chat_template = template


def _from_pretrained(name: str, model: Any) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    import posttrain.models.sse_h  # noqa: F401 - AutoTokenizer reads the model's configuration, of a family registered here
    from posttrain.models.hub import check_available

    revision = getattr(model, "revision", None) if name == getattr(model, "path", None) else None
    check_available(name, file="tokenizer_config.json", what="tokenizer", revision=revision)
    options = {} if revision is None else {"revision": revision}
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=bool(getattr(model, "trust_remote_code", False)), **options)
    except PosttrainError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"tokenizer {name}: it brings Python code of its own; read it, then allow it with model.trust_remote_code: true"
            ) from error
        hint = "the folder holds no tokenizer" if Path(name).is_dir() else "no such folder, and no such model on the hub"
        raise CheckpointError(f"tokenizer {name}: cannot be loaded ({hint}): {str(error).splitlines()[0]}") from error


def _model_vocab_size(model: Any) -> int | None:
    init = getattr(model, "init", None)
    if init:
        return init.get("vocab_size")
    config = Path(str(getattr(model, "path", None) or "")) / "config.json"
    if not config.is_file():
        return None
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("vocab_size")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{config}: not a configuration: {error}") from None


def _template_words() -> list[str]:
    """Words of the word problems; the name opens a problem, every other word follows a space."""
    text = " ".join(phrase for phrases in arithmetic.PHRASES.values() for phrase in phrases)
    inner = {f" {word}" for word in re.findall(r"[A-Za-z]+", text + " has bags of How many")}
    return [*arithmetic.NAMES, *sorted(inner | {f" {thing}" for thing in arithmetic.THINGS})]


def _wrap(tokenizer: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    vocabulary = tokenizer.get_vocab()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN if UNKNOWN in vocabulary else None,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=NO_LIMIT,
    )
    wrapped.chat_template = templates.TAGGED
    return wrapped
