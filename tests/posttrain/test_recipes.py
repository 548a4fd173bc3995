"""Every recipe that ships loads, and `posttrain check` prices it."""

import re
from pathlib import Path

import pytest

from posttrain.check import activation_bytes, check, estimate, training_memory
from posttrain.config import load_recipe
from posttrain.errors import DataError

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
TWINS = [path for path in RECIPES if path.name.startswith("transformer-2b")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_is_priced(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert check(recipe) == 0
    out = capsys.readouterr().out
    assert f"name: {path.stem}" in out
    assert "parameters" in out
    assert "tokens" in out
    numbers = estimate(recipe).numbers
    assert numbers["parameters"] > 0
    for stage in set(recipe.stages) - {"report"}:
        assert numbers[f"{stage}.tokens"] > 0


def test_every_promised_recipe_ships() -> None:
    names = {path.stem for path in RECIPES}
    family = {f"{kind}-2b-{stage}" for kind in ("sse-h", "transformer") for stage in ("distill-80k", "grpo-32k", "eval")}
    assert family | {"demo"} <= names


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.stem)
def test_twins_differ_in_nothing_but_the_model(path: Path) -> None:
    ours = load_recipe(path).model_dump()
    theirs = load_recipe(path.with_name(path.name.replace("transformer", "sse-h"))).model_dump()
    for key in ("name", "description", "run_dir", "model"):
        ours.pop(key), theirs.pop(key)
    ours["rollout"].pop("max_sequences"), theirs["rollout"].pop("max_sequences")
    assert ours == theirs


def test_the_papers_numbers() -> None:
    folder = RECIPES[0].parent
    distil = load_recipe(folder / "sse-h-2b-distill-80k.yaml")
    assert (distil.data.train.limit, distil.trainer["num_train_epochs"], distil.data.max_length) == (80_000, 5, 32_768)
    grpo = load_recipe(folder / "sse-h-2b-grpo-32k.yaml")
    assert (grpo.grpo["num_generations"], grpo.grpo["max_steps"], grpo.rollout.max_length) == (8, 230, 32_768)
    aime = load_recipe(folder / "sse-h-2b-eval.yaml").eval.suites["aime24"]
    assert (aime.samples, aime.temperature, aime.top_p) == (32, 1.0, 0.7)
    assert estimate(distil).numbers["parameters"] == pytest.approx(2.0e9, rel=0.03)


@pytest.mark.parametrize("path", [path for path in RECIPES if "extends:" not in path.read_text()], ids=lambda path: path.stem)
def test_every_number_has_its_source(path: Path) -> None:
    """Learning rates, batch sizes and lengths carry a comment on their line or share the header's."""
    text = path.read_text()
    if "Every number is our choice" in text:
        return
    keys = (
        r"learning_rate|num_\w+|max_length|max_steps|max_completion_length|epsilon\w*|beta|limit|\w+_size|\w+accumulation_steps"
    )
    bare = [line for line in text.splitlines() if re.match(rf"\s+({keys}):", line) and "#" not in line]
    assert bare == []


def small(tmp_path: Path, *overrides: str):
    path = tmp_path / "r.yaml"
    path.write_text(
        "name: small\nmodel:\n  tokenizer: arithmetic\n"
        "  init: {hidden_size: 64, intermediate_size: 96, num_attention_heads: 2, num_hidden_layers: 2, vocab_size: 100,"
        " layer_types: [full_attention, full_attention], max_position_embeddings: 4096}\n"
        "data: {train: {kind: arithmetic, limit: 50}, max_length: 128}\nstages: [sft]\n"
    )
    return load_recipe(path, overrides)


def test_memory_by_hand(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    # Embeddings 2 x 100 x 64; a layer: 4 x 64 x 64 attention, 3 x 64 x 96 MLP, 2 x 64 norms; the last norm 64.
    parameters = 2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    parts = training_memory(recipe, recipe.model.init, "trainer", 128)
    assert parts["weights"] == parts["gradients"] == 4 * parameters
    assert parts["optimizer"] == 8 * parameters
    layer = 4 * (4 * 64 + 3 * 96 + 5 * 64)
    assert activation_bytes(recipe.model.init, 128, element=4, checkpointing=False) == 128 * 2 * layer
    assert parts["activations"] == 128 * (2 * 64 * 4 + layer), "TRL checkpoints by default"


@pytest.mark.parametrize(("stage", "weights", "gradients", "optimizer"), [(0, 1, 1, 1), (1, 1, 1, 4), (2, 1, 4, 4), (3, 4, 4, 4)])
def test_zero_shards(tmp_path: Path, stage: int, weights: int, gradients: int, optimizer: int) -> None:
    alone = small(tmp_path, "model.dtype=bfloat16", "deepspeed.stage=0")
    recipe = small(tmp_path, "model.dtype=bfloat16", f"deepspeed.stage={stage}", "ray.num_workers=4")
    whole, parts = (training_memory(r, r.model.init, "trainer", 128) for r in (alone, recipe))
    assert whole["optimizer"] == 6 * whole["weights"], "two fp32 moments and an fp32 copy of bf16 weights"
    for name, share in (("weights", weights), ("gradients", gradients), ("optimizer", optimizer)):
        assert parts[name] == whole[name] / share


def test_check_finds_missing_data(tmp_path: Path) -> None:
    recipe = small(tmp_path, f"data.train={{path: {tmp_path}/absent.jsonl}}")
    with pytest.raises(DataError, match="absent.jsonl"):
        estimate(recipe)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    recipe = small(tmp_path, f"data.train={{path: {tmp_path}/rows.jsonl}}")
    with pytest.raises(DataError, match="no column problem; its first row has: question, answer"):
        estimate(recipe)
    recipe = small(
        tmp_path, f"data.train={{path: {tmp_path}/rows.jsonl, columns: {{problem: question}}}}", "trainer.num_train_epochs=2"
    )
    assert estimate(recipe).numbers["sft.tokens"] == 1 * 128 * 2
