"""Sources: files, columns, filters, and errors that name the place."""

import gzip
import json
from types import SimpleNamespace

import pytest

from posttrain.data.load import load_source, read_files
from posttrain.errors import DataError

ROWS = [{"problem": f"{n}+1=?", "answer": str(n + 1), "solution": f"{n}+1={n + 1}"} for n in range(6)]


def source(path=None, **fields):
    return SimpleNamespace(**{"kind": "jsonl", "path": None if path is None else str(path)} | fields)


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_jsonl_plain_and_gzipped(tmp_path, name):
    rows = load_source(source(write(tmp_path / name, ROWS)))
    assert [row["problem"] for row in rows] == [row["problem"] for row in ROWS]
    assert len({row["id"] for row in rows}) == 6
    assert rows[0]["source"].endswith(name)


def test_parquet_and_folder(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[3:]), tmp_path / "b.parquet")
    write(tmp_path / "a.jsonl", ROWS[:3])
    assert [row["answer"] for row in load_source(source(tmp_path))] == [row["answer"] for row in ROWS]


def test_columns_limit_and_shuffle(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"q": row["problem"], "gold": n + 1, "key": n} for n, row in enumerate(ROWS)])
    columns = {"problem": "q", "answer": "gold", "id": "key", "solution": None}
    rows = load_source(source(path, columns=columns, limit=2))
    assert [(row["id"], row["problem"], row["answer"]) for row in rows] == [("0", "0+1=?", "1"), ("1", "1+1=?", "2")]
    shuffled = [load_source(source(path, columns=columns, shuffle=True, seed=s, limit=3)) for s in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert len(shuffled[0]) == 3
    assert any(int(row["id"]) > 2 for part in shuffled for row in part)


def test_answers_of_other_shapes(tmp_path):
    rows = [{"problem": "p", "answer": "work\n#### 1,000", "list": ["2", 3]}]
    path = write(tmp_path / "rows.jsonl", rows)
    assert load_source(source(path, answer_after="####"))[0]["answer"] == "1,000"
    assert load_source(source(path, columns={"answer": "list"}))[0]["answer"] == "2, 3"
    with pytest.raises(DataError, match=r"rows.jsonl:1: the mark '=='"):
        load_source(source(path, answer_after="=="))


def test_solution_suffix(tmp_path):
    rows = [*ROWS[:1], {**ROWS[1], "solution": "so \\boxed{2}"}]
    loaded = load_source(source(write(tmp_path / "rows.jsonl", rows), solution_suffix="\n\\boxed{{answer}}"))
    assert loaded[0]["solution"] == "0+1=1\n\\boxed{1}"
    assert loaded[1]["solution"] == "so \\boxed{2}"


def test_arithmetic_source():
    rows = load_source(source(kind="arithmetic", limit=20, seed=4, split="eval", arithmetic=SimpleNamespace(max_operations=2)))
    assert len(rows) == 20
    assert all(row["level"] == 2 and row["id"].startswith("arithmetic-eval-4-") for row in rows)


def test_recipe_objects(tmp_path):
    config = pytest.importorskip("posttrain.config")
    given = config.DataSource(path=str(write(tmp_path / "rows.jsonl", [{"q": "p", "answer": "1"}])), columns={"problem": "q"})
    assert load_source(given)[0]["problem"] == "p"
    assert load_source(config.DataSource(kind="arithmetic", limit=3))[2]["source"] == "arithmetic"


def test_sft_keeps_no_columns_that_it_does_not_read(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{**row, "ok": True, "messages": ["m"] * 9, "level": 1} for row in ROWS])
    rows = load_source(source(path, filters={"correct_column": "ok"}), needs_solution=True)
    assert {tuple(sorted(row)) for row in rows} == {("answer", "id", "level", "ok", "problem", "solution", "source")}
    assert "messages" in load_source(source(path))[0]
    for wrong in ({"filters": {"correct_column": "okay"}}, {"columns": {"level": "lvl"}}, {"columns": {"solution": "message"}}):
        with pytest.raises(DataError, match="it has: problem, answer, solution, ok, messages, level"):
            load_source(source(path, **wrong), needs_solution=True)


def test_the_runs_seed_is_used_where_the_source_has_none():
    config = pytest.importorskip("posttrain.config")

    def problems(seed, own=None):
        return [row["problem"] for row in load_source(config.DataSource(kind="arithmetic", limit=5, seed=own), seed=seed)]

    assert problems(1) == problems(1) != problems(2)
    assert problems(1, own=3) == problems(2, own=3) == problems(3)


def test_hub_source_streams(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = {}

    def load_dataset(path, **options):
        asked.update(options, path=path)
        return ({"problem": f"p{n}", "answer": "1"} if n < 2 else pytest.fail("read past the limit") for n in range(9))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = load_source(source("org/set", kind="hub", name="main", split="test", limit=2))
    assert [row["problem"] for row in rows] == ["p0", "p1"]
    assert asked == {"path": "org/set", "name": "main", "split": "test", "revision": None, "streaming": True}

    def missing(path, **options):
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{path}' doesn't exist")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    with pytest.raises(DataError, match=r"org/set .*doesn't exist"):
        load_source(source("org/set", kind="hub"))


def test_missing_file_names_the_nearest(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"trian.jsonl: no such file or folder; did you mean 'train.jsonl'"):
        load_source(source(tmp_path / "trian.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder holds no"):
        load_source(source(tmp_path / "empty"))


def test_missing_column_names_those_present_and_the_nearest(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"problems": "p", "answer": "1"}])
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: no column 'problem' .* it has: problems, answer; did you mean 'problems'"
    ):
        load_source(source(path))
    with pytest.raises(DataError, match="no column 'solution'"):
        load_source(source(path, columns={"problem": "problems"}), needs_solution=True)
    with pytest.raises(DataError, match=r"'problm' is not something to map.*'problem'"):
        load_source(source(path, columns={"problm": "problems"}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"problem": "p", "answer": "1"}\n{"problem": \n', r"rows.jsonl:2: not valid JSON"),
        ("[1, 2]\n", r"rows.jsonl:1: a JSON object was expected, got list"),
        ("\n\n", "no rows"),
        ('{"problem": "p", "answer": "1"}\n{"problem": "p", "answer": " "}\n', r"rows.jsonl:2: its answer is empty"),
        ('{"problem": null, "answer": "1"}\n', r"rows.jsonl:1: its problem is empty"),
        ('{"problem": "p", "answer": true}\n', r"rows.jsonl:1: its answer is true, which is no answer to compare with"),
        ('{"problem": "p", "answer": NaN}\n', r"rows.jsonl:1: its answer is NaN"),
        ('{"id": 1, "problem": "p", "answer": "1"}\n{"id": "1", "problem": "q", "answer": "1"}\n', "two rows have the id '1'"),
    ],
)
def test_bad_rows_are_named(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        load_source(source(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "rows.jsonl:2: cannot be read as JSON"),
        ('{"problem": "p", "answer": ' + "9" * 5000 + "}", "rows.jsonl:2: cannot be read as JSON"),
        (r'{"problem": "a\ud800b", "answer": "1"}', "rows.jsonl:2: its problem holds half a surrogate pair"),
        (r'{"problem": "p", "answer": "1", "solution": "\udc00"}', "rows.jsonl:2: its solution holds half a surrogate pair"),
    ],
)
def test_lines_that_json_or_text_cannot_hold(tmp_path, line, message):
    (tmp_path / "rows.jsonl").write_text('{"problem": "p", "answer": "1"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        load_source(source(tmp_path / "rows.jsonl"))


def test_a_byte_order_mark_and_windows_lines(tmp_path):
    content = b'\xef\xbb\xbf{"problem": "p", "answer": 1}\r\n{"problem": "q", "answer": "2"}\r\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert [(row["problem"], row["answer"]) for row in load_source(source(tmp_path / name))] == [("p", "1"), ("q", "2")]


def test_unreadable_files(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"not gzip")
    whole = gzip.compress(b'{"problem": "1+1", "answer": "2"}\n' * 50, mtime=0)
    (tmp_path / "damaged.jsonl.gz").write_bytes(whole[:12] + b"\xff\xff\xff\xff" + whole[16:])
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\n")
    for name in ("a.jsonl.gz", "damaged.jsonl.gz", "b.jsonl"):
        with pytest.raises(DataError, match=rf"{name}:1: cannot be read"):
            load_source(source(tmp_path / name))


class Pool:
    def verify(self, pairs):
        return [
            SimpleNamespace(correct=gold in output, reason="match" if gold in output else "mismatch") for gold, output in pairs
        ]


def test_filters_count_their_reasons(tmp_path):
    rows = [
        {**ROWS[0], "ok": True},
        {**ROWS[1], "ok": False},
        {**ROWS[2], "ok": True, "solution": "wrong"},
        {**ROWS[3], "ok": True, "solution": "4 " * 50},
    ]
    path, report = write(tmp_path / "rows.jsonl", rows), {}
    filters = SimpleNamespace(correct_column="ok", min_tokens=1, max_tokens=10, verified=True)
    words = lambda text, **_: {"input_ids": text.split()}  # noqa: E731
    kept = load_source(source(path, filters=filters), tokenizer=words, pool=Pool(), report=report)
    assert [row["problem"] for row in kept] == ["0+1=?"]
    assert report["read"] == 4
    assert report["kept"] == 1
    assert report["dropped"] == {"ok is not true": 1, "solution above 10 tokens": 1, "not verified: mismatch": 1}
    with pytest.raises(DataError, match="the filters left none of 4 rows"):
        load_source(source(path, filters={"min_tokens": 99}), tokenizer=words)
    with pytest.raises(DataError, match=r"no column 'okay'.*did you mean 'ok'"):
        load_source(source(path, filters={"correct_column": "okay"}))
    with pytest.raises(DataError, match="needs true or false"):
        load_source(source(path, filters={"correct_column": "problem"}))


def test_verified_by_the_real_pool(tmp_path):
    pytest.importorskip("posttrain.rewards.pool")
    rows = [{"problem": "p", "answer": "7", "solution": f"so \\boxed{{{given}}}"} for given in (7, 8)]
    kept = load_source(source(write(tmp_path / "rows.jsonl", rows), filters={"verified": True}))
    assert [row["solution"] for row in kept] == ["so \\boxed{7}"]


def test_real_files(shared):
    counts = {"gsm8k_train": 7471, "math_train": 7469, "aime_1983_2023": 968}
    for name, count in counts.items():
        assert len(load_source(source(shared / f"data/train/{name}.jsonl.gz"), needs_solution=True)) == count
    assert sum(1 for _ in read_files(shared / "data/eval")) == 2866
