"""Evaluation of a small random model: the same table whatever the batch, resumed or not; samples of two protocols never mix."""

import json
from functools import partial

import pytest

from posttrain.config import Recipe
from posttrain.errors import CheckpointError, DataError, RunFolderError
from posttrain.evaluation import evaluate
from posttrain.evaluation.samples import Sample
from posttrain.evaluation.table import format_table, score
from posttrain.file_lock import hold
from posttrain.runtime.worker import StageStopped, WorkerContext


def recipe(**sections) -> Recipe:
    base = {
        "name": "toy",
        "model": {
            "tokenizer": "arithmetic",
            "init": {
                "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "adapter_rank": 4,
                "gate_rank": 4, "chunk_size": 16, "layer_types": ["sse", "full_attention"], "max_position_embeddings": 256,
            },
        },
        "stages": ["eval"],
        "data": {"max_length": 128, "max_prompt_length": 64},
        "reward": {"workers": 1},
        "eval": {"suites": {"toy": {"arithmetic": {}, "limit": 6}}, "samples": 2, "max_tokens": 12, "models": ["base"]},
    }  # fmt: skip
    for name, section in sections.items():
        base[name] = {**base[name], **section} if isinstance(section, dict) else section
    return Recipe.model_validate(base)


@pytest.fixture
def run_path(tmp_path):
    from posttrain.data.tokenizer import arithmetic_tokenizer
    from posttrain.models.loading import new_model

    tokenizer = arithmetic_tokenizer()
    init = dict(recipe().model.init, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    new_model(init, seed=0).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path


def context(run_path) -> WorkerContext:
    return WorkerContext(stage="eval", run_path=run_path)


def texts(run_path) -> list[tuple]:
    lines = (run_path / "eval" / "base" / "toy" / "samples.jsonl").read_text().splitlines()
    return [(s["problem_id"], s["sample"], s["text"], s["mean_logprob"]) for s in map(json.loads, lines)]


def test_the_table_does_not_depend_on_the_batch(run_path, tmp_path_factory):
    rows = evaluate(recipe(), run_path, context(run_path))
    one_by_one = sorted(texts(run_path))
    for file in (run_path / "eval").rglob("samples.jsonl"):
        file.unlink()
    again = evaluate(recipe(eval={"max_sequences": 2}), run_path, context(run_path))
    assert sorted(texts(run_path)) == one_by_one
    assert rows == again
    assert len({text for _, _, text, _ in one_by_one}) > 6, "samples of one problem differ from each other"
    results = json.loads((run_path / "eval" / "results.json").read_text())
    assert results[0]["problems"] == 6
    assert results[0]["samples"] == 2


def test_a_stopped_evaluation_goes_on_where_it_was(run_path, monkeypatch):
    evaluate(recipe(), run_path, context(run_path))
    whole = sorted(texts(run_path))
    path = run_path / "eval" / "base" / "toy" / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # Five samples, and a line that was torn in the middle.
    lines.sort(key=lambda line: (json.loads(line)["problem_id"], json.loads(line)["sample"]))
    path.write_text("".join(lines[:5]) + lines[5][:20])
    asked = spy_on_prompts(monkeypatch)
    evaluate(recipe(), run_path, context(run_path))
    assert sorted(texts(run_path)) == whole
    assert sum(len(prompt.samples) for prompt in asked) == 12 - 5, "what was there was not drawn again"
    assert (1,) in {prompt.samples for prompt in asked}, "of the problem with half its samples, the other half was"


def spy_on_prompts(monkeypatch) -> list:
    from posttrain.inference.engine import EngineBackend

    asked, submit = [], EngineBackend._submit

    def spy(self, prompt):
        asked.append(prompt)
        submit(self, prompt)

    monkeypatch.setattr(EngineBackend, "_submit", spy)
    return asked


def test_a_suite_that_another_process_still_writes_is_left_alone(run_path, monkeypatch):
    monkeypatch.setattr("posttrain.evaluation.runner.hold", partial(hold, patience_s=0))
    folder = run_path / "eval" / "base" / "toy"
    with hold(folder), pytest.raises(RunFolderError, match="is being written by another process"):
        evaluate(recipe(), run_path, context(run_path))
    assert [path.name for path in folder.iterdir()] == [".lock"]
    evaluate(recipe(), run_path, context(run_path))
    assert len(texts(run_path)) == 12


def test_other_settings_set_the_old_samples_aside(run_path):
    evaluate(recipe(), run_path, context(run_path))
    before = texts(run_path)
    evaluate(recipe(eval={"temperature": 0.5}), run_path, context(run_path))
    folder = run_path / "eval" / "base" / "toy"
    assert (folder / "samples.stale-1.jsonl").exists()
    assert len(texts(run_path)) == len(before)
    assert texts(run_path) != before


def test_a_stop_keeps_what_was_drawn(run_path, monkeypatch):
    stopping, reported = context(run_path), []
    monkeypatch.setattr(stopping, "report", lambda step, total, **_: reported.append((step, total)))
    monkeypatch.setattr(stopping, "stop_requested", lambda: len(reported) == 4)
    with pytest.raises(StageStopped, match="stopped after 3 of 12 samples"):
        evaluate(recipe(), run_path, stopping)
    assert len(texts(run_path)) == 3
    asked = spy_on_prompts(monkeypatch)
    evaluate(recipe(), run_path, context(run_path))
    assert sum(len(prompt.samples) for prompt in asked) == 12 - 3
    assert len({(problem, sample) for problem, sample, *_ in texts(run_path)}) == 12


def test_errors_name_what_is_missing(run_path):
    with pytest.raises(CheckpointError, match="run that stage first"):
        evaluate(recipe(eval={"models": ["grpo"]}), run_path, context(run_path))


def test_a_prompt_and_completion_beyond_the_context_of_a_checkpoint(run_path):
    """The recipe knows no context where the model is a checkpoint, so this is found when the model is there."""
    given = recipe(model={"init": None, "path": str(run_path / "base")}, eval={"max_tokens": 300})
    with pytest.raises(DataError, match=r"max_tokens 300 make \d+, above the model's context of 256.*lower max_tokens"):
        evaluate(given, run_path, context(run_path))


def sample(problem: str, number: int, correct: bool | None, answer: str | None = "1", finish: str = "stop") -> Sample:
    return Sample(
        problem_id=problem, sample=number, correct=correct, reason="match", gold="1", answer=answer, length=10,
        finish_reason=finish, mean_logprob=-0.1, problem="?", text="",
    )  # fmt: skip


def test_an_unreadable_gold_is_listed_and_not_scored():
    row = score("m", "s", [sample("a", 0, True), sample("b", 0, None), sample("c", 0, False, finish="length")])
    assert (row.problems, row.unscored) == (2, 1)
    assert row.accuracy is not None
    assert row.accuracy.mean == 0.5
    assert row.truncated == pytest.approx(1 / 3)
    assert "+1 unscored" in format_table([row])


def test_nothing_scored_is_not_zero():
    row = score("m", "s", [sample("a", 0, None)])
    assert row.accuracy is None
    assert " - " in format_table([row])


def test_uneven_samples_are_refused():
    with pytest.raises(ValueError, match="same number"):
        score("m", "s", [sample("a", 0, True), sample("a", 1, True), sample("b", 0, True)])
