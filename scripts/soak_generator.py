"""Many short requests at two generators of one tiny model, with random aborts, forks, snapshots (some through a file, half of
them to the other generator), and updates of the weights under every policy; then nothing may be left.

    python scripts/soak_generator.py [--requests 10000] [--seed 0] [--device cuda --graphs]

Every sample must come out exactly once, aborted or finished; at the end no slot, page, byte of a tensor, file or thread is held
that was not there before, and a request gives bitwise (on a GPU: token by token) what it gives on a fresh generator. Prints what
was done and what is left; exits with 1 if anything is.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from posttrain.errors import PosttrainError
from posttrain.models.loading import new_model
from posttrain.models.paged import PAGE
from posttrain.rollout import Generator, load_snapshot, save_snapshot
from posttrain.types import Completion, Request

VOCABULARY, LENGTH, SEQUENCES, PAGES = 50, 160, 8, 8
PROMPTS = (1, 3, 9, 17, 40, 60, 63, 64, 120, 127)  # lengths, some about to need a page
POLICIES = ("continue", "recompute", "restart", "finish")
# Samples that may be open at once, and how often an event happens in a turn.
OPEN = 48
ABORT, MOVE, UPDATE, TO_DISK = 0.08, 0.1, 0.05, 0.2


def make_model(device: str, seed: int) -> Any:
    """Every kind of layer; on a GPU those that a CUDA graph can hold."""
    types = ["sse", "sse_gdn", "full_attention", "sliding_attention"]
    types = [kind for kind in types if device == "cpu" or kind != "sse_gdn"]
    width = 32 if device == "cpu" else 64
    fields = {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 48, "num_hidden_layers": len(types),
        "layer_types": types, "num_attention_heads": 2, "adapter_rank": 4, "gate_rank": 4, "chunk_size": 16, "sliding_window": 40,
        "initializer_range": 0.2,
    }  # fmt: skip
    return new_model(fields, seed, device=device).eval()


class Soak:
    """The two generators, what is open at each, and what still has to come out."""

    def __init__(self, *, seed: int, device: str, graphs: bool, read_late: bool, folder: Path) -> None:
        self.rng, self.device, self.folder = random.Random(seed), device, folder
        self.graphs, self.read_late = graphs, read_late
        self.model = make_model(device, 0)
        self.weights = [make_model(device, n).state_dict() for n in range(2)]
        self.generators = [self.generator() for _ in range(2)]
        self.version = 0
        self.submitted = 0
        self.home: dict[str, int] = {}
        self.left: dict[str, set[int]] = {}
        self.moved: Counter[tuple[int, str, int]] = Counter()  # samples whose abort is only a move
        self.did: Counter[str] = Counter()

    def generator(self) -> Generator:
        return Generator(
            self.model, eos_token_ids=[1], max_sequences=SEQUENCES, max_length=LENGTH, max_prefill_tokens=64,
            kv_tokens=PAGES * PAGE, return_router_indices=True, cuda_graphs=self.graphs, read_late=self.read_late,
        )  # fmt: skip

    def request(self, name: str) -> Request:
        rng = self.rng
        return Request(
            id=name, prompt_ids=[rng.randrange(2, VOCABULARY) for _ in range(rng.choice(PROMPTS))],
            n=rng.choice((1, 1, 2, 3, 5)), max_tokens=rng.randrange(1, 13), temperature=rng.choice((0.0, 0.7, 1.0, 1.0)),
            top_k=rng.choice((0, 0, 5)), top_p=rng.choice((1.0, 1.0, 0.9)), min_p=rng.choice((0.0, 0.0, 0.05)),
            seed=rng.randrange(1000),
        )  # fmt: skip

    def run(self, requests: int) -> None:
        while self.submitted < requests or self.left:
            while self.submitted < requests and sum(map(len, self.left.values())) < OPEN and self.rng.random() < 0.8:
                self.submit()
            if self.left and self.rng.random() < ABORT:
                name = self.rng.choice(list(self.left))
                self.did["request aborted"] += self.generators[self.home[name]].abort(name)
            if self.left and self.rng.random() < MOVE:
                self.move(self.rng.choice(list(self.left)))
            if self.rng.random() < UPDATE:
                self.update()
            for number, generator in enumerate(self.generators):
                for completion in generator.step():
                    self.take(number, completion)
        for number, generator in enumerate(self.generators):
            while generator.has_unfinished:
                for completion in generator.step():
                    self.take(number, completion)

    def submit(self) -> None:
        name, home = str(self.submitted), self.rng.randrange(2)
        request = self.request(name)
        self.generators[home].submit(request)
        self.home[name], self.left[name] = home, set(range(request.n))
        self.submitted += 1
        self.did["samples"] += request.n

    def move(self, name: str) -> None:
        """Through a snapshot to either generator."""
        source = self.home[name]
        try:
            snapshot = self.generators[source].snapshot(name)
        except ValueError:  # it was aborted, or its last tokens were on their way
            self.did["snapshot too late"] += 1
            return
        self.generators[source].abort(name)
        for sample in (*snapshot["pending"], *(saved["sample"] for saved in snapshot["sequences"])):
            self.moved[source, name, sample] += 1
        if self.rng.random() < TO_DISK:
            path = self.folder / name
            save_snapshot(snapshot, path)
            snapshot = load_snapshot(path)
            path.unlink()
            self.did["snapshot on disk"] += 1
        self.home[name] = self.rng.randrange(2)
        self.generators[self.home[name]].restore(snapshot, recompute=self.rng.random() < 0.1)
        self.did["snapshot"] += 1

    def update(self) -> None:
        policy = self.rng.choice(POLICIES)
        self.version += 1
        for generator in self.generators:
            # One model: the second finds its weights changed already.
            weights = self.weights[self.version % 2]
            try:
                generator.update_weights(self.version, weights, unfinished=policy)
            except PosttrainError:
                assert policy == "finish" and generator.num_begun
                self.did["update refused"] += 1
                generator.update_weights(self.version, weights, unfinished="recompute")
            self.did[f"update, {policy}"] += 1

    def take(self, number: int, completion: Completion) -> None:
        key = number, completion.request_id, completion.sample
        if completion.finish_reason == "abort" and self.moved[key]:
            self.moved[key] -= 1
            return
        left = self.left[completion.request_id]
        left.remove(completion.sample)  # a KeyError here: a sample came out twice
        assert completion.versions == sorted(completion.versions) and len(completion.token_ids) <= 12
        self.did[completion.finish_reason] += 1
        if not left:
            del self.left[completion.request_id]

    # -- what is left -------------------------------------------------------------------------------------------------

    def held(self) -> list[str]:
        """What the generators still hold of any request."""
        found = []
        for number, generator in enumerate(self.generators):
            scheduler, books = generator._scheduler, generator._runner.cache.pages
            assert books is not None
            checks = {
                "requests": len(scheduler.groups) + len(scheduler.waiting) + len(scheduler.restoring) + len(scheduler.running),
                "slots": scheduler.num_slots - len(set(scheduler.free)),
                "pages": books.num_pages - 1 - len(set(books.free)),
                "holders of pages": sum(books.holders) + sum(map(len, books.pages)),
                "steps in flight": int(generator._loop.flight is not None),
            }
            found += [f"generator {number}: {count} {what}" for what, count in checks.items() if count]
        if any(self.moved.values()):
            found.append(f"{sum(self.moved.values())} samples that were moved and never came out")
        return found + [f"file {name}" for name in os.listdir(self.folder)]

    def answers(self, generator: Generator) -> list[Any]:
        """To one certain request, which also leaves a generator's small buffers with certain sizes."""
        asked = [Request(id="last", prompt_ids=[5, 6, 7] * 23, n=4, max_tokens=12, seed=9)]
        return [(c.token_ids, c.logprobs if self.device == "cpu" else ()) for c in generator.generate(asked)[0]]


def tensor_bytes(device: str) -> int:
    """Bytes of all tensors that are alive; a compiler's stand-ins, of other types, have none."""
    gc.collect()
    if device != "cpu":
        return torch.cuda.memory_allocated()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return sum({a.untyped_storage().data_ptr(): a.untyped_storage().nbytes() for a in tensors}.values())


def soak(
    requests: int, *, seed: int = 0, device: str = "cpu", graphs: bool = False, read_late: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """(what was done, what is left that should not be)."""
    with tempfile.TemporaryDirectory() as folder:
        run = Soak(seed=seed, device=device, graphs=graphs, read_late=read_late, folder=Path(folder))
        run.run(min(requests, 50))  # tables and buffers that stay are made
        for generator in run.generators:
            run.answers(generator)
        bytes_before, threads = tensor_bytes(device), threading.active_count()
        run.submitted, start = 0, time.perf_counter()
        run.home.clear()
        run.run(requests)
        seconds = time.perf_counter() - start
        left = run.held()
        used = [run.answers(generator) for generator in run.generators]
        more = tensor_bytes(device) - bytes_before
        # Graphs for kinds of sampling that the first requests had not have memory of their own.
        if more > 0 and not graphs:
            left.append(f"{more:,} bytes of tensors more than before")
        if threading.active_count() > threads:
            left.append(f"{threading.active_count() - threads} threads")
        if used != [run.answers(run.generator())] * 2:
            left.append("a request is answered otherwise than by a fresh generator")
        counts = Counter[str]()
        for generator in run.generators:
            counts.update(generator.counts)
    did = {"requests": requests, "seconds": round(seconds, 1), **dict(sorted(run.did.items())), **counts}
    return did, left


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--graphs", action="store_true", help="decode by CUDA graphs")
    parser.add_argument("--read-at-once", action="store_true", help="read each step's tokens before the next one is launched")
    args = parser.parse_args(arguments)
    did, left = soak(
        args.requests, seed=args.seed, device=args.device, graphs=args.graphs, read_late=not args.read_at_once
    )  # fmt: skip
    for name, value in did.items():
        print(f"{name:<20} {value:,}")
    print("left behind:         " + ("; ".join(left) or "nothing"))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
