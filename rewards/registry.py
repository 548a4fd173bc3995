"""From a recipe's `reward` section to one callable: named rewards and the user's own, weighted, summed, broken down.

rewards = build_rewards({"functions": [{"name": "maths"}, {"path": "my_rewards.py:brevity", "weight": 0.1}]})
rewards(prompts, completions, answer=golds)      # [1.04, None, 0.02]
rewards.score(prompts, completions, answer=golds).parts["brevity"]
"""

from __future__ import annotations

import contextvars
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from posttrain.rewards.errors import RewardError
from posttrain.rewards.format import FormatReward, OverlongPenalty, RepetitionPenalty
from posttrain.rewards.language import LanguageReward
from posttrain.rewards.maths import MathsReward
from posttrain.rewards.pool import VerifierPool

NAMED: dict[str, Callable[..., Any]] = {
    "maths": MathsReward,
    "format": FormatReward,
    "overlong": OverlongPenalty,
    "repetition": RepetitionPenalty,
    "language": LanguageReward,
}


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One function of a set.

    Attributes:
        required: where it gives None, the sample has no reward at all; otherwise None adds nothing.
        limit_s: longest time that a call may take, of a function that has no limits of its own.
    """

    name: str
    function: Callable[..., Sequence[float | None]]
    weight: float = 1.0
    required: bool = False
    limit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scores:
    """`total[i]` the weighted sum of sample i, or None; `parts[name][i]` what each reward gave, unweighted."""

    total: list[float | None]
    parts: dict[str, list[float | None]]


class RewardSet:
    """The weighted sum of rewards, itself with TRL's signature. `breakdown` keeps the parts of the last call.

    A sample is None where a required reward is None (the gold answer could not be read) or where every reward is.
    """

    __name__ = "reward"

    def __init__(self, rewards: Sequence[Reward], pool: VerifierPool | None = None):
        if not rewards:
            raise RewardError("a reward needs at least one function (`reward.functions`)")
        names = [reward.name for reward in rewards]
        if len(set(names)) < len(names):
            raise RewardError(f"two rewards have one name: {', '.join(names)}; give each entry its own `name`")
        self.rewards, self.pool = list(rewards), pool
        self.breakdown: dict[str, list[float | None]] = {}

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        scores = self.score(prompts, completions, **columns)
        self.breakdown = scores.parts
        return scores.total

    def score(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Scores:
        """Totals and parts; unlike a call it keeps nothing, so that threads may share the set.

        Raises:
            RewardError: a reward raised, returned something that is not one number or None a completion, or did not return in
                time.
        """
        parts = {reward.name: _evaluate_in_time(reward, prompts, completions, columns) for reward in self.rewards}
        return Scores(total=[self._total(parts, index) for index in range(len(completions))], parts=parts)

    def _total(self, parts: dict[str, list[float | None]], index: int) -> float | None:
        total, given = 0.0, False
        for reward in self.rewards:
            value = parts[reward.name][index]
            if value is not None:
                total, given = total + reward.weight * value, True
            elif reward.required:
                return None
        return total if given else None

    def counters(self) -> dict[str, int]:
        """The verifier pool's totals (verified, timeouts, ...), empty without one."""
        return self.pool.counters.as_dict() if self.pool else {}

    def close(self) -> None:
        if self.pool:
            self.pool.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _evaluate_in_time(
    reward: Reward, prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, Any]
) -> list[float | None]:
    """`_evaluate`, on a thread that is left behind where it does not come back: nothing can end a call of Python from outside."""
    if reward.limit_s is None:
        return _evaluate(reward, prompts, completions, columns)
    found: queue.SimpleQueue[list[float | None] | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put(_evaluate(reward, prompts, completions, columns))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            found.put(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=f"reward {reward.name}", daemon=True).start()
    try:
        values = found.get(timeout=reward.limit_s)
    except queue.Empty:
        raise RewardError(
            f"reward {reward.name!r} has not returned for {reward.limit_s:.0f} s, given {len(completions)} completions; if it is "
            "only slow, raise grpo.batch_timeout_s"
        ) from None
    if isinstance(values, BaseException):
        raise values
    return values


def _evaluate(reward: Reward, prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, Any]) -> list[float | None]:
    try:
        values = reward.function(prompts=prompts, completions=completions, **columns)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything, or end the process
        where, cause = _first_failing(reward, prompts, completions, columns, error)
        raise RewardError(f"reward {reward.name!r} {_said(cause)}, {where}") from cause
    if not isinstance(values, (list, tuple)) or len(values) != len(completions):
        given = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        raise RewardError(
            f"reward {reward.name!r} returned {given} for {len(completions)} completions; a list of that length is needed"
        )
    return [_number(reward, value, index, completions) for index, value in enumerate(values)]


def _said(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        return f"called sys.exit({code}): a reward must return, and None leaves a sample out"
    return f"raised {type(error).__name__}: {error}"


def _number(reward: Reward, value: Any, index: int, completions: Sequence[Any]) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RewardError(
            f"reward {reward.name!r} returned {value!r}, a finite number or None is needed, {_sample(index, completions)}"
        )
    return float(value)


def _sample(index: int, completions: Sequence[Any]) -> str:
    return f"on sample {index} of {len(completions)}, completion {repr(completions[index])[:300]}"


def _first_failing(reward: Reward, prompts, completions, columns, error: BaseException) -> tuple[str, BaseException]:
    """Which sample a reward fails on: called once more on one sample after another, for the message alone."""
    size = len(completions)
    for index in range(size):
        one = {
            name: [column[index]] if isinstance(column, (list, tuple)) and len(column) == size else column
            for name, column in columns.items()
        }
        try:
            reward.function(prompts=[prompts[index]], completions=[completions[index]], **one)
        except (Exception, SystemExit) as cause:  # noqa: BLE001 - raised by the caller, with the sample's name
            return _sample(index, completions), cause
    return f"on a batch of {size} (on none of its samples alone)", error


def build_rewards(config: Any, *, limit_s: float | None = None) -> RewardSet:
    """The reward set of a recipe's `reward` section, given as an object with attributes or a mapping.

    `functions`: entries of `name` (one of maths, format, overlong, repetition, language) or `path` ("package.module:function",
    "file.py:function"), `weight` (1.0), `args` ({}: keyword arguments of a named reward; for one's own, arguments bound to the
    function, or passed to the class). With both given, `name` is what the breakdown calls it. `required` (bool) sets whether
    None leaves the sample out; by default for `maths` alone. `timeout_s`, `workers`, `memory_mb` and `answer` (fields of
    `AnswerPolicy`) set up the verifier pool.

    Args:
        limit_s: longest time that one call of a function of one's own may take; verifications have their own limit.

    Raises:
        RewardError: an entry that names nothing known, cannot be imported, or does not take its `args`.
    """
    entries = _get(config, "functions") or [{"name": "maths"}]
    pool: VerifierPool | None = None
    rewards = []
    for entry in entries:
        name, path = _get(entry, "name"), _get(entry, "path")
        arguments = dict(_get(entry, "args") or {})
        if path:
            function = _own(str(path), arguments)
            name = name or str(path).rsplit(":", 1)[-1]
        else:
            if name == "maths":
                pool = pool or _pool(config)
                arguments["pool"] = pool
            function = _named(name, arguments)
        weight, required = _get(entry, "weight"), _get(entry, "required")
        rewards.append(
            Reward(
                name=name,
                function=function,
                weight=1.0 if weight is None else float(weight),
                required=bool(getattr(function, "required", False)) if required is None else bool(required),
                limit_s=limit_s if path else None,
            )
        )
    return RewardSet(rewards, pool)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _pool(config: Any) -> VerifierPool:
    given = {name: _get(config, name) for name in ("workers", "timeout_s", "memory_mb")}
    return VerifierPool(**{name: value for name, value in given.items() if value is not None}, policy=_get(config, "answer"))


def _named(name: Any, arguments: dict[str, Any]) -> Any:
    if name not in NAMED:
        near = difflib.get_close_matches(str(name), NAMED, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RewardError(f"unknown reward {name!r}{hint} Known: {', '.join(NAMED)}; your own goes under `path`")
    try:
        return NAMED[name](**arguments)
    except TypeError as error:
        raise RewardError(f"reward {name!r} does not take these `args`: {error}") from error


def _own(path: str, arguments: dict[str, Any]) -> Any:
    """The user's function, or an instance of the user's class, with its arguments bound."""
    module_path, colon, attribute = path.rpartition(":")
    if not colon or not module_path or not attribute:
        raise RewardError(f"reward path {path!r}: write 'package.module:function' or 'file.py:function'")
    module = _load_file(module_path, path) if module_path.endswith(".py") else _import(module_path, path)
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise RewardError(
            f"reward path {path!r}: {module_path} has no function {attribute!r} (it has: {', '.join(functions) or 'none'})"
        )
    try:
        if inspect.isclass(function):
            return function(**arguments)
        if arguments:
            inspect.signature(function).bind_partial(**arguments)
            return functools.partial(function, **arguments)
    except TypeError as error:
        raise RewardError(f"reward path {path!r} does not take these `args`: {error}") from error
    return function


def _import(module_path: str, path: str) -> Any:
    try:
        return importlib.import_module(module_path)
    except (Exception, SystemExit) as error:  # a user's module may raise anything, or end the process
        reason = f"{type(error).__name__}: {error}"
        raise RewardError(f"reward path {path!r}: cannot import {module_path}: {reason}") from error


def _load_file(file: str, path: str) -> Any:
    location = Path(file).expanduser().resolve()
    if not location.is_file():
        raise RewardError(f"reward path {path!r}: there is no file {location}")
    name = f"_posttrain_reward_{location.stem}_{abs(hash(str(location)))}"
    spec = importlib.util.spec_from_file_location(name, location)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything, or end the process
        raise RewardError(f"reward path {path!r}: cannot load {location}: {type(error).__name__}: {error}") from error
    return module
