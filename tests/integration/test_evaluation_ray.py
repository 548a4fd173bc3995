"""Engines on a Ray cluster: the table does not depend on their number, and one that is killed costs nothing."""

from collections import Counter
from contextlib import suppress
from functools import partial

import psutil
import pytest

from posttrain.config import RayConfig
from posttrain.errors import DataError
from posttrain.evaluation import evaluate
from posttrain.evaluation.grading import Grader
from posttrain.inference import BackendError, Prompt
from posttrain.inference.cluster import ClusterBackend
from posttrain.runtime.session import ray_session
from tests.posttrain.scripted_backend import Scripted
from tests.posttrain.test_evaluation_runner import context, recipe, texts


@pytest.fixture(scope="module")
def session():
    with ray_session(RayConfig(num_cpus=4)):
        yield


def cluster(tmp_path, engines=2, max_failures=3, **script) -> ClusterBackend:
    make = partial(Scripted, str(tmp_path), **script)
    return ClusterBackend(make, {}, engines=engines, num_cpus=1, max_failures=max_failures)


def prompts(*extra: str) -> list[Prompt]:
    return [
        Prompt(id=name, messages=(), samples=(0, 1, 2), seed=i) for i, name in enumerate([*extra, *map("p{}".format, range(10))])
    ]


def test_a_killed_engine_costs_nothing(session, tmp_path):
    backend = cluster(tmp_path, dies="p3")
    got = list(backend.generate(prompts()))
    assert (tmp_path / "died").exists()
    assert Counter((text.prompt_id, text.sample) for text in got) == {(f"p{i}", j): 1 for i in range(10) for j in range(3)}
    assert all(text.text.startswith(f"{text.prompt_id[1:]}/{text.sample}/") for text in got), "every sample from its own seed"
    # The engines stay for the next suite.
    assert len(list(backend.generate(prompts()))) == 30
    backend.close()


def test_engines_that_keep_dying_end_it(session, tmp_path):
    backend = cluster(tmp_path, dies="p-always", max_failures=1)
    kept = []
    with pytest.raises(BackendError, match="2 engines died"):
        for text in backend.generate(prompts("p-always")):
            kept.append(text)
    assert {(text.prompt_id, text.sample) for text in kept} >= {("p-always", 0)}


def test_engines_that_cannot_be_placed_are_not_waited_for_in_silence(session, tmp_path, caplog):
    """As after the loss of the machine that the last engine ran on: Ray would wait for another for ever."""
    backend = ClusterBackend(partial(Scripted, str(tmp_path)), {}, engines=2, num_cpus=100, start_limit_s=1.0)
    with pytest.raises(BackendError, match=r"no engine is left.*asks for 100 CPUs and 0 GPUs; the cluster has \{'CPU': '4'"):
        list(backend.generate(prompts()))
    assert "no engine runs: waiting for Ray to place an engine" in caplog.text


def test_an_error_of_a_backend_arrives_as_itself(session, tmp_path):
    with pytest.raises(DataError, match="row p2: refused"):
        list(cluster(tmp_path, fails="p2").generate(prompts()))


@pytest.fixture
def run_path(tmp_path):
    from posttrain.data.tokenizer import arithmetic_tokenizer
    from posttrain.models.loading import new_model

    tokenizer = arithmetic_tokenizer()
    init = dict(recipe().model.init or {}, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    new_model(init, seed=0).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path


def engine_processes() -> list[psutil.Process]:
    """Those of this test's own cluster that run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # gone, or about to be: psutil's ZombieProcess is one
            found += [process] if "EngineActor" in " ".join(process.cmdline()) else []
    return found


@pytest.mark.slow
def test_the_table_depends_neither_on_the_engines_nor_on_one_that_is_killed(session, run_path, monkeypatch):
    alone = evaluate(recipe(), run_path, context(run_path))
    one = sorted(texts(run_path))
    for file in (run_path / "eval").rglob("samples.jsonl"):
        file.unlink()
    killed, submit = [], Grader.submit

    def kill_one_at_the_third_sample(self, row, text):
        submit(self, row, text)
        if self.seen == 3:
            [victim, *_] = [process for process in engine_processes() if process.pid not in killed]
            victim.kill()
            killed.append(victim.pid)
        self.seen += 1

    monkeypatch.setattr(Grader, "seen", 1, raising=False)
    monkeypatch.setattr(Grader, "submit", kill_one_at_the_third_sample)
    given = recipe(eval={"backend": {"engines": 2}, "max_sequences": 2})
    spread = evaluate(given, run_path, context(run_path))
    assert killed
    assert sorted(texts(run_path)) == one, "every sample once, each as one engine alone draws it"
    assert spread == alone
    settings = (run_path / "eval" / "base" / "toy" / "settings.json").read_text()
    assert "engines" not in settings, "how many there were is not part of the protocol"
    assert psutil.wait_procs(engine_processes(), timeout=30)[1] == [], "none outlives its stage"
