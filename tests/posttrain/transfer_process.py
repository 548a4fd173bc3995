"""A generator's process for the tests of the weight transfer: receives, and says what it got.

python transfer_process.py HOST PORT NAME DEVICE LENT DIES_AT STOPS_AT EXTRA

DEVICE: "" receives by broadcast, the sender's own copies from its buckets, which are found in the files LENT.*. DIES_AT: at this
version it dies as a killed process does, in the middle of the transfer; STOPS_AT: it stands still until it gets SIGCONT. EXTRA: a
name that its model has besides.
One JSON line a version on standard output: {"version": n, "sums": {name: sum of its numbers}}, or {"error": text} at the end.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import torch.multiprocessing

from posttrain.errors import PosttrainError
from posttrain.grpo.split.transfer.receiver import CollectiveReceiver

SHAPES = {"a": (3, 5), "b": (1000,), "c": (), "tied": (3, 5)}


class Faulty(CollectiveReceiver):
    dies_at = stops_at = -1

    def _transfer(self, number, go, version, entries, sizes):
        if version == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if version == self.stops_at:
            self.stops_at = -1
            os.kill(os.getpid(), signal.SIGSTOP)
        return super()._transfer(number, go, version, entries, sizes)


def main() -> None:
    host, port, name, device, lent, dies_at, stops_at, extra = sys.argv[1:9]
    torch.multiprocessing.set_sharing_strategy("file_system")

    def borrow(number: int):
        path = Path(f"{lent}.{number}")
        while not path.exists():
            time.sleep(0.01)
        return pickle.loads(path.read_bytes())

    shapes = SHAPES | ({extra: (2,)} if extra else {})
    receiver = Faulty((host, int(port)), shapes, name=name, host=host, device_name=device, transfer_limit_s=6.0, borrow=borrow)
    receiver.dies_at, receiver.stops_at = int(dies_at), int(stops_at)
    print(json.dumps({"joined": True}), flush=True)
    try:
        while True:
            version = receiver.receive(0.5)
            if version is not None:
                sums = {key: float(tensor.double().sum()) for key, tensor in receiver.staged.items()}
                print(json.dumps({"version": version, "sums": sums}), flush=True)
                receiver.release()
    except PosttrainError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    finally:
        receiver.close()


if __name__ == "__main__":
    main()
