"""The recipe's section of the generator."""

from __future__ import annotations

import inspect

import pytest
from pydantic import ValidationError

from posttrain.config.sections import RolloutConfig
from posttrain.rollout import Generator
from tests.posttrain.rollout_models import make_generator, make_model


def test_every_option_is_an_argument_of_the_generator():
    options = RolloutConfig(memory_fraction=0.8, unfinished="recompute", max_prefill_tokens=64).engine_options()
    wanted = {"max_prefill_tokens": 64, "memory_fraction": 0.8, "cuda_graphs": True, "unfinished": "recompute"}
    assert {name: options[name] for name in wanted} == wanted
    assert options.keys() <= inspect.signature(Generator).parameters.keys()
    assert make_generator(make_model(), **options).unfinished == "recompute"


def test_defaults_are_the_generators():
    parameters = inspect.signature(Generator).parameters
    for name, value in RolloutConfig().engine_options().items():
        assert parameters[name].default == value, name


@pytest.mark.parametrize(
    "given", [{"memory_fraction": 0}, {"memory_fraction": 1.1}, {"unfinished": "drop"}, {"cuda_graphs": "yes please"}]
)
def test_bad_values_are_refused(given):
    with pytest.raises(ValidationError, match=next(iter(given))):
        RolloutConfig(**given)
