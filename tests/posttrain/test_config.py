"""Recipes: what is accepted, what is refused, and that the message helps."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.config import Recipe, dump_recipe, load_recipe, recipe_from_dict
from posttrain.config.trl import GRPO_ARGUMENTS, OWNED, SFT_ARGUMENTS, coerce
from posttrain.errors import ConfigError

BASE = """\
name: tiny
model:
  tokenizer: arithmetic
  init: {hidden_size: 32, num_attention_heads: 2, num_hidden_layers: 2, layer_types: [sse, full_attention],
         vocab_size: 256, max_position_embeddings: 512}
data:
  max_length: 256
  max_prompt_length: 64
  train: {kind: arithmetic}
trainer:
  learning_rate: 2e-5
grpo:
  num_generations: 4
  per_device_train_batch_size: 8
  max_completion_length: 100
eval:
  suites:
    held: {arithmetic: {}, limit: 10}
  max_tokens: 100
reward:
  functions: [{name: maths}]
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def load(write, *overrides: str, text: str = BASE) -> Recipe:
    return load_recipe(write(text), overrides)


def message(write, *overrides: str, text: str = BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write, *overrides, text=text)
    return str(caught.value)


def test_defaults_and_types(write) -> None:
    recipe = load(write)
    assert recipe.run_dir == "runs/tiny"
    assert recipe.trainer == {"learning_rate": 2e-5}, "YAML 1.1 reads 2e-5 as text"
    assert recipe.argument("trainer", "num_train_epochs") == 3.0, "TRL's default"
    assert recipe.grpo.arguments["num_generations"] == recipe.grpo["num_generations"] == 4
    assert recipe.grpo.truncated_completions == "mask"
    assert "truncated_completions" not in recipe.grpo.arguments


def test_resolved_recipe_reads_back_to_itself(write) -> None:
    recipe = load(write)
    assert load(write, text=dump_recipe(recipe)) == recipe
    assert recipe_from_dict(recipe.model_dump(mode="json")) == recipe
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_the_runs_seed_draws_training_problems_and_never_evaluation_problems(write) -> None:
    one, other = load(write, "seed=1"), load(write, "seed=2")
    assert one.data.train is not None and one.data.train.seed is None
    assert one.eval.suites["held"].source() == other.eval.suites["held"].source()
    for extra in ([], ["eval.suites.held={path: a.jsonl}"], ["eval.suites.held={hub: org/set}"]):
        assert load(write, *extra).eval.suites["held"].source().seed == 0
    assert load(write, "eval.suites.held.data_seed=5").eval.suites["held"].source().seed == 5


def test_overrides(write) -> None:
    recipe = load(
        write, "trainer.learning_rate=1e-4", "eval.suites.held.limit=3", "rollout.stop=['###', x]", "deepspeed.stage=1", "seed=7"
    )
    assert recipe.trainer["learning_rate"] == 1e-4
    assert recipe.eval.suites["held"].limit == 3
    assert recipe.rollout.stop == ["###", "x"]
    assert recipe.deepspeed is not None and recipe.deepspeed.stage == 1
    assert recipe.seed == 7


def test_override_in_a_list(write) -> None:
    text = BASE.replace("[{name: maths}]", "[{name: maths}, {name: format, weight: 0.1}]")
    assert load(write, "reward.functions.1.weight=0.5", text=text).reward.functions[1].weight == 0.5
    assert "position" in message(write, "reward.functions.2.weight=0.5", text=text)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "trainer.lerning_rate=1",
            "trainer.lerning_rate: unknown key (SFTConfig of TRL has no such argument); did you mean learning_rate?",
        ),
        ("grpo.num_generation=4", "did you mean num_generations?"),
        ("grpo.truncated_completion=mask", "did you mean truncated_completions?"),
        ("trainr.max_steps=1", "trainr: unknown key; did you mean trainer?"),
        ("rollout.max_seqences=3", "rollout.max_seqences: unknown key; did you mean max_sequences?"),
        ("eval.suites.held.limt=3", "eval.suites.held.limt: unknown key; did you mean limit?"),
        ("data.train.arithmetic.max_operation=3", "did you mean max_operations?"),
        ("model.init.hiden_size=8", "model.init.hiden_size: unknown field of SSEHConfig; did you mean hidden_size?"),
        ("reward.functions.0.name=math", "reward.functions.0.name: unknown reward 'math'; known: maths, format"),
        (
            "reward.functions.0.args={corect: 1}",
            "reward.functions.0.args.corect: maths takes no such argument; did you mean correct?",
        ),
        ("data.decontaminate=[aime42]", "did you mean aime"),
        ("trainer.lr_scheduler_type=cosin", "did you mean cosine?"),
        ("grpo.loss_type=dapoo", "did you mean dapo?"),
    ],
)
def test_typo_names_the_nearest(write, override: str, said: str) -> None:
    assert said in message(write, override)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.output_dir=x", "run folder"),
        ("trainer.run_name=x", "`name`"),
        ("trainer.seed=1", "`seed`"),
        ("trainer.resume_from_checkpoint=x", "--resume"),
        ("trainer.packing=true", "always packed"),
        ("trainer.hub_token=abc", "HF_TOKEN"),
        ("trainer.deepspeed=x.json", "`deepspeed` section"),
        ("grpo.use_vllm=true", "own generator"),
        ("grpo.vllm_mode=server", "own generator"),
        ("grpo.mask_truncated_completions=true", "truncated_completions"),
        ("grpo.reward_weights=[1]", "reward.functions"),
        ("grpo.sync_ref_model=true", "could not be resumed"),
        ("grpo.log_completions=true", "rollouts/"),
    ],
)
def test_owned_arguments_say_why(write, override: str, said: str) -> None:
    text = message(write, override)
    assert "cannot be set in a recipe" in text
    assert said in text


@pytest.mark.parametrize(
    "override",
    [
        "trainer.learning_rate=fast",
        "trainer.learning_rate=[1]",
        "trainer.learning_rate=.nan",
        "trainer.learning_rate=-1",
        "trainer.max_steps=1.5",
        "trainer.bf16=3",
        "trainer.gradient_checkpointing=maybe",
        "trainer.per_device_train_batch_size=0",
        "grpo.temperature=true",
        "grpo.epsilon=.inf",
        "seed=-1",
        "seed=2.5",
        "name='has space'",
        "name=../up",
        "stages=[]",
        "stages=[grpo, sft]",
        "stages=[sft, sft]",
        "stages=[distil]",
        "deepspeed.stage=4",
        "deepspeed={stage: 2, offload_parameters: true}",
        "data.max_length=0",
        "data.train.kind=csv",
        "data.train={kind: jsonl}",
        "data.train={kind: jsonl, path: a.jsonl, arithmetic: {}}",
        "data.train.arithmetic={min_operations: 5, max_operations: 2}",
        "data.train=null",
        "model.path=x",
        "model.init=null",
        "model.tokenizer=null",
        "model.init.num_partitions=0",
        "model.init.num_attention_heads=5",
        "reward.functions=[]",
        "reward.functions=[{}]",
        "reward.functions=[{name: maths, path: a.py:f}]",
        "reward.functions=[{path: a.py}]",
        "reward.functions=[{path: absent.py:reward}]",
        "reward.functions.0.name=math",
        "eval.suites={}",
        "eval.suites.unknown={}",
        "eval.suites.held={path: a.jsonl, hub: b}",
        "eval.suites={'../../up': {arithmetic: {}}}",
        "eval.suites={'a/b': {arithmetic: {}}}",
        "eval.suites={'': {arithmetic: {}}}",
        "rollout.stop=['']",
        "grpo.num_generations=1",
        "grpo.num_generations=3",
        "trainer.logging_steps=0",
        "grpo.save_steps=0",
        "grpo.temperature=0",
        "grpo.top_p=0",
        "grpo.top_p=2",
        "grpo.top_k=-1",
        "grpo.min_p=1",
        "grpo.max_completion_length=500",
        "grpo={num_generations: 4, per_device_train_batch_size: 8, generation_batch_size: 8, steps_per_generation: 1}",
        "data.max_length=1000",
        "eval.max_tokens=500",
        "rollout.max_length=100",
    ],
)
def test_refused_with_the_key_named(write, override: str) -> None:
    key = override.partition("=")[0]
    text = message(write, override)
    assert any(part in text for part in (key, key.rpartition(".")[2])), text


def test_errors_carry_file_and_line(write) -> None:
    path = write(BASE + "rollout:\n  max_seqences: 3\n")
    with pytest.raises(ConfigError, match=rf"{path}:23: rollout.max_seqences"):
        load_recipe(path)


def test_every_error_is_reported_at_once(write) -> None:
    text = message(write, "trainer.a=1", "trainer.b=2", "rollout.c=3", "seed=-1")
    for key in ("trainer.a", "trainer.b", "rollout.c", "seed"):
        assert key in text
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nname: b\n", ":2: name: given twice"),
        ("name: [\n", "not valid YAML"),
        ("- a\n", "a recipe is a mapping"),
        ("1: a\n", "a key must be text"),
        ("seed: !!bool x\n", ":1: 'x' is no bool"),
        ("seed: !!int ''\n", ":1: '' is no int"),
        ("seed: !!timestamp x\n", ":1: 'x' is no timestamp"),
        ('extends: "a\\0b"\n', "no such recipe"),
        ("name: !!python/object/apply:os.system [echo]\n", "not valid YAML|given|name"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n" + "".join(
            f"d{i}: &d{i} [{', '.join([f'*d{i - 1}' if i else '*c'] * 9)}]\n" for i in range(8)), "too large"),
        ("a: &a [*a]\n", "too large or too deeply|not valid"),
        ("name: \x00\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_yaml_that_is_not_a_recipe(write, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe(write(text))


def test_python_tags_run_nothing(write, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(ConfigError):
        load_recipe(write(f"name: !!python/object/apply:os.mkdir ['{mark}']\n"))
    assert not mark.exists()


@pytest.mark.parametrize("override", ["trainer", "=1", "trainer..x=1", "trainer.learning_rate.x=1", "seed=[", ".=1"])
def test_bad_overrides(write, override: str) -> None:
    assert "override" in message(write, override)


def test_a_section_that_an_override_made_up_is_the_overrides_fault(write) -> None:
    assert message(write, "grpo.foo.bar=1").startswith("override 'grpo.foo.bar=1': grpo.foo: unknown key")


def test_missing_recipe_names_the_nearest(write) -> None:
    path = write(BASE, "demo.yaml")
    with pytest.raises(ConfigError, match=r"no such recipe; did you mean demo.yaml\?"):
        load_recipe(path.with_name("demmo.yaml"))


def test_extends(write) -> None:
    write(BASE, "base.yaml")
    child = write("extends: base.yaml\nname: child\ntrainer: {max_steps: 3}\n", "child.yaml")
    recipe = load_recipe(child)
    assert recipe.name == "child"
    assert recipe.trainer == {"learning_rate": 2e-5, "max_steps": 3}
    bad = write("extends: base.yaml\ntrainer: {max_stepz: 3}\n", "bad.yaml")
    with pytest.raises(ConfigError, match=rf"{bad}:2: trainer.max_stepz.*max_steps"):
        load_recipe(bad)


def test_extends_in_a_circle(write) -> None:
    first = write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match="circle"):
        load_recipe(first)


def test_named_suites_take_the_papers_protocol(write) -> None:
    text = BASE.replace("  suites:\n    held: {arithmetic: {}, limit: 10}\n  max_tokens: 100", "  suites: [aime24, math500]")
    text = text.replace("max_position_embeddings: 512", "max_position_embeddings: 40000")
    recipe = load(write, text=text)
    aime, math = recipe.eval.suites["aime24"], recipe.eval.suites["math500"]
    assert (aime.samples, aime.temperature, aime.top_p, aime.max_tokens) == (32, 1.0, 0.7, 32768)
    assert aime.hub == "HuggingFaceH4/aime_2024"
    assert math.samples == 4
    assert load(write, "eval.samples=2", text=text).eval.suites["aime24"].samples == 2
    both = load(write, "eval.samples=2", "eval.suites={aime24: {samples: 5}}", text=text)
    assert both.eval.suites["aime24"].samples == 5, "the suite's own value wins over eval's"


def test_suites_as_sources(write) -> None:
    recipe = load(write, "eval.suites.gsm8k={path: test.jsonl, limit: 50}", "eval.suites.hub={hub: a/b, split: validation}")
    held, local, hub = (recipe.eval.suites[name].source() for name in ("held", "gsm8k", "hub"))
    assert (held.kind, held.split, held.limit) == ("arithmetic", "eval", 10)
    assert (local.kind, local.path, local.limit, local.columns.problem) == ("jsonl", "test.jsonl", 50, "problem")
    assert (hub.kind, hub.path, hub.split) == ("hub", "a/b", "validation")


def test_a_column_can_be_switched_off(write, tmp_path: Path) -> None:
    from posttrain.data.load import load_source

    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": 7, "problem": "1+1", "answer": "2"}\n{"id": 7, "problem": "1+2", "answer": "3"}\n')
    recipe = load(write, f"data.train={{kind: jsonl, path: {file}, columns: {{id: null}}}}")
    assert [row["id"] for row in load_source(recipe.data.train)] == ["rows.jsonl-000000", "rows.jsonl-000001"]


def test_arithmetic_defaults_are_the_generators() -> None:
    from posttrain.config import ArithmeticConfig
    from posttrain.data.arithmetic import Difficulty

    assert ArithmeticConfig().model_dump() == dataclasses.asdict(Difficulty())


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        ("2e-5", "float", 2e-5),
        (3, "float", 3.0),
        (3.0, "int", 3),
        ("1e3", "int", 1000),
        (None, "int | None", None),
        (True, "bool | None", True),
        ("none", "str | None", "none"),
        ({"a": 1}, "dict | str | None", {"a": 1}),
        (["q"], "None | str | list", ["q"]),
    ],
)
def test_coerce(value, types: str, expected) -> None:
    result = coerce(value, types)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "types"),
    [("x", "float"), (1.5, "int"), (True, "int"), (1, "bool"), (None, "float"), ([1], "str"), ("nan", "float")],
)
def test_coerce_refuses(value, types: str) -> None:
    with pytest.raises(ValueError, match="wrong type|finite|could not convert"):
        coerce(value, types)


def test_trl_arguments_match_the_installed_trl(root: Path) -> None:
    sys.path.insert(0, str(root / "scripts"))
    try:
        import update_trl_arguments
    finally:
        sys.path.pop(0)
    import trl

    assert update_trl_arguments.arguments(trl.SFTConfig) == SFT_ARGUMENTS, "run scripts/update_trl_arguments.py"
    assert update_trl_arguments.arguments(trl.GRPOConfig) == GRPO_ARGUMENTS, "run scripts/update_trl_arguments.py"


def test_owned_arguments_exist_in_trl() -> None:
    assert set(OWNED) <= set(SFT_ARGUMENTS) | set(GRPO_ARGUMENTS)


def test_config_imports_nothing_heavy(root: Path) -> None:
    code = (
        "import sys, posttrain.config; print([m for m in ('torch', 'ray', 'transformers', 'trl', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_every_field_has_a_docstring(root: Path) -> None:
    missing = []
    for path in (root / "posttrain" / "config").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") in ("Section", "Sampling") for base in node.bases):
                for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    if isinstance(field, ast.AnnAssign) and not documented:
                        missing.append(f"{path.name}: {node.name}.{ast.unparse(field.target)}")
    assert missing == []


def test_a_recipe_that_only_evaluates_is_told_to_list_its_stages(write) -> None:
    text = BASE.replace("  train: {kind: arithmetic}\n", "")
    said = message(write, text=text)
    assert "this one has no data to train on" in said and "`stages: [eval, report]`" in said and "data.train" not in said
    assert load(write, "stages=[eval]", text=text).stages == ["eval"]
