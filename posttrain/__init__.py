"""RL post-training for sparse-state linear-attention models."""

__version__ = "0.1.0"
