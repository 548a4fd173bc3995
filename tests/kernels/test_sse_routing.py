"""Routing, the balance loss, and what bad input gets."""

import pytest
import torch

from posttrain.kernels.sse import ChunkState, balance_loss, route, sse, sse_extend, sse_gdn
from posttrain.kernels.sse.cases import Case, make_case


def test_route_keeps_the_largest_without_renormalising():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    probs, weight, index = route(logits, 2)
    assert index.tolist() == [[1, 3]]
    torch.testing.assert_close(weight, torch.tensor([[0.4, 0.3]]))
    torch.testing.assert_close(probs.sum(-1), torch.ones(1))


@pytest.mark.parametrize("selected", [1, 2, 3])
def test_ties_go_to_the_lowest_index(selected):
    _, _, index = route(torch.tensor([[0.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]), selected)
    assert index.tolist() == [[1, 2, 3][:selected], [0, 1, 2][:selected]]


def test_route_is_fp32_for_low_precision_and_float64_for_float64():
    assert route(torch.zeros(2, 3, dtype=torch.bfloat16), 1)[0].dtype == torch.float32
    assert route(torch.zeros(2, 3, dtype=torch.float64), 1)[1].dtype == torch.float64


def test_balance_loss_by_hand():
    probs = torch.tensor([[0.7, 0.3], [0.4, 0.6]], requires_grad=True)
    loss = balance_loss(probs, torch.tensor([[0], [1]]))
    assert loss.item() == pytest.approx(2 * (0.55 * 0.5 + 0.45 * 0.5))
    loss.backward()
    torch.testing.assert_close(probs.grad, torch.full((2, 2), 0.5))
    assert balance_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([[0]])).item() == pytest.approx(2.0)
    assert balance_loss(torch.zeros(0, 4), torch.zeros(0, 1, dtype=torch.int64)).item() == 0


@pytest.mark.parametrize("selected", [0, 5])
def test_route_refuses(selected):
    with pytest.raises(ValueError, match="must be in"):
        route(torch.zeros(3, 4), selected)
    with pytest.raises(ValueError, match=r"\[T, N\]"):
        route(torch.zeros(4), 1)


BAD = {
    "gate": (dict(gate="reads"), "gate='reads'"),
    "backend": (dict(backend="cuda"), "backend='cuda'"),
    "triton": (dict(backend="triton", chunk_size=129), "backend='triton'"),
    "partitions": (dict(num_partitions=0), "num_partitions=0"),
    "index too large": (dict(index=torch.full((12, 2), 4)), r"\[0, 4\)"),
    "index twice": (dict(index=torch.zeros(12, 2, dtype=torch.int64)), "twice"),
    "index dtype": (dict(index=torch.zeros(12, 2, dtype=torch.int32)), "int64"),
    "chunk": (dict(chunk_size=0), "chunk_size=0"),
    "cu_seqlens end": (dict(cu_seqlens=torch.tensor([0, 5, 11])), "T=12"),
    "cu_seqlens falls": (dict(cu_seqlens=torch.tensor([0, 8, 5, 12])), "without falling"),
    "cu_seqlens dtype": (dict(cu_seqlens=torch.tensor([0.0, 12.0])), "integers"),
    "weight shape": (dict(weight=torch.zeros(12, 1)), r"weight must have shape \[12, 2\]"),
    "state shape": (dict(initial_state=torch.zeros(1, 5, 2, 16, 24)), "initial_state"),
    "half a shared partition": (dict(k1=None), "only q1, g1"),
    "key shape": (dict(k2=torch.zeros(12, 2, 15)), "k2"),
    "no routed key": (dict(k2=None), "k2 is None"),
    "values": (dict(v=torch.zeros(12, 48)), r"\[T, H, V\]"),
    "no key channels": (dict(q2=torch.zeros(12, 2, 0), k2=torch.zeros(12, 2, 0), g2=torch.zeros(12, 2, 0)), "K at least 1"),
    "no value channels": (dict(v=torch.zeros(12, 2, 0)), "at least one channel"),
    "v2": (dict(v2=torch.zeros(12, 3, 2, 24)), "v2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises(name):
    change, message = BAD[name]
    case = Case(lengths=(5, 7), routed=2)
    tensors, options = make_case(case)
    given = {**tensors, **options, **change}
    positional = [given.pop(n) for n in (*case.names, "weight", "index")]
    with pytest.raises(ValueError, match=message):
        sse(*positional, **given)


def test_gdn_names_its_scalars():
    case = Case(lengths=(5,), transition="gdn")
    tensors, options = make_case(case)
    positional = [tensors[n] for n in (*case.names, "weight", "index")]
    positional[3] = torch.zeros(5, 2, 16)
    with pytest.raises(ValueError, match=r"b1 must have shape \[5, 2\]"):
        sse_gdn(*positional, **options)


@pytest.mark.parametrize(
    ("slots", "allocate", "message"),
    [
        ([0, 9], {}, r"\[0, 3\)"),
        ([1, 1], {}, "must differ"),
        ([0], {}, "one slot a sequence"),
        ([0, 1], dict(transition="gdn"), "transition='gdn'"),
        ([0, 1], dict(heads=3), "the state holds"),
    ],
)
def test_extend_refuses(slots, allocate, message):
    case = Case(lengths=(5, 7), initial=False)
    tensors, options = make_case(case)
    del options["chunk_size"]
    sizes = dict(num_slots=3, num_partitions=4, heads=2, key_dim=16, value_dim=24, chunk_size=16)
    state = ChunkState.allocate(**{**sizes, **allocate})
    with pytest.raises(ValueError, match=message):
        sse_extend(*[tensors[n] for n in (*case.names, "weight", "index")], state=state, slots=torch.tensor(slots), **options)


def test_allocate_refuses():
    with pytest.raises(ValueError, match="transition"):
        ChunkState.allocate(1, 1, 1, 1, 1, 1, transition="rwkv")
    with pytest.raises(ValueError, match="heads=0"):
        ChunkState.allocate(1, 1, 0, 1, 1, 1)
