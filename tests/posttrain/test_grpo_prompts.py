"""The prompts of the GRPO stage: a gold answer that cannot be read is listed and never sampled from."""

import json

import pytest

pytest.importorskip("math_verify")

from posttrain.config import Recipe
from posttrain.data.tokenizer import arithmetic_tokenizer
from posttrain.errors import DataError
from posttrain.grpo.prompts import make_prompts, prompts_per_batch

GOLDS = ["3", r"\frac{1}{2}", r"\frac{1}{", "7", r"\left(", "9", "11"]


def recipe(tmp_path, count: int, **reward) -> Recipe:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{n}", "problem": f"{n}+1", "answer": gold} for n, gold in enumerate(GOLDS[:count])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Recipe.model_validate(
        {
            "name": "toy",
            "stages": ["grpo"],
            "run_dir": str(tmp_path / "run"),
            "model": {
                "tokenizer": "arithmetic",
                "init": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "adapter_rank": 4, "gate_rank": 4, "chunk_size": 16, "layer_types": ["sse"],
                         "max_position_embeddings": 256},
            },
            "data": {"max_length": 128, "max_prompt_length": 64, "prompts": {"kind": "jsonl", "path": str(path)}},
            "grpo": {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 16},
            "reward": {"workers": 1, **reward},
        }
    )  # fmt: skip


def test_unreadable_golds_are_listed_and_left_out(tmp_path):
    prompts, report = make_prompts(recipe(tmp_path, 7), arithmetic_tokenizer())
    assert sorted(prompts["answer"]) == sorted(["3", r"\frac{1}{2}", "7", "9", "11"])
    assert report["kept"] == 5 and report["dropped"]["a gold answer that cannot be read"] == 2
    assert sorted(row["id"] for row in report["unreadable_gold"]) == ["p2", "p4"]


def test_rewards_that_read_no_gold_keep_every_prompt(tmp_path):
    prompts, report = make_prompts(recipe(tmp_path, 7, functions=[{"name": "format"}]), arithmetic_tokenizer())
    assert len(prompts) == 7 and "unreadable_gold" not in report


def test_too_few_that_can_be_read(tmp_path):
    with pytest.raises(DataError, match="3 prompts, but one generation batch needs 4"):
        make_prompts(recipe(tmp_path, 4), arithmetic_tokenizer())


def test_all_learners_share_a_batch(tmp_path):
    one = recipe(tmp_path, 7)
    assert prompts_per_batch(one) == 4
    assert prompts_per_batch(one.model_copy(update={"grpo": one.grpo.model_copy(update={"learners": 3})})) == 12
