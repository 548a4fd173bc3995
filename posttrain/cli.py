"""The command line: parse, validate, and only then import what is heavy.

posttrain run RECIPE [section.key=value ...] [--resume]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain import __version__
from posttrain.errors import ConfigError, PosttrainError

if TYPE_CHECKING:
    from posttrain.config import Recipe

STAGE_COMMANDS = {
    "run": "run every stage of the recipe in order; finished stages are skipped",
    "distill": "have a teacher write traces of the recipe's problems, and keep the verified ones as rows for SFT",
    "sft": "supervised fine-tuning on the recipe's traces",
    "grpo": "reinforcement learning on the recipe's prompts",
    "eval": "evaluate; model=PATH evaluates any checkpoint",
    "report": "write report.html of a recipe's run, or of a run folder",
}
EPILOG = """\
overrides are written section.key=value, the value as in YAML:
  posttrain sft recipes/sse-h-2b-distill-80k.yaml trainer.learning_rate=2e-5 run_dir=runs/lr-2e-5
"""
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="posttrain",
        description="Distil, improve with GRPO, and evaluate sparse-state linear-attention language models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"posttrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in STAGE_COMMANDS.items():
        command = _recipe_command(commands, name, text)
        if name == "report":
            text = "write it again every S seconds (10) while the run goes on; the open page follows"
            command.add_argument("--watch", nargs="?", type=float, const=10.0, metavar="S", help=text)
        else:
            command.add_argument("--resume", action="store_true", help="continue an unfinished stage at its last checkpoint")
    _recipe_command(commands, "check", "validate a recipe, print it resolved, and estimate memory and tokens; starts nothing")
    _generate_command(commands)
    _serve_command(commands)
    _compare_command(commands)
    _submit_command(commands)
    commands.add_parser("doctor", help="say what this machine has, which backends will be used, and what to install")
    return parser


def _recipe_command(commands: argparse._SubParsersAction, name: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=text, description=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("recipe", help="YAML file, or a run folder (its config.yaml)")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the recipe's")
    return command


def _compare_command(commands: argparse._SubParsersAction) -> None:
    text = "compare two evaluated runs problem by problem: the difference with its interval, and the problems that changed"
    command = commands.add_parser("compare", help=text, description=text)
    for name in ("a", "b"):
        command.add_argument(
            f"run_{name}", metavar=f"RUN_{name.upper()}", help="run folder, or RUN/eval/MODEL for one of its models"
        )


def _generate_command(commands: argparse._SubParsersAction) -> None:
    text = "sample completions from a checkpoint; one JSON line a completion"
    command = commands.add_parser("generate", help=text, description=text)
    command.add_argument("model", help="checkpoint folder or hub id")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="a user message; may be given several times")
    source.add_argument("--file", help="JSON lines with `problem` or `prompt`, and optionally `id` and `seed`")
    command.add_argument("--n", type=int, default=1, help="completions a prompt")
    command.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--top-k", type=int, default=0, help="0 is off")
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--max-tokens", type=int, default=256)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--stop", action="append", default=[], help="string that ends a completion; may be given several times")
    command.add_argument("--system", help="system message")
    command.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    command.add_argument("--tokenizer", help="folder, hub id or arithmetic; by default the checkpoint's")
    command.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    command.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    command.add_argument("--max-sequences", type=int, default=32, help="sequences decoded at once")
    command.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings along")
    command.add_argument("--output", help="file for the JSON lines; by default standard output")


def _serve_command(commands: argparse._SubParsersAction) -> None:
    text = "serve a checkpoint over OpenAI's completions and chat routes, until Ctrl-C"
    command = commands.add_parser("serve", help=text, description=text)
    command.add_argument("model", help="checkpoint folder or hub id")
    command.add_argument("--host", default="127.0.0.1", help="address to bind; by default this machine alone can reach it")
    command.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    command.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable with the bearer token to ask for")
    command.add_argument("--served-model-name", metavar="NAME", help="name that clients ask for; by default MODEL as given")
    command.add_argument("--max-sequences", type=int, default=32, help="sequences decoded at once")
    command.add_argument("--max-queue", type=int, default=1024, help="samples that may wait beside them; more get HTTP 429")
    command.add_argument("--max-length", type=int, help="prompt and completion tokens together; by default the model's context")
    command.add_argument("--memory-fraction", type=float, default=0.85, metavar="F", help="of free GPU memory, for caches")
    command.add_argument("--no-cuda-graphs", dest="cuda_graphs", action="store_false", help="decode without CUDA graphs on a GPU")
    command.add_argument("--tokenizer", help="folder, hub id or arithmetic; by default the checkpoint's")
    command.add_argument("--chat-template", help="Jinja file, or simple, chatml, tagged; by default the tokenizer's")
    command.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    command.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda where there is one")
    command.add_argument("--shutdown-timeout", type=int, default=30, metavar="S", help="seconds that running requests get to end")
    command.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings along")


def _submit_command(commands: argparse._SubParsersAction) -> None:
    text = "run a recipe as a job of a Ray cluster, and follow its log; Ctrl-C asks whether to stop it"
    command = commands.add_parser(
        "submit", help=text, description=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("recipe", nargs="?", help="YAML file, or a run folder (its config.yaml)")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the recipe's")
    command.add_argument("--address", help="the head's dashboard, HOST:8265; by default RAY_ADDRESS, then this machine")
    command.add_argument("--stage", default="run", choices=[name for name in STAGE_COMMANDS if name != "report"])
    command.add_argument("--resume", action="store_true", help="continue an unfinished stage at its last checkpoint")
    command.add_argument(
        "--working-dir", metavar="DIR", help="folder to upload, from which the recipe's relative paths are meant"
    )
    command.add_argument("--installed", action="store_true", help="use the posttrain of the nodes, rather than this checkout")
    command.add_argument("--no-wait", action="store_true", help="print the job's id and leave it running")
    command.add_argument("--stop", metavar="JOB", help="stop this job: it saves, then ends")


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    # argparse leaves over what stands behind an option (`sft RECIPE --resume a.b=1`).
    unknown = [text for text in rest if "overrides" not in args or text.startswith("-") or "=" not in text]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    try:
        return _dispatch(args)
    except PosttrainError as error:
        print(f"posttrain: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        hint = "; continue with --resume" if args.command in STAGE_COMMANDS and args.command != "report" else ""
        print(f"\nposttrain: interrupted{hint}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; devnull keeps the interpreter from complaining at exit.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return 1


def _dispatch(args: argparse.Namespace) -> int:
    if args.command == "doctor":
        from posttrain.doctor import doctor

        return doctor()
    if args.command == "generate":
        from posttrain.rollout.cli import generate_command

        return generate_command(args)
    if args.command == "serve":
        from posttrain.serve.cli import serve_command

        return serve_command(args)
    if args.command == "compare":
        from posttrain.evaluation.compare import compare_command

        return compare_command(args.run_a, args.run_b)
    if args.command == "submit":
        from posttrain.runtime.submit import submit_command

        if (args.recipe is None) == (args.stop is None):
            raise ConfigError("submit: give either a recipe to run, or --stop JOB")
        return submit_command(args, lambda: read_recipe(args.stage, args.recipe, args.overrides))
    recipe = read_recipe(args.command, args.recipe, args.overrides)
    if args.command == "check":
        from posttrain.check import check

        return check(recipe, args.overrides)
    if args.command == "report" and args.watch is not None:
        from posttrain.report import watch_report

        if args.watch <= 0:
            raise ConfigError(f"--watch {args.watch:g}: give a number of seconds above 0")
        watch_report(recipe, args.watch)
        return 0
    stages: list[str] = [*recipe.stages] if args.command == "run" else [args.command]
    # Imported last: everything that can be wrong with the input is known by now.
    from posttrain.runtime.stages import run_stages

    return run_stages(recipe, stages, resume=getattr(args, "resume", False))


def read_recipe(command: str, path: str, overrides: list[str]) -> Recipe:
    """The recipe of a command, with its overrides; the stage that the command names is checked even if `stages` leaves it out.

    Raises:
        ConfigError: see `posttrain.config.load_recipe`.
    """
    from posttrain.config import STAGES, load_recipe

    overrides = list(overrides)
    if os.path.isdir(path):  # pathlib's raises for names that are too long
        folder, path = path, str(Path(path) / "config.yaml")
        if not Path(path).is_file():
            raise ConfigError(f"{folder} is a folder without config.yaml; give a recipe (YAML) or a run folder")
        if not any(text.startswith("run_dir=") for text in overrides):
            overrides.append(f"run_dir={folder}")
    elif command == "report" and not path.endswith((".yaml", ".yml")) and not os.path.exists(path):
        raise ConfigError(f"{path}: no such run folder; give the folder of a run (runs/NAME by default), or its recipe")
    overrides, model = _expand_model(overrides)
    recipe = load_recipe(path, overrides)
    evaluates = command == "eval" or not set(recipe.stages) - {"eval", "report"}
    if model is not None and evaluates and not any(text.startswith("run_dir=") for text in overrides):
        # Results of different checkpoints must not meet in one folder.
        overrides.append(f"run_dir={Path(recipe.run_dir) / model_slug(model)}")
        recipe = load_recipe(path, overrides)
    if command in STAGES and command not in recipe.stages:
        stages = [stage for stage in STAGES if stage in recipe.stages or stage == command]
        recipe = load_recipe(path, [*overrides, f"stages=[{', '.join(stages)}]"])
    return recipe


def model_slug(path: str) -> str:
    """A folder name for a checkpoint's path: its last three parts."""
    parts = [part for part in re.split(r"[/\\]+", path.strip()) if part not in ("", ".", "..")]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts[-3:])) or "model"


def _expand_model(overrides: list[str]) -> tuple[list[str], str | None]:
    """`model=PATH` is short for model.path=PATH and no new model, in every command that reads a recipe."""
    expanded: list[str] = []
    model = None
    for text in overrides:
        if text.startswith("model="):
            model = text.removeprefix("model=").strip()
            if not model:
                raise ConfigError("override 'model=': give the path or hub id of a checkpoint")
            expanded += [f"model.path={model}", "model.init=null"]
        else:
            expanded.append(text)
    return expanded, model
