"""Time to bring a model's weights from a learner to a generator on another GPU, and how long the generator stands still for it.

    python scripts/bench_weight_sync.py                                   # two GPUs, NCCL, SSE-H-2B in bfloat16
    python scripts/bench_weight_sync.py --one-gpu                         # both on one GPU (CUDA IPC)
    python scripts/bench_weight_sync.py --cpu --size sse-h-600m --scale 8 # a trial without a GPU (gloo, widths over 8)

Real processes and the transfer of split GRPO (posttrain/grpo/split/transfer), without Ray. The generator computes matrix products
all the while (its "decoding") and swaps between two of them; the gap that it sees is the pause. `--kill` ends with a generator
that is killed in the middle of a broadcast, and says how long the learner took to get past it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing as mp
from bench_tools import describe, environment, table, write_results

from posttrain.grpo.split.transfer.receiver import CollectiveReceiver
from posttrain.grpo.split.transfer.sender import CollectiveSender
from posttrain.grpo.split.weights import Inbox
from posttrain.models.loading import new_model
from posttrain.models.sizes import PAPER_SIZES

HOST = "127.0.0.1"


def main() -> None:
    arguments = parse()
    if not arguments.cpu and torch.cuda.device_count() < (1 if arguments.one_gpu else 2):
        raise SystemExit("two GPUs are needed (one with --one-gpu, none with --cpu)")
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    generator = context.Process(target=generate, args=(theirs, arguments, "generator"), daemon=True)
    generator.start()
    result = learn(ours, arguments, generator)
    generator.kill()
    lines = table_of(result)
    print("\n".join(lines))
    if arguments.out:
        record = {"environment": environment(torch.device("cpu" if arguments.cpu else "cuda")), **result}
        text = ["# Weights from a learner to a generator", "", *describe(record["environment"]), *lines]
        write_results(arguments.out, "weight_sync", record, text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="sse-h-2b", choices=list(PAPER_SIZES))
    parser.add_argument("--scale", type=int, default=1, help="divide the widths and the vocabulary by this")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--versions", type=int, default=10, help="timed ones, after three that warm up")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--kill", action="store_true", help="kill the generator in the middle of a last broadcast")
    parser.add_argument("--out", type=Path, help="folder of weight_sync.md and weight_sync.json; without, they are not written")
    return parser.parse_args()


def model_of(arguments: argparse.Namespace, device: str) -> Any:
    """Random weights: what travels does not depend on them."""
    fields = dict(PAPER_SIZES[arguments.size])
    for name in ("hidden_size", "intermediate_size", "vocab_size"):
        if arguments.scale > 1 and name in fields:
            fields[name] = fields[name] // arguments.scale // 64 * 64
    if arguments.scale > 1:
        fields["num_attention_heads"] = max(1, fields["hidden_size"] // 64)
    fields.setdefault("vocab_size", 151936 // arguments.scale)
    with torch.device(device):  # on the host a 2B model takes a minute
        return new_model(fields, seed=0, dtype=arguments.dtype, device=device)


def device_of(arguments: argparse.Namespace, number: int) -> str:
    return "cpu" if arguments.cpu else f"cuda:{0 if arguments.one_gpu else number}"


# -- the learner ----------------------------------------------------------------------------------------------------------


def learn(connection: Connection, arguments: argparse.Namespace, generator: Any) -> dict[str, Any]:
    device = device_of(arguments, 0)
    if not arguments.cpu:
        torch.cuda.set_device(device)
    sender = CollectiveSender(
        HOST,
        device,
        bucket_bytes=arguments.bucket_mb * 2**20,
        answer_limit_s=10.0,
        transfer_limit_s=30.0,
        lend=lambda number, handle: connection.send(("lend", number, handle)),
    )
    connection.send(("address", sender.address))
    model = model_of(arguments, device)
    weights = model.state_dict()
    expect(connection, "ready")
    rows = []
    for version in range(arguments.versions + 3):
        with torch.no_grad():
            next(iter(weights.values())).fill_(version)
        synchronize(device)
        begun = time.perf_counter()
        sender.publish(version, weights)
        seconds = time.perf_counter() - begun
        assert sender.last is not None and sender.last.receivers == 1, "the generator did not take part"
        _, got, receive_s, pause_s, gap_s, first = expect(connection, "swapped")
        assert (got, first) == (version, float(version)), f"version {version} was sent, {got} with {first} arrived"
        if version >= 3:
            row = {"publish_s": seconds, "handshake_s": sender.last.wait_s, "transfer_s": sender.last.transfer_s}
            rows.append(row | {"receive_s": receive_s, "pause_s": pause_s, "gap_s": gap_s})
    result = summary(arguments, rows, sender.last.nbytes if sender.last else 0, sum(t.numel() for t in weights.values()))
    if arguments.kill:
        connection.send(("die",))
        # In a run the pool of generators says so, as soon as Ray has noticed.
        threading.Thread(target=lambda: (generator.join(), sender.forget("generator")), daemon=True).start()
        begun = time.perf_counter()
        sender.publish(10**6, weights)
        result["past_a_killed_generator_s"] = time.perf_counter() - begun
    sender.close()
    return result


def expect(connection: Connection, kind: str) -> Any:
    """The generator's next message.

    Raises:
        RuntimeError: it said something else, or nothing for ten minutes.
    """
    if not connection.poll(600):
        raise RuntimeError(f"no {kind!r} from the generator for 10 minutes")
    message = connection.recv()
    if message[0] != kind:
        raise RuntimeError(f"{kind!r} was expected, the generator said {message}")
    return message


# -- the generator --------------------------------------------------------------------------------------------------------


def generate(connection: Connection, arguments: argparse.Namespace, name: str) -> None:
    device = device_of(arguments, 1)
    if not arguments.cpu:
        torch.cuda.set_device(device)
    _, address = connection.recv()
    model = model_of(arguments, device)
    own = model.state_dict()
    lent: dict[int, Any] = {}
    dying = [False]

    def hear() -> None:
        while connection.poll(0):
            message = connection.recv()
            if message[0] == "lend":
                lent[message[1]] = message[2]
            dying[0] = dying[0] or message[0] == "die"

    def borrow(number: int) -> Any:
        while number not in lent:
            hear()
        return lent[number]

    class Mortal(CollectiveReceiver):
        def _transfer(self, *given: Any) -> str:
            hear()
            if dying[0]:
                os.kill(os.getpid(), 9)
            return super()._transfer(*given)

    receiver = Mortal(
        address, {key: tuple(t.shape) for key, t in own.items()}, name=name, host=HOST, device=device, borrow=borrow
    )
    inbox = Inbox(receiver)
    connection.send(("ready",))
    square = torch.randn(256 if arguments.cpu else 4096, 256 if arguments.cpu else 4096, device=device)
    last = time.perf_counter()
    gap = 0.0
    while True:
        torch.mm(square, square)
        synchronize(device)
        now = time.perf_counter()
        gap, last = max(gap, now - last), now
        version = inbox.poll()
        if version is None:
            continue
        begun = time.perf_counter()
        with torch.no_grad():
            for key, tensor in inbox.staged.items():
                own[key].copy_(tensor)
        synchronize(device)
        pause = time.perf_counter() - begun
        seconds, first = inbox.seconds, float(next(iter(own.values())).flatten()[-1])
        inbox.release()
        connection.send(("swapped", version, seconds, pause, gap, first))
        gap, last = 0.0, time.perf_counter()


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


# -- the table ------------------------------------------------------------------------------------------------------------


def summary(arguments: argparse.Namespace, rows: list[dict[str, float]], nbytes: int, parameters: int) -> dict[str, Any]:
    figures = {name: [statistics.median(row[name] for row in rows), max(row[name] for row in rows)] for name in rows[0]}
    return {
        "way": "gloo" if arguments.cpu else "CUDA IPC" if arguments.one_gpu else "NCCL",
        "model": arguments.size + (f" / {arguments.scale}" if arguments.scale > 1 else ""),
        "parameters": parameters,
        "dtype": arguments.dtype,
        "bytes": nbytes,
        "bucket_mb": arguments.bucket_mb,
        "versions": len(rows),
        "gb_per_s": nbytes / figures["transfer_s"][0] / 1e9,
        "median_and_max": figures,
    }


def table_of(result: dict[str, Any]) -> list[str]:
    names = {
        "publish_s": "learner: publish, whole",
        "handshake_s": "of it until the generator has answered",
        "transfer_s": "of it buckets, transfer and checksums",
        "receive_s": "generator: receiving, while it computes",
        "pause_s": "generator: swap (it stands still)",
        "gap_s": "longest step of the generator meanwhile",
    }
    lines = [
        f"{result['model']}, {result['parameters'] / 1e9:.2f} billion parameters in {result['dtype']} "
        f"({result['bytes'] / 1e9:.2f} GB), {result['way']}, buckets of {result['bucket_mb']} MB, {result['versions']} versions.",
        "",
        *table(
            ["", "median", "slowest"],
            [(text, *(f"{1e3 * seconds:.1f} ms" for seconds in result["median_and_max"][key])) for key, text in names.items()],
        ),
        f"{result['gb_per_s']:.1f} GB/s from the first bucket to the last checksum.",
    ]
    if "past_a_killed_generator_s" in result:
        seconds = result["past_a_killed_generator_s"]
        lines.append(f"{seconds:.1f} s to get past a generator that was killed in the middle of a broadcast.")
    return lines


if __name__ == "__main__":
    main()
