"""The prompts of the GRPO stage on disk: written once by the driver, so that bad data fails before any stage has trained, and a
resume samples from the same prompts whatever happened to the source files meanwhile.

data/grpo/ holds a `datasets` folder (columns `prompt_ids`, `prompt_index`, `prompt` and those that rewards read) and info.json,
the account of what was kept and dropped.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from posttrain.data.prepare import prepare_prompts
from posttrain.errors import DataError
from posttrain.rewards.pool import VerifierPool
from posttrain.run_folder import RunFolder, atomic_directory, last_checkpoint

if TYPE_CHECKING:
    from datasets import Dataset

    from posttrain.config import Recipe

# Columns that no reward reads, and that may be long.
UNUSED_COLUMNS = ("solution",)


def prepare(recipe: Recipe, run: RunFolder) -> str:
    """Make the prompts of the recipe, or keep those that a checkpoint of this run was trained on; returns one line about them.

    Raises:
        PosttrainError: no prompts, prompts without an answer, too long ones, or fewer than one generation batch needs.
    """
    from posttrain.data.tokenizer import load_tokenizer

    folder = run.path / "data" / "grpo"
    if last_checkpoint(run.path / "grpo") is None or not folder.is_dir():
        prompts, info = make_prompts(recipe, load_tokenizer(recipe.model))
        with atomic_directory(folder) as temporary:
            prompts.save_to_disk(temporary)
            (temporary / "info.json").write_text(json.dumps(info, indent=2, default=str), encoding="utf-8")
    info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
    dropped = [f"left out {count} ({reason})" for reason, count in info.get("dropped", {}).items() if count]
    return "; ".join([f"{info['kept']} prompts", *dropped])


def load_prompts(recipe: Recipe, run: RunFolder, tokenizer: Any) -> Dataset:
    """The prompts that the driver prepared, or, where no driver has (tests, notebooks), those of the recipe."""
    from datasets import Dataset

    folder = run.path / "data" / "grpo"
    return Dataset.load_from_disk(str(folder)) if folder.is_dir() else make_prompts(recipe, tokenizer)[0]


def make_prompts(recipe: Recipe, tokenizer: Any) -> tuple[Dataset, dict[str, Any]]:
    """Prompts with their ids, their place in the data set and their text, and the account of them."""
    from datasets import Dataset

    limits = recipe.reward
    with VerifierPool(limits.workers, limits.timeout_s, limits.memory_mb, policy=limits.answer) as pool:
        prepared = prepare_prompts(recipe.data, tokenizer, seed=recipe.seed, suites=recipe.eval.suites, pool=pool)
        rows, unreadable = _readable(recipe, prepared.rows, pool)
    report = dict(prepared.report)
    if unreadable:
        report["kept"] = len(rows)
        report["dropped"] = {**report.get("dropped", {}), "a gold answer that cannot be read": len(unreadable)}
        report["unreadable_gold"] = unreadable
    needed = prompts_per_batch(recipe)
    if len(rows) < needed:
        raise DataError(
            f"{len(rows)} prompts, but one generation batch needs {needed} different ones: give more prompts, "
            "or lower grpo.per_device_train_batch_size or grpo.gradient_accumulation_steps"
        )
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in UNUSED_COLUMNS]
    texts = tokenizer.batch_decode([row["prompt_ids"] for row in rows])
    prompts = [
        {**{name: row.get(name) for name in names}, "prompt_index": index, "prompt": text}
        for index, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]
    for name in prompts[0]:
        _check_column(name, [row[name] for row in prompts], report.get("source", "data"))
    return Dataset.from_list(prompts), report


def _readable(
    recipe: Recipe, rows: list[dict[str, Any]], pool: VerifierPool
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The prompts whose gold answer the reward `maths` can read, and the others as id and answer: they would be sampled from, and
    give no reward, at every epoch."""
    maths = next((function for function in recipe.reward.functions if function.name == "maths"), None)
    column = maths.args.get("column", "answer") if maths else ""
    if maths is None or not rows or column not in rows[0]:
        return rows, []
    verdicts = pool.verify([(row[column], "") for row in rows])
    lost = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict.correct is None]
    kept = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict.correct is not None]
    return kept, [{"id": str(row.get("id", "")), "answer": str(row[column])} for row in lost]


def _check_column(name: str, values: list[Any], source: str) -> None:
    """Raises DataError where a column of the user's cannot be stored, as numbers in one row and text in another."""
    import pyarrow

    try:
        pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, UnicodeError) as error:
        raise DataError(
            f"{source}: the values of its column {name!r} do not fit together ({error}); "
            "give it one kind of value in every row, or remove it"
        ) from error


def prompts_per_batch(recipe: Recipe) -> int:
    """Different prompts that one generation batch of all learners takes, by TRL's rules for its batch arguments."""
    rows = recipe.argument("grpo", "generation_batch_size")
    if rows is None:
        steps = recipe.argument("grpo", "steps_per_generation") or recipe.argument("grpo", "gradient_accumulation_steps")
        rows = recipe.argument("grpo", "per_device_train_batch_size") * recipe.grpo.learners * steps
    return max(1, rows // recipe.argument("grpo", "num_generations"))
