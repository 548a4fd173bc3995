"""Names of models: what is found missing without asking the hub, and what the hub's answers mean."""

import httpx
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from posttrain.errors import CheckpointError
from posttrain.models import hub


@pytest.fixture
def asked(monkeypatch):
    """The hub's one answer; the list of questions."""
    questions = []

    def answer(url, **options):
        questions.append((url, options))
        raise httpx.ConnectError("no network")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", answer)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return questions


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "~/x", "runs/x/grpo/final", "checkpoint-230", "x/final", "a b/c", "there/missing"]
)
def test_what_can_only_be_a_folder_is_not_asked_for(asked, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="no such folder"):
        hub.check_available(name)
    assert asked == []


def test_a_folder_is_enough(asked, tmp_path):
    hub.check_available(str(tmp_path))
    assert asked == []


def test_an_id_costs_one_short_request(asked):
    with pytest.raises(CheckpointError, match=r"the hub cannot be asked \(ConnectError\)"):
        hub.check_available("owner/name")
    [(url, options)] = asked
    assert url.endswith("/owner/name/resolve/main/config.json")
    assert options["timeout"] <= 10
    assert not options["retry_on_errors"]


def test_an_id_that_the_hub_does_not_know(asked, monkeypatch):
    def unknown(*_, **__):
        raise RepositoryNotFoundError("401", response=httpx.Response(401, request=httpx.Request("HEAD", "http://x")))

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unknown)
    with pytest.raises(CheckpointError, match="no such model on the hub"):
        hub.check_available("owner/name")


def test_offline_is_said(asked, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        hub.check_available("owner/name")
    assert asked == []


def test_a_cached_id_is_not_asked_for(asked, monkeypatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "/cache/config.json")
    hub.check_available("owner/name")
    assert asked == []
