"""Imports point one way: kernels <- models <- posttrain -> rewards."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = ("kernels", "models", "rewards")
# What each part may import of this project, beside itself.
ALLOWED = {
    "kernels": {"posttrain.kernels"},
    "models": {"posttrain.kernels", "posttrain.models", "posttrain.errors", "posttrain.types"},
    "rewards": {"posttrain.rewards", "posttrain.errors", "posttrain.types"},
}
# Sections of a recipe are plain pydantic: parts that are configured by one may name its type.
TYPES_ONLY = {"rewards": {"posttrain.config"}}


def python_files(folder: Path) -> Iterator[Path]:
    """Every module once: the links inside posttrain/ are not followed."""
    for root, directories, files in os.walk(folder):
        directories[:] = [
            name for name in directories if not (Path(root) / name).is_symlink() and not name.startswith((".", "__pycache"))
        ]
        yield from (Path(root) / name for name in sorted(files) if name.endswith(".py"))


def imported(path: Path, package: str) -> Iterator[tuple[str, int, bool]]:
    """(module, line, only for type checkers) of every import, those inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, id(node) in typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno, id(node) in typing_only) for alias in node.names)


def package_of(root: Path, path: Path) -> str:
    parts = path.relative_to(root).parent.parts
    return ".".join(parts if parts[0] == "posttrain" else ("posttrain", *parts))


def inside(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


@pytest.mark.parametrize("part", TOP)
def test_no_arrow_points_back(root: Path, part: str) -> None:
    wrong = [
        f"{path.relative_to(root)}:{line}: {module}"
        for path in python_files(root / part)
        for module, line, typing_only in imported(path, package_of(root, path))
        if module.split(".")[0] == "posttrain"
        and not inside(module, ALLOWED[part] | (TYPES_ONLY.get(part, set()) if typing_only else set()))
    ]
    assert wrong == []


def test_nothing_imports_the_bare_folders(root: Path) -> None:
    wrong = [
        f"{path.relative_to(root)}:{line}: {module}"
        for folder in ("posttrain", "scripts", "tests", *TOP)
        for path in python_files(root / folder)
        for module, line, _ in imported(path, package_of(root, path))
        if module.split(".")[0] in TOP
    ]
    assert wrong == []


def test_the_walk_sees_what_it_should(tmp_path: Path) -> None:
    (tmp_path / "kernels" / "sse").mkdir(parents=True)
    path = tmp_path / "kernels" / "sse" / "a.py"
    path.write_text(
        "import models.x\nfrom posttrain.models import y\nfrom . import b\nfrom ..other import c\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from posttrain.config import d\n"
        "def f():\n    import posttrain.models.z\n"
    )
    found = {module: typing_only for module, _, typing_only in imported(path, package_of(tmp_path, path))}
    assert set(found) == {
        "models.x", "posttrain.models.y", "posttrain.kernels.sse.b", "posttrain.kernels.other.c",
        "typing.TYPE_CHECKING", "posttrain.config.d", "posttrain.models.z",
    }  # fmt: skip
    assert found["posttrain.config.d"]
    assert not found["posttrain.models.z"]


@pytest.mark.parametrize("part", TOP)
def test_the_layout(root: Path, part: str) -> None:
    link = root / "posttrain" / part
    assert link.is_symlink()
    assert os.readlink(link) == f"../{part}"
    assert not (root / part / "__init__.py").exists(), "a top-level package would shadow Hugging Face's `kernels`"
