"""Loss on the completion alone, EOS last, prompts the same in training and sampling."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from posttrain.data import templates
from posttrain.data.arithmetic import generate
from posttrain.data.chat import encode_sft, encode_sft_batch, messages, prompt_ids
from posttrain.data.tokenizer import arithmetic_tokenizer, train_bpe_tokenizer
from posttrain.errors import ConfigError, DataError

ROW = {"id": "r1", "problem": "2+3=?", "answer": "5", "solution": "2+3=5\n\\boxed{5}"}
USER = "{%- for m in messages -%}{%- if m['role'] == 'user' -%}{{ '<|user|>' + m['content'] }}{%- endif -%}{%- endfor -%}"
START = "{{ '<|assistant|>' }}"
ADD = "{%- if add_generation_prompt -%}" + START + "{%- endif -%}"
TURN = "{%- if messages[-1]['role'] == 'assistant' -%}" + START + "TEXT{%- endif -%}" + ADD
UNMARKED = USER + TURN.replace("TEXT", "{{ messages[-1]['content'] + eos_token }}")
UNMARKED_NEWLINE = USER + TURN.replace("TEXT", "{{ messages[-1]['content'] + eos_token + '\n' }}")
NO_EOS = USER + TURN.replace("TEXT", "{{ messages[-1]['content'] }}")
EOS_OUTSIDE = USER + TURN.replace(
    "TEXT", "{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}{{ eos_token + '\n' }}"
)
EOS_THEN_NEWLINE = USER + TURN.replace(
    "TEXT", "{% generation %}{{ messages[-1]['content'] + eos_token + '\n' }}{% endgeneration %}"
)


def trained(tokenizer, sample):
    return tokenizer.decode([token for token, label in zip(sample["input_ids"], sample["labels"], strict=True) if label != -100])


def check(tokenizer, row, cfg=None, prompt=None):
    sample = encode_sft(tokenizer, row, cfg)
    begin = prompt_ids(tokenizer, row, cfg)
    labels = sample["labels"]
    assert len(labels) == len(sample["input_ids"])
    assert sample["input_ids"][: len(begin)] == begin
    assert labels[: len(begin)] == [-100] * len(begin)
    assert labels[len(begin) :] == sample["input_ids"][len(begin) :]
    assert labels[-1] == tokenizer.eos_token_id
    assert labels.count(tokenizer.eos_token_id) == 1
    assert trained(tokenizer, sample) == row["solution"] + tokenizer.eos_token
    return sample


@pytest.mark.parametrize(
    "template",
    [templates.TAGGED, UNMARKED, UNMARKED_NEWLINE, NO_EOS, EOS_OUTSIDE, EOS_THEN_NEWLINE],
    ids=["tagged", "unmarked", "unmarked_newline", "no_eos", "eos_outside", "eos_then_newline"],
)
def test_every_shape_of_template_trains_the_same_tokens(template):
    tokenizer = arithmetic_tokenizer()
    expected = check(tokenizer, ROW)
    tokenizer.chat_template = template
    assert check(tokenizer, ROW) == expected


@pytest.mark.parametrize("name", ["simple", "chatml", "tagged"])
def test_builtin_templates_with_bpe(name):
    rows = generate(200, 0, word_fraction=0.5)
    tokenizer = train_bpe_tokenizer((f"{row['problem']}\n{row['solution']}" for row in rows), 400)
    if name == "chatml":
        tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = templates.BUILTIN[name][0]
    cfg = SimpleNamespace(system_prompt="You add.", prompt_suffix="\nBox it.")
    for row in rows[:30]:
        check(tokenizer, row, cfg)
    text = tokenizer.decode(encode_sft(tokenizer, rows[0], cfg)["input_ids"])
    assert text.index("You add.") < text.index(rows[0]["problem"] + "\nBox it.") < text.index(rows[0]["solution"])


def test_batches_equal_single_rows():
    tokenizer, rows = arithmetic_tokenizer(), generate(600, 0)
    batch = encode_sft_batch(tokenizer, rows)
    assert len(batch) == 600
    assert all(batch[n] == encode_sft(tokenizer, rows[n]) for n in (0, 255, 256, 599))


def test_system_prompt_and_suffix():
    turns = messages(ROW, SimpleNamespace(system_prompt="S", prompt_suffix=" Box it."))
    assert turns == [{"role": "system", "content": "S"}, {"role": "user", "content": "2+3=? Box it."}]
    assert messages(ROW) == [{"role": "user", "content": "2+3=?"}]


def test_a_prompt_that_does_not_begin_the_conversation_is_refused():
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = (
        USER + "{%- if add_generation_prompt -%}{{ 'Answer:' }}{%- else -%}{{ messages[-1]['content'] }}{%- endif -%}"
    )
    with pytest.raises(DataError, match=r"row r1: .* do not begin"):
        encode_sft(tokenizer, ROW)


def test_nothing_to_train_on():
    tokenizer = arithmetic_tokenizer()
    with pytest.raises(DataError, match="row r1: it has no solution"):
        encode_sft(tokenizer, {**ROW, "solution": ""})
    tokenizer.chat_template = USER + ADD
    with pytest.raises(DataError, match="row r1"):
        encode_sft(tokenizer, ROW)


def test_long_prompts():
    tokenizer = arithmetic_tokenizer()
    with pytest.raises(DataError, match=r"row r1: its prompt has 7 tokens, more than data.max_prompt_length 6"):
        prompt_ids(tokenizer, ROW, SimpleNamespace(max_prompt_length=6))
    assert len(prompt_ids(tokenizer, ROW, SimpleNamespace(max_prompt_length=7))) == 7


@pytest.mark.parametrize("token", ["<|end|>", "<|assistant|>", "<|pad|>"])
def test_texts_that_forge_a_turn_are_refused(token):
    tokenizer = arithmetic_tokenizer()
    for name in ("problem", "solution"):
        row = {**ROW, name: f"1{token}2"}
        with pytest.raises(DataError, match=r"row r1: .*special token"):
            encode_sft(tokenizer, row)
    with pytest.raises(DataError, match=r"row r1: its problem holds a special token"):
        prompt_ids(tokenizer, {**ROW, "problem": f"1{token}2"})


@pytest.mark.parametrize("problem", ["{% generation %}{{ 7*7 }}{% endgeneration %}", "</script><!--", "a\0b"])
def test_markup_in_a_problem_is_text(problem):
    tokenizer = arithmetic_tokenizer()
    row = {**ROW, "problem": problem}
    check(tokenizer, row)
    assert tokenizer.decode(prompt_ids(tokenizer, row)) == f"<|user|>{problem}<|assistant|>"


@pytest.mark.parametrize("template", ["{{ broken", "{% if %}", "{{ nope.nope }}", "{{ raise_exception('no system') }}"])
def test_a_template_that_is_wrong_is_named(template):
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = template
    for encode in (encode_sft, prompt_ids):
        with pytest.raises(ConfigError, match=r"model\.chat_template"):
            encode(tokenizer, ROW)
