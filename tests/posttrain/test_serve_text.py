"""Texts of the server: streams add up to whole answers, across characters and stop strings that are split between tokens."""

import random

import pytest

from posttrain.data.tokenizer import train_bpe_tokenizer
from posttrain.serve.text import TextStream, final_text


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe_tokenizer(["the cat — naïve café, 数学 и числа 🙂"] * 4, 300)


def streamed(tokenizer, ids, stop, reason):
    stream = TextStream(tokenizer, stop)
    pieces = [stream.feed(token) for token in ids[:-1]]
    return pieces, stream.finish(ids, reason)


@pytest.mark.parametrize("text", ["the cat 🙂🙂 naïve", "数学数学 — café", " the the  cat\n", "🙂"])
def test_no_piece_holds_half_a_character(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    pieces, rest = streamed(tokenizer, ids, (), "length")
    assert "".join(pieces) + rest == text
    assert "\ufffd" not in "".join(pieces)


def test_random_tokens_add_up(tokenizer):
    """Random bytes are mostly no characters; the end may cut one, and special tokens stand anywhere."""
    rng = random.Random(5)
    for _ in range(200):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 30))]
        pieces, rest = streamed(tokenizer, ids, ("t", "ca"), "length")
        assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=True)


def by_character(tokenizer, text):
    return [token for character in text for token in tokenizer(character)["input_ids"]]


def test_a_stop_string_never_shows(tokenizer):
    ids = by_character(tokenizer, "aXEN, bXENDX")  # stops in its last token but one
    ids = ids[:-1]
    pieces, rest = streamed(tokenizer, ids, ("XEND", "never"), "stop")
    assert "".join(pieces) + rest == "aXEN, b" == final_text(tokenizer, ids, ("XEND", "never"), "stop")
    assert "".join(pieces) == "aXEN, b", "what turned out to be no stop string was sent, what might become one was not"


def test_the_earliest_of_several_stops_cuts(tokenizer):
    ids = tokenizer("one two")["input_ids"]
    assert final_text(tokenizer, by_character(tokenizer, "ab abc"), ("c", "bc"), "stop") == "ab a"
    assert final_text(tokenizer, ids, ("two",), "length") == "one two", "the limit ended it, not the string"


def test_a_special_token_as_stop(tokenizer):
    """Texts have no special tokens, so nothing is cut; and what looks like a stop string around one did not stop the engine."""
    text = by_character(tokenizer, "a")
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    end = [tokenizer.eos_token_id]
    assert final_text(tokenizer, [*text, user], ("<|user|>",), "stop") == "a"
    assert final_text(tokenizer, [*text, user, *by_character(tokenizer, "bc"), *end], ("ab",), "stop") == "abc"
