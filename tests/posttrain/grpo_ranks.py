"""A learner on several ranks (gloo), for tests: run in processes of their own, each leaves its gradients."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def one_step(folder: str, *, micro: int, accumulation: int, split: bool = False, **given: Any) -> torch.Tensor:
    """The gradient of one optimiser step on eight completions of two prompts (a rank's share of them, under several)."""
    from posttrain.grpo.split.deal import Dealer
    from posttrain.models.loading import new_model
    from tests.integration.test_grpo_learner import FIELDS, Gradients, make

    learner = make(
        Path(folder),
        model=new_model({**FIELDS, "balance_loss_coef": 0.0}, seed=3),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        scoring={"truncated_completions": "mask"},
        max_completion_length=14,
        max_grad_norm=0.0,
        learning_rate=0.0,
        max_steps=1,
        **given,
    )
    if split:
        dealer, own, data = Dealer(60.0), learner._collect, learner.train_dataset
        assert data is not None

        def collect(rows: list[dict[str, Any]], step: int) -> Any:
            everything = [data[index] for index in learner.prompt_sampler().batch(learner.batch_number)]
            collected = dealer.deal(lambda: own(everything, step))
            # What is dealt is what the rank's own loader has.
            assert [row["prompt_index"] for row in collected.rows] == [row["prompt_index"] for row in rows]
            return collected

        learner._collect = collect
    seen = Gradients()
    learner.add_callback(seen)
    learner.train()
    return seen.flat


def _enter(rank: int, world: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)


def _rank(rank: int, world: int, port: int, folder: str, runs: dict[str, dict[str, Any]]) -> None:
    _enter(rank, world, port)
    gradients = {name: one_step(f"{folder}/{name}-{rank}", **given) for name, given in runs.items()}
    torch.save(gradients, f"{folder}/gradients-{rank}.pt")
    torch.distributed.destroy_process_group()


def _rank_of_which_one_is_nan(rank: int, world: int, port: int, folder: str) -> None:
    _enter(rank, world, port)
    from posttrain.errors import PosttrainError
    from posttrain.grpo.learner import Learner

    original = Learner.compute_loss

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        loss = original(self, *given, **named)
        return loss * float("nan") if rank == 1 else loss

    Learner.compute_loss = compute_loss  # type: ignore[method-assign]
    try:
        one_step(f"{folder}/nan-{rank}", micro=2, accumulation=2)
    except PosttrainError as error:
        Path(folder, f"error-{rank}").write_text(str(error))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all(Path(folder, f"error-{other}").exists() for other in range(world)):
        time.sleep(0.05)
    os._exit(0)  # gloo may abort a process that ends in the middle of a step


def errors_where_one_is_nan(world: int, folder: Path) -> list[str]:
    """What each of `world` processes says where the loss of the second is NaN."""
    arguments = (world, _free_port(), str(folder))
    mp.spawn(_rank_of_which_one_is_nan, args=arguments, nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
    return [Path(folder, f"error-{rank}").read_text() for rank in range(world)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def on_ranks(world: int, folder: Path, runs: dict[str, dict[str, Any]]) -> dict[str, list[torch.Tensor]]:
    """`one_step` with each of `runs` on `world` processes; the gradient of each rank."""
    arguments = (world, _free_port(), str(folder), runs)
    mp.spawn(_rank, args=arguments, nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
    every = [torch.load(folder / f"gradients-{rank}.pt") for rank in range(world)]
    return {name: [gradients[name] for gradients in every] for name in runs}
