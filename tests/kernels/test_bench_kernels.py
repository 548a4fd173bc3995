"""The kernel benchmark's parts that run without a GPU: its peers' arithmetic, floors, tables, and a trial of the scripts."""

import json
import math
import sys
import types

import pytest
import torch

from posttrain.kernels.sse import sse


@pytest.fixture(scope="module", autouse=True)
def scripts(root):
    sys.path.insert(0, str(root / "scripts"))
    yield
    sys.path.remove(str(root / "scripts"))


@pytest.fixture
def fla(monkeypatch):
    """A stand-in for the package: its chunk_gla's interface over our own chunked operator."""

    def chunk_gla(q, k, v, g, cu_seqlens=None):
        tokens = q.shape[1]
        bounds = torch.tensor([0, tokens]) if cu_seqlens is None else cu_seqlens
        weight, index = torch.ones(tokens, 1, dtype=v.dtype), torch.zeros(tokens, 1, dtype=torch.int64)
        o, final = sse(
            None,
            None,
            None,
            q[0],
            k[0],
            g[0],
            v[0],
            weight,
            index,
            cu_seqlens=bounds,
            num_partitions=1,
            gate="none",
            backend="torch",
        )
        return o[None], final

    module = types.ModuleType("fla.ops.gla")
    module.chunk_gla = chunk_gla
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gla", module)


def make(lengths=(40,), **options):
    from bench_problem import make_problem

    options = dict(heads=2, dim=8, partitions=4, device=torch.device("cpu"), dtype=torch.float32, g_dtype=torch.float32) | options
    return make_problem(lengths, **options)


@pytest.mark.parametrize(("lengths", "routed"), [((40,), 1), ((40,), 2), ((17, 1, 30), 1), ((17, 1, 30), 3)])
def test_the_composed_peer_is_sse(fla, lengths, routed):
    from bench_checks import truth_of
    from bench_problem import build_composed
    from bench_tools import relative_error

    p = make(lengths, routed=routed)
    truth, found = truth_of(p), build_composed(p.double()).named()
    assert list(found) == list(truth) == ["o", *(f"d{n}" for n in p.tensors)]
    for name, a in found.items():
        assert relative_error(a, truth[name]) < 1e-12, name


def test_the_masking_peer_is_sse(fla):
    from bench_checks import truth_of
    from bench_problem import build_masking
    from bench_tools import relative_error

    p = make(routed=2)
    truth, found = truth_of(p), build_masking(p.double()).named()
    for name, a in found.items():
        assert relative_error(a, truth[name]) < 1e-12, name
    with pytest.raises(ValueError, match="one sequence"):
        build_masking(make((20, 20)))


def test_plain_attention_is_ours_on_one_partition(fla):
    from bench_checks import truth_of_plain
    from bench_problem import build_gla
    from bench_tools import relative_error

    p = make()
    truth, found = truth_of_plain(p), build_gla(p.double()).named()
    assert list(found) == ["o", "dq", "dk", "dg", "dv"]
    for name, a in found.items():
        assert relative_error(a, truth[name]) < 1e-12, name


def test_problems_that_differ_in_partitions_share_their_tensors():
    four, sixteen = make(), make(partitions=16)
    assert all(torch.equal(four.tensors[n], sixteen.tensors[n]) for n in four.tensors if n != "weight")
    assert int(sixteen.index.max()) > 3
    assert torch.equal(four.up, sixteen.up)


def test_bitwise_checks_see_a_difference():
    from bench_checks import packs_bitwise, repeats_bitwise
    from bench_problem import build_ours

    p = make((19, 0, 1, 20))
    assert all(packs_bitwise(p, "torch", chunk_size=16).values())
    calls = iter((1.0, 1.0 + 1e-6))
    call = build_ours(p, "torch")
    same = repeats_bitwise(call._replace(forward=lambda: build_ours(p, "torch").forward() * next(calls)))
    assert not same["o"]


def test_floors_by_hand():
    from bench_report import BF16_FLOP_PER_S, COPY_BYTES_PER_S, floors_ms

    floors = floors_ms(10, 3, 4, states=2, chunk=8)
    tensor = 10 * 3 * 4 * 2
    flops = 10 * 2 * 3 * (8 * (4 + 4) + 4 * 4 * 4)  # C (K + V) and twice 2 K V
    assert floors["forward"] == pytest.approx((1e3 * (8 * tensor + 120) / COPY_BYTES_PER_S, 1e3 * flops / BF16_FLOP_PER_S))
    assert floors["both"] == pytest.approx((1e3 * (23 * tensor + 240) / COPY_BYTES_PER_S, 3e3 * flops / BF16_FLOP_PER_S))


def test_relative_error():
    from bench_tools import relative_error

    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, math.nan]), truth) == math.inf
    assert relative_error(torch.tensor([3.0]), truth) == math.inf
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0


def test_unwritten_memory_is_nan():
    from bench_tools import poisoned_memory

    with poisoned_memory():
        assert torch.empty(7).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_failing_peer_is_a_reason(capsys):
    from bench_tools import attempt

    assert attempt("a peer", lambda: 3) == 3
    assert attempt("a peer", lambda: {}["o"]) == "KeyError: 'o'"
    assert "a peer: FAILED" in capsys.readouterr().out


def test_the_report_compares_with_like_tensors():
    from bench_report import Report
    from bench_tools import Timing

    settings = dict(heads=1, dim=8, dtype="bf16", g_dtype="bf16", backend="triton", chunk_size=64, cold=False)
    environment = dict(device="a device", date="2000-01-01", command="python x")
    report = Report(environment, settings, [64])
    for name, ms in (("sse-n4k1", 9.0), ("sse-n4k1", 3.0), ("fla-gla", 2.0)):
        report.add_timing(name, 64, "both", Timing(ms=ms, low_ms=ms, high_ms=ms, repeats=5, host_ms=1.0, first_s=1.0))
    report.add_timing("attention", 64, "both", "RuntimeError: none")
    report.errors["SSE", "ours"] = {"o": 1e-3, "dq2": 4e-3, "dweight": 1e-3, "dk1": math.inf}
    report.errors["SSE", "fla"] = {"o": 1e-3, "dq": 2e-3, "dk": 1.0}
    text = "\n".join(report.markdown())
    assert "| 64 | failed | 2 | 3 | 1.50 |" in text
    assert "| dq2 | 4.00e-03 | 2.00e-03 | 2.00 |" in text and "| dweight | 1.00e-03 | - | - |" in text
    assert "RuntimeError: none" in text
    record = report.record()
    assert [row["ms"] for row in record["timings_before"]] == [9.0]
    assert record["ratios"] == [{"ratio": "n4k1 / fla chunk_gla", "tokens": 64, "pass": "both", "value": 1.5}]


def test_a_trial_on_the_cpu(tmp_path, monkeypatch, capsys):
    import bench_kernels

    sizes = ["--tokens", "24", "--heads", "1", "--dim", "8", "--check-tokens", "24", "--chunk-size", "16"]
    arguments = [
        "--device",
        "cpu",
        "--backend",
        "torch",
        *sizes,
        "--quick",
        "--skip",
        "masking-n4k1",
        "sse-gdn",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["somewhere/bench_kernels.py", *arguments])
    assert bench_kernels.main(arguments) == 0
    record = json.loads((tmp_path / "kernels.json").read_text())
    assert record["environment"]["command"].endswith("--skip masking-n4k1 sse-gdn")
    assert str(tmp_path) not in record["environment"]["command"]
    rows = {(r["variant"], r["pass"]): r for r in record["timings"]}
    assert rows["sse-n4k1", "both"]["ms"] > 0 and rows["sse-packed", "forward"]["ms"] > 0
    assert rows["fla-gla", "both"]["failed"] == "RuntimeError: needs a GPU"
    assert ("masking-n4k1", "both") not in rows
    errors = {e["case"]: e["errors"] for e in record["errors"]}
    assert errors["SSE-n4k1, 24 tokens"]["dweight"] < 1e-5 and errors["plain GLA, 24 tokens"]["o"] < 1e-2
    assert all(all(same.values()) for same in record["bitwise"].values())
    assert "| 24 |" in (tmp_path / "kernels.md").read_text()
    with pytest.raises(SystemExit):
        bench_kernels.main(["--device", "cpu"])
    assert "give --out" in capsys.readouterr().err


def test_the_sanitizer_script(monkeypatch, capsys):
    import sanitize_kernels

    arguments = ["--device", "cpu", "--backend", "torch", "--cases", "empty ones", "per route", "nothing"]
    assert sanitize_kernels.main(arguments) == 0
    assert "12 ok, 0 refused, 0 FAIL" in capsys.readouterr().out

    def wrong(*tensors, **options):
        o, final = sse(*tensors, **options)
        return (o if o.dtype == torch.float64 else 1.1 * o), final

    monkeypatch.setattr(sanitize_kernels, "sse", wrong)
    assert sanitize_kernels.main([*arguments, "--transition", "gla", "--dtype", "fp32"]) == 1
    assert "FAIL    gla fp32 per route" in capsys.readouterr().out
