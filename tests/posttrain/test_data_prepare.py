"""The whole way from a data section to ids, and its report."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from posttrain.data.prepare import encode_prompts, evaluation_problems, prepare_prompts, prepare_sft
from posttrain.data.tokenizer import arithmetic_tokenizer
from posttrain.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizer():
    return arithmetic_tokenizer()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def section(train, **fields):
    defaults = {
        "train": train,
        "prompts": None,
        "decontaminate": [],
        "max_length": 40,
        "max_prompt_length": 20,
        "overlong_prompt": "error",
    }
    return SimpleNamespace(**defaults | {"system_prompt": None, "prompt_suffix": ""} | fields)


def rows():
    short = [{"id": str(n), "problem": f"{n}+1=?", "answer": str(n + 1), "solution": f"{n}+1={n + 1}"} for n in range(5)]
    return [*short, {"id": "long", "problem": "1+1=?", "answer": "2", "solution": "1" * 60}]


def test_sft(tokenizer, tmp_path):
    train = SimpleNamespace(kind="jsonl", path=write(tmp_path / "rows.jsonl", rows()))
    held_out = write(tmp_path / "eval.jsonl", [{"problem": "3 + 1 = ?", "answer": "4"}])
    prepared = prepare_sft(section(train, decontaminate=[held_out]), tokenizer)
    assert [row["id"] for row in prepared.rows] == ["0", "1", "2", "4"]
    report = prepared.report
    assert report["dropped"] == {"above max_length 40": 1}
    assert report["contaminated"] == {held_out: 1}
    assert report["contaminated_ids"] == ["3"]
    assert (report["read"], report["kept"]) == (6, 4)
    assert report["tokens"] == sum(len(row["input_ids"]) for row in prepared.rows)
    with pytest.raises(DataError, match=r"no rows are left.*above max_length 3: 6"):
        prepare_sft(section(train, max_length=3), tokenizer)


def test_prompts(tokenizer, tmp_path):
    given = [{"problem": "1+1=?", "answer": "2"}, {"problem": "1+" * 20 + "1=?", "answer": "21"}]
    data = section(SimpleNamespace(kind="jsonl", path=write(tmp_path / "rows.jsonl", given)))
    with pytest.raises(DataError, match=r"more than data.max_prompt_length 20"):
        prepare_prompts(data, tokenizer)
    data.overlong_prompt = "drop"
    prepared = prepare_prompts(data, tokenizer)
    assert [tokenizer.decode(row["prompt_ids"]) for row in prepared.rows] == ["<|user|>1+1=?<|assistant|>"]
    assert prepared.rows[0]["answer"] == "2"
    assert prepared.report["dropped"] == {"prompt above max_prompt_length 20": 1}
    assert encode_prompts(given[:1], data, tokenizer).rows[0]["prompt_ids"] == prepared.rows[0]["prompt_ids"]


def test_what_to_decontaminate_against(tmp_path):
    suite = SimpleNamespace(path=write(tmp_path / "suite.jsonl", [{"q": "p1", "answer": "1"}]), columns={"problem": "q"})
    file = write(tmp_path / "file.jsonl", [{"problem": "p2"}])
    assert evaluation_problems(["own", file], {"own": suite}) == {"own": ["p1"], file: ["p2"]}
    with pytest.raises(ConfigError, match="'nowhere' is neither a suite nor a file"):
        evaluation_problems(["nowhere"])
    with pytest.raises(DataError, match="no column 'problem'"):
        evaluation_problems([suite.path])


def test_recipe_section(tokenizer):
    config = pytest.importorskip("posttrain.config")
    data = config.DataConfig(train={"kind": "arithmetic", "limit": 50}, max_length=128)
    prepared = prepare_sft(data, tokenizer, suites={"held": config.SuiteConfig(arithmetic={}, limit=10)})
    assert len(prepared.rows) == 50
    assert len(evaluation_problems(["held"], {"held": config.SuiteConfig(arithmetic={}, limit=10)})["held"]) == 10
