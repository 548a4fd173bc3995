"""The training benchmark's dry run, and its count of operations against sums by hand."""

import json
import sys

import pytest


@pytest.fixture
def bench(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))
    before = list(sys.path)
    import bench_train

    yield bench_train
    sys.path[:] = before


def test_dry_run_writes_every_row(bench, tmp_path):
    arguments = [
        "--device",
        "cpu",
        "--tiny",
        "--unfused",
        "--repeats",
        "1",
        "--seconds",
        "0",
        "--sequences",
        "2",
        "--tokens",
        "32",
    ]
    assert bench.main([*arguments, "--out", str(tmp_path)]) == 0
    runs = json.loads((tmp_path / "train_step.json").read_text())["runs"]
    assert len(runs) == 5
    assert all(run["failed"] is None and run["tokens_per_second"] > 0 and run["utilisation"] > 0 for run in runs)
    # The same loss by both implementations of the Transformer, near log(512): weights are small.
    assert all(abs(run["loss"] - 6.24) < 0.2 for run in runs)
    text = (tmp_path / "train_step.md").read_text()
    assert all(f"| {run['name']} | 32 |" in text for run in runs)


def test_model_flops_by_hand(bench):
    fields = {"hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20,
              "adapter_rank": 3, "gate_rank": 1, "layer_types": ["sse", "full_attention"]}  # fmt: skip
    sse = 4 * 64 + 4 * 8 + 4 + 2 * 3 * 16 + 2 * (16 + 8)
    blocks = 2 * (3 * 80 + 16) + 8
    parameters = sse + 4 * 64 + blocks + 160
    want = 6 * parameters * 12 + 3 * 4 * 12 * 2 * 16 * 2 + 3 * 2 * 4**2 * 8 * 3
    assert bench.model_flops(fields, tokens=12, sequences=3) == want


def test_every_kernel_of_ours_has_a_kind(bench):
    kinds = bench.own_kernels()
    assert kinds["rms_norm_backward_kernel"] == "fused elementwise" and kinds["cross_entropy_kernel"] == "cross-entropy"
    total = bench.by_kind([
        ("rms_norm_forward_kernel", 1000.0, 1), ("nvjet_tst_128x256_NNT", 3000.0, 1), ("Optimizer.step#AdamW.step", 9000.0, 1),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 2000.0, 1), ("unheard_of", 500.0, 1),
    ])  # fmt: skip
    assert total == {"matmul": 3.0, "softmax attention": 2.0, "fused elementwise": 1.0, "other": 0.5}
