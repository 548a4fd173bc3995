"""The stage `distill` against a server whose answers are known: what is kept, what is counted, and what a restart finds."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from posttrain.config import dump_recipe, recipe_from_dict
from posttrain.config.data import DataSource
from posttrain.data.load import load_source
from posttrain.data.tokenizer import arithmetic_tokenizer
from posttrain.distill import stage
from posttrain.distill.problems import prepare
from posttrain.errors import ConfigError, DataError, RunFolderError
from posttrain.inference import BackendError
from posttrain.models.loading import new_model
from posttrain.report.collect import collect
from posttrain.run_folder import RunFolder
from posttrain.runtime.prepare import with_traces
from posttrain.runtime.worker import StageStopped, WorkerContext
from tests.posttrain.fake_teacher import asked, make_recipe, right, serving


def run(recipe, context=None):
    """The stage as its worker runs it, without Ray."""
    folder = RunFolder(recipe.run_dir)
    folder.path.mkdir(exist_ok=True)
    prepare(recipe, folder)
    stage.distill(recipe, folder.path, context or WorkerContext(stage="distill", run_path=folder.path))
    return json.loads((folder.path / "distill" / "final" / "report.json").read_text())


def journal(recipe):
    return [json.loads(line) for line in (Path(recipe.run_dir) / "distill" / "traces.jsonl").read_text().splitlines()]


def rows(recipe):
    return [
        row
        for file in sorted(Path(recipe.run_dir, "distill", "final").glob("*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]


def test_right_traces_become_rows_that_sft_reads(tmp_path):
    with serving(lambda problem, seed: {"text": f"{right(problem)} [{seed}]"}) as teacher:
        recipe = make_recipe(
            tmp_path, teacher.url, count=5, stages=("distill", "sft"), top_k=20, teacher={"revision": "abc", "logprobs": True},
            rows_per_file=2, system_prompt="Think.",
        )  # fmt: skip
        account = run(recipe)
    assert (account["rows"], account["traces"], account["problems"], account["solved"]) == (5, 10, 5, 5)
    assert account["not_chosen"] == {"beyond per_problem": 5}
    assert account["files"] == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    body = teacher.requests[0]
    system, user = body["messages"]
    assert system == {"role": "system", "content": "Think."}
    assert re.fullmatch(r"What is (\d) plus \1 \? Answer in a box\.", user["content"])
    assert (body["max_tokens"], body["top_k"], body["temperature"]) == (64, 20, 0.6)
    source = with_traces(recipe, RunFolder(recipe.run_dir)).data.train
    loaded = load_source(source, needs_solution=True)
    assert sorted(row["id"].partition("#")[0] for row in loaded) == [f"sum-{n}" for n in range(1, 6)]
    first = rows(recipe)[0]
    n = asked(first["problem"])
    assert first["answer"] == str(2 * n)
    assert first["solution"].startswith(right(first["problem"]))
    assert first["pass_rate"] == 1.0
    provenance = json.loads(first["provenance"])
    assert provenance["problem_id"] == f"sum-{n}"
    assert first["id"] == f"sum-{n}#{provenance['sample']}"
    assert first["solution"].endswith(f"[{provenance['seed']}]"), "the recorded seed is the one that the server got"
    assert provenance["teacher"]["model"] == "fake"
    assert provenance["teacher"]["revision"] == "abc"
    assert provenance["sampling"]["top_k"] == 20
    assert provenance["prompt"] == {"system": "Think.", "suffix": " Answer in a box."}
    assert provenance["verifier"]["functions"][0]["name"] == "maths"
    assert provenance["mean_logprob"] == -1.0
    assert "math-verify" in provenance["versions"]
    assert collect(Path(recipe.run_dir))["distillation"] == account, "the report shows it"
    assert time.strptime(provenance["written"], "%Y-%m-%dT%H:%M:%SZ").tm_year > 2000


def test_what_is_bad_is_counted_by_reason(tmp_path):
    def answer(problem, seed):
        n = asked(problem)
        return [
            {"text": right(problem)},
            {"text": ""},
            {"text": right(problem), "finish_reason": "length"},
            {"text": "So \\boxed{7777}."},
            {"text": right(problem), "finish_reason": "content_filter"},
            {"text": right(problem), "reasoning": "the same number twice"},
            {"text": "", "reasoning": "and so on, for ever", "finish_reason": "stop"},
            {"text": None},
        ][n - 1]

    with serving(answer, logprobs=False) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=8, filters={"thinking": "any"})
        account = run(recipe)
    assert account["rejected"] == {
        "empty": 4,
        "truncated": 2,
        "wrong answer": 2,
        "aborted": 2,
        "a thinking block without end": 2,
        "the same text again": 2,
    }
    assert account["rows"] == 2
    assert account["traces"] == 16
    kept = {row["id"].partition("#")[0]: row for row in rows(recipe)}
    assert kept["sum-6"]["solution"] == f"<think>\nthe same number twice\n</think>\n\n{right('What is 6 plus 6 ?')}"
    assert json.loads(kept["sum-1"]["provenance"])["mean_logprob"] is None, "an endpoint without log-probabilities"


def test_difficulty_is_measured_and_balanced(tmp_path):
    hits = Counter()

    def answer(problem, seed):
        n = asked(problem)
        hits[n] += 1
        # The first three problems are solved once in four, the others always.
        good = n > 3 or hits[n] == 2
        return {"text": f"{right(problem) if good else 'So 1.'} ({seed})"}

    with serving(answer) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=12, samples=4, balance={"rows": 6}, teacher={"concurrency": 1})
        account = run(recipe)
    assert account["pass_rate"] == pytest.approx((3 * 0.25 + 9) / 12)
    assert [(row["up_to"], row["problems"], row["rows"]) for row in account["bins"]] == [
        (0.25, 3, 3),
        (0.5, 0, 0),
        (0.75, 0, 0),
        (1.0, 9, 3),
    ]
    assert sorted(row["pass_rate"] for row in rows(recipe)) == [0.25, 0.25, 0.25, 1.0, 1.0, 1.0]
    assert account["rejected"] == {"wrong answer": 9}
    assert account["not_chosen"] == {"beyond per_problem": 27, "its difficulty is full": 6}


def test_a_teacher_that_solves_nothing_stops_early_and_says_why(tmp_path):
    with serving(lambda problem, seed: {"text": "I don't know.", "finish_reason": "length"}) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=40, give_up_after=3)
        with pytest.raises(DataError, match=r"solved none of 3 problems \(\d+ truncated\).*max_tokens"):
            run(recipe)
        assert len(teacher.requests) < 40
    with serving(lambda problem, seed: {"text": "It is 1."}) as teacher:
        (tmp_path / "b").mkdir()
        recipe = make_recipe(tmp_path / "b", teacher.url, count=2)
        with pytest.raises(DataError, match=r"none of 4 traces is left to train on; left out: 4 wrong answer"):
            run(recipe)
    assert not (tmp_path / "b" / "run" / "distill" / "final").exists()


def test_a_server_that_dies_half_way_costs_nothing(tmp_path):
    broken = {"on": False}
    served = Counter()

    def answer(problem, seed):
        if sum(served.values()) >= 7:
            broken["on"] = True
        if broken["on"]:
            return {"status": 500}
        served[problem, seed] += 1
        return {"text": f"{right(problem)} [{seed}]"}

    with serving(answer) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=10, teacher={"retries": 0, "concurrency": 1})
        with pytest.raises(BackendError, match="HTTP 500.*--resume"):
            run(recipe)
    before = journal(recipe)
    assert len(before) == 7
    # It comes back on another port, and is asked for what is missing, no more.
    with serving(lambda problem, seed: {"text": f"{right(problem)} [{seed}]"}) as teacher:
        moved = recipe.model_copy(deep=True)
        moved.distill.teacher.base_url = teacher.url
        account = run(moved)
        assert len(teacher.requests) == 13
    assert journal(recipe)[:7] == before
    assert account["traces"] == 20
    assert len({(t["problem"], t["sample"]) for t in journal(recipe)}) == 20
    assert len({t["seed"] for t in journal(recipe)}) == 20


def test_a_problem_that_the_server_refuses_is_counted_and_stops_nothing(tmp_path):
    def answer(problem, seed):
        return {"status": 400} if asked(problem) in (1, 4) else {"text": f"{right(problem)} [{seed}]"}

    with serving(answer) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=5, teacher={"concurrency": 1})
        account = run(recipe)
        assert len(teacher.requests) == 10, "a refusal is not tried again"
        assert run(recipe) == account
        assert len(teacher.requests) == 10, "nor by the next run"
    assert account["rejected"] == {"refused by the server": 4}
    assert (account["traces"], account["rows"], account["solved"]) == (10, 3, 3)
    assert [line["text"] for line in journal(recipe) if line["problem"] == "sum-4"] == ["HTTP 400: broken"] * 2


def test_a_server_that_refuses_everything_stops_and_is_asked_again_later(tmp_path):
    with serving(lambda problem, seed: {"status": 400}) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=40, teacher={"concurrency": 1})
        with pytest.raises(BackendError, match=r"refuses every request, 31 samples of 16 problems.*HTTP 400: broken"):
            run(recipe)
        assert len(teacher.requests) < 40
    assert journal(recipe) == []
    with serving(lambda problem, seed: {"text": f"{right(problem)} [{seed}]"}) as teacher:
        mended = recipe.model_copy(deep=True)
        mended.distill.teacher.base_url = teacher.url
        assert run(mended)["rows"] == 40


def test_the_last_problem_of_a_resumed_run_may_be_refused(tmp_path):
    """The server has answered before: that everything is refused since says nothing about the requests."""
    dying = {"on": True}

    def answer(problem, seed):
        if asked(problem) == 3:
            return {"status": 500 if dying["on"] else 413}
        return {"text": f"{right(problem)} [{seed}]"}

    with serving(answer) as teacher:
        rows = [{"id": f"sum-{n}", "problem": f"What is {n} plus {n} ?", "answer": str(2 * n)} for n in (1, 2, 3)]
        (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"problems": {"path": str(tmp_path / "few.jsonl"), "shuffle": False}}
        recipe = make_recipe(tmp_path, teacher.url, teacher={"concurrency": 1, "retries": 0}, **given)
        with pytest.raises(BackendError, match="HTTP 500"):
            run(recipe)
        assert len(journal(recipe)) == 4
        dying["on"] = False
        assert run(recipe)["rejected"] == {"refused by the server": 2}


def test_the_key_of_a_refusal_that_is_everybodys_stops_at_once(tmp_path):
    with serving(lambda problem, seed: {"status": 401}) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=9, teacher={"concurrency": 1})
        with pytest.raises(BackendError, match="HTTP 401.*api_key_env"):
            run(recipe)
        assert len(teacher.requests) == 1


def test_stopping_keeps_what_was_graded(tmp_path):
    class Stopping(WorkerContext):
        def stop_requested(self):
            return True

    with serving(lambda problem, seed: {"text": f"{right(problem)} [{seed}]"}) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=10)
        with pytest.raises(StageStopped):
            run(recipe, Stopping(stage="distill", run_path=Path(recipe.run_dir)))
        kept = len(journal(recipe))
        assert 1 <= kept < 20
        assert run(recipe)["traces"] == 20


def test_other_filters_cost_no_second_visit(tmp_path, monkeypatch):
    with serving(lambda problem, seed: {"text": f"{right(problem)} [{seed}]"}) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=4)
        assert run(recipe)["rows"] == 4
        asked_for = len(teacher.requests)
    stricter = recipe.model_copy(deep=True)
    stricter.distill.balance.per_problem = 2
    monkeypatch.setattr(stage, "open_teacher", None)
    assert run(stricter)["rows"] == 8, "the server is gone"
    assert asked_for == 8
    other = recipe.model_copy(deep=True)
    other.distill.temperature = 0.1
    with pytest.raises(RunFolderError, match="sampling"):
        run(other)


def test_run_folder_lets_the_selection_change_until_sft_has_begun(tmp_path):
    recipe = make_recipe(tmp_path, "http://127.0.0.1:9/v1", stages=("distill", "sft"))
    with RunFolder.open(recipe, resume=False) as folder:
        folder.stage_dir("distill").joinpath("traces.jsonl").touch()
        folder.mark_done("distill")
    changed = recipe.model_copy(deep=True)
    changed.distill.filters.max_repetition = 0.5
    changed.distill.teacher.base_url = "http://127.0.0.1:10/v1"
    with RunFolder.open(changed, resume=False) as folder:
        assert not folder.stage_done("distill"), "it is computed again"
        folder.mark_done("distill")
        (folder.stage_dir("sft") / "checkpoint-1").mkdir()
    with pytest.raises(RunFolderError, match=r"distill.filters.max_repetition: 0.5 there, 0.2 now"):
        RunFolder.open(recipe, resume=True)
    other = changed.model_copy(deep=True)
    other.distill.samples = 3
    with pytest.raises(RunFolderError, match=r"distill.samples"):
        RunFolder.open(other, resume=True)


def test_the_students_tokenizer_counts_where_a_filter_asks(tmp_path):
    with serving(lambda problem, seed: {"text": f"{right(problem)}{'' if asked(problem) == 1 else ' Yes' * 9}"}) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, count=2, filters={"max_tokens": 60})
        account = run(recipe)
    counts = {t["problem"]: t["student_tokens"] for t in journal(recipe)}
    # One token a character, but for \boxed{ and " gives", which is a word of the arithmetic templates.
    text = right("What is 1 plus 1 ?")
    assert counts["sum-1"] == len(text) - len("\\boxed{") + 1 - len(" gives") + 1
    assert account["rejected"]["above 60 tokens"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill": {"problems": {"kind": "arithmetic"}}}, "distill.teacher: the stage distill needs a teacher"),
        ({"distill": {"teacher": {"model": "m", "base_url": "http://x/v1"}}}, "distill.problems"),
        ({"distill": {"teacher": {"model": "m"}}}, "base_url"),
        ({"distill": {"teacher": {"base_url": "http://x/v1"}}}, "name the teacher"),
        ({"distill": {"samples": 1, "balance": {"per_problem": 2}}}, "per_problem"),
        ({"distill": {"balance": {"edges": [0.5, 0.25, 1.0]}}}, "edges"),
        ({"distill": {"balance": {"shares": [1.0]}}}, "shares"),
        ({"data": {"train": {"kind": "arithmetic"}}, "stages": ["distill", "sft"]}, "data.train: leave it out"),
    ],
)
def test_recipes_that_cannot_work_are_refused(changes, message):
    plain = {"name": "x", "stages": ["distill"], "model": {"tokenizer": "arithmetic", "init": {}}}
    with pytest.raises(ConfigError, match=message):
        recipe_from_dict({**plain, **changes})


def test_sft_before_the_traces_are_there_is_refused(tmp_path):
    recipe = make_recipe(tmp_path, "http://127.0.0.1:9/v1", stages=("distill", "sft"))
    with pytest.raises(DataError, match="run the stage distill first"):
        with_traces(recipe, RunFolder(recipe.run_dir))


REWARD = """
def short(prompts, completions, **columns):
    return [1.0 if len(text) < 40 else 0.0 for text in completions]
"""


def test_a_teacher_of_our_own_family(tmp_path):
    """In-process; its tokenizer is here, so that problems it cannot take are left out before it is asked."""
    (tmp_path / "mine.py").write_text(REWARD)
    tokenizer = arithmetic_tokenizer()
    fields = {"layer_types": ["sse", "full_attention"], "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    fields |= {"num_attention_heads": 2, "adapter_rank": 4, "gate_rank": 4, "chunk_size": 8, "max_position_embeddings": 128}
    fields |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    new_model(fields, seed=0, dtype="float32").save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    rows = [{"id": str(n), "problem": f"{n}+{n}=?", "answer": str(2 * n)} for n in range(1, 5)]
    rows += [
        {"id": "long", "problem": "1+" * 30 + "1=?", "answer": "31"},
        {"id": "forged", "problem": "1<|end|>?", "answer": "1"},
    ]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = make_recipe(
        tmp_path, "", problems={"path": str(tmp_path / "few.jsonl")}, max_tokens=60, temperature=1.0, top_p=1.0, samples=3,
        teacher={"kind": "engine", "model": str(tmp_path / "teacher"), "dtype": "float32", "max_sequences": 4},
        data={"prompt_suffix": "", "max_prompt_length": 24, "overlong_prompt": "drop"},
    )  # fmt: skip
    values = recipe.model_dump(mode="json")
    values["reward"]["functions"] = [{"path": f"{tmp_path / 'mine.py'}:short"}]
    account = run(recipe_from_dict(values))
    info = json.loads((tmp_path / "run" / "data" / "distill" / "info.json").read_text())
    assert info["dropped"] == {"a prompt above max_prompt_length 24, or with a special token": 2}
    assert account["traces"] == 12
    assert all(line["mean_logprob"] < 0 for line in journal(recipe))
    values["data"]["overlong_prompt"], values["run_dir"] = "error", str(tmp_path / "other")
    with pytest.raises(DataError, match="row long: its prompt has"):
        run(recipe_from_dict(values))


WORKER = """
import sys
from pathlib import Path
from posttrain.config import load_recipe
from posttrain.distill.stage import distill
from posttrain.runtime.worker import WorkerContext
recipe = load_recipe(sys.argv[1])
path = Path(recipe.run_dir)
distill(recipe, path, WorkerContext(stage="distill", run_path=path))
"""


@pytest.mark.slow
def test_killed_at_any_moment_nothing_is_lost_or_doubled(tmp_path, root):
    """SIGKILL again and again, then a run to the end: the set is, byte for byte, that of a run that nobody disturbed."""

    def answer(problem, seed):
        time.sleep(0.02)
        return {"text": f"{right(problem) if seed % 3 else 'So 0.'} [{seed}]"}

    with serving(answer) as teacher:
        (tmp_path / "calm").mkdir()
        calm = make_recipe(tmp_path / "calm", teacher.url, count=60)
        run(calm)
        recipe = make_recipe(tmp_path, teacher.url, count=60)
        folder = RunFolder(recipe.run_dir)
        folder.path.mkdir()
        prepare(recipe, folder)
        (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        traces = folder.path / "distill" / "traces.jsonl"
        for wanted in (1, 20, 70):
            worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "recipe.yaml")], env=environment)
            deadline = time.monotonic() + 60
            while not (traces.exists() and traces.read_bytes().count(b"\n") >= wanted):
                assert worker.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
            worker.send_signal(signal.SIGKILL)
            worker.wait()
        with open(traces, "ab") as file:
            file.write(b'{"problem": "sum-1", "sample": 0, "text": "torn')
        assert run(recipe) == run(calm)
    lines = journal(recipe)
    assert len(lines) == len({(t["problem"], t["sample"]) for t in lines}) == 120

    def essence(recipe):
        return sorted((row["id"], row["solution"], row["pass_rate"]) for row in rows(recipe))

    assert essence(recipe) == essence(calm)


def test_problems_of_a_hub_or_generator_will_do(tmp_path):
    def answer(problem, seed):
        return {"text": f"The answer is \\boxed{{{golds[problem.removesuffix(' Answer in a box.')]}}}."}

    source = DataSource(kind="arithmetic", limit=5)
    golds = {row["problem"]: row["answer"] for row in load_source(source)}
    with serving(answer) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, problems=source.model_dump())
        assert run(recipe)["rows"] == 5
