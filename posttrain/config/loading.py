"""YAML file and overrides -> Recipe, with errors that name the file, the line, the key and the nearest allowed one."""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from posttrain.config.recipe import Recipe
from posttrain.config.trl import ArgumentError, check_argument, nearest
from posttrain.errors import ConfigError

Key = tuple[str | int, ...]
Marks = dict[Key, str]

MAX_NODES, MAX_DEPTH, MAX_EXTENDS = 100_000, 40, 10


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 2e-5 as a number, as YAML 1.2 does (1.1 makes a string of it)."""


_Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe, what it extends, and the overrides (`section.key=value`, the value in YAML).

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, or a value is not allowed.
    """
    content, marks = _read(Path(path), ())
    for text in overrides:
        _override(content, marks, text)
    return recipe_from_dict(content, marks=marks, origin=str(path))


def recipe_from_dict(content: dict[str, Any], *, marks: Marks | None = None, origin: str = "recipe") -> Recipe:
    """Validate a recipe that is already a dict, such as one that was sent to a worker.

    Raises:
        ConfigError: see `load_recipe`.
    """
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        lines = _describe(error, content, marks or {}, origin)
    raise ConfigError("\n".join(lines))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load_recipe` reads it back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=130)


def _read(path: Path, chain: tuple[Path, ...]) -> tuple[dict[str, Any], Marks]:
    """Return content and positions of a file, merged over the file that it `extends`."""
    if "\0" in str(path):
        raise ConfigError(f"{str(path)!r}: no such recipe")
    if path.resolve() in chain or len(chain) > MAX_EXTENDS:
        raise ConfigError(f"{path}: `extends` goes round in a circle: {' -> '.join(str(p) for p in (*chain, path))}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such recipe{nearest(path.name, near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a recipe: {error}") from None
    content, marks = _parse(text, str(path))
    parent = content.pop("extends", None)
    if parent is None:
        return content, marks
    if not isinstance(parent, str):
        raise ConfigError(f"{marks[('extends',)]}: extends: got {parent!r}, but it must be the path of a recipe")
    base, base_marks = _read(path.parent / parent, (*chain, path.resolve()))
    return merge(base, content), base_marks | marks


def _parse(text: str, origin: str) -> tuple[dict[str, Any], Marks]:
    marks: Marks = {}
    try:
        content = _load(text, origin, (), marks)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply for a recipe") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigError(f"{origin}: a recipe is a mapping of sections, got {type(content).__name__}")
    return content, marks


def _load(text: str, origin: str, key: Key, marks: Marks) -> Any:
    loader = _Loader(text)
    loader.name = origin
    try:
        node = loader.get_single_node()
        return None if node is None else _construct(loader, node, key, marks, [0])
    finally:
        loader.dispose()


def _construct(loader: _Loader, node: yaml.Node, key: Key, marks: Marks, count: list[int]) -> Any:
    """Like SafeLoader's constructor, but remembers lines, refuses duplicate keys, and is bounded where aliases explode."""
    where = f"{loader.name}:{node.start_mark.line + 1}"
    count[0] += 1
    if count[0] > MAX_NODES or len(key) > MAX_DEPTH:
        raise ConfigError(f"{where}: too large or too deeply nested for a recipe")
    marks.setdefault(key, where)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*key, i), marks, count) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        try:
            return loader.construct_object(node, deep=True)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        except (LookupError, AttributeError):  # PyYAML on `!!bool x`, `!!int ''`, `!!timestamp x`
            raise ConfigError(f"{where}: {node.value!r} is no {node.tag.rpartition(':')[2]}") from None
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = f"{loader.name}:{key_node.start_mark.line + 1}"
        name = loader.construct_object(key_node, deep=True) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(name, str):
            raise ConfigError(f"{line}: {_dotted(key)}: a key must be text, got {key_node.value!r}; quote it")
        if name in result:
            raise ConfigError(f"{line}: {_dotted((*key, name))}: given twice in this file")
        marks[(*key, name)] = line
        result[name] = _construct(loader, value_node, (*key, name), marks, count)
    return result


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, section by section."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _override(content: dict[str, Any], marks: Marks, text: str) -> None:
    name, equals, raw = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {text!r}: write section.key=value, for example trainer.learning_rate=2e-5")
    try:
        value = _load(raw, f"override {text!r}", tuple(keys), {})
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"override {text!r}: the value is not valid YAML; quote it") from None
    target: Any = content
    for depth, key in enumerate(keys[:-1]):
        if isinstance(target, list):
            target = target[_position(target, key, text)]
            continue
        if target.get(key) is None:
            target[key] = {}
            marks[_key(".".join(keys[: depth + 1]))] = f"override {text!r}"
        target = target[key]
        if not isinstance(target, dict | list):
            raise ConfigError(f"override {text!r}: {'.'.join(keys[: depth + 1])} is a value ({target!r}), not a section")
    if isinstance(target, list):
        target[_position(target, keys[-1], text)] = value
    else:
        target[keys[-1]] = value
    marks[_key(name.strip())] = f"override {text!r}"


def _position(items: list[Any], key: str, text: str) -> int:
    if not key.isdigit() or int(key) >= len(items):
        raise ConfigError(f"override {text!r}: {key!r} must be a position in a list of {len(items)}, from 0")
    return int(key)


def _describe(error: ValidationError, content: dict[str, Any], marks: Marks, origin: str) -> list[str]:
    """One line an error: where, which key, what is wrong."""
    lines = []
    for item in error.errors(include_url=False):
        key: Key = tuple(item["loc"])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ArgumentError):
            lines += _bad_arguments(key, content, marks, origin)
        elif item["type"] == "extra_forbidden":
            section = _section(key[:-1])
            allowed = list(section.model_fields) if section else []
            close = nearest(str(key[-1]), allowed) or f"; allowed here: {', '.join(allowed)}"
            lines.append(f"{_where(marks, key, origin)}: {_dotted(key)}: unknown key{close}")
        elif item["type"] == "missing":
            lines.append(f"{_where(marks, key, origin)}: {_dotted(key)}: missing, but needed")
        elif item["type"] == "value_error" and not key:
            for line in str(cause).splitlines():
                named = _key(line.partition(":")[0])
                lines.append(f"{_where(marks, named, origin)}: {line}")
        elif item["type"] == "value_error":
            lines.append(f"{_where(marks, key, origin)}: {_dotted(key)}: {cause}")
        else:
            lines.append(f"{_where(marks, key, origin)}: {_dotted(key)}: got {item['input']!r}; {_lower(item['msg'])}")
    return lines


def _bad_arguments(key: Key, content: dict[str, Any], marks: Marks, origin: str) -> list[str]:
    """Every bad TRL argument of a section, where validation stopped at the first."""
    from posttrain.config.sections import GrpoConfig

    section = str(key[0])
    own = tuple(GrpoConfig.model_fields) if section == "grpo" else ()
    lines = []
    for name, value in content[section].items():
        try:
            if name not in own:
                check_argument(section, name, value, own)
        except ArgumentError as error:
            lines.append(f"{_where(marks, (section, name), origin)}: {section}.{name}: {error}")
    return lines


def _where(marks: Marks, key: Key, origin: str) -> str:
    """Position of the key, or of the nearest section around it."""
    while key and key not in marks:
        key = key[:-1]
    return marks.get(key, origin) if key else origin


def _section(key: Key) -> type[BaseModel] | None:
    """The section class at a place in the recipe."""
    current: Any = Recipe
    for part in key:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            current = field.annotation if field else None
        elif typing.get_origin(current) in (list, dict):
            current = typing.get_args(current)[-1]
        current = _without_none(current)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return parts[0] if len(parts) == 1 else annotation
    return annotation


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key) or "recipe"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _key(dotted: str) -> Key:
    return tuple(int(part) if part.isdigit() else part for part in dotted.split("."))
