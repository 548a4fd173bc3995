"""The rewards as TRL's own GRPOTrainer calls them: `reward_funcs=[...]` with `reward_weights`, no learner of ours."""

from __future__ import annotations

import pytest
import trl
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.data.tokenizer import arithmetic_tokenizer
from posttrain.rewards.format import FormatReward, OverlongPenalty, RepetitionPenalty
from posttrain.rewards.language import LanguageReward
from posttrain.rewards.maths import MathsReward
from posttrain.rewards.pool import VerifierPool
from posttrain.rewards.registry import build_rewards


@pytest.fixture(scope="module")
def parts():
    tokenizer = arithmetic_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    rows = Dataset.from_list([{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)])
    return LlamaForCausalLM(config), tokenizer, rows


def train(parts, folder, reward_funcs, **arguments):
    model, tokenizer, rows = parts
    config = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        **arguments,
    )
    trainer = trl.GRPOTrainer(model, reward_funcs=reward_funcs, args=config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return next(entry for entry in trainer.state.log_history if "reward" in entry)


def test_each_reward_is_one_of_trls(parts, tmp_path):
    with VerifierPool(workers=1, timeout_s=60.0) as pool:
        rewards = [
            MathsReward(pool),
            FormatReward(),
            OverlongPenalty(max_length=8, cache=4),
            RepetitionPenalty(ngram=2),
            LanguageReward(language="en"),
        ]
        logged = train(parts, tmp_path, rewards, reward_weights=[1.0, 0.5, 1.0, 0.1, 0.1])
        assert pool.counters.verified == 4
    for name in ("maths", "format", "overlong", "repetition", "language"):
        assert f"rewards/{name}/mean" in logged
    # Random weights end no sequence: 8 tokens of at most 8 are 4 over the cache of 4.
    assert -1.0 <= logged["rewards/overlong/mean"] <= 0.0 and logged["rewards/format/mean"] == 0.0


def test_a_whole_set_is_one_reward(parts, tmp_path):
    with build_rewards({"functions": [{"name": "maths"}, {"name": "format", "weight": 0.5}], "workers": 1}) as rewards:
        logged = train(parts, tmp_path, rewards)
        assert set(rewards.breakdown) == {"maths", "format"} and len(rewards.breakdown["maths"]) == 4
    assert "rewards/reward/mean" in logged
