"""SSE-H, registered with transformers' Auto classes as model_type "sse_h"."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from posttrain.models.sse_h.causal_lm import SSEHCausalLMOutput, SSEHForCausalLM
from posttrain.models.sse_h.configuration import SSEHConfig
from posttrain.models.sse_h.modeling import SSEHModel, SSEHModelOutput

AutoConfig.register("sse_h", SSEHConfig, exist_ok=True)
AutoModel.register(SSEHConfig, SSEHModel, exist_ok=True)
AutoModelForCausalLM.register(SSEHConfig, SSEHForCausalLM, exist_ok=True)

__all__ = ["SSEHCausalLMOutput", "SSEHConfig", "SSEHForCausalLM", "SSEHModel", "SSEHModelOutput"]
