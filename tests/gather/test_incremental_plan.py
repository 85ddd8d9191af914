"""`c4_plan_gather` and `c4_remap` in the incremental form, against the token-by-token model, and what they refuse."""

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies

import torch_sparse_mla
from torch_sparse_mla import GatherPlan
from torch_sparse_mla.gather import reference

from ..decode.rejections import expect_rejection
from .cases import POISON, device_of, every_implementation, poisoned_plan, random_topk
from .resident_cases import STEPS, ResidentStep, every_step, resident_views, steps

plan_op = torch.ops.torch_sparse_mla.c4_plan_gather.default
remap_op = torch.ops.torch_sparse_mla.c4_remap.default


def planned(implementation: str, step: ResidentStep, rank: int) -> torch.Tensor:
    device = device_of(implementation)
    plan = poisoned_plan(step, device)
    function = reference.c4_plan_gather if implementation == "reference" else plan_op
    function(*step.plan_args(rank, plan, device))
    return plan


def remapped(implementation: str, step: ResidentStep, topk: torch.Tensor) -> tuple[list, list]:
    plan = planned(implementation, step, 0)
    slots = torch.full(topk.shape, POISON, dtype=torch.int32, device=plan.device)
    counts = torch.full(topk.shape[:1], POISON, dtype=torch.int32, device=plan.device)
    function = reference.c4_remap if implementation == "reference" else remap_op
    function(topk.to(plan.device), plan, slots, counts, *step.remap_args())
    return slots.tolist(), counts.tolist()


@every_implementation
@every_step
def test_plan_matches_model(implementation, step):
    for rank in range(step.sizes.world):
        plan = planned(implementation, step, rank).cpu()
        assert resident_views(step.sizes, plan) == step.plan(rank)


@every_implementation
@hypothesis.given(step=steps(), data=strategies.data())
@hypothesis.settings(max_examples=25)
def test_any_plan_matches_model(implementation, step, data):
    rank = data.draw(strategies.integers(0, step.sizes.world - 1))
    plan = planned(implementation, step, rank).cpu()
    assert resident_views(step.sizes, plan) == step.plan(rank)


def test_only_new_records_are_sent():
    """Example: 37 tokens of which 21 are resident, four ranks in runs of 4."""
    step = STEPS["second-chunk"]
    plan = planned("op-cpu", step, 1)
    # Tokens 21..36: of rank 1 those of 21..23 and 36 is rank 1's again; rank 0 has 32..35.
    assert step.sizes.owner_offsets(plan).tolist() == [[0, 4, 8, 12, 16]]
    assert step.sizes.host_sent([37], [21]) == [4, 4, 4, 4]


@every_implementation
@every_step
@pytest.mark.parametrize("causal", [True, False])
def test_remap_matches_model(implementation, step, causal):
    topk = random_topk(step, 21, seed=3, causal=causal)
    assert remapped(implementation, step, topk) == step.remap(topk.tolist())


@every_implementation
@hypothesis.given(step=steps(), columns=strategies.integers(1, 20), causal=strategies.booleans())
@hypothesis.settings(max_examples=20)
def test_any_remap_matches_model(implementation, step, columns, causal):
    topk = random_topk(step, columns, causal=causal)
    assert remapped(implementation, step, topk) == step.remap(topk.tolist())


@every_implementation
def test_places_beyond_the_buffer_are_absent(implementation):
    """Device data that the host did not check: no slot leaves the slice of its rank."""
    step = STEPS["two-requests"]
    for start in (-1, step.sizes.resident, 2**31 - 1):
        bad = dataclasses.replace(step, starts=[start, 0])
        topk = random_topk(step, 5)
        slots, counts = remapped(implementation, bad, topk)
        right, _ = step.remap(topk.tolist())
        for row, request in enumerate(step.plan(0)["row_requests"]):
            if request == 0:
                assert slots[row] == [-1] * 5 and counts[row] == 0
            elif request == 1:
                assert slots[row].count(-1) == right[row].count(-1)


@every_implementation
def test_resident_lengths_beyond_the_request_count_as_all_of_it(implementation):
    step = STEPS["two-requests"]
    plan = planned(implementation, dataclasses.replace(step, known=[99, -5]), 2).cpu()
    assert step.sizes.resident_lengths(plan).tolist() == [5, 0]
    assert int(step.sizes.owner_offsets(plan)[0, -1]) == 30


def test_public_functions_take_what_residency_gives(device):
    step = STEPS["a-prefix-hit-beside"]
    table = step.block_table.to(device)
    held = {"resident_starts": step.starts, "resident_lengths": step.known}
    plan = torch_sparse_mla.c4_plan_gather(step.lengths, step.new_lengths, table, step.sizes, rank=3, **held)
    assert resident_views(step.sizes, plan.cpu()) == step.plan(3)
    topk = random_topk(step, 9)
    slots, counts = torch_sparse_mla.c4_remap(topk.to(device), plan, step.sizes)
    assert (slots.tolist(), counts.tolist()) == step.remap(topk.tolist())


@pytest.mark.parametrize(
    "change, argument, allowed",
    [
        ({"resident_lengths": None}, "resident_lengths", "2 requests, as Residency.begin gives them"),
        ({"resident_starts": [1]}, "resident_starts", "2 requests"),
        ({"resident_lengths": [4, 27]}, "resident_lengths", "0 to 3, the tokens before the chunk"),
        ({"resident_lengths": [-1, 27]}, "resident_lengths", "0 to 3"),
        ({"resident_lengths": [1.5, 27]}, "resident_lengths", "integers"),
        ({"resident_starts": [0.5, 27]}, "resident_starts", "integers"),
        ({"resident_starts": [13, 12]}, "resident_starts", "or more, behind the records of the request before it"),
        ({"resident_starts": [-1, 4]}, "resident_starts", "0 or more"),
        ({"resident_starts": [99, 4]}, "resident_starts", "those of a slice of a resident buffer"),
        ({"sizes": "full"}, "resident_starts", "None for sizes of the full gather"),
        ({"sizes": "small"}, "lengths", "at most the capacity 2"),
    ],
    ids=str,
)
def test_public_function_refuses_before_anything_is_written(change, argument, allowed):
    step = STEPS["two-requests"]
    sizes = {
        "full": dataclasses.replace(step.sizes, resident=0),
        "small": dataclasses.replace(step.sizes, capacity=2),
    }.get(change.pop("sizes", None), step.sizes)
    given = {"resident_starts": step.starts, "resident_lengths": step.known} | change
    if sizes.capacity == 2:
        given["resident_lengths"] = [0, 0]
    plan = torch.full((sizes.words,), POISON, dtype=torch.int32)
    with expect_rejection("c4_plan_gather", argument, allowed):
        torch_sparse_mla.c4_plan_gather(
            step.lengths, step.new_lengths, step.block_table, sizes, rank=0, plan=plan, **given
        )
    assert (plan == POISON).all()


@every_implementation
@pytest.mark.parametrize(
    "at, value, argument, allowed",
    [
        (-1, 0, "resident_starts", "a tensor where resident is above 0, else None"),
        (-2, None, "resident_lengths", "a tensor where resident is above 0"),
        (-2, torch.zeros(3, dtype=torch.int32), "resident_lengths", "shape [requests] = [2]"),
        (-3, torch.zeros(2, dtype=torch.int64), "resident_starts", "dtype int32"),
        (-1, 2**30, "plan", "the sizes of a GatherPlan"),
    ],
    ids=str,
)
def test_operator_rejects(implementation, at, value, argument, allowed):
    step = STEPS["two-requests"]
    plan = poisoned_plan(step, device_of(implementation))
    arguments = list(step.plan_args(0, plan, device_of(implementation)))
    arguments[at] = value.to(plan.device) if isinstance(value, torch.Tensor) else value
    with expect_rejection("c4_plan_gather", argument, allowed):
        plan_op(*arguments)
    assert (plan == POISON).all()


@every_implementation
@pytest.mark.parametrize(
    "change, argument, allowed",
    [
        ({"known": [6, 27]}, "resident_lengths", "0 to the request's length"),
        ({"starts": [-1, 4]}, "resident_starts", "0 or more, with all records below"),
        ({"starts": [13, 2**31 - 1]}, "resident_starts", "0 or more, with all records below"),
    ],
    ids=str,
)
def test_checked_mode_refuses_places_that_cannot_be(implementation, change, argument, allowed, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    step = STEPS["two-requests"]
    planned(implementation, step, 0)
    with expect_rejection("c4_plan_gather", argument, allowed):
        planned(implementation, dataclasses.replace(step, **change), 0)


@pytest.mark.parametrize("resident", [-1, 2**30, 1.5, None])
def test_sizes_refuse_a_resident_slice_that_cannot_be(resident):
    with pytest.raises(ValueError, match="GatherPlan: argument 'resident'"):
        GatherPlan(1, 1, 8, 4, 4, 8, resident)


def test_opcheck():
    step = STEPS["two-requests"]
    plan = poisoned_plan(step)
    torch.library.opcheck(plan_op, step.plan_args(1, plan))
    topk = random_topk(step, 7)
    outputs = torch.empty_like(topk), torch.empty(len(topk), dtype=torch.int32)
    torch.library.opcheck(remap_op, (topk, planned("op-cpu", step, 0), *outputs, *step.remap_args()))
