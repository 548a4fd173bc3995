"""The command line: what it starts, what it prints, and its exit codes."""

import json
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from posttrain import cli
from posttrain.errors import ConfigError, PosttrainError

RECIPE = """\
name: tiny
run_dir: {run_dir}
model: {{tokenizer: arithmetic, init: {{hidden_size: 32, num_attention_heads: 2, vocab_size: 256, max_position_embeddings: 512}}}}
data: {{train: {{kind: arithmetic}}, max_length: 256, max_prompt_length: 64}}
grpo: {{num_generations: 4, max_completion_length: 100}}
eval: {{suites: {{held: {{arithmetic: {{}}}}}}, max_tokens: 100}}
stages: [sft, grpo, eval]
"""
HEAVY = ("torch", "ray", "transformers", "trl", "datasets")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format(run_dir=tmp_path / "run"))
    return str(path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list:
    """Calls of `run_stages`, which does nothing."""
    calls: list = []

    def run_stages(recipe, stages, *, resume):
        calls.append((recipe, stages, resume))
        return 0

    monkeypatch.setitem(sys.modules, "posttrain.runtime.stages", types.SimpleNamespace(run_stages=run_stages))
    return calls


@pytest.mark.parametrize("arguments", [["--help"], ["check", "RECIPE"], ["sft", "--help"], ["--version"]], ids=" ".join)
def test_light_commands_import_nothing_heavy_and_are_quick(root: Path, recipe: str, arguments: list[str]) -> None:
    arguments = [recipe if text == "RECIPE" else text for text in arguments]
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print('HEAVY', [m for m in {HEAVY} if m in sys.modules]))\n"
        "from posttrain.cli import main\n"
        f"sys.exit(main({arguments!r}))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    # CPU time, for a busy machine must not fail the test.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_run_takes_the_recipes_stages(recipe: str, started: list) -> None:
    assert cli.main(["run", recipe]) == 0
    ((read, stages, resume),) = started
    assert (read.name, stages, resume) == ("tiny", ["sft", "grpo", "eval"], False)


@pytest.mark.parametrize("order", [["--resume", "{r}", "seed=3"], ["{r}", "seed=3", "--resume"], ["{r}", "--resume", "seed=3"]])
def test_options_and_overrides_in_any_order(recipe: str, started: list, order: list[str]) -> None:
    assert cli.main(["sft", *(text.format(r=recipe) for text in order)]) == 0
    ((read, stages, resume),) = started
    assert (read.seed, stages, resume) == (3, ["sft"], True)


def test_a_stage_that_the_recipe_leaves_out_is_checked(recipe: str, started: list) -> None:
    assert cli.main(["report", recipe]) == 0
    assert started[0][1] == ["report"]
    assert started[0][0].stages == ["sft", "grpo", "eval", "report"]
    assert cli.main(["eval", recipe, "stages=[sft]", "eval.suites={}"]) == 2


def test_unknown_options_are_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for extra in (["--fast"], ["doctor-x"], ["--n=3"]):
        if extra == ["doctor-x"]:
            assert cli.main(["sft", recipe, *extra]) == 2
            assert "section.key=value" in capsys.readouterr().err
        else:
            with pytest.raises(SystemExit) as caught:
                cli.main(["sft", recipe, *extra])
            assert caught.value.code == 2


def test_mistakes_are_one_message_and_exit_2(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", recipe, "trainer.lerning_rate=1"]) == 2
    streams = capsys.readouterr()
    assert "did you mean learning_rate?" in streams.err
    assert "Traceback" not in streams.err
    assert cli.main(["run", "nowhere.yaml"]) == 2


def test_exit_codes_of_stages(recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def use(function) -> None:
        monkeypatch.setitem(sys.modules, "posttrain.runtime.stages", types.SimpleNamespace(run_stages=function))

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    def failed(*_, **__):
        error = PosttrainError("no luck")
        error.exit_code = 1
        raise error

    use(interrupted)
    assert cli.main(["sft", recipe]) == 130
    assert "--resume" in capsys.readouterr().err
    use(failed)
    assert cli.main(["sft", recipe]) == 1
    assert "no luck" in capsys.readouterr().err
    use(lambda *_, **__: 130)
    assert cli.main(["sft", recipe]) == 130


def test_eval_of_a_checkpoint_gets_its_own_folder(recipe: str, started: list, tmp_path: Path) -> None:
    assert cli.main(["eval", recipe, "model=runs/x/grpo/checkpoint-230"]) == 0
    read = started[0][0]
    assert (read.model.path, read.model.init) == ("runs/x/grpo/checkpoint-230", None)
    assert read.run_dir == str(tmp_path / "run" / "x-grpo-checkpoint-230")
    assert cli.main(["eval", recipe, "model=org/name", "run_dir=here"]) == 0
    assert started[1][0].run_dir == "here"
    assert cli.main(["eval", recipe, "model="]) == 2


@pytest.mark.parametrize("command", ["run", "sft", "grpo"])
def test_a_model_on_the_command_line_is_where_training_starts(recipe: str, started: list, tmp_path: Path, command: str) -> None:
    assert cli.main([command, recipe, "model=org/name"]) == 0
    read = started[0][0]
    assert (read.model.path, read.model.init) == ("org/name", None)
    assert read.run_dir == str(tmp_path / "run"), "the run is the recipe's: its folder says what it began from"
    assert cli.main(["check", recipe, "model=org/name"]) == 0, "check takes what run takes"


def test_a_report_of_no_folder_speaks_of_folders(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "runs/nowhere"]) == 2
    assert "no such run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "slug"),
    [
        ("runs/x/grpo/checkpoint-230/", "x-grpo-checkpoint-230"),
        ("org/name", "org-name"),
        ("../a b", "a-b"),
        ("./", "model"),
    ],
)
def test_model_slug(path: str, slug: str) -> None:
    assert cli.model_slug(path) == slug


def test_a_run_folder_stands_for_its_recipe(recipe: str, started: list, tmp_path: Path) -> None:
    from posttrain.config import dump_recipe, load_recipe

    folder = tmp_path / "moved"
    folder.mkdir()
    with pytest.raises(ConfigError, match="without config.yaml"):
        cli.read_recipe("report", str(folder), [])
    (folder / "config.yaml").write_text(dump_recipe(load_recipe(recipe)))
    assert cli.main(["report", str(folder)]) == 0
    assert started[0][0].run_dir == str(folder)


def test_check_prints_the_resolved_recipe_and_starts_nothing(
    recipe: str, started: list, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", recipe, "trainer.max_steps=10"]) == 0
    out = capsys.readouterr().out
    for expected in ("max_steps: 10", "run_dir:", "parameters", "memory a process", "generation memory", "tokens a step"):
        assert expected in out
    assert started == []
    assert not Path(load_run_dir(out)).exists()


def load_run_dir(out: str) -> str:
    return next(line.split(": ")[1] for line in out.splitlines() if line.startswith("run_dir:"))


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for expected in ("python", "torch", "trl", "sse kernels", "generator", "the main job can run here"):
        assert expected in out
    from posttrain import doctor

    versions = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: {"trl": None, "transformers": "4.0"}.get(name, versions(name)))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "the main job cannot run here: trl" in out
    assert 'pip install "trl' in out
    assert "4.0, outside" in out


def test_doctor_asks_for_what_the_package_does(root: Path) -> None:
    import tomllib

    from packaging.requirements import Requirement

    from posttrain.doctor import PACKAGES

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    samples = [Version(f"{major}.{minor}.5") for major in range(30) for minor in range(70)]
    wanted = {}
    for requirement in map(Requirement, listed):
        wanted.setdefault(requirement.name, []).append(requirement.specifier)
    for package in PACKAGES:
        if package.name == "triton":
            continue  # torch brings it along
        ours = list(SpecifierSet(package.versions).filter(samples))
        assert ours and ours == list(wanted[package.name][0].filter(samples)), package.name


def test_doctor_knows_bad_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain import doctor

    monkeypatch.setattr(doctor, "installed", {"triton": "3.6.0", "numpy": "2.4.1"}.get)
    assert "numpy<2.4" in doctor.conflicts()[0].advice
    monkeypatch.setattr(doctor, "installed", {"triton": "3.7.1", "numpy": "2.4.1"}.get)
    assert doctor.conflicts() == []


# ---- generate ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from posttrain.data.tokenizer import arithmetic_tokenizer
    from posttrain.models.loading import new_model

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = arithmetic_tokenizer()
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2, "adapter_rank": 4}
    fields |= {"gate_rank": 4, "layer_types": ["sse", "full_attention"], "vocab_size": len(tokenizer), "chunk_size": 8}
    new_model({**fields, "max_position_embeddings": 64}, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_generate_a_prompt(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(checkpoint), "--prompt", "1+2=?", "--n", "3", "--max-tokens", "6", "--seed", "5"]
    assert cli.main(command) == 0
    first = lines(capsys.readouterr().out)
    assert [row["sample"] for row in first] == [0, 1, 2]
    assert all(row["prompt"] == "1+2=?" and 1 <= row["tokens"] <= 6 and row["seed"] == 5 and row["logprob"] < 0 for row in first)
    assert cli.main(command) == 0
    assert lines(capsys.readouterr().out) == first, "the seed fixes the samples"


def test_generate_a_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"id": "a", "problem": "1+2=?"}\n\n{"prompt": "3*4=?", "seed": 9}\n')
    assert cli.main(["generate", str(checkpoint), "--file", str(file), "--max-tokens", "4", "--output", str(out)]) == 0
    rows = lines(out.read_text())
    assert {(row["id"], row["seed"]) for row in rows} == {("a", 0), ("2", 9)}
    assert lines(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "1+1=?", "--max-tokens", "1000"], "the model's context of 64"),
        (["--prompt", "1+1=?", "--temperature", "-1"], "temperature"),
        (["--prompt", "1+1=?", "--n", "0"], "n=0"),
        (["--file", "absent.jsonl"], "no such file"),
        (["--prompt", "1+1=?", "--output", "/nowhere/x"], "--output"),
        (["--prompt", "1+1=?", "--max-sequences", "0"], "--max-sequences 0"),
        (["--prompt", "1+1=?", "--stop", ""], "--stop"),
        (["--prompt", "1+1=?", "--device", "nonsense"], "--device nonsense"),
        (["--prompt", "1+1=?", "--device", "meta"], "--device meta"),
        (["--prompt", "1\udcff"], "no text"),
        (["--prompt", "1<|end|>"], "special token"),
    ],
)
def test_generate_mistakes(checkpoint: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(checkpoint), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no prompt"),
        ("{", ":1: not valid JSON"),
        ('{"text": "x"}', "no text"),
        ('["x"]', "a JSON object was expected"),
        ("[" * 100_000, ":1: cannot be read as JSON"),
        ('{"prompt": "\\ud800"}', "no text"),
        ('{"prompt": "x", "seed": "y"}', "seed"),
    ],
)
def test_generate_bad_files(
    checkpoint: Path, tmp_path: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert cli.main(["generate", str(checkpoint), "--file", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_check_refuses_a_checkpoint_that_run_would_refuse(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for named in (tmp_path / "absent", "runs/x/grpo/checkpoint-230", "a/b/c"):
        assert cli.main(["check", recipe, f"model={named}"]) == 2
        assert f"checkpoint {named}: no such folder" in capsys.readouterr().err
    teacher = ["distill.problems={kind: arithmetic}", "distill.teacher.kind=engine", "distill.teacher.model=a/b/c"]
    assert cli.main(["check", recipe, "stages=[distill]", *teacher]) == 2
    assert "checkpoint a/b/c: no such folder" in capsys.readouterr().err
    assert cli.main(["check", recipe, "stages=[eval]", "eval.suites=[math500]", "eval.models=[runs/x/later]"]) == 0
    assert "checkpoint runs/x/later: no such folder" in capsys.readouterr().out, "another run may make it"
    backend = "eval.backend={kind: openai, base_url: 'http://localhost:1/v1'}"
    assert cli.main(["check", recipe, "stages=[eval]", "eval.suites=[math500]", "model=a/b/c", backend]) == 0, "a server's name"


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "", "/dev/null"])
def test_paths_that_cannot_be_recipes(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", path]) == 2
    assert "posttrain: " in capsys.readouterr().err


def test_generate_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(tmp_path / "absent"), "--prompt", "x"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_generate_files_that_are_no_text(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("a.jsonl", b'{"prompt": "\xe9"}'), ("b.gz", b"no gzip")):
        (tmp_path / name).write_bytes(content)
        assert cli.main(["generate", str(checkpoint), "--file", str(tmp_path / name)]) == 2
        assert "cannot be read" in capsys.readouterr().err


def test_generate_takes_no_more_memory_than_the_samples_need(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(checkpoint), "--prompt", "1+1=?", "--max-tokens", "2", "--max-sequences", str(10**9)]
    assert cli.main(command) == 0
    assert len(lines(capsys.readouterr().out)) == 1
