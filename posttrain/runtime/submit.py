"""`posttrain submit`: a recipe as a job of a running Ray cluster, through its Job API.

    posttrain submit recipes/x.yaml --address HEAD:8265 run_dir=/shared/runs/x      # uploads, starts, follows the log
    posttrain submit --stop JOB --address HEAD:8265                                 # as Ctrl-C in a terminal: saves, then ends

What is uploaded: the resolved recipe, reward files that it names, the files of --working-dir, and from a checkout the package
itself (an installed posttrain must be installed on the nodes too). The job runs `posttrain STAGE recipe.yaml` on the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.config import Recipe, dump_recipe
from posttrain.errors import ConfigError, PosttrainError
from posttrain.runtime.session import RAY_ENVIRONMENT

RECIPE_FILE = "recipe.yaml"
# Ray would kill a job 3 s after it was asked to stop; a step has to end and a checkpoint to be written.
STOP_WAIT_S = 900
# What a working folder has that no job needs.
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.egg-info")
MOST_BYTES = 200 * 2**20
EXIT_CODES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 143}


class JobError(PosttrainError):
    """The cluster's job server cannot be reached, or refuses."""

    exit_code = 1


def submit_command(args: argparse.Namespace, read: Callable[[], Recipe]) -> int:
    """Submit, follow or stop a job; returns 0 when it succeeded, 1 when it failed, 143 when it was stopped.

    Args:
        read: gives the recipe.

    Raises:
        ConfigError: the recipe cannot run as a job.
        JobError: the cluster cannot be reached or refuses.
    """
    if args.stop is not None:
        return stop(client_of(args.address), args.stop)
    recipe = read()
    check_recipe(recipe)
    client = client_of(args.address)
    with tempfile.TemporaryDirectory(prefix="posttrain-job-") as folder:
        pack(recipe, Path(folder), working_dir=args.working_dir, with_package=not args.installed)
        job = _call(
            lambda: client.submit_job(
                entrypoint=entrypoint(args.stage, resume=args.resume),
                runtime_env={"working_dir": folder, "env_vars": job_environment()},
                metadata={"recipe": recipe.name, "run_dir": recipe.run_dir},
            )
        )
    print(f"job {job}: {args.stage} of {recipe.name}, run folder {recipe.run_dir}", file=sys.stderr)
    if args.no_wait:
        print(job)
        return 0
    return follow(client, job, args.address)


def check_recipe(recipe: Recipe) -> None:
    """Raise ConfigError for what means something else on the cluster than here."""
    if not os.path.isabs(recipe.run_dir):
        raise ConfigError(
            f"run_dir: {recipe.run_dir!r} would lie in a temporary folder of the job; give an absolute path on a file system "
            "that all nodes see, run_dir=/shared/runs/NAME"
        )


def entrypoint(stage: str, *, resume: bool) -> str:
    """The job's shell command; `exec`, so that the stop signal reaches posttrain itself."""
    return "exec " + shlex.join(["python", "-m", "posttrain", stage, RECIPE_FILE, *(["--resume"] if resume else [])])


def job_environment() -> dict[str, str]:
    return {
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
        "PYTHONUNBUFFERED": "1",
        # The job's folder holds the package where a checkout was submitted; elsewhere the installed one is found.
        "PYTHONPATH": ".",
    }


def pack(recipe: Recipe, folder: Path, *, working_dir: str | None, with_package: bool) -> None:
    """Fill `folder` with what the job needs.

    Raises:
        ConfigError: the working folder is not there, or too big to upload.
    """
    if working_dir is not None:
        if not Path(working_dir).is_dir():
            raise ConfigError(f"--working-dir: no such folder {working_dir!r}")
        shutil.copytree(working_dir, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
    package = Path(__file__).parents[1]
    if with_package and (package.parent / "pyproject.toml").is_file():
        # kernels/, models/ and rewards/ are links in a checkout: followed here, for Ray's archive may not.
        shutil.copytree(package, folder / "posttrain", ignore=LEFT_OUT, dirs_exist_ok=True)
    for function in recipe.reward.functions:
        file = Path((function.path or "").rpartition(":")[0])
        if file.suffix == ".py" and not file.is_absolute() and ".." not in file.parts:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / file)
    (folder / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise ConfigError(
            f"--working-dir: {size / 2**20:.0f} MB to upload, at most {MOST_BYTES // 2**20} are sensible; put data on a file "
            "system that all nodes see, and name it by its absolute path"
        )


def client_of(address: str | None) -> Any:
    """A client of the job server at `address` (HOST:8265, or a URL; by default RAY_ADDRESS, then this machine's).

    Raises:
        JobError: Ray's job client is not installed, or nobody answers.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import aiohttp  # noqa: F401 - what ray[default] brings and plain ray lacks
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise JobError(f"jobs need more of Ray than is installed here ({error}): pip install 'posttrain[cluster]'") from error
    address = address or os.environ.get("RAY_ADDRESS") or "127.0.0.1:8265"
    url = address if "://" in address else f"http://{address}"
    return _call(lambda: JobSubmissionClient(url), f"{url}: ")


def follow(client: Any, job: str, address: str | None = None) -> int:
    """Print the job's log until it ends; Ctrl-C asks whether to stop it, or only to look away."""
    while True:
        try:
            asyncio.run(_tail(client, job))
            break
        except KeyboardInterrupt:
            if _wants_stop(job):
                return stop(client, job)
            again = f" --address {address}" if address else ""
            print(f"job {job} goes on; posttrain submit --stop {job}{again} ends it", file=sys.stderr)
            return 0
    return _ended(client, job)


def stop(client: Any, job: str) -> int:
    """Ask a job to save and end, and wait until it has."""
    _call(lambda: client.stop_job(job))
    print(f"job {job} was asked to stop: it ends after the step, with a checkpoint", file=sys.stderr)
    return follow(client, job)


def _ended(client: Any, job: str) -> int:
    info = _call(lambda: client.get_job_info(job))
    status = str(getattr(info.status, "value", info.status))
    reason = str(info.message or "").partition(", last available logs")[0] if status == "FAILED" else ""
    print(f"job {job}: {status.lower()}" + (f": {reason}" if reason else ""), file=sys.stderr)
    return EXIT_CODES.get(status, 1)


def _wants_stop(job: str) -> bool:
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"\nstop job {job} (it saves first)? [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


async def _tail(client: Any, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def _call(ask: Callable[[], Any], prefix: str = "") -> Any:
    """What the job server answers; its refusals in words."""
    from ray.exceptions import RayError

    try:
        return ask()
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise JobError(
            f"{prefix}{str(error).strip() or type(error).__name__}\nIs the head's dashboard running and reachable, and are the "
            "token (RAY_AUTH_TOKEN, or ~/.ray/auth_token) and RAY_AUTH_MODE the cluster's?"
        ) from error
