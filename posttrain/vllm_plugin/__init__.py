"""Serves SSE-H checkpoints in vLLM: an out-of-tree plugin, found by vLLM through the entry point `vllm.general_plugins`.

    vllm serve runs/x/grpo/final --dtype bfloat16 --enforce-eager

    model.py     the network: this project's own layers, vLLM's paged attention
    mixer.py     SSE layers whose states lie in vLLM's pages
    recurrent.py one token a sequence: the operator as a recurrence on the touched partitions; triton_recurrent.py on a GPU
    backend.py   what vLLM tells an SSE layer about a batch

Interfaces as they are in vLLM 0.26 to 0.32.

vLLM keeps, a sequence and layer, the plain recurrent state in fp32. Prefill is `posttrain.kernels.sse` (Triton on a GPU) from
that state; decoding is the recurrence. The chunk grid of training and of posttrain's own generator is not kept: log-probabilities
agree with theirs to rounding, not to the bit.
"""

from __future__ import annotations

ARCHITECTURE = "SSEHForCausalLM"


def register() -> None:
    """Make vLLM know the family; called by vLLM in each of its processes, and harmless when called again."""
    from vllm import ModelRegistry

    import posttrain.models.sse_h  # noqa: F401 - registers the configuration with transformers' AutoConfig

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        # By name: the class is imported in a process of its own first, before CUDA may be touched.
        ModelRegistry.register_model(ARCHITECTURE, "posttrain.vllm_plugin.model:VllmSSEH")
