"""The four folders import as `posttrain.*` however posttrain is installed, and shadow nothing."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

# Imports every part, and says where it came from.
PROBE = """
import importlib.util, posttrain, posttrain.kernels.sse, posttrain.models.sse_h, posttrain.rewards.extract
import transformers, trl
for module in (posttrain, posttrain.kernels.sse, posttrain.models.sse_h, posttrain.rewards.extract):
    print(module.__name__, module.__file__)
for name in ("kernels", "models", "rewards"):
    spec = importlib.util.find_spec(name)
    print(name, spec.origin if spec else None)
"""
IGNORED = ("build", "dist", "runs", "benchmarks", "docs", "tests", "__pycache__", ".*", "*.egg-info")


def run(*command: object, cwd: Path, timeout: int = 300, **env: str) -> str:
    """Output of a command; PYTHONPATH and the like of this process do not leak into it."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    clean |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **env}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def places(output: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in output.splitlines() if " " in line)


def pip(*arguments: object, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd, timeout=600)


def isolation() -> list[str]:
    """Build with the installed setuptools where it is new enough, else in an environment that pip makes."""
    version = importlib.metadata.version("setuptools") if importlib.util.find_spec("setuptools") else "0"
    return ["--no-build-isolation"] if int(version.split(".")[0]) >= 77 else []


@pytest.fixture(scope="module")
def checkout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with their links, so that builds leave nothing behind."""
    target = tmp_path_factory.mktemp("checkout") / "posttrain-src"
    shutil.copytree(root, target, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))
    for name in ("README.md", "LICENSE"):
        assert (target / name).is_file()
    return target


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Python of a new environment without posttrain that sees this one's packages."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    # A path entry's own .pth files are not read, so an editable posttrain of this environment stays out.
    Path(site, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_plain_checkout(root: Path) -> None:
    found = places(run(sys.executable, "-c", PROBE, cwd=root))
    assert found["posttrain.kernels.sse"] == str(root / "posttrain" / "kernels" / "sse" / "__init__.py")
    assert found["kernels"] == "None" or "site-packages" in found["kernels"], "the folder itself must be no package"
    assert "usage: posttrain" in run(sys.executable, "-m", "posttrain", "--help", cwd=root)


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", *isolation(), "--wheel-dir", folder, checkout, cwd=folder)
    (path,) = folder.glob("posttrain-*.whl")
    return path


@pytest.mark.slow
def test_wheel_contents(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"posttrain"}, "nothing beside posttrain at the top"
    sources = {
        f"posttrain/{path.relative_to(root)}"
        for part in ("kernels", "models", "rewards")
        for path in (root / part).rglob("*.py")
    }  # fmt: skip
    sources |= {str(path.relative_to(root)) for path in (root / "posttrain").glob("*/*.py") if not path.parent.is_symlink()}
    assert sources <= set(names)
    for path in (root / "posttrain").rglob("*.html"):
        assert str(path.relative_to(root)) in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("entry_points.txt") for name in names)
    assert not any("test" in name.split("/")[1] for name in names if "/" in name)
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata


@pytest.mark.slow
def test_wheel_installed(wheel: Path, environment: Path, tmp_path: Path) -> None:
    pip("--python", environment, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    found = places(run(environment, "-c", PROBE, cwd=tmp_path))
    assert found["posttrain.kernels.sse"].startswith(str(environment.parents[1]))
    assert found["models"] == found["rewards"] == "None"
    assert "usage: posttrain" in run(environment.parent / "posttrain", "--help", cwd=tmp_path)


@pytest.mark.slow
def test_editable_install(checkout: Path, environment: Path, tmp_path: Path) -> None:
    pip("--python", environment, "install", "--quiet", "--no-deps", *isolation(), "--editable", checkout, cwd=tmp_path)
    found = places(run(environment, "-c", PROBE, cwd=tmp_path))
    assert found["posttrain.models.sse_h"].startswith(str(checkout)), "edits of the checkout take effect"
    assert found["models"] == found["rewards"] == "None", "from elsewhere the bare folders are not importable"
    assert "usage: posttrain" in run(environment.parent / "posttrain", "--help", cwd=tmp_path)
    run(environment, "-c", PROBE, cwd=checkout)


@pytest.mark.slow
def test_ray_worker_with_the_checkout_as_working_dir(checkout: Path, environment: Path, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys, ray\n"
        "ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False,\n"
        "         runtime_env={'working_dir': sys.argv[1]})\n"
        "@ray.remote\n"
        "def probe():\n"
        "    import posttrain.kernels.sse, posttrain.models.sse_h, posttrain.rewards.extract, transformers, trl\n"
        "    return posttrain.kernels.sse.__file__\n"
        "print('file', ray.get(probe.remote(), timeout=240))\n"
    )
    found = places(run(environment, script, checkout, cwd=tmp_path, RAY_AUTH_MODE="disabled"))
    assert "working_dir_files" in found["file"], found


@pytest.mark.slow
def test_hugging_face_kernels_package_absent_and_present(root: Path, environment: Path, tmp_path: Path) -> None:
    """`import transformers, trl` from the repository root, where a folder `kernels` lies in the way."""
    if importlib.util.find_spec("kernels.layer") is None:
        found = places(run(environment, "-c", PROBE, cwd=root))
        assert found["kernels"] == "None"
    target = tmp_path / "hub-kernels"
    pip("install", "--quiet", "--no-deps", "--target", target, "kernels", cwd=tmp_path)
    code = PROBE + "\nfrom transformers.utils import is_kernels_available\nprint('available', is_kernels_available())"
    found = places(run(environment, "-c", code, cwd=root, PYTHONPATH=str(target)))
    assert found["kernels"].startswith(str(target))
    assert found["posttrain.kernels.sse"].startswith(str(root))


@pytest.mark.slow
def test_pyright_resolves_the_parts(checkout: Path) -> None:
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    file = checkout / "posttrain" / "typed_probe.py"
    file.write_text(
        "from posttrain.kernels.sse import sse\nfrom posttrain.models.sizes import resolve\n"
        "from posttrain.rewards.extract import find_answer\n"
        "reveal_type(resolve)\n"
    )
    try:
        out = run(sys.executable, "-m", "pyright", "--pythonpath", sys.executable, file, cwd=checkout)
    finally:
        file.unlink()
    assert "0 errors" in out
    assert 'Type of "resolve" is "(' in out
    assert "could not be resolved" not in out
