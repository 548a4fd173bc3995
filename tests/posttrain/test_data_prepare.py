"""The whole way from a data section to ids, and its report."""

import json
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers")

from posttrain.data import chat
from posttrain.data.packing import pack, pack_samples
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


def test_rows_with_special_tokens_are_left_out_and_counted(tokenizer, tmp_path):
    forged = [{"id": "p", "problem": "1<|end|>", "answer": "1", "solution": "1"}]
    forged += [{"id": "s", "problem": "1+0=?", "answer": "1", "solution": "1<|user|>2"}]
    data = section(SimpleNamespace(kind="jsonl", path=write(tmp_path / "rows.jsonl", rows()[:2] + forged)))
    prepared = prepare_sft(data, tokenizer)
    assert [row["id"] for row in prepared.rows] == ["0", "1"]
    assert prepared.report["dropped"] == {"a special token in the text": 2}
    prompts = prepare_prompts(data, tokenizer)
    assert [row["id"] for row in prompts.rows] == ["0", "1", "s"], "prompts have no solution"
    assert prompts.report["dropped"] == {"a special token in the text": 1}


def traces(path, count, length):
    """`count` rows whose solutions have about `length` tokens, no two the same."""
    digits = [str((row * 7919 + at) % 9973) for row in range(count) for at in range(0, length, 4)]
    size = len(digits) // count
    return write(
        path,
        (
            {"id": str(row), "problem": f"{row}+1=?", "answer": "1", "solution": " ".join(digits[row * size : (row + 1) * size])}
            for row in range(count)
        ),
    )


def test_samples_are_the_single_rows_and_packed_rows_their_joins(tokenizer, tmp_path):
    data = section(SimpleNamespace(kind="jsonl", path=traces(tmp_path / "rows.jsonl", 30, 50)), max_length=1000)
    samples = prepare_sft(data, tokenizer).rows
    assert all(sample[name].dtype == np.int32 for sample in samples for name in ("input_ids", "labels"))
    given = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    single = [chat.encode_sft(tokenizer, row, data) for row in given]
    assert [{name: sample[name].tolist() for name in single[0]} for sample in samples] == single
    for overlong, width in (("drop", 200), ("truncate", 30), ("split", 30)):
        packed = list(pack_samples(samples, width, seed=3, overlong=overlong))
        assert len(packed) == len(pack_samples(samples, width, seed=3, overlong=overlong)) > 1
        lengths = [len(sample["input_ids"]) for sample in single]
        for row, pieces in zip(packed, pack(lengths, width, seed=3, overlong=overlong).rows, strict=True):
            for name in single[0]:
                assert row[name].tolist() == [token for n, start, stop in pieces for token in single[n][name][start:stop]]
            assert row["seq_lengths"] == [stop - start for _, start, stop in pieces]


def test_long_traces_make_small_batches(tokenizer, monkeypatch):
    sizes = []
    encode = chat._encode_batch
    monkeypatch.setattr(chat, "_encode_batch", lambda *args: sizes.append(len(args[1])) or encode(*args))
    monkeypatch.setattr(chat, "BATCH", 3)
    monkeypatch.setattr(chat, "BATCH_CHARACTERS", 20)
    lengths = [1, 1, 1, 1, 25, 1, 10, 10, 1]
    samples = list(chat.iter_sft(tokenizer, ({"problem": "1", "solution": "2" * length} for length in lengths)))
    assert sizes == [3, 2, 3, 1]
    assert [sum(label != -100 for label in sample["labels"]) - 1 for sample in samples] == lengths


def test_memory_is_bounded(tokenizer, tmp_path, monkeypatch):
    """From the file to the packed rows on disk: 8 bytes a token for ids and labels, the text, and what one batch takes."""
    run_folder, dataset = pytest.importorskip("posttrain.run_folder"), pytest.importorskip("posttrain.sft.dataset")
    pytest.importorskip("datasets")
    monkeypatch.setattr(chat, "BATCH_CHARACTERS", 10_000)
    monkeypatch.setattr(dataset, "ROWS_PER_BATCH", 2)
    peaks = {}
    for count in (20, 100, 300):
        data = section(SimpleNamespace(kind="jsonl", path=traces(tmp_path / "rows.jsonl", count, 1500)), max_length=4096)
        run = run_folder.RunFolder(tmp_path / f"run-{count}")
        run.path.mkdir()
        tracemalloc.start()
        try:
            prepared = prepare_sft(data, tokenizer)
            dataset.write_rows(run, pack_samples(prepared.rows, 4096), prepared.report)
            peaks[count] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        tokens = prepared.report["tokens"]
        assert sum(len(row["input_ids"]) for row in dataset.load_rows(run)) == tokens > count * 1500
    # The first round pays for imports; between the others only the number of rows differs.
    assert (peaks[300] - peaks[100]) / (tokens * 200 / 300) < 12


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
