"""What is read before Ray starts: bad input of a later stage is refused before an earlier one has trained."""

import json

import pytest

from posttrain.config import Recipe
from posttrain.errors import DataError
from posttrain.evaluation.runner import find_checkpoints
from posttrain.grpo.prompts import load_prompts, prompts_per_batch
from posttrain.run_folder import RunFolder
from posttrain.runtime.prepare import ensure_base, prepare

INIT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "adapter_rank": 4,
    "gate_rank": 4, "chunk_size": 16, "layer_types": ["sse"], "max_position_embeddings": 256,
}  # fmt: skip


def recipe(tmp_path, **sections) -> Recipe:
    arithmetic = {"kind": "arithmetic", "limit": 40}
    given = {
        "name": "toy",
        "run_dir": str(tmp_path / "run"),
        "model": {"tokenizer": "arithmetic", "init": INIT},
        "data": {"max_length": 128, "max_prompt_length": 64, "train": arithmetic, "prompts": arithmetic},
        "grpo": {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 16},
        "eval": {"suites": {"toy": {"arithmetic": {}, "limit": 3}}, "max_tokens": 16},
        "reward": {"workers": 1},
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    return Recipe.model_validate(given)


def run_of(given: Recipe) -> RunFolder:
    run = RunFolder(given.run_dir)
    run.path.mkdir(parents=True, exist_ok=True)
    return run


def test_everything_is_made_before_ray(tmp_path):
    given = recipe(tmp_path)
    run = run_of(given)
    prepare(given, run, ["sft", "grpo", "eval"])
    assert (run.path / "base" / "model.safetensors").is_file()
    assert (run.path / "data" / "sft" / "rows.arrow").is_file()
    prompts = load_prompts(given, run, None)
    assert len(prompts) == 40
    assert {"prompt_ids", "prompt_index", "prompt", "answer"} <= set(prompts.column_names)
    assert "solution" not in prompts.column_names


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"prompts": {"kind": "jsonl", "path": "nowhere.jsonl"}}}, "nowhere.jsonl"),
        ({"data": {"prompts": {"kind": "arithmetic", "limit": 3}}}, "3 prompts, but one generation batch needs 4"),
        ({"data": {"max_prompt_length": 5}}, "max_prompt_length 5"),
        ({"eval": {"suites": {"toy": {"path": "nothing.jsonl"}}}}, "nothing.jsonl"),
    ],
)
def test_bad_input_of_a_later_stage_stops_the_run_at_once(tmp_path, sections, message):
    given = recipe(tmp_path, **sections)
    run = run_of(given)
    with pytest.raises(DataError, match=message):
        prepare(given, run, ["sft", "grpo", "eval"])
    assert not (run.path / "base").exists()


@pytest.mark.parametrize("values", [(1, "one"), ({"a": 1}, 3), (10**30, 1), ("\ud800", "b")])
def test_a_column_that_cannot_be_stored_is_named(tmp_path, values):
    source = tmp_path / "prompts.jsonl"
    rows = [{"problem": f"{i}+1=?", "answer": str(i + 1), "own": values[i % 2]} for i in range(8)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = recipe(tmp_path, data={"prompts": {"kind": "jsonl", "path": str(source)}})
    with pytest.raises(DataError, match=r"column 'own' do not fit together"):
        prepare(given, run_of(given), ["grpo"])


def test_a_resume_keeps_the_prompts_it_was_trained_on(tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"id": str(i), "problem": f"{i}+1=?", "answer": str(i + 1)}) + "\n" for i in range(8)))
    given = recipe(tmp_path, data={"prompts": {"kind": "jsonl", "path": str(source)}})
    run = run_of(given)
    prepare(given, run, ["grpo"])
    before = load_prompts(given, run, None)["prompt_ids"]
    source.write_text(source.read_text().replace("+1=?", "+2=?"))
    (run.path / "grpo" / "checkpoint-2").mkdir(parents=True)
    prepare(given, run, ["grpo"])
    assert load_prompts(given, run, None)["prompt_ids"] == before


@pytest.mark.parametrize(
    ("arguments", "prompts"),
    [
        ({}, 4),
        ({"gradient_accumulation_steps": 3}, 12),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 1}, 4),
        ({"generation_batch_size": 32}, 8),
    ],
)
def test_prompts_a_batch_follow_trl(tmp_path, arguments, prompts):
    from trl.trainer.grpo_config import GRPOConfig

    given = recipe(tmp_path, grpo=arguments, data={"train": {"kind": "arithmetic", "limit": 400}})
    assert prompts_per_batch(given) == prompts
    args = GRPOConfig(output_dir=str(tmp_path), bf16=False, **given.grpo.arguments)
    assert args.generation_batch_size is not None
    assert args.num_generations is not None
    assert args.generation_batch_size // args.num_generations == prompts


def test_a_checkpoint_is_evaluated_where_it_lies(tmp_path):
    made = recipe(tmp_path)
    ensure_base(made, run_of(made))
    checkpoint = str(run_of(made).path / "base")
    given = recipe(tmp_path).model_copy(update={"run_dir": str(tmp_path / "other"), "stages": ["eval"]})
    given = given.model_copy(update={"model": given.model.model_copy(update={"path": checkpoint, "init": None})})
    run = run_of(given)
    prepare(given, run, ["eval"])
    assert not (run.path / "base").exists(), "the weights are not copied"
    assert find_checkpoints(given, run.path) == {checkpoint: checkpoint}
