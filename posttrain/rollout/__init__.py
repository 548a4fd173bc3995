"""The rollout engine: continuous batching over the chunk grid. `Generator` is its interface."""

from posttrain.rollout.engine import Generator, Unfinished
from posttrain.rollout.sequence import StreamedToken
from posttrain.rollout.snapshot import load_snapshot, save_snapshot

__all__ = ["Generator", "StreamedToken", "Unfinished", "load_snapshot", "save_snapshot"]
