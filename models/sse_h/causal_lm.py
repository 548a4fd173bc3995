"""The language model: the decoder with its head, losses and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.utils.generic import ModelOutput, can_return_tuple

from posttrain.kernels.batch_invariant import head_logprobs
from posttrain.kernels.wide_product import wide_product
from posttrain.models.cache import SlotCache
from posttrain.models.linear import Linear, is_plain
from posttrain.models.loss import alike, chunked_cross_entropy, shift_labels
from posttrain.models.packing import Packing
from posttrain.models.paged import OneToken
from posttrain.models.sse_h.configuration import SSEHConfig
from posttrain.models.sse_h.modeling import SSEHModel, SSEHModelOutput, SSEHPreTrainedModel


@dataclass
class SSEHCausalLMOutput(ModelOutput):
    """Output of the language model; `loss` includes the weighted balance loss in training, `logits` are None where skipped.

    log_probs, entropy: fp32 [B, columns], of the labels in `score_labels` and of their distributions, where asked for.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: SlotCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    balance_loss: Tensor | None = None
    router_indices: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None


class SSEHForCausalLM(SSEHPreTrainedModel, GenerationMixin):
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: SSEHConfig) -> None:
        super().__init__(config)
        self.model = SSEHModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.exact = False  # see `posttrain.models.exact`
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """generate() leaves the cache to the first forward, which makes a SlotCache with a slot a row."""
        return False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        past_key_values: SlotCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        router_indices: Tensor | None = None,
        output_router_indices: bool = False,
        output_hidden_states: bool | None = None,
        skip_logits: bool | None = None,
        score_labels: Tensor | None = None,
        temperature: float = 1.0,
        one_token: OneToken | None = None,
        **kwargs: Any,
    ) -> SSEHCausalLMOutput:
        """Logits [B, columns, vocabulary], or of the columns in `logits_to_keep`; with labels also the loss.

        Args:
            labels: [B, columns], shifted inside as in transformers; -100 does not count. A sequence's first token is never a
                target, so nothing is predicted across a boundary of the packing.
            shift_labels: labels that were shifted already.
            logits_to_keep: the last n columns (0: all), or a LongTensor of columns (rows of a packed input).
            num_items_in_batch: divides the summed cross-entropy instead of this batch's own count (gradient accumulation).
            skip_logits: do not compute logits; default: in training with labels, where the loss is made in chunks of rows.
            score_labels: [B, columns], shifted already, -100 where nothing is scored: instead of logits come log-probabilities
                and entropies at `temperature`, from fp32 logits that never exist all at once; in strict mode a generator's bits.
                For models that `scores_labels`.
            one_token: see `SSEHModel.forward`.
        """
        if one_token is not None:
            out = self.model(input_ids=input_ids, past_key_values=past_key_values, one_token=one_token)
            logits = self._wide_logits(out.last_hidden_state)
            return SSEHCausalLMOutput(logits=logits, past_key_values=past_key_values, router_indices=out.router_indices)
        source = input_ids if inputs_embeds is None else inputs_embeds
        if source is None:
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        packing = self.model.make_packing(source, attention_mask, cu_seq_lens_q, position_ids, past_key_values)
        outputs = self.model(
            input_ids=input_ids,
            cu_seq_lens_q=cu_seq_lens_q,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            router_indices=router_indices,
            output_router_indices=output_router_indices,
            output_hidden_states=output_hidden_states,
            packing=packing,
        )
        hidden = outputs.last_hidden_state
        if score_labels is not None:
            return self._scores(outputs, score_labels, temperature)
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self._loss(hidden, packing, labels, shift_labels, num_items_in_batch)
        if skip_logits is None:
            skip_logits = self.training and loss is not None
        logits = None
        if not skip_logits:
            columns = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            some = hidden[:, columns]
            logits = self.lm_head(some) if past_key_values is None else self._wide_logits(some)
        return SSEHCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            balance_loss=outputs.balance_loss,
            router_indices=outputs.router_indices,
        )

    def _wide_logits(self, hidden: Tensor) -> Tensor:
        """Logits of a generator; on a GPU in fp32, as `score_labels` computes them."""
        if self.exact or torch.is_grad_enabled() or not hidden.is_cuda or not is_plain(self.lm_head):
            return self.lm_head(hidden)
        flat, weight = alike(hidden.flatten(0, -2), self.lm_head.weight)
        return wide_product(flat, weight).view(*hidden.shape[:-1], -1)

    def _scores(self, outputs: SSEHModelOutput, labels: Tensor, temperature: float) -> SSEHCausalLMOutput:
        if not scores_labels(self):
            raise ValueError(
                "score_labels is for strict mode (call posttrain.models.exact.make_exact(model) first) and for models on a GPU "
                "whose head is a plain product: no adapters, hooks or ZeRO-3"
            )
        hidden = outputs.last_hidden_state
        assert hidden is not None
        scored = labels != -100
        rows, weight = hidden[scored], self.lm_head.weight
        if not self.exact:
            rows, weight = alike(rows, weight)
        found = head_logprobs(rows, weight, labels[scored], temperature=temperature, exact=self.exact)
        # Scattered, so that a batch without any label stays connected to the model.
        log_probs, entropy = (a.new_zeros(labels.shape).masked_scatter(scored, a) for a in found)
        return SSEHCausalLMOutput(
            log_probs=log_probs, entropy=entropy, balance_loss=outputs.balance_loss, router_indices=outputs.router_indices
        )

    def _loss(
        self,
        hidden: Tensor,
        packing: Packing,
        labels: Tensor | None,
        shifted: Tensor | None,
        num_items: Tensor | int | None,
    ) -> Tensor:
        if shifted is not None:
            targets = packing.pack(shifted)
        else:
            assert labels is not None
            targets = shift_labels(packing.pack(labels), packing.lengths)
        loss = chunked_cross_entropy(packing.pack(hidden), targets.to(hidden.device), self.lm_head, num_items=num_items)
        return loss if self.model.balance_loss is None else loss + self.model.balance_loss


def scores_labels(model: Any) -> bool:
    """Whether `model`, which may be wrapped (DistributedDataParallel, DeepSpeed, PEFT), takes `score_labels`."""
    while hasattr(model, "module"):
        model = model.module
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, SSEHForCausalLM):
        return False
    return model.exact or (model.lm_head.weight.is_cuda and is_plain(model.lm_head))
