"""The Triton kernels in Triton's interpreter, against the model. Run by `tests/test_triton_interpreted.py`.

Programs run one after another and their lanes in step, so what barriers are for does not show here.
"""

import contextlib
import os

import hypothesis
import pytest
import torch

from torch_sparse_mla import SelectionPlan
from torch_sparse_mla.selection import contract, plan, reference, triton_kernels, triton_kernels_slots

from .cases import POISON, PlanCase, assert_plan, cases, make_case, random_case
from .slot_cases import check_slots, slot_cases

assert os.environ.get("TRITON_INTERPRET") == "1", "needs TRITON_INTERPRET=1 before Triton is imported"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def forget_launches():
    """They are kept for each reserved size; some tests change what they are made from."""
    kept = (triton_kernels._launches, contract._reserved)
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@contextlib.contextmanager
def block_by_block():
    """The kernels for requests whose entries do not fit the registers of one program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "MAX_ENTRIES_IN_REGISTERS", 0)
        patch.setattr(triton_kernels, "MAX_BLOCK", 128)
        triton_kernels._launches.cache_clear()
        yield
        triton_kernels._launches.cache_clear()


def planned(case: PlanCase) -> torch.Tensor:
    triton_kernels.plan_selection(*case.args())
    return case.plan


@hypothesis.given(case=cases())
@hypothesis.settings(max_examples=12)
def test_matches_model(case):
    assert_plan(case, planned(case))


@hypothesis.given(case=cases())
@hypothesis.settings(max_examples=12)
def test_matches_model_block_by_block(case):
    with block_by_block():
        assert_plan(case, planned(case))


@pytest.mark.parametrize("world, interleave, page_size", [(1, 1, 16), (4, 1, 16), (8, 4, 16), (3, 5, 15)])
def test_longer_lists_match_model(world, interleave, page_size):
    geometry = {"world": world, "interleave": interleave, "page_size": page_size, "rank": world - 1}
    case = random_case(
        1, requests=2, rows_per_request=4, topk=200, **geometry, context=500, reserved_rows_per_request=5
    )
    assert_plan(case, planned(case))


def test_lists_of_several_blocks_match_model():
    geometry = {"world": 2, "interleave": 2, "page_size": 16, "rank": 1}
    case = random_case(2, requests=2, rows_per_request=3, topk=130, **geometry, context=300)
    with block_by_block():
        assert_plan(case, planned(case))


@pytest.mark.parametrize("several_blocks", [False, True])
def test_positions_that_are_whole_tables_apart(several_blocks):
    """All of them start in two cells, so all but two positions are settled by the spare tables' rounds."""
    apart = SelectionPlan(1, 2, 20, 2).cells
    lists = [[apart * index + row for index in range(20)] for row in (0, 1)]
    lists[1][5:10] = [apart * 19, -1, 0, apart * 19, apart * 3]
    case = make_case(lists, [list(range(20 * apart // 32 + 1))], page_size=16, world=2, rank=1)
    with block_by_block() if several_blocks else contextlib.nullcontext():
        assert_plan(case, planned(case))


@pytest.mark.parametrize("several_blocks", [False, True])
def test_tables_that_are_much_too_small(several_blocks, monkeypatch):
    """Every round has collisions, as for lists chosen to collide: more rounds, the same result."""
    monkeypatch.setattr(plan.SelectionPlan, "cells", plan.PARTITIONS)
    monkeypatch.setattr(plan.SelectionPlan, "spare_cells", 2)
    # The union kernel keeps numbers where the tables were; so few cells leave no room for them.
    monkeypatch.setattr(plan.SelectionPlan, "table_words", 512)
    case = random_case(3, requests=1, rows_per_request=3, topk=60, world=2, context=150)
    with block_by_block() if several_blocks else contextlib.nullcontext():
        assert_plan(case, planned(case))


def test_first_entries_of_every_position():
    """The first kernel by itself: what the second one builds on."""
    case = make_case([[5, 5, -1, 90], [0, 5, 0, 3]], [[1, 2, -1]], page_size=4)
    section = case.selection.sections["first_entries"]
    assert planned(case)[section.offset :][:8].tolist() == [0, 0, -1, -1, 4, 0, 4, 7]


def test_writes_nothing_beyond_the_plan():
    case = random_case(4, requests=2, rows_per_request=2, topk=33, world=2, context=50, page_size=8)
    words = case.selection.words
    longer = torch.full((words + 64,), POISON, dtype=torch.int32)
    triton_kernels.plan_selection(case.topk, case.block_table, longer, *case.args()[3:])
    assert_plan(case, longer[:words])
    assert (longer[words:] == POISON).all()


def test_page_limit_is_the_last_page_whose_slots_fit():
    limit = contract.page_limit(64)
    assert limit * 64 - 1 == 2**31 - 1
    case = make_case([[0, 255, 256]], [[limit - 1, 0, 0, 0, limit]], page_size=64)
    assert_plan(case, planned(case))
    assert case.selection.owned_slots(case.plan)[0] == 2**31 - 64


def test_bad_arguments_are_refused_before_the_launch():
    case = make_case([[0, 1]], [[0]])
    with pytest.raises(ValueError, match="plan_selection: argument 'rank'"):
        triton_kernels.plan_selection(case.topk, case.block_table, case.plan, 1, 4, 1, 1, 1)
    assert (case.plan == POISON).all()


@pytest.mark.parametrize("tile", [8, 4096])
def test_current_tokens_match_the_reference(tile, monkeypatch):
    monkeypatch.setattr(triton_kernels_slots, "REQUEST_BLOCK", tile)
    for seed, dtype in enumerate((torch.int32, torch.int64)):
        case = random_case(seed, requests=3, rows_per_request=2, topk=7, world=2, context=20)
        remap = case.selection.remap(planned(case))[: len(case.topk)]
        lengths = torch.tensor([case.topk[1, 2] + 1, case.topk[0, 0] + 1, 21, 0, -3, case.topk[5, 6] + 1], dtype=dtype)
        given, expected = torch.full((6,), POISON, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
        triton_kernels_slots.current_token_slots(case.topk, lengths, remap, given, 2)
        reference.current_token_slots(case.topk, lengths, remap, expected, 2)
        assert torch.equal(given, expected) and int((expected >= 0).sum()) > 1


@hypothesis.given(case=slot_cases())
@hypothesis.settings(max_examples=30)
def test_slots_match_model(case):
    check_slots(triton_kernels_slots.selected_slots, case)
