"""Recipes: parsed safely, validated whole, and without importing torch.

recipe = load_recipe("recipes/demo.yaml", ["trainer.learning_rate=2e-5"])
recipe.model_dump(mode="json")      # the resolved recipe; Recipe.model_validate(...) reads it back
"""

from posttrain.config.data import ArithmeticConfig, ColumnMap, DataConfig, DataSource, FilterConfig, ModelConfig
from posttrain.config.distill import BalanceConfig, DistillConfig, TeacherConfig, TraceFilters
from posttrain.config.loading import dump_recipe, load_recipe, recipe_from_dict
from posttrain.config.recipe import STAGES, Recipe
from posttrain.config.sections import (
    DeepSpeedConfig,
    EvalConfig,
    GrpoConfig,
    RayConfig,
    RewardConfig,
    RewardFunction,
    RolloutConfig,
    SuiteConfig,
)
from posttrain.config.suites import SUITES, Suite

__all__ = [
    "STAGES",
    "SUITES",
    "ArithmeticConfig",
    "BalanceConfig",
    "ColumnMap",
    "DataConfig",
    "DataSource",
    "DeepSpeedConfig",
    "DistillConfig",
    "EvalConfig",
    "FilterConfig",
    "GrpoConfig",
    "ModelConfig",
    "RayConfig",
    "Recipe",
    "RewardConfig",
    "RewardFunction",
    "RolloutConfig",
    "Suite",
    "SuiteConfig",
    "TeacherConfig",
    "TraceFilters",
    "dump_recipe",
    "load_recipe",
    "recipe_from_dict",
]
