"""Packing loses nothing, fills rows, repeats exactly; the collator's tensors."""

import random
import subprocess
import sys

import pytest

from posttrain.data.packing import pack, pack_samples
from posttrain.errors import DataError


def lengths(count, seed=0, top=900):
    rng = random.Random(seed)
    return [min(top, max(1, int(rng.lognormvariate(4.5, 1)))) for _ in range(count)]


def test_every_sample_once_and_rows_full():
    sizes = lengths(3000)
    packing = pack(sizes, 1024)
    assert not packing.dropped
    assert not packing.shortened
    pieces = [piece for row in packing.rows for piece in row]
    assert sorted(pieces) == [(n, 0, size) for n, size in enumerate(sizes)]
    assert all(sum(stop - start for _, start, stop in row) <= 1024 for row in packing.rows)
    assert packing.fill == pytest.approx(sum(sizes) / (1024 * len(packing.rows)))
    assert packing.fill > 0.99
    assert len(packing.rows) <= -(-sum(sizes) // 1024) + 2


def test_seed_and_epoch_decide_everything():
    sizes = lengths(500)
    first = pack(sizes, 1024, seed=1, epoch=0).rows
    assert first == pack(sizes, 1024, seed=1, epoch=0).rows
    assert first != pack(sizes, 1024, seed=1, epoch=1).rows
    assert first != pack(sizes, 1024, seed=2, epoch=0).rows


def test_best_fit_by_hand():
    """8 and 7 open rows of 10; 3 fits best beside 7, 2 beside 8, 5 and 4 share a third, and 1 fills it."""
    packing = pack([2, 5, 8, 1, 7, 4, 3], 10)
    assert sorted(sorted(piece[0] for piece in row) for row in packing.rows) == [[0, 2], [1, 3, 5], [4, 6]]
    assert packing.fill == 1.0


@pytest.mark.parametrize(
    ("overlong", "pieces", "dropped", "shortened"),
    [
        ("drop", [(1, 0, 10)], [0, 2], []),
        ("truncate", [(0, 0, 10), (1, 0, 10)], [2], [0]),
        ("split", [(0, 0, 10), (0, 10, 20), (0, 20, 23), (1, 0, 10)], [2], [0]),
    ],
)
def test_too_long_and_empty(overlong, pieces, dropped, shortened):
    packing = pack([23, 10, 0], 10, overlong=overlong)
    assert sorted(piece for row in packing.rows for piece in row) == pieces
    assert (packing.dropped, packing.shortened) == (dropped, shortened)


def test_nothing_fits():
    sample = {"input_ids": [1] * 9, "labels": [1] * 9}
    with pytest.raises(DataError, match="none of 1 samples fits into max_length 8"):
        pack_samples([sample], 8)
    assert pack([], 8).rows == []
    with pytest.raises(ValueError, match="overlong"):
        pack([1], 8, overlong="cut")
    with pytest.raises(ValueError, match="max_length"):
        pack([1], 1)


def test_large_and_quick():
    """80K samples of up to 32K tokens, the size of a distillation set."""
    rng = random.Random(0)
    sizes = [rng.randint(200, 32_768) for _ in range(80_000)]
    assert pack(sizes, 32_768).fill > 0.99


def test_collate():
    torch = pytest.importorskip("torch")
    from posttrain.data.collate import collate

    samples = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    row = pack_samples(samples, 5)[0]
    assert row["seq_lengths"] in ([3, 2], [2, 3])
    batch = collate([{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, 4, 5], "seq_lengths": [3, 2]}, samples[1]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 4, 5]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, 5]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 7]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert all(tensor.device.type == "cpu" for tensor in batch.values())
    with pytest.raises(ValueError, match="seq_lengths sum to 4"):
        collate([{"input_ids": [1, 2], "labels": [1, 2], "seq_lengths": [4]}])
    with pytest.raises(ValueError, match="at least one"):
        collate([])


def test_only_the_collator_imports_torch(root):
    modules = "arithmetic chat decontaminate filters load packing prepare templates tokenizer"
    imports = "; ".join(f"import posttrain.data.{name}" for name in modules.split())
    code = f"{imports}; import sys; assert not {{'torch', 'transformers', 'datasets'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
