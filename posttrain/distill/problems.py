"""The problems that the teacher is asked, written once a run as data/distill/problems.jsonl with the account of those left out.

Everything that can be known before the teacher is asked is checked here: an evaluation problem, a problem that stands there
twice, or a gold answer that cannot be read would cost traces and bring no row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.decontaminate import Decontaminator, normalise
from posttrain.errors import DataError
from posttrain.run_folder import RunFolder, atomic_directory

if TYPE_CHECKING:
    from posttrain.config import Recipe

Row = dict[str, Any]

COLUMNS = ("id", "problem", "answer", "source", "level")
FOLDER = Path("data") / "distill"


def prepare(recipe: Recipe, run: RunFolder) -> str:
    """Write the problems of the recipe, or keep those that this run has; returns one line about them.

    Raises:
        PosttrainError: the source cannot be read, or leaves nothing to ask.
    """
    folder = run.path / FOLDER
    if not folder.is_dir():
        from posttrain.data.load import load_source
        from posttrain.data.prepare import evaluation_problems
        from posttrain.evaluation.grading import verifier_pool

        assert recipe.distill.problems is not None, "checked by the recipe"
        _check_teacher(recipe)
        report: Row = {}
        rows = load_source(recipe.distill.problems, seed=recipe.seed, report=report)
        suites = evaluation_problems(recipe.data.decontaminate, recipe.eval.suites)
        with verifier_pool(recipe.reward) as pool:
            clean, dropped, listed = screen(rows, suites, pool)
        clean, unfit = _fitting(clean, recipe)
        info = {
            "source": report["source"],
            "revision": recipe.distill.problems.revision,
            "read": report["read"],
            "dropped": {**report["dropped"], **dropped, **unfit},
            "unreadable_gold": listed,
            "kept": len(clean),
        }
        if not clean:
            raise DataError(f"distill.problems: no problem is left to ask; {summary(info)}")
        with atomic_directory(folder) as target:
            with open(target / "problems.jsonl", "w", encoding="utf-8") as file:
                file.writelines(json.dumps({name: row.get(name) for name in COLUMNS}, ensure_ascii=False) + "\n" for row in clean)
            (target / "info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")
    return summary(read_info(run))


def _check_teacher(recipe: Recipe) -> None:
    """Before a data set is fetched: whether the teacher's checkpoint can be had at all.

    Raises:
        CheckpointError: it cannot.
    """
    from posttrain.distill.teacher import teacher_of
    from posttrain.models.hub import check_available

    teacher = teacher_of(recipe)
    if teacher.kind != "openai":
        check_available(str(teacher.model), what="teacher", revision=teacher.revision)


def screen(rows: Iterable[Row], suites: dict[str, list[str]], pool: Any) -> tuple[list[Row], dict[str, int], list[str]]:
    """Rows worth asking, {reason: rows left out}, and the ids whose gold answer cannot be read."""
    dropped: Counter[str] = Counter()
    decontaminator = Decontaminator(suites)
    fresh: list[Row] = []
    seen: set[str] = set()
    for row in rows:
        match = decontaminator.check(row)
        # Signs count: "x+1" and "x-1" are two problems with the same words.
        text = " ".join(row["problem"].split())
        if match is not None:
            dropped[f"repeats {match.suite}"] += 1
        elif text in seen:
            dropped["the same problem again"] += 1
        elif not normalise(text):
            dropped["a problem without words or numbers"] += 1
        else:
            seen.add(text)
            fresh.append(row)
    verdicts = pool.verify([(row["answer"], "") for row in fresh])
    unreadable = [row["id"] for row, verdict in zip(fresh, verdicts, strict=True) if verdict.correct is None]
    if unreadable:
        dropped["a gold answer that cannot be read"] = len(unreadable)
    left_out = set(unreadable)
    return [row for row in fresh if row["id"] not in left_out], dict(dropped), unreadable


def _fitting(rows: list[Row], recipe: Recipe) -> tuple[list[Row], dict[str, int]]:
    """Rows that the teacher's own tokenizer takes, where it is here (a server keeps its to itself).

    Raises:
        DataError: a prompt is too long, or holds a special token, and `data.overlong_prompt` is not "drop".
    """
    from posttrain.distill.prompts import prompt_of
    from posttrain.distill.teacher import teacher_of, teacher_tokenizer

    if teacher_of(recipe).kind == "openai":
        return rows, {}
    from posttrain.data.chat import conversation_ids

    tokenizer, limit = teacher_tokenizer(recipe), recipe.data.max_prompt_length
    kept = []
    for row in rows:
        try:
            conversation_ids(tokenizer, prompt_of(row, (0,), recipe).messages, name=row["id"], max_prompt_length=limit)
        except DataError:
            if recipe.data.overlong_prompt != "drop":
                raise
        else:
            kept.append(row)
    reason = f"a prompt above max_prompt_length {limit}, or with a special token"
    return kept, {reason: len(rows) - len(kept)} if len(kept) < len(rows) else {}


def read_problems(run: RunFolder) -> list[Row]:
    """The problems of the run, in their order.

    Raises:
        DataError: they were not prepared.
    """
    path = run.path / FOLDER / "problems.jsonl"
    if not path.is_file():
        raise DataError(f"{path} is missing: it is made before the stage starts; run the distill stage again with --resume")
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_info(run: RunFolder) -> dict[str, Any]:
    """The account of the problems."""
    return json.loads((run.path / FOLDER / "info.json").read_text(encoding="utf-8"))


def summary(info: dict[str, Any]) -> str:
    """The account in one line."""
    parts = [f"{info['kept']} of {info['read']} problems of {info['source']}"]
    return "; ".join([*parts, *(f"left out {count} ({reason})" for reason, count in info["dropped"].items() if count)])
