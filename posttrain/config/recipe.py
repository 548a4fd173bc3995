"""The recipe: every section together, and the checks that concern more than one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.config.base import Section
from posttrain.config.data import DataConfig, ModelConfig
from posttrain.config.distill import DistillConfig
from posttrain.config.sections import DeepSpeedConfig, EvalConfig, GrpoConfig, RayConfig, RewardConfig, RolloutConfig
from posttrain.config.trl import check_arguments

StageName = Literal["distill", "sft", "grpo", "eval", "report"]
STAGES: tuple[StageName, ...] = ("distill", "sft", "grpo", "eval", "report")
# Without a word of the recipe: distill needs a teacher, which no recipe has by default.
DEFAULT_STAGES = STAGES[1:]


class Recipe(Section):
    """One run, whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run, in the report and the trackers; letters, digits, dot, dash and underscore."""

    description: str = ""
    """What the run is for, shown in the report."""

    run_dir: str = ""
    """Folder of the run; runs/<name> by default."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random: weights, order of the data, rollouts."""

    stages: list[StageName] = Field(default_factory=lambda: list(DEFAULT_STAGES), min_length=1)
    """What `posttrain run` runs, in this order."""

    model: ModelConfig
    """Where the model comes from."""

    data: DataConfig = Field(default_factory=DataConfig)
    """What it reads."""

    distill: DistillConfig = Field(default_factory=DistillConfig)
    """The teacher, and which of its traces become the rows that SFT reads (stage distill)."""

    trainer: dict[str, Any] = Field(default_factory=dict)
    """SFT: arguments of TRL's SFTConfig."""

    grpo: GrpoConfig = Field(default_factory=GrpoConfig)
    """GRPO: arguments of TRL's GRPOConfig and options of our own."""

    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """The generator."""

    reward: RewardConfig = Field(default_factory=RewardConfig)
    """What a completion earns."""

    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation."""

    ray: RayConfig = Field(default_factory=RayConfig)
    """Processes."""

    deepspeed: DeepSpeedConfig | None = None
    """ZeRO; none trains with DDP."""

    @field_validator("trainer", mode="before")
    @classmethod
    def _check_trainer(cls, given: Any) -> Any:
        return check_arguments("trainer", given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        from posttrain.config.consistency import problems

        found = problems(self)
        if found:
            raise ValueError("\n".join(found))
        self.run_dir = self.run_dir or f"runs/{self.name}"
        return self

    def argument(self, section: Literal["trainer", "grpo"], name: str) -> Any:
        """The value of a TRL argument: the recipe's, or TRL's default."""
        from posttrain.config.trl import TABLES

        given = self.trainer if section == "trainer" else self.grpo.arguments
        return given[name] if name in given else TABLES[section][1][name][1]
