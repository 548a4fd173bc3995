"""Sections of a recipe that say what the model is and what it reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Section
from posttrain.models.sizes import PAPER_SIZES

ARITHMETIC = "arithmetic"


class ModelConfig(Section):
    """The model that the first stage starts from: a checkpoint (`path`) or a new one (`init`)."""

    path: str | None = None
    """Folder or hub id of a Hugging Face checkpoint."""

    revision: str | None = None
    """Commit or tag of a hub checkpoint, and of the tokenizer that lies beside it."""

    init: dict[str, Any] | None = None
    """Fields of `SSEHConfig` for a model with random weights, drawn from the recipe's seed."""

    tokenizer: str | None = None
    """Folder or hub id of a tokenizer, or "arithmetic" for the built-in one; by default the checkpoint's own."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which the weights are loaded and trained (`trainer.bf16: true` adds autocast on float32 weights)."""

    size: str | None = None
    """Named size (sse-h-2b, transformer-2b, ...) that `posttrain check` assumes while the checkpoint isn't on this machine."""

    trust_remote_code: bool = False
    """Run Python code that the checkpoint or tokenizer brings along. Only for repositories that you have read."""

    chat_template: str | None = None
    """Replaces the tokenizer's chat template: simple, chatml, tagged, or Jinja text."""

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if self.path is not None and self.init is not None:
            raise ValueError("both `path` and `init` are given; a model starts from a checkpoint or from new weights, not both")
        if self.path is None and self.init is None:
            raise ValueError("neither `path` (a checkpoint) nor `init` (fields of a new model) is given")
        if self.size is not None and self.size not in PAPER_SIZES:
            raise ValueError(f"size {self.size!r} is unknown; known: {', '.join(PAPER_SIZES)}")
        if self.init is not None and self.tokenizer is None:
            raise ValueError("a new model (`init`) needs `tokenizer`: a folder, a hub id, or arithmetic")
        return self


class ArithmeticConfig(Section):
    """Difficulty of the procedural arithmetic problems (`posttrain.data.arithmetic.Difficulty`).

    How many: the source's or suite's `limit`; which: its `seed`. Training and evaluation problems never coincide.
    """

    min_operations: Annotated[int, Field(ge=1, le=12)] = 2
    """Fewest operations in a problem."""

    max_operations: Annotated[int, Field(ge=1, le=12)] = 3
    """Most operations in a problem."""

    max_operand: Annotated[int, Field(ge=2)] = 20
    """Largest number written in a problem."""

    max_multiplier: Annotated[int, Field(ge=2)] = 5
    """In a product one side is at most this; a divisor is at most this."""

    max_value: Annotated[int, Field(ge=2)] = 99
    """No intermediate result is above this in absolute value."""

    operators: Annotated[str, Field(pattern=r"^[-+*/]+$")] = "+-*"
    """Any of + - * /; a quotient is always exact."""

    bracket_fraction: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Share of problems with brackets."""

    word_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of word problems; the rest are expressions without brackets."""

    allow_negative: bool = False
    """Whether intermediate results may be below zero (never in word problems)."""

    teacher_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the steps in `solution` that come out wrong, as in the traces of an unverified teacher; `answer` stays right."""

    @model_validator(mode="after")
    def _possible(self) -> ArithmeticConfig:
        if self.min_operations > self.max_operations:
            raise ValueError(f"min_operations {self.min_operations} is above max_operations {self.max_operations}")
        if self.max_value < self.max_operand:
            raise ValueError(f"max_value {self.max_value} is below max_operand {self.max_operand}")
        if self.bracket_fraction + self.word_fraction > 1 + 1e-9:
            raise ValueError(f"bracket_fraction {self.bracket_fraction} and word_fraction {self.word_fraction} exceed 1 together")
        return self


class ColumnMap(Section):
    """Which columns of the file hold what; null where a column of that name means something else."""

    problem: str = "problem"
    """The problem's text."""

    answer: str = "answer"
    """The gold answer."""

    solution: str | None = "solution"
    """The reasoning trace to imitate; SFT needs it, GRPO and evaluation don't."""

    id: str | None = "id"
    """A row's name, unique; rows without this column, and all rows where it is null, are numbered."""

    source: str | None = "source"
    """Where the row comes from; the file's name by default."""

    level: str | None = "level"
    """Difficulty; optional."""

    subject: str | None = "subject"
    """Field of mathematics, for evaluation's tables by subject; optional."""


class FilterConfig(Section):
    """Which rows stay."""

    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Fewest tokens of the solution."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of the solution."""

    verified: bool = False
    """Keep only rows whose solution reaches the gold answer, by math-verify."""

    correct_column: str | None = None
    """Keep only rows where this column is true (data sets that bring their own verdict)."""


class DataSource(Section):
    """One set of problems: a JSONL file (plain or .gz), a `datasets` hub id, or the procedural generator."""

    kind: Literal["jsonl", "hub", "arithmetic"] = "jsonl"
    """Where the rows come from."""

    path: str | None = None
    """File (jsonl) or data set id (hub)."""

    name: str | None = None
    """Configuration of a hub data set."""

    revision: str | None = None
    """Commit or tag of a hub data set."""

    split: str = "train"
    """Split of a hub data set; for arithmetic, train or eval."""

    columns: ColumnMap = Field(default_factory=ColumnMap)
    """Names of the columns."""

    limit: Annotated[int, Field(ge=1)] | None = None
    """Keep this many rows at most; for arithmetic, make this many (10,000 by default)."""

    shuffle: bool = False
    """Shuffle before `limit` cuts, so that it keeps a sample of all the rows."""

    seed: Annotated[int, Field(ge=0)] | None = None
    """Seed of the shuffle, and of the arithmetic problems; by default the recipe's."""

    solution_suffix: str | None = None
    """Added to a solution that has no \\boxed{}, with {answer} replaced by the gold answer."""

    answer_after: str | None = None
    """The gold answer is what follows this mark in the answer column (GSM8K: "####")."""

    filters: FilterConfig = Field(default_factory=FilterConfig)
    """Which rows stay."""

    arithmetic: ArithmeticConfig | None = None
    """Difficulty, where kind is arithmetic."""

    @model_validator(mode="before")
    @classmethod
    def _kind_from_content(cls, given: Any) -> Any:
        if isinstance(given, dict) and "kind" not in given and given.get("arithmetic") is not None and "path" not in given:
            return {**given, "kind": "arithmetic"}
        return given

    @model_validator(mode="after")
    def _complete(self) -> DataSource:
        if self.kind == ARITHMETIC:
            if self.path is not None:
                raise ValueError("kind: arithmetic makes its rows itself, and takes no `path`")
            if self.arithmetic is None:
                self.arithmetic = ArithmeticConfig()
        else:
            if self.path is None:
                raise ValueError(f"kind: {self.kind} needs `path` ({'a file' if self.kind == 'jsonl' else 'a data set id'})")
            if self.arithmetic is not None:
                raise ValueError(f"`arithmetic` goes with kind: arithmetic, but kind is {self.kind}")
        return self


class DataConfig(Section):
    """Training data and how a row becomes token ids."""

    train: DataSource | None = None
    """Problems with solutions, for SFT."""

    prompts: DataSource | None = None
    """Problems for GRPO; by default those of `train`."""

    decontaminate: list[str] = Field(default_factory=list)
    """Evaluation suites (by name) or JSONL files: training rows that share their 13-grams are dropped."""

    max_length: Annotated[int, Field(ge=2)] = 1024
    """Tokens of a packed training row; a sample longer than this is dropped."""

    max_prompt_length: Annotated[int, Field(ge=1)] = 512
    """Tokens of a prompt (GRPO and evaluation); a longer one is an error, or dropped in GRPO, as `overlong_prompt` says."""

    overlong_prompt: Literal["error", "drop"] = "error"
    """What GRPO does with a prompt longer than `max_prompt_length`; evaluation leaves nothing out."""

    system_prompt: str | None = None
    """System message before each problem."""

    prompt_suffix: str = ""
    """Text after each problem, such as "Put the final answer in \\boxed{}." """
