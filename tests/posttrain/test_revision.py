"""A commit or tag of a hub checkpoint reaches everything that is loaded from there, and nothing else."""

from typing import Any

import pytest
import transformers

from posttrain.config import ModelConfig
from posttrain.data import tokenizer
from posttrain.distill.teacher import teacher_model, teacher_tokenizer
from posttrain.inference.opening import identity_of
from posttrain.models import hub
from tests.posttrain.fake_teacher import make_recipe


@pytest.fixture
def loaded(monkeypatch):
    """(name, revision) of each tokenizer that is asked for."""
    asked: list[tuple[str, Any]] = []

    def from_pretrained(name, revision=None, **_):
        asked.append((name, revision))
        return tokenizer.arithmetic_tokenizer()

    monkeypatch.setattr(hub, "check_available", lambda name, **given: asked.append((name, given["revision"])))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    return asked


def test_the_tokenizer_beside_the_weights_comes_from_their_revision(loaded):
    tokenizer.load_tokenizer(ModelConfig(path="org/model", revision="abc"))
    assert loaded == [("org/model", "abc")] * 2


def test_a_tokenizer_of_its_own_does_not(loaded):
    tokenizer.load_tokenizer(ModelConfig(path="org/model", revision="abc", tokenizer="org/other"))
    assert loaded == [("org/other", None)] * 2


def test_a_teachers_revision(loaded, tmp_path):
    recipe = make_recipe(tmp_path, "", teacher={"kind": "engine", "model": "org/model", "revision": "abc"})
    teacher_tokenizer(recipe)
    assert loaded == [("org/model", "abc")] * 2
    teacher = recipe.distill.teacher
    assert teacher is not None
    assert identity_of(teacher, teacher_model(recipe))["revision"] == "abc"
    plain = teacher_model(recipe).model_copy(update={"revision": None})
    assert "revision" not in identity_of(teacher, plain)
