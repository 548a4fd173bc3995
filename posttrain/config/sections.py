"""The other sections of a recipe: generation, rewards, GRPO, evaluation, Ray, DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import ItemsView, KeysView
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from posttrain.config.answers import AnswerConfig
from posttrain.config.backend import BackendConfig
from posttrain.config.base import Section
from posttrain.config.data import ArithmeticConfig, ColumnMap, DataSource
from posttrain.config.grpo_parts import CurriculumConfig, LoraConfig
from posttrain.config.suites import SUITES
from posttrain.config.trl import check_arguments

Positive = Annotated[int, Field(ge=1)]


class RolloutConfig(Section):
    """The generator, in GRPO and in evaluation."""

    max_sequences: Positive = 64
    """Sequences that are decoded at once; memory a sequence is what `posttrain check` prints."""

    max_length: Positive | None = None
    """Context, prompt and completion together; by default what the stage needs."""

    max_prefill_tokens: Positive = 8192
    """Prompt tokens that one step of the generator reads at most."""

    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of the GPU memory that is free when the generator starts that its states, keys and values may take; a learner in the
    same process needs the rest. Where not all sequences fit at full length, the youngest wait in host memory."""

    cuda_graphs: bool = True
    """Decode by CUDA graphs on a GPU, sampling included, in models whose layers allow it (SSE with GLA decay, attention)."""

    exact: bool = False
    """Strict mode: generator and learner compute the same bits, so that a token's log-probability is the learner's, whatever
    shared its batch (the mismatch is 0). For bfloat16 models of "sse" and attention layers, no adapters, on a GPU; slower."""

    unfinished: Literal["continue", "recompute", "restart", "finish"] = "continue"
    """What becomes of samples that have begun when new weights arrive (split placement): they go on from the old weights' state,
    go on from a state that the new weights compute from their tokens, begin again, or are finished first."""

    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a completion, besides the end token."""

    router_replay: bool = True
    """Give the learner the partitions that the generator chose, so that both compute the same policy."""

    def engine_options(self) -> dict[str, Any]:
        """What every generator of the recipe is made with, by the names of its arguments."""
        names = ("max_prefill_tokens", "memory_fraction", "cuda_graphs", "exact", "unfinished")
        return {name: getattr(self, name) for name in names}


class RewardFunction(Section):
    """One reward: a built-in one by name, or `file.py:function` by path, with TRL's signature."""

    name: str | None = None
    """Name of a built-in reward."""

    path: str | None = None
    """`file.py:function` or `package.module:function`."""

    weight: float = 1.0
    """Factor in the sum."""

    required: bool | None = None
    """Where this reward gives None, the sample has no reward at all; by default so for `maths` alone."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward."""

    @model_validator(mode="after")
    def _one_origin(self) -> RewardFunction:
        if (self.name is None) == (self.path is None):
            raise ValueError("give either `name` (a built-in reward) or `path` (file.py:function)")
        if self.path is not None and ":" not in self.path:
            raise ValueError(f"path {self.path!r} names no function; write file.py:function")
        return self


class RewardConfig(Section):
    """What a completion earns, and the limits of the verifier's processes."""

    functions: list[RewardFunction] = Field(default_factory=lambda: [RewardFunction(name="maths")], min_length=1)
    """Rewards that are summed with their weights."""

    answer: AnswerConfig = Field(default_factory=AnswerConfig)
    """Where an answer stands in an output, and what equals it."""

    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Wall-clock limit of one verification; its process is killed then, and the answer counts as wrong."""

    workers: Positive = 2
    """Verifier processes; in split placement of each of the `actors`."""

    actors: Positive = 1
    """Processes of split placement that score groups, each with verifiers of its own, spread over the cluster's nodes."""

    memory_mb: Annotated[int, Field(ge=64)] = 2048
    """Memory that a verification may take beyond what its process needs to start."""


class GrpoConfig(Section):
    """TRL's GRPO arguments by their own names, and the options of posttrain's learner listed here.

    Reads like a mapping too (`grpo["num_generations"]`, `dict(grpo)`); `arguments` is the TRL part alone.
    """

    model_config = ConfigDict(extra="allow")

    truncated_completions: Literal["mask", "penalise", "keep"] = "mask"
    """Completions cut at the length limit: left out of the loss, given `truncation_penalty`, or treated like any other."""

    truncation_penalty: float = -1.0
    """Reward of a truncated completion where they are penalised."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group, or of the group's other completions."""

    max_extra_groups: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling: groups that a batch may sample beyond its own, in place of those that teach nothing because all their
    rewards are equal or none is trained on. Once they are used up, such groups stay in the batch. 0 trains on whatever comes."""

    extra_groups_ahead: Annotated[int, Field(ge=0)] = 0
    """How many of them are sampled together with the batch, before anybody knows whether they are needed (over-sampling)."""

    curriculum: CurriculumConfig | None = None
    """How often prompts come; without it each comes once a pass over the data."""

    lora: LoraConfig | None = None
    """Adapters; without, every weight is trained."""

    placement: Literal["colocated", "split"] = "colocated"
    """Where completions come from: the learner's own process, or generators in processes of their own that run ahead of it."""

    learners: Positive = 1
    """Training processes, which share every batch; in colocated placement each of them generates its part."""

    generators: Positive = 1
    """Generators in split placement."""

    weights: Literal["broadcast", "object_store"] = "broadcast"
    """How weights reach the generators: NCCL (gloo between CPUs, CUDA IPC within a GPU), or through Ray's object store where the
    machines cannot connect to each other."""

    cpus_per_generator: Annotated[float, Field(gt=0)] = 1
    """CPU cores that each of them holds."""

    gpus_per_generator: Annotated[float, Field(ge=0)] | None = None
    """GPUs that each of them holds; by default 1 where the cluster has any, else 0."""

    generator_failures: Annotated[int, Field(ge=0)] = 3
    """Generators that may die and be replaced in one go of the stage."""

    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Batches that generators may run ahead: no token is older than this many policy versions. 0 is strictly on-policy."""

    batch_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time without any finished group before the stage ends, naming who is late."""

    @model_validator(mode="before")
    @classmethod
    def _check_arguments(cls, given: Any) -> Any:
        return check_arguments("grpo", given, own=tuple(cls.model_fields)) if isinstance(given, dict) else given

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for TRL's GRPOConfig, without ours."""
        return dict(self.model_extra or {})

    def _all(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields} | self.arguments

    def keys(self) -> KeysView[str]:
        return self._all().keys()

    def items(self) -> ItemsView[str, Any]:
        return self._all().items()

    def get(self, key: str, default: Any = None) -> Any:
        return self._all().get(key, default)

    def __getitem__(self, key: str) -> Any:
        return self._all()[key]

    def __contains__(self, key: str) -> bool:
        return key in self._all()


class Sampling(Section):
    """How completions are drawn in evaluation; unset values fall back (suite -> eval -> the suite's protocol)."""

    samples: Positive | None = None
    """Completions a problem; 32 for AIME and AMC, 4 for the other named suites, 1 for files."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """1.0 by default; 0 is greedy."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """0.7 by default."""

    max_tokens: Positive | None = None
    """Tokens of a completion at most; 32768 by default."""


class SuiteConfig(Sampling):
    """One evaluation set: a known name needs nothing else; any other name needs path, hub or arithmetic."""

    path: str | None = None
    """JSONL file (plain or .gz)."""

    hub: str | None = None
    """`datasets` id."""

    name: str | None = None
    """Configuration of the hub data set."""

    split: str | None = None
    """Split of the hub data set (test by default), or eval for arithmetic."""

    arithmetic: ArithmeticConfig | None = None
    """Held-out problems of the procedural generator."""

    columns: ColumnMap = Field(default_factory=ColumnMap)
    """Names of the columns."""

    answer_after: str | None = None
    """The gold answer is what follows this mark in the answer column."""

    limit: Positive | None = None
    """This many problems; for arithmetic, 200 by default."""

    data_seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the arithmetic problems. Never the recipe's: runs with different seeds answer the same problems."""

    @model_validator(mode="after")
    def _one_origin(self) -> SuiteConfig:
        known = next((suite for suite in SUITES.values() if suite.hub == self.hub), None)
        if self.path is not None and known is not None:
            # A local file replaces a known set, and has columns of its own.
            self.hub = self.name = self.split = None
            if self.columns == ColumnMap(**known.columns):
                self.columns, self.answer_after = ColumnMap(), None
        given = [key for key in ("path", "hub", "arithmetic") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given together; problems come from one place")
        if self.split is None:
            self.split = "test" if self.arithmetic is None else "eval"
        if self.arithmetic is not None and self.limit is None:
            self.limit = 200
        return self

    def source(self) -> DataSource:
        """The problems, as `posttrain.data.load_source` reads them."""
        split = self.split or "test"
        common: dict[str, Any] = {"limit": self.limit, "seed": self.data_seed}
        if self.arithmetic is not None:
            return DataSource(kind="arithmetic", arithmetic=self.arithmetic, split=split, **common)
        common |= {"columns": self.columns, "answer_after": self.answer_after}
        if self.path is not None:
            return DataSource(kind="jsonl", path=self.path, **common)
        return DataSource(kind="hub", path=self.hub, name=self.name, split=split, **common)


DEFAULT_SAMPLING = {"samples": 1, "temperature": 1.0, "top_p": 0.7, "max_tokens": 32768}


class EvalConfig(Sampling):
    """What is evaluated, on what, and how."""

    models: list[str] = Field(default_factory=list)
    """base, sft, grpo (what the stages of this recipe make) or paths; by default all that the recipe's stages make."""

    suites: dict[str, SuiteConfig] = Field(default_factory=dict)
    """Evaluation sets by name; a list of known names will do."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the samples."""

    max_sequences: Positive | None = None
    """Sequences that an engine decodes at once; by default `rollout.max_sequences`."""

    backend: BackendConfig = Field(default_factory=BackendConfig)
    """What writes the completions."""

    @model_validator(mode="before")
    @classmethod
    def _names_to_suites(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("suites"), list):
            return {**given, "suites": {str(name): {} for name in given["suites"]}}
        return given

    @model_validator(mode="after")
    def _resolve(self) -> EvalConfig:
        for name, suite in self.suites.items():
            # It names a folder under eval/<model>/.
            if not re.fullmatch(r"[^./\\\0][^/\\\0]{0,99}", name):
                raise ValueError(f"suites.{name}: the name becomes a folder's: 1 to 100 characters, no slash, no dot in front")
            known = SUITES.get(name)
            if suite.path is None and suite.hub is None and suite.arithmetic is None and known is None:
                raise ValueError(
                    f"suites.{name}: not a known suite ({', '.join(SUITES)}); give its `path`, `hub` or `arithmetic`"
                )
            if known is not None and suite.path is None and suite.arithmetic is None and suite.hub in (None, known.hub):
                suite.hub, suite.name, suite.split, suite.answer_after = known.hub, known.name, known.split, known.answer_after
                suite.columns = ColumnMap(**known.columns) if suite.columns == ColumnMap() else suite.columns
            protocol = {"samples": known.samples} if known else {}
            for key, default in DEFAULT_SAMPLING.items():
                if getattr(suite, key) is None:
                    value = getattr(self, key)
                    setattr(suite, key, protocol.get(key, default) if value is None else value)
        return self


class RayConfig(Section):
    """Where the processes run."""

    address: str | None = None
    """Ray cluster: none starts one on this machine, auto joins the running one, or host:port."""

    num_workers: Positive = 1
    """Training processes."""

    cpus_per_worker: Annotated[float, Field(gt=0)] = 1
    """CPU cores that each of them holds."""

    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    """GPUs that each of them holds; by default 1 where the machine has a GPU, else 0."""

    num_cpus: Positive | None = None
    """CPU cores that a cluster started here offers; by default those of the machine, or as many more as the workers ask for."""

    object_store_memory_mb: Annotated[int, Field(ge=80)] | None = None
    """Size of the object store of a cluster started here; 200 by default, for only small messages go through it."""

    max_failures: Annotated[int, Field(ge=0)] = 0
    """Restarts of a stage whose worker died, each from its last checkpoint."""

    listen: Literal["loopback", "network"] = "loopback"
    """Where the processes of a cluster started here listen: this machine alone reaches them, or its network does."""

    dashboard: bool = False
    """Start Ray's dashboard (3 s and 200 MB more)."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the workers."""


class DeepSpeedConfig(Section):
    """ZeRO under the trainers."""

    stage: Literal[0, 1, 2, 3] = 2
    """0 replicates everything; 1 shards the optimizer, 2 gradients too, 3 weights too."""

    offload_optimizer: bool = False
    """Keep the optimizer's state in main memory."""

    offload_parameters: bool = False
    """Keep weights in main memory (stage 3)."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Further DeepSpeed settings, merged over what posttrain writes."""

    @model_validator(mode="after")
    def _offload_needs_sharding(self) -> DeepSpeedConfig:
        if self.offload_optimizer and self.stage == 0:
            raise ValueError("offload_optimizer needs stage 1, 2 or 3")
        if self.offload_parameters and self.stage != 3:
            raise ValueError(f"offload_parameters needs stage 3, but stage is {self.stage}")
        return self
