"""The arithmetic tokenizer, trained BPE, and what load_tokenizer refuses."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

transformers = pytest.importorskip("transformers")

from posttrain.data.arithmetic import generate  # noqa: E402
from posttrain.data.tokenizer import arithmetic_tokenizer, load_tokenizer, train_bpe_tokenizer  # noqa: E402
from posttrain.errors import CheckpointError, ConfigError  # noqa: E402

HARD = {"max_operations": 5, "operators": "+-*/", "allow_negative": True, "word_fraction": 0.5}


def model(**fields):
    return SimpleNamespace(
        **{"tokenizer": None, "path": None, "init": None, "chat_template": None, "trust_remote_code": False} | fields
    )


@pytest.fixture(scope="module")
def tokenizer():
    return arithmetic_tokenizer()


def test_small_vocabulary_and_single_tokens(tokenizer):
    assert len(tokenizer) < 256
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("(12+3)*4=?")) == ["(", "1", "2", "+", "3", ")", "*", "4", "=", "?"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\\boxed{42}")) == ["\\boxed{", "4", "2", "}"]
    text = "Tom has 5 bags of 7 coins, gives away 3, then has 2 times as many. How many coins?"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    assert pieces[:5] == ["Tom", " has", " ", "5", " bags"]
    assert all(len(piece) > 1 or not piece.isalpha() for piece in pieces)


def test_any_ascii_text_survives(tokenizer):
    texts = [
        "".join(map(chr, range(128))),
        "  two  spaces ",
        "\n\n\t",
        " hash has\nhas",
        "Tommy Tom",
        "\\boxed{\\boxed{",
        "a , b . c 's",
    ]
    texts += [f"{row['problem']}\n{row['solution']}" for row in generate(300, 0, **HARD)]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_generated_rows_hold_no_unknown_and_stay_short(tokenizer):
    rows = generate(500, 1)
    problems = [tokenizer.encode(row["problem"]) for row in rows]
    solutions = [tokenizer.encode(row["solution"]) for row in rows]
    assert not any(tokenizer.unk_token_id in ids for ids in problems + solutions)
    assert max(map(len, problems)) <= 40
    assert max(map(len, solutions)) <= 50
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token, again.pad_token) == ("<|end|>", "<|pad|>")
    for row in generate(100, 2, **HARD):
        ids = again.encode(row["solution"])
        assert ids == tokenizer.encode(row["solution"])
        assert again.decode(ids) == row["solution"]
    turns = [{"role": "user", "content": "1+1=?"}]
    assert again.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == "<|user|>1+1=?<|assistant|>"
    assert load_tokenizer(model(path=str(tmp_path))).get_vocab() == tokenizer.get_vocab()


def test_bpe_round_trip_and_single_digits(tmp_path):
    rows = generate(300, 0, word_fraction=0.7)
    bpe = train_bpe_tokenizer((f"{row['problem']}\n{row['solution']}" for row in rows), 320)
    assert len(bpe) <= 320
    for text in ("héllo 日本 ∑", "12345 + 678", " \n\n \\boxed{7}"):
        assert bpe.decode(bpe.encode(text)) == text
    assert sum(piece.isdigit() for piece in bpe.convert_ids_to_tokens(bpe.encode("12345"))) == 5
    bpe.save_pretrained(tmp_path)
    assert load_tokenizer(model(tokenizer=str(tmp_path), init={"vocab_size": 320})).encode("Tom has 12") == bpe.encode(
        "Tom has 12"
    )
    with pytest.raises(ValueError, match="vocab_size=100"):
        train_bpe_tokenizer(["a"], 100)


def test_train_tokenizer_script(root, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"problem": "one and one", "solution": "two"}\n' * 3)
    script = [
        sys.executable,
        str(root / "scripts/train_tokenizer.py"),
        str(tmp_path / "rows.jsonl"),
        "--output",
        str(tmp_path / "out"),
    ]
    done = subprocess.run([*script, "--vocab-size", "270"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_tokenizer(model(tokenizer=str(tmp_path / "out"))).eos_token == "<|end|>"
    bad = subprocess.run([*script, "--columns", "problem", "proof"], capture_output=True, text=True, cwd=tmp_path)
    assert bad.returncode == 2
    assert "proof" in bad.stderr
    assert "Traceback" not in bad.stderr


def test_what_cannot_work_is_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="tokenizer is missing"):
        load_tokenizer(model())
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(model(tokenizer=str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"largest id is .* vocab_size is 64"):
        load_tokenizer(model(tokenizer="arithmetic", init={"vocab_size": 64}))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"vocab_size": 32}')
    with pytest.raises(CheckpointError, match="vocab_size is 32"):
        load_tokenizer(model(tokenizer="arithmetic", path=str(tmp_path / "model")))
    for text in ("{", "[]"):
        (tmp_path / "model/config.json").write_text(text)
        with pytest.raises(CheckpointError, match="not a configuration"):
            load_tokenizer(model(tokenizer="arithmetic", path=str(tmp_path / "model")))
    with pytest.raises(ConfigError, match="neither a file"):
        load_tokenizer(model(tokenizer="arithmetic", chat_template="alpaca"))
    with pytest.raises(ConfigError, match=r"<\|im_start\|>"):
        load_tokenizer(model(tokenizer="arithmetic", chat_template="chatml"))


def test_without_eos_or_template(tmp_path):
    bare = arithmetic_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "template")
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(model(tokenizer=str(tmp_path / "template")))
    assert "User:" in load_tokenizer(model(tokenizer=str(tmp_path / "template"), chat_template="simple")).chat_template
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}")
    given = load_tokenizer(model(tokenizer=str(tmp_path / "template"), chat_template=str(tmp_path / "own.jinja")))
    assert given.chat_template == "{{ messages[0]['content'] }}"
    no_eos = arithmetic_tokenizer()
    no_eos.eos_token = None
    no_eos.save_pretrained(tmp_path / "eos")
    with pytest.raises(CheckpointError, match="no end-of-sequence"):
        load_tokenizer(model(tokenizer=str(tmp_path / "eos")))


def test_padding_falls_back_to_eos(tmp_path):
    no_pad = arithmetic_tokenizer()
    no_pad.pad_token = None
    no_pad.save_pretrained(tmp_path)
    assert load_tokenizer(model(tokenizer=str(tmp_path))).pad_token == "<|end|>"


def test_code_of_a_checkpoint_runs_only_when_the_recipe_says_so(tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    from posttrain.models.loading import load_model

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    mark = tmp_path / "ran"
    folder = tmp_path / "checkpoint"
    arithmetic_tokenizer().save_pretrained(folder)
    (folder / "code.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast, PreTrainedConfig\n"
        "class Tokenizer(PreTrainedTokenizerFast): ...\n"
        "class Config(PreTrainedConfig):\n    model_type = 'own'\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}')
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        load_tokenizer(model(tokenizer=str(folder)))
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        load_model(folder)
    assert not mark.exists()
    with pytest.raises(CheckpointError, match="family 'own'"):
        load_model(folder, trust_remote_code=True)
    assert mark.exists()


@pytest.mark.slow
def test_the_tokenizer_of_an_sse_h_checkpoint_loads_in_a_process_that_knows_no_family_yet(tmp_path):
    from posttrain.models.loading import new_model

    fields = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "layer_types": ["sse"],
    }
    new_model({**fields, "vocab_size": 256}, seed=0).save_pretrained(tmp_path)
    arithmetic_tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys; from types import SimpleNamespace; from posttrain.data.tokenizer import load_tokenizer\n"
        "given = dict(tokenizer=None, path=sys.argv[1], init=None, chat_template=None, trust_remote_code=False)\n"
        "print(load_tokenizer(SimpleNamespace(**given)).eos_token)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "<|end|>", done.stderr[-1000:]
