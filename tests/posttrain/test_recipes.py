"""Every recipe that ships loads, and `posttrain check` prices it."""

import json
import re
from pathlib import Path

import pytest

from posttrain.check import activation_bytes, check, estimate, model_fields, tokenizer_size, training_memory
from posttrain.config import load_recipe
from posttrain.errors import CheckpointError, DataError

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
    """In the paper's recipes every number carries a comment on its line; in the others the header may speak for all."""
    text = path.read_text()
    if path.stem in ("demo", "gsm8k"):
        assert "Every number is our choice" in text
        return
    assert "Every number is our choice" not in text
    bare = [line for line in text.splitlines() if re.match(r"[\s-]+\w+:\s*[-+.\d]+(e[-+]?\d+)?\s*$", line)]
    assert bare == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_warm_up_is_one_that_the_schedule_has(path: Path) -> None:
    recipe = load_recipe(path)
    for section in ("trainer", "grpo"):
        if recipe.argument(section, "lr_scheduler_type") == "constant":
            assert not recipe.argument(section, "warmup_steps"), f"{section}: `constant` ignores it; use constant_with_warmup"


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


@pytest.mark.parametrize("kind", ["words", "bytes", "unigram", "configured"])
def test_the_vocabulary_of_a_tokenizer_folder_is_what_training_gives_a_new_model(tmp_path: Path, kind: str) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    from posttrain.data.tokenizer import arithmetic_tokenizer, train_bpe_tokenizer

    folder = tmp_path / "tokenizer"
    if kind == "bytes":
        train_bpe_tokenizer(["1+2=3", "three and four"], 300).save_pretrained(folder)
    elif kind == "unigram":
        backend = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    else:
        arithmetic_tokenizer().save_pretrained(folder)
    if kind == "configured":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config |= {"bos_token": "<|new|>", "mask_token": {"content": "<|mask|>", "__type": "AddedToken"}}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = len(transformers.AutoTokenizer.from_pretrained(folder))
    assert tokenizer_size(folder) == size
    recipe = small(tmp_path, f"model={{init: {{num_hidden_layers: 2}}, tokenizer: {folder}}}")
    fields = model_fields(recipe)
    assert fields is not None and fields["vocab_size"] == size
    assert "vocabulary" not in estimate(recipe).text()
    assert (model_fields(small(tmp_path, f"model.tokenizer={folder}")) or {})["vocab_size"] == 100, "given in init"


def test_an_unknown_or_broken_tokenizer(tmp_path: Path) -> None:
    assert "32,000 assumed for org/name" in estimate(small(tmp_path, "model={init: {}, tokenizer: org/name}")).text()
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read as a tokenizer's: KeyError: 'vocab'"):
        estimate(small(tmp_path, f"model={{init: {{}}, tokenizer: {tmp_path}}}"))


@pytest.mark.parametrize("config", ["[]", "{", '{"model_type": "sse_h", "hidden_size": "a"}', '{"num_hidden_layers": "x"}'])
def test_check_names_a_configuration_that_is_none(tmp_path: Path, config: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    given = small(tmp_path, f"model.path={tmp_path}/model", "model.init=null")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        model_fields(given)


def test_check_reads_data_as_training_does(tmp_path: Path) -> None:
    (tmp_path / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"problem": "1+1=?", "answer": "2"}\n')
    assert estimate(small(tmp_path, f"data.train={{path: {tmp_path}/bom.jsonl}}"))
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(DataError, match="cannot be read as JSON lines"):
        estimate(small(tmp_path, f"data.train={{path: {tmp_path}/deep.jsonl}}"))
