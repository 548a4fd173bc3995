"""The rollout engine: continuous batching over the chunk grid. `Generator` is its interface."""

from posttrain.rollout.engine import Generator
from posttrain.rollout.sequence import StreamedToken

__all__ = ["Generator", "StreamedToken"]
