"""GRPO with generators in processes of their own: real Ray actors, which are killed one after another."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch

from posttrain.config import RayConfig
from posttrain.grpo.sampler import derived_seed
from posttrain.grpo.source import Collected
from posttrain.grpo.split.experience import SplitExperience
from posttrain.grpo.split.pool import SplitError, SplitSettings
from posttrain.grpo.split.stage import SplitSource
from posttrain.grpo.split.transfer.buckets import WeightError, WeightsGone
from posttrain.grpo.split.weights import ObjectStoreReceiver, ObjectStoreSender, WeightBoard
from posttrain.run_folder import RunFolder
from posttrain.runtime.session import ray_session
from tests.integration.test_grpo_stage import GRPO, recipe, run, weights
from tests.posttrain.scripted_engine import TOKENS, open_scripted_scorer, opener, scripted_plan

BATCHES = 8


@pytest.fixture(scope="module")
def session():
    with ray_session(RayConfig(num_cpus=4)):
        yield


def processes(actor: str) -> list[psutil.Process]:
    """Those of this test's own cluster that run an actor of this class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [process] if f"ray::{actor}" in " ".join(process.cmdline()) else []
    return found


def kill(actor: str) -> None:
    victim = processes(actor)[0]
    victim.kill()
    victim.wait(10)


def scripted(folder: Path) -> SplitExperience:
    return SplitExperience(
        scripted_plan(BATCHES),
        folder=folder / "buffer",
        open_workbench=opener(folder),
        open_scorer=open_scripted_scorer,
        settings=SplitSettings(generators=2, rewards=2, max_staleness=1, num_cpus=1, limit_s=60.0),
    )


def rows(batch: int) -> list[dict[str, Any]]:
    plan = scripted_plan(BATCHES)
    return [plan.row(2 * batch), plan.row(2 * batch + 1)]


def collect(experience: SplitExperience, batch: int) -> Collected:
    return experience.collect(rows(batch), batch, {"w": torch.tensor(batch)})


def check(collected: Collected, batch: int) -> None:
    """The prompts, seeds and scores of the plan, and tokens of the weights that they name."""
    for row, group, total in zip(rows(batch), collected.completions, collected.ratings.totals, strict=True):
        seed = derived_seed("rollout", 3, batch, row["prompt_index"])
        assert [c.logprobs for c in group] == [[seed % 1000 / 1000] * TOKENS] * 2
        assert total == [float(row["answer"] == row["prompt"])] * 2
        for completion in group:
            assert completion.prompt_ids == row["prompt_ids"]
            assert completion.token_ids == completion.versions, "weights of version n hold n"
            assert set(completion.versions) <= {batch - 1, batch}
    assert collected.metrics["staleness/max"] <= 1


def essence(collected: Collected) -> Any:
    return [[(c.request_id, c.sample, c.token_ids, c.versions) for c in group] for group in collected.completions]


@pytest.mark.long
@pytest.mark.slow
def test_whoever_is_killed_no_batch_is_lost_twice_or_out_of_order(session, tmp_path) -> None:
    import ray

    first = scripted(tmp_path)
    seen = []
    try:
        victims = ["", "GeneratorActor", "ExperienceBuffer", "RewardActor", "WeightBoard", "", ""]
        for batch, victim in enumerate(victims):
            if victim:
                kill(victim)
            collected = collect(first, batch)
            check(collected, batch)
            seen.append(essence(collected))
            first.ack(batch)
        first.commit(5)
    finally:
        first.close()
    # The next batch, which may have been under way, is to be stuck.
    (tmp_path / "buffer" / "batch-00000007.jsonl").unlink(missing_ok=True)
    (tmp_path / "stuck").touch()
    assert sorted(path.name for path in (tmp_path / "buffer").glob("batch-*"))[0] == "batch-00000005.jsonl"

    # The learner is gone, and its last checkpoint has batches 0 to 4: it gets 5 and 6 again, the very same.
    second = scripted(tmp_path)
    try:
        for batch in (5, 6):
            collected = collect(second, batch)
            assert essence(collected) == seen[batch]
            second.ack(batch)
        # On a busy machine generators take longer to start than the learner is to wait below.
        deadline = time.monotonic() + 90
        while ray.get(second.buffer.state.remote())["taken"] < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        second._settings = replace(second._settings, limit_s=5.0)
        with pytest.raises(SplitError, match=r"batch 7: no group has come for 5 s, and 2 of 2 are missing. slot 14: with gen"):
            collect(second, 7)
    finally:
        second.close()
    assert psutil.wait_procs(processes("GeneratorActor"), timeout=30)[1] == [], "none outlives its learner"


def test_weights_through_the_object_store(session) -> None:
    import ray

    board: Any = ray.remote(num_cpus=0)(WeightBoard).remote()
    tied = torch.arange(6.0).reshape(2, 3)
    given = {"a": tied, "b": torch.tensor([1.0, -2.5], dtype=torch.bfloat16), "tied": tied}
    sender = ObjectStoreSender(board, bucket_bytes=16)
    receiver = ObjectStoreReceiver(board, {"a": (2, 3), "b": (2,), "tied": (2, 3)})
    assert receiver.newest() == -1
    sender.publish(3, given)
    tied += 1  # the learner trains on; what was published stays
    fetched = receiver.fetch(3)
    assert (
        torch.equal(fetched["a"], tied - 1) and torch.equal(fetched["tied"], tied - 1) and torch.equal(fetched["b"], given["b"])
    )
    with pytest.raises(WeightsGone, match="version 2 are not on the board; the newest are 3"):
        receiver.fetch(2)
    manifest = ray.get(board.manifest.remote(3))
    assert len(manifest.buckets) == 2
    ray.get(board.post.remote(replace(manifest, version=4, checksums=(manifest.checksums[0] ^ 1, manifest.checksums[1]))))
    with pytest.raises(WeightError, match="bucket 1 of 2 of version 4 arrived changed"):
        receiver.fetch(4)
    with pytest.raises(WeightError, match=r"1 missing \['lm_head'\]"):
        ObjectStoreReceiver(board, {**{name: tuple(tensor.shape) for name, tensor in given.items()}, "lm_head": (1,)}).fetch(3)


def trained(folder: RunFolder) -> list[list[Any]]:
    """What was trained on at each step, sample by sample."""
    names = ("step", "prompt_index", "sample", "completion_ids", "advantage")
    tables: Sequence[Path] = sorted((folder.path / "rollouts").iterdir())
    return [[row[name] for name in names] for path in tables for row in pq.read_table(path).to_pylist()]


@pytest.mark.slow
def test_on_policy_it_is_the_colocated_run_to_the_bit_though_a_generator_is_killed(session, tmp_path, monkeypatch) -> None:
    split: dict[str, Any] = {"placement": "split", "generators": 2, "max_staleness": 0, "batch_timeout_s": 120.0}
    colocated = run(recipe(tmp_path / "colocated"))
    killed: list[int] = []
    original = SplitSource.on_step_end

    def kill_one_after_the_first_step(self, args, state, control, **others) -> None:
        original(self, args, state, control, **others)
        if not killed:
            victim = processes("GeneratorActor")[0]
            killed.append(victim.pid)
            victim.kill()

    monkeypatch.setattr(SplitSource, "on_step_end", kill_one_after_the_first_step)
    folder = run(recipe(tmp_path / "split", grpo={**GRPO, **split}))
    assert killed and killed[0] != os.getpid()
    assert trained(folder) == trained(colocated)
    a, b = weights(folder), weights(colocated)
    assert all(torch.equal(a[name], b[name]) for name in a)
    metrics = folder.read_metrics("grpo")
    assert [line["staleness_max"] for line in metrics] == [0, 0, 0]
    assert all(line["time_wait"] > 0 and line["time_sync"] > 0 for line in metrics)
    assert not list((folder.path / "grpo" / "buffer").glob("batch-*")), "all are in the final weights"
