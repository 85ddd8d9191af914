"""What `plan_selection` refuses, with what words, and that nothing is written then."""

import dataclasses

import pytest
import torch

from torch_sparse_mla import SelectionPlan, plan_selection

from ..decode.rejections import assert_untouched, expect_rejection, snapshot
from .cases import POISON, PlanCase, assert_plan, call, every_implementation, make_case, random_case, reference

OP = "plan_selection"


def valid_case() -> PlanCase:
    sizes = {"requests": 2, "rows_per_request": 2, "topk": 6}
    return random_case(1, **sizes, world=2, context=20, page_size=8, interleave=4, reserved_rows_per_request=3)


def run(implementation: str, case: PlanCase) -> None:
    if implementation == "reference":
        reference.plan_selection(*case.args())
    else:
        torch.ops.torch_sparse_mla.plan_selection(*case.args())


def refuse(implementation: str, case: PlanCase, argument: str, allowed: str) -> None:
    before = snapshot(case)
    with expect_rejection(OP, argument, allowed):
        run(implementation, case)
    assert_untouched(case, before)


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "op-cuda" else "cpu"


@every_implementation
@pytest.mark.parametrize(
    "change, argument, allowed",
    [
        ({"rows_per_request": 0}, "rows_per_request", "1 or more"),
        ({"rows_per_request": 3}, "topk", "requests * rows_per_request = 2 * 3"),
        ({"rows_per_request": 1}, "topk", "requests * rows_per_request = 2 * 1"),
        ({"reserved_rows_per_request": 1}, "reserved_rows_per_request", "the call's 2 up"),
        ({"reserved_rows_per_request": -1}, "reserved_rows_per_request", "the call's 2 up"),
        ({"reserved_rows_per_request": 4}, "plan", "words for SelectionPlan(requests=2, rows_per_request=4"),
        ({"reserved_requests": 1}, "reserved_requests", "the call's 2 up"),
        ({"reserved_requests": 3}, "plan", "words for SelectionPlan(requests=3, rows_per_request=3"),
        ({"world": 0}, "world", "1 or more"),
        ({"world": 9}, "plan", "world=9"),
        ({"rank": 2}, "rank", "0 <= rank < world = 2"),
        ({"rank": -1}, "rank", "0 <= rank < world = 2"),
        ({"interleave": 0}, "interleave", "1 or more"),
        ({"pages": -1}, "pages", "None, or 0 and up"),
        ({"interleave": 3}, "page_size", "a multiple of the interleave 3"),
        ({"page_size": 0}, "page_size", "a multiple of the interleave 4"),
        ({"page_size": 2**30}, "page_size", "page_size * world up to 2147483647"),
    ],
    ids=str,
)
def test_rejects_sizes(implementation, change, argument, allowed):
    refuse(implementation, dataclasses.replace(valid_case().to(device_of(implementation)), **change), argument, allowed)


@every_implementation
@pytest.mark.parametrize(
    "argument, change, allowed",
    [
        ("topk", lambda t: t.long(), "dtype int32"),
        ("topk", lambda t: t.flatten(), "a shape of 2 dimension(s)"),
        ("topk", lambda t: t.t().contiguous().t(), "a contiguous tensor"),
        ("topk", lambda t: t[:3], "requests * rows_per_request = 2 * 2"),
        ("topk", lambda t: t[:, :0], "at least one entry in a row"),
        ("block_table", lambda t: t.float(), "dtype int32"),
        ("block_table", lambda t: t.unsqueeze(0), "a shape of 2 dimension(s)"),
        ("block_table", lambda t: torch.cat([t, t], 1)[:, ::2], "a last stride of 1"),
        ("plan", lambda t: t.long(), "dtype int32"),
        ("plan", lambda t: t.view(1, -1), "a shape of 1 dimension(s)"),
        ("plan", lambda t: torch.cat([t, t])[::2], "a contiguous tensor"),
        ("plan", lambda t: t[:-1], "words for SelectionPlan(requests=2, rows_per_request=3, topk=6, world=2)"),
        ("plan", lambda t: torch.cat([t, t])[1:], "storage aligned to 16 bytes"),
    ],
)
def test_rejects_tensors(implementation, argument, change, allowed):
    case = valid_case().to(device_of(implementation))
    refuse(implementation, dataclasses.replace(case, **{argument: change(getattr(case, argument))}), argument, allowed)


@every_implementation
@pytest.mark.parametrize("other", ["topk", "block_table"])
def test_rejects_a_plan_that_overlaps_an_input(implementation, other):
    case = valid_case().to(device_of(implementation))
    shape = getattr(case, other).shape
    inside = case.plan[40 : 40 + shape.numel()].view(shape)
    refuse(implementation, dataclasses.replace(case, **{other: inside}), "plan", "memory of its own")


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["block_table", "plan"])
def test_rejects_tensors_of_another_device(argument):
    case = valid_case().to("cuda")
    case = dataclasses.replace(case, **{argument: getattr(case, argument).cpu()})
    with expect_rejection(OP, argument, "device cuda:0, where 'topk' is"):
        run("op-cuda", case)


@pytest.mark.parametrize("requests, rows, argument", [(3, 2, "reserved_requests"), (2, 4, "reserved_rows_per_request")])
def test_public_function_refuses_more_than_reserved(requests, rows, argument):
    """Over capacity: a union can have no more records than the reserved rows have entries."""
    selection = SelectionPlan(requests=2, rows_per_request=3, topk=6, world=2)
    case = random_case(1, requests=requests, rows_per_request=rows, topk=6, world=2, context=20)
    plan = torch.full((selection.words,), POISON, dtype=torch.int32)
    with expect_rejection(OP, argument, "as many as in the call"):
        plan_selection(case.topk, case.block_table, selection, page_size=8, interleave=4, rank=0, plan=plan)
    assert (plan == POISON).all()


def hole_case() -> PlanCase:
    """Pages of 2 x 4 positions: request 0 has pages for 0..15, request 1 none for 8..15."""
    topk = [[0, -1, 15], [-1, -1, 3], [7, 1, -1], [2, 5, 6]]
    return make_case(topk, [[4, 6], [2, -1]], world=2, rank=1)


@every_implementation
@pytest.mark.parametrize("row, column, value", [(1, 0, 16), (2, 2, 8), (3, 1, -2), (0, 1, 2**31 - 1)])
def test_checked_mode_names_the_first_row_without_a_record(implementation, row, column, value, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    case = hole_case()
    case.topk[row, column] = value
    case.topk[3, 2] = 99
    case = case.to(device_of(implementation))
    before = snapshot(case)
    with expect_rejection(OP, "topk", "a position below 16 on a page of the block table") as error:
        run(implementation, case)
    assert f"got {value} in row {row}, column {column};" in str(error.value)
    assert_untouched(case, before)


@every_implementation
def test_checked_mode_accepts_what_is_right(implementation, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    assert_plan(hole_case(), call(implementation, hole_case()))
    empty = make_case(torch.empty(0, 3), torch.empty(0, 2))
    assert_plan(empty, call(implementation, empty))


@pytest.mark.gpu
def test_checked_mode_refuses_a_capture(monkeypatch):
    case = hole_case().to("cuda")
    run("op-cuda", case)
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    refused = pytest.raises(RuntimeError, match="plan_selection: TORCH_SPARSE_MLA_CHECK=1 synchronises")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        run("op-cuda", case)


@pytest.mark.parametrize(
    ("topk", "block_table", "argument"),
    [((2, 4), (1, 3), "topk"), ((8,), (1, 3), "topk"), ((2, 8), (3,), "block_table")],
)
def test_public_function_refuses_other_shapes_than_reserved(topk, block_table, argument):
    """The operator lays a plan out by K, the views by the reserved K: they must be one."""
    selection = SelectionPlan(1, 2, 8, 2)
    tensors = (torch.zeros(size, dtype=torch.int32) for size in (topk, block_table))
    with pytest.raises(ValueError, match=f"plan_selection: argument '{argument}': got shape"):
        plan_selection(*tensors, selection, page_size=4, interleave=1, rank=0)
