"""Stop strings across token boundaries, split characters and decoders that change the start of what they decode."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.rollout.stop import StopMatcher


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges make "ab", "abc", " x" and "END": texts have many encodings, characters split into bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("\u0120", "x"), ("E", "N"), ("EN", "D")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module")
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a marker for the space before them; the decoder drops a leading space."""
    tokens = ["<unk>", *("\u2581" + word for word in ("the", "answer", "END", "is", "so")), "ly", "!", "\u2581"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def ids_of(tokenizer, pieces: list[str]) -> list[int]:
    vocab = tokenizer.get_vocab()
    return [vocab[piece] for piece in pieces]


def first_end(matcher: StopMatcher, ids: list[int]) -> int | None:
    """Tokens sampled when the matcher first says stop."""
    return next((count for count in range(1, len(ids) + 1) if matcher.ends(ids[:count])), None)


def matcher(tokenizer, *stop: str) -> StopMatcher:
    return StopMatcher(stop, tokenizer, request_id="r")


def test_a_stop_string_may_span_tokens(byte_tokenizer):
    ids = ids_of(byte_tokenizer, ["a", "E", "N", "D", "b"])
    assert first_end(matcher(byte_tokenizer, "END"), ids) == 4
    ids = ids_of(byte_tokenizer, ["a", "EN", "D", "b"])
    assert first_end(matcher(byte_tokenizer, "END"), ids) == 3


def test_it_may_begin_and_end_inside_tokens(byte_tokenizer):
    ids = ids_of(byte_tokenizer, ["abc", "abc", "END"])
    assert first_end(matcher(byte_tokenizer, "ca"), ids) == 2
    assert first_end(matcher(byte_tokenizer, "cabcE"), ids) == 3
    assert first_end(matcher(byte_tokenizer, "cb", "NA"), ids) is None


def test_characters_split_into_bytes(byte_tokenizer):
    ids = byte_tokenizer("x\u00e9\u6f22\u5b57y")["input_ids"]
    assert len(ids) > 5, "the characters must be split for this test to mean anything"
    assert first_end(matcher(byte_tokenizer, "\u6f22"), ids) == 6
    assert first_end(matcher(byte_tokenizer, "\u00e9\u6f22\u5b57"), ids) == 9


def test_long_texts_and_byte_tokens_widen_the_window(byte_tokenizer):
    stop = "\u6f22" * 30  # 90 tokens for 30 characters
    ids = byte_tokenizer("a" * 200 + stop + "b")["input_ids"]
    assert first_end(matcher(byte_tokenizer, stop), ids) == len(ids) - 1


def test_every_split_of_a_text_finds_the_same_place(byte_tokenizer):
    rng = random.Random(0)
    pieces = ["a", "b", "c", "ab", "abc", "\u0120", "x", "\u0120x", "E", "N", "D", "EN", "END"]
    for _ in range(300):
        ids = ids_of(byte_tokenizer, [rng.choice(pieces) for _ in range(40)])
        stop = rng.choice(["ab", "c x", "xEN", "END", " ", "bb", "DD"])
        text, expected = "", None
        for count in range(1, len(ids) + 1):
            text = byte_tokenizer.decode(ids[:count])
            if stop in text:
                expected = count
                break
        assert first_end(matcher(byte_tokenizer, stop), ids) == expected, (text, stop)


def test_a_space_that_the_decoder_drops_at_the_start(metaspace_tokenizer):
    words = ["\u2581the", "\u2581answer", "\u2581is", "\u2581so", "ly"] * 8
    ids = ids_of(metaspace_tokenizer, [*words, "\u2581END", "!"])
    assert first_end(matcher(metaspace_tokenizer, " END"), ids) == len(ids) - 1
    assert first_end(matcher(metaspace_tokenizer, "soly the answer is"), ids) == 8
    assert first_end(matcher(metaspace_tokenizer, "is so"), ids) == 4
    assert first_end(matcher(metaspace_tokenizer, "ly END!"), ids) == len(ids)


def test_bad_stop_strings_are_refused(byte_tokenizer):
    with pytest.raises(ValueError, match="r: stop strings .* need a tokenizer"):
        StopMatcher(("x",), None, request_id="r")
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("x", ""), byte_tokenizer, request_id="r")
    with pytest.raises(ValueError, match="one string"):
        StopMatcher("x", byte_tokenizer, request_id="r")
