"""Backends that write completions, behind one protocol: our engine, vLLM, any OpenAI-compatible server, alone or on a cluster.

`open_backend` imports what the chosen one needs, and nothing else.
"""

from posttrain.inference.opening import open_backend
from posttrain.inference.protocol import Backend, BackendError, Prompt, SamplingOptions, Text, prompt_seed, sample_seed

__all__ = ["Backend", "BackendError", "Prompt", "SamplingOptions", "Text", "open_backend", "prompt_seed", "sample_seed"]
