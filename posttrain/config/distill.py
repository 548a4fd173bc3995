"""The section of a recipe that says who writes the traces, which of them are kept, and how many of each difficulty."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.backend import BackendConfig, Positive
from posttrain.config.base import Section
from posttrain.config.data import DataSource

Share = Annotated[float, Field(ge=0, le=1)]


class TeacherConfig(BackendConfig):
    """The model that writes the traces, and how it is reached: as in `eval.backend`, with the model named here."""

    kind: Literal["engine", "vllm", "openai"] = "openai"
    """openai: any OpenAI-compatible server; vllm: engines that this run starts; engine: posttrain's own, for the SSE-H family."""

    model: str = ""
    """Name that the server knows the teacher by, or a folder or hub id (vllm, engine)."""

    revision: str | None = None
    """Commit or tag of the teacher; recorded with every row, and what is loaded (vllm, engine), its tokenizer too."""

    tokenizer: str | None = None
    """Folder or hub id of the teacher's tokenizer; by default the teacher's own (vllm, engine)."""

    chat_template: str | None = None
    """Replaces the teacher's chat template (vllm, engine)."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the teacher's weights (vllm, engine)."""

    max_sequences: Positive = 256
    """Sequences that an engine decodes at once (vllm, engine)."""

    trust_remote_code: bool = False
    """Run Python code that the teacher's checkpoint brings along. Only for repositories that you have read."""

    @model_validator(mode="after")
    def _named(self) -> TeacherConfig:
        if not self.model:
            raise ValueError("model: name the teacher, as the server knows it (openai) or by its folder or hub id")
        return self


class TraceFilters(Section):
    """Which traces are kept. Whatever these say, an empty, truncated or aborted trace is not."""

    min_reward: float = 1.0
    """Least total of the recipe's rewards (`reward.functions`); 1.0 is a right answer by the maths reward alone."""

    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Fewest tokens of a trace, by the student's tokenizer."""

    max_tokens: Positive | None = None
    """Most tokens of a trace, by the student's tokenizer."""

    language: Literal["latin", "han", "cyrillic", "any"] = "any"
    """Script that the letters of a trace must be in; letters of formulas count for every script."""

    language_share: Share = 0.95
    """Least share of a trace's letters in that script."""

    max_repetition: Share = 0.2
    """Largest share of a trace's 20-word sequences that occurred in it before."""

    thinking: Literal["any", "required", "forbidden"] = "any"
    """Whether a trace must, or must not, open with one closed <think> block and go on behind it."""


class BalanceConfig(Section):
    """How many traces of which difficulty; difficulty is the share of the teacher's own traces that are right."""

    rows: Positive | None = None
    """Rows of the set; by default all that pass the filters."""

    per_problem: Positive = 1
    """Rows of one problem at most."""

    edges: list[Share] = Field(default_factory=lambda: [0.25, 0.5, 0.75, 1.0], min_length=1)
    """Upper ends of the difficulty bins, by pass rate; the last is 1."""

    shares: list[Share] | None = None
    """Share of the rows that each bin should have; equal by default. What a bin cannot fill goes to the others."""

    max_pass_rate: Share = 1.0
    """Problems that the teacher solves more often than this are left out as too easy."""

    prefer: Literal["random", "shortest", "longest"] = "random"
    """Which traces of a problem are taken where it has more than `per_problem`."""

    @model_validator(mode="after")
    def _bins(self) -> BalanceConfig:
        if self.edges != sorted(set(self.edges)) or self.edges[-1] != 1.0 or self.edges[0] == 0.0:
            raise ValueError(f"edges: got {self.edges}; they must rise, start above 0 and end at 1")
        if self.shares is not None and (len(self.shares) != len(self.edges) or sum(self.shares) <= 0):
            raise ValueError(f"shares: got {self.shares}; one share for each of the {len(self.edges)} edges, not all 0")
        return self


class DistillConfig(Section):
    """A teacher's traces: written, verified, filtered, balanced, and saved as the rows that SFT reads."""

    teacher: TeacherConfig | None = None
    """Who writes."""

    problems: DataSource | None = None
    """What is asked: problems with gold answers."""

    samples: Positive = 4
    """Traces a problem; they also measure its difficulty."""

    temperature: Annotated[float, Field(ge=0)] = 0.6
    """Of the teacher's sampling."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Of the teacher's sampling."""

    top_k: Annotated[int, Field(ge=0)] = 0
    """Of the teacher's sampling; 0 is off."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the teacher's sampling; 0 is off."""

    max_tokens: Positive = 32768
    """Tokens of a trace at most; one that reaches them is counted as truncated."""

    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a trace, besides the teacher's end token."""

    seed: Annotated[int, Field(ge=0)] | None = None
    """Seed of the traces; by default the recipe's."""

    system_prompt: str | None = None
    """System message that the teacher gets; by default `data.system_prompt`. The student never sees it."""

    prompt_suffix: str | None = None
    """Text after each problem that the teacher gets; by default `data.prompt_suffix`."""

    give_up_after: Positive | None = 256
    """Stop with an error when this many problems are answered and none is solved: a wrong template, a wrong teacher, wrong gold
    answers. None goes on to the end."""

    filters: TraceFilters = Field(default_factory=TraceFilters)
    """Which traces are kept; may be changed later, without asking the teacher again."""

    balance: BalanceConfig = Field(default_factory=BalanceConfig)
    """How many of which difficulty; may be changed later, without asking the teacher again."""

    rows_per_file: Positive = 5000
    """Rows of one parquet file of the set."""

    @model_validator(mode="after")
    def _samples_cover_rows(self) -> DistillConfig:
        if self.balance.per_problem > self.samples:
            raise ValueError(f"balance.per_problem: {self.balance.per_problem} rows a problem, but only {self.samples} samples")
        return self
