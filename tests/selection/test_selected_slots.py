"""`selected_slots`: where selected tokens lie, on one rank or on all."""

from dataclasses import replace

import hypothesis
import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla import sharding
from torch_sparse_mla.selection import reference

from .cases import every_implementation
from .slot_cases import SlotCase, check_slots, make_slot_case, slot_cases

op = torch.ops.torch_sparse_mla.selected_slots


def run(implementation: str):
    function = reference.selected_slots if implementation == "reference" else op
    return function, "cuda" if implementation == "op-cuda" else "cpu"


@hypothesis.given(case=slot_cases())
def test_matches_model(case):
    check_slots(op, case)


@every_implementation
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("slots_per_rank", [0, 24, 1000])
@pytest.mark.parametrize("world, interleave, page_size", [(1, 1, 16), (4, 4, 16), (3, 5, 15)])
def test_matches_model_for_long_lists(implementation, slots_per_rank, packed, world, interleave, page_size):
    geometry = {"world": world, "interleave": interleave, "page_size": page_size, "rank": world - 1, "packed": packed}
    case = make_slot_case(topk=2051, copies=world, slots_per_rank=slots_per_rank, rows_per_request=4, **geometry)
    function, device = run(implementation)
    check_slots(function, case.to(device))


def test_matches_the_sharding_arithmetic():
    case = make_slot_case(rank=1)
    op(*case.args())
    tokens = torch.where(case.topk < case.lengths.unsqueeze(1), case.topk, -1)
    expected = sharding.local_slots(tokens.view(2, -1), case.block_table, 4, 1, 3, 2).view(tokens.shape)
    assert torch.equal(case.slots.long(), expected)


@every_implementation
def test_positions_and_pages_at_the_ends_of_int32(implementation):
    function, device = run(implementation)
    topk = torch.tensor([[2**31 - 1, 2**31 - 2, -(2**31), 0, 5]], dtype=torch.int32)
    pages = torch.tensor([[2**31 - 1, 2**25 - 1, 2**25]], dtype=torch.int32)
    lengths = torch.tensor([2**31 - 1], dtype=torch.int32)
    case = SlotCase(topk, pages, lengths, torch.zeros_like(topk), None, 64, 1, 0, 1, 0)
    check_slots(function, case.to(device))
    for token in (64, 128):
        check_slots(function, replace(case, topk=torch.full_like(topk, token)).to(device))


@every_implementation
def test_accepts_no_rows(implementation):
    function, device = run(implementation)
    check_slots(function, make_slot_case(requests=0).to(device))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("slots_per_rank", [0, 24])
def test_opcheck(slots_per_rank, packed):
    torch.library.opcheck(op, make_slot_case(copies=2, slots_per_rank=slots_per_rank, packed=packed).args())


def test_packed_lists_compile_into_one_graph():
    case = make_slot_case(packed=True)
    torch._dynamo.reset()
    torch.compile(op, fullgraph=True, backend="aot_eager")(*case.args())
    check_slots(lambda *args: None, case)


def test_public_function_makes_one_copy():
    case = make_slot_case(rank=2)
    given = torch_sparse_mla.selected_slots(
        case.topk, case.block_table, case.lengths, page_size=4, interleave=2, rank=2, world=3
    )
    assert given.tolist() == case.expected()


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_replays_follow_the_lists(packed):
    case = make_slot_case(copies=3, packed=packed).to("cuda")
    op(*case.args())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*case.args())
    for seed in range(1, 4):
        other = make_slot_case(copies=3, seed=seed, packed=packed)
        for name in ("topk", "block_table", "lengths"):
            getattr(case, name).copy_(getattr(other, name))
        case.slots.zero_()
        graph.replay()
        assert case.slots.tolist() == other.expected()


WRONG = {
    "topk-dtype": ("topk", lambda case: {"topk": case.topk.long()}, "dtype int32"),
    "topk-stride": ("topk", lambda case: {"topk": case.topk.repeat(1, 2)[:, ::2]}, "a contiguous tensor"),
    "topk-rows": ("topk", lambda case: {"topk": case.topk[:3].clone()}, "a multiple of the 2 requests"),
    "lengths": ("lengths", lambda case: {"lengths": case.lengths[:3].clone()}, r"shape \[rows\] = \[4\]"),
    "slots-rows": ("slots", lambda case: {"slots": case.slots[:3].clone()}, "a multiple of 4 rows"),
    "counts": ("counts", lambda case: {"counts": case.lengths[:3].clone()}, r"shape \[rows of slots\] = \[4\]"),
    "counts-over": ("counts", lambda case: {"counts": case.slots.view(-1)[:4]}, "memory of its own"),
    "slots-over": ("slots", lambda case: {"slots": case.topk}, "memory of its own"),
    "page_size": ("page_size", lambda case: {"page_size": 3}, "a multiple of the interleave 2"),
    "rank": ("rank", lambda case: {"rank": 3}, "0 <= rank < world = 3"),
    "slots_per_rank": ("slots_per_rank", lambda case: {"slots_per_rank": 2**30}, "at most 715827882"),
}


@every_implementation
@pytest.mark.parametrize("wrong", WRONG)
def test_rejects(implementation, wrong):
    argument, change, allowed = WRONG[wrong]
    function, device = run(implementation)
    case = make_slot_case().to(device)
    before = case.slots.clone()
    with pytest.raises(ValueError, match=f"selected_slots: argument '{argument}': got .*; allowed: .*{allowed}"):
        function(*replace(case, **change(case)).args())
    assert torch.equal(case.slots, before)
