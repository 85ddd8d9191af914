"""`plan_selection` against the plain-Python model, and what its rules promise."""

import dataclasses

import hypothesis
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_sparse_mla
from torch_sparse_mla import SelectionPlan, sharding

from .cases import (
    POISON,
    PlanCase,
    assert_plan,
    assert_same_plan,
    call,
    cases,
    every_implementation,
    make_case,
    random_case,
    views,
)

op = torch.ops.torch_sparse_mla.plan_selection.default


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    torch._dynamo.reset()


@every_implementation
def test_one_list_of_one_rank(implementation):
    case = make_case([[9, 3, -1, 9, 0]], [[7, 5, 6]])
    plan = views(case, call(implementation, case))
    assert plan["remap"].tolist() == [[0, 1, -1, 0, 2]]
    assert plan["owner_offsets"].tolist() == [[0, 3]]
    assert plan["owned_slots"].tolist() == [6 * 4 + 1, 7 * 4 + 3, 7 * 4, -1, -1]
    assert plan["counts"].tolist() == [3]


@every_implementation
def test_two_ranks_in_segments_by_first_occurrence(implementation):
    case = make_case([[5, 2, 7], [4, 5, 0]], [[3, 1]], world=2, rank=1)
    plan = views(case, call(implementation, case))
    # Even positions are rank 0's: 2, 4, 0; odd ones rank 1's: 5, 7.
    assert plan["remap"].tolist() == [[3, 0, 4], [1, 3, 2]]
    assert plan["owner_offsets"].tolist() == [[0, 3, 5]]
    assert plan["owned_slots"].tolist() == [3 * 4 + 2, 3 * 4 + 3, -1, -1, -1, -1]


@every_implementation
@hypothesis.given(case=cases())
@hypothesis.settings(max_examples=150)
def test_matches_model(implementation, case):
    assert_plan(case, call(implementation, case))


@every_implementation
@pytest.mark.parametrize("world, interleave, page_size", [(1, 1, 16), (4, 1, 16), (8, 4, 16), (3, 5, 15)])
@pytest.mark.parametrize("rows_per_request, topk", [(1, 500), (4, 130), (4, 300)])
def test_longer_lists_match_model(implementation, rows_per_request, topk, world, interleave, page_size):
    sizes = {"requests": 2, "rows_per_request": rows_per_request, "topk": topk}
    geometry = {"world": world, "interleave": interleave, "page_size": page_size, "rank": world - 1}
    case = random_case(topk, **sizes, **geometry, context=700, reserved_rows_per_request=5)
    assert_plan(case, call(implementation, case))


@every_implementation
@pytest.mark.parametrize("world", range(1, 9))
def test_records_gathered_from_all_ranks_are_the_selected_ones(implementation, world):
    """What every rank sends, put segment behind segment, is what `remap` expects to find."""
    sizes = {"requests": 3, "rows_per_request": 2, "topk": 40, "reserved_rows_per_request": 3}
    interleave = 1 + world % 3
    geometry = {"world": world, "interleave": interleave, "page_size": 4 * interleave, "context": 90}
    case = random_case(world, **sizes, **geometry)
    capacity = case.selection.capacity_per_request
    workspace = torch.full((case.selection.capacity,), POISON)
    plans = [views(case, call(implementation, dataclasses.replace(case, rank=rank))) for rank in range(world)]
    for rank, plan in enumerate(plans):
        for name in ("remap", "owner_offsets", "counts"):
            assert torch.equal(plan[name], plans[0][name]), "every rank has the same plan"
        for request in range(3):
            begin, end = plan["owner_offsets"][request, rank : rank + 2].tolist()
            slots = plan["owned_slots"][request * capacity :][: end - begin]
            # The record's "bytes" are its global position, found from its slot alone.
            blocks = (case.block_table[request] == (slots // case.page_size).unsqueeze(1)).int().argmax(1)
            local = blocks * case.page_size + slots % case.page_size
            positions = sharding.global_position(rank, local, world, interleave)
            workspace[request * capacity + begin : request * capacity + end] = positions
    remap = plans[0]["remap"][: len(case.topk)]
    assert torch.equal(remap >= 0, case.topk >= 0)
    gathered = workspace[remap.clamp(min=0).long()]
    assert torch.equal(torch.where(remap >= 0, gathered, -1), case.topk.long())


@every_implementation
def test_requests_with_the_same_positions_do_not_share(implementation):
    case = make_case([[1, 2], [2, 1], [1, 2]], [[4], [9], [6]], reserved_rows_per_request=3)
    plan = views(case, call(implementation, case))
    assert plan["remap"][:3].tolist() == [[0, 1], [6, 7], [12, 13]]
    assert plan["owned_slots"].view(3, 6)[:, :3].tolist() == [[17, 18, -1], [38, 37, -1], [25, 26, -1]]


@every_implementation
@pytest.mark.parametrize("world", [1, 4])
def test_union_that_fills_the_capacity(implementation, world):
    topk = torch.arange(4 * 32, dtype=torch.int32).flip(0).view(4, 32)
    case = make_case(topk, torch.arange(8).view(1, 8), page_size=16, world=world, rank=world - 1)
    plan = views(case, call(implementation, case))
    assert plan["counts"].tolist() == [128] == [case.selection.capacity]
    assert plan["remap"].flatten().sort().values.tolist() == list(range(128))
    assert (plan["owned_slots"] >= 0).sum() == 128 // world
    assert_plan(case, call(implementation, case))


@every_implementation
def test_later_smaller_call_leaves_nothing_of_an_earlier_one(implementation):
    """Same buffer, same reserved sizes: 3 requests of 4 rows, then 1 of 2, with nearly nothing selected."""
    large = random_case(
        1, requests=3, rows_per_request=4, topk=20, world=2, context=60, page_size=8, reserved_requests=3
    )
    small = make_case(
        [[5, -1] + [-1] * 18, [-1] * 20],
        [[2, 3, 4, 5]],
        page_size=8,
        world=2,
        rank=1,
        reserved_requests=3,
        reserved_rows_per_request=4,
    )
    device = "cuda" if implementation == "op-cuda" else "cpu"
    large, small = large.to(device), small.to(device)
    op(*large.args())
    op(*dataclasses.replace(small, plan=large.plan).args())
    assert_plan(small.to("cpu"), large.plan.cpu())


@every_implementation
def test_nothing_selected(implementation):
    case = make_case([[-1] * 5] * 6, [[0, 1], [2, 3]], world=3)
    plan = views(case, call(implementation, case))
    assert all((plan[name] == -1).all() for name in ("remap", "owned_slots"))
    assert all((plan[name] == 0).all() for name in ("owner_offsets", "counts"))


@every_implementation
@pytest.mark.parametrize("reserved_requests", [0, 2])
def test_no_requests(implementation, reserved_requests):
    case = make_case(torch.empty(0, 5), torch.empty(0, 3), world=2, reserved_requests=reserved_requests)
    assert_plan(case, call(implementation, case))


@every_implementation
def test_writes_nothing_beyond_the_plan(implementation):
    case = random_case(3, requests=2, rows_per_request=2, topk=33, world=2, context=50, page_size=8)
    words = case.selection.words
    case = dataclasses.replace(case, plan=torch.empty(words + 64, dtype=torch.int32))
    plan = call(implementation, case)
    assert_plan(case, plan[:words])
    assert (plan[words:] == POISON).all()


@every_implementation
def test_block_table_that_is_part_of_a_larger_one(implementation):
    case = random_case(4, requests=3, rows_per_request=1, topk=30, world=2, context=60, page_size=8)
    expected = case.expected()
    larger = torch.full((5, 9), -1, dtype=torch.int32)
    larger[:3, : case.block_table.shape[1]] = case.block_table
    larger = larger.to("cuda" if implementation == "op-cuda" else "cpu")
    part = larger[:3, : case.block_table.shape[1]]
    case = dataclasses.replace(case.to(larger.device.type), block_table=part)
    op(*case.args())
    for name, view in views(case, case.plan.cpu()).items():
        assert view.tolist() == expected[name]


def test_public_function_allocates_and_derives_the_rows():
    selection = SelectionPlan(requests=3, rows_per_request=4, topk=8, world=2)
    case = random_case(
        5,
        requests=2,
        rows_per_request=3,
        topk=8,
        world=2,
        context=30,
        reserved_requests=3,
        reserved_rows_per_request=4,
    )
    geometry = {"page_size": 64, "interleave": 1, "rank": 0}
    plan = torch_sparse_mla.plan_selection(case.topk, case.block_table, selection, **geometry)
    assert plan.shape == (selection.words,)
    assert_plan(case, plan)
    given = torch.full_like(plan, POISON)
    assert torch_sparse_mla.plan_selection(case.topk, case.block_table, selection, **geometry, plan=given) is given
    assert_same_plan(case, given, plan)


def test_public_function_takes_requests_without_a_row():
    selection = SelectionPlan(requests=3, rows_per_request=4, topk=8, world=2)
    plan = torch.full((selection.words,), POISON, dtype=torch.int32)
    nothing = torch.empty(0, 8, dtype=torch.int32)
    table = torch.zeros(2, 5, dtype=torch.int32)
    torch_sparse_mla.plan_selection(nothing, table, selection, page_size=64, interleave=1, rank=0, plan=plan)
    for view, value in ((selection.remap, -1), (selection.owned_slots, -1), (selection.counts, 0)):
        assert (view(plan) == value).all()


@pytest.mark.parametrize(
    "options",
    [
        {"requests": 2, "rows_per_request": 2, "topk": 20},
        {"requests": 1, "rows_per_request": 1, "topk": 20, "reserved_requests": 2, "reserved_rows_per_request": 3},
        {"requests": 0, "rows_per_request": 1, "topk": 20, "reserved_requests": 1},
    ],
    ids=["full", "fewer-than-reserved", "no-requests"],
)
def test_opcheck(options):
    case = random_case(6, **options, world=2, context=50, page_size=8)
    torch.library.opcheck(op, case.args())


def plan_publicly(case: PlanCase):
    def function(topk, block_table):
        return torch_sparse_mla.plan_selection(
            topk, block_table, case.selection, page_size=case.page_size, interleave=case.interleave, rank=case.rank
        )

    return function


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_results_equal_eager(backend):
    sizes = {"requests": 2, "rows_per_request": 2, "topk": 20, "reserved_rows_per_request": 3}
    case = random_case(7, **sizes, world=2, context=50, page_size=8)
    compiled = torch.compile(plan_publicly(case), fullgraph=True, backend=backend)
    assert_plan(case, compiled(case.topk, case.block_table))


def test_one_compiled_graph_serves_every_number_of_requests():
    graphs = torch._dynamo.testing.CompileCounter()
    sizes = {"rows_per_request": 2, "topk": 20, "reserved_requests": 9}
    function = plan_publicly(random_case(8, requests=2, **sizes, world=2, context=50, page_size=8))
    compiled = torch.compile(function, fullgraph=True, backend=graphs)
    for requests in (2, 5, 9):
        case = random_case(8, requests=requests, **sizes, world=2, context=50, page_size=8)
        for tensor in (case.topk, case.block_table):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert_plan(case, compiled(case.topk, case.block_table))
    assert graphs.frame_count == 1


def test_fakes_accept_fake_cuda_tensors():
    case = random_case(9, requests=2, rows_per_request=2, topk=20, world=2, context=50, page_size=8)
    with FakeTensorMode():
        topk, block_table = (
            torch.empty(tensor.shape, dtype=torch.int32, device="cuda") for tensor in (case.topk, case.block_table)
        )
        plan = plan_publicly(case)(topk, block_table)
        assert (plan.shape, plan.device.type) == ((case.selection.words,), "cuda")
