"""The stage `distill` against a server whose answers are known: what is kept, what is counted, and what is refused."""

import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from posttrain.config import recipe_from_dict
from posttrain.config.data import DataSource
from posttrain.data.load import load_source
from posttrain.data.tokenizer import arithmetic_tokenizer
from posttrain.errors import CheckpointError, ConfigError, DataError
from posttrain.models.loading import new_model
from posttrain.report.collect import collect
from posttrain.run_folder import RunFolder
from posttrain.runtime.prepare import with_traces
from tests.posttrain.fake_teacher import asked, journal, make_recipe, right, rows, run, serving


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


def test_a_teacher_that_is_missing_is_named_before_the_problems_are_fetched(tmp_path):
    recipe = make_recipe(
        tmp_path,
        "",
        problems={"path": str(tmp_path / "none.jsonl")},
        teacher={"kind": "engine", "model": str(tmp_path / "absent")},
    )
    with pytest.raises(CheckpointError, match=r"teacher .*absent: no such folder"):
        run(recipe)


def test_problems_of_a_hub_or_generator_will_do(tmp_path):
    def answer(problem, seed):
        return {"text": f"The answer is \\boxed{{{golds[problem.removesuffix(' Answer in a box.')]}}}."}

    source = DataSource(kind="arithmetic", limit=5)
    golds = {row["problem"]: row["answer"] for row in load_source(source)}
    with serving(answer) as teacher:
        recipe = make_recipe(tmp_path, teacher.url, problems=source.model_dump())
        assert run(recipe)["rows"] == 5
