"""`c4_plan_gather` against the token-by-token model, and what it refuses."""

import dataclasses

import hypothesis
import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla import GatherPlan
from torch_sparse_mla.gather import reference

from ..decode.rejections import expect_rejection
from .cases import (
    CHUNKS,
    POISON,
    Chunk,
    chunks,
    device_of,
    every_chunk,
    every_implementation,
    make_chunk,
    poisoned_plan,
    views,
)

OP = "c4_plan_gather"
op = torch.ops.torch_sparse_mla.c4_plan_gather.default


def planned(implementation: str, chunk: Chunk, rank: int) -> torch.Tensor:
    device = device_of(implementation)
    plan = poisoned_plan(chunk, device)
    function = reference.c4_plan_gather if implementation == "reference" else op
    function(*chunk.plan_args(rank, plan, device))
    return plan.cpu()


@every_implementation
def test_published_example(implementation):
    chunk = make_chunk([5, 12], [2, 3], world=4, interleave=4, page_size=8)
    plan = views(chunk.sizes, planned(implementation, chunk, rank=1))
    assert plan["causal_lengths"] == [4, 5, 10, 11, 12]
    assert plan["row_requests"] == [0, 0, 1, 1, 1]
    assert plan["starts"] == [[0, 4], [0, 1], [0, 0], [0, 0]]
    assert plan["owner_offsets"] == [[0, 8, 16, 24, 32]]


@every_implementation
@every_chunk
def test_every_rank_matches_model(implementation, chunk):
    for rank in range(chunk.sizes.world):
        assert views(chunk.sizes, planned(implementation, chunk, rank)) == chunk.plan(rank)


@every_implementation
@hypothesis.given(chunk=chunks())
@hypothesis.settings(max_examples=80)
def test_matches_model(implementation, chunk):
    rank = chunk.sizes.world - 1
    assert views(chunk.sizes, planned(implementation, chunk, rank)) == chunk.plan(rank)


@every_implementation
def test_many_requests(implementation):
    lengths = [(7 * request) % 23 for request in range(300)]
    chunk = make_chunk(lengths, [length // 2 for length in lengths], world=3, requests=301)
    assert views(chunk.sizes, planned(implementation, chunk, 2)) == chunk.plan(2)


@every_implementation
def test_later_smaller_chunk_leaves_nothing_of_an_earlier_one(implementation):
    large = make_chunk([40, 30, 20], [40, 3, 20])
    small = dataclasses.replace(large, lengths=[9], new_lengths=[4], block_table=large.block_table[:1])
    device = device_of(implementation)
    plan = poisoned_plan(large, device)
    for chunk in (large, small):
        op(*chunk.plan_args(1, plan, device))
    assert views(large.sizes, plan.cpu()) == small.plan(1)


@every_implementation
def test_lengths_beyond_the_capacity_make_a_plan_of_nothing(implementation):
    """They can come only from the device: the host, which knows them too, refuses them."""
    chunk = make_chunk([33, 32], [33, 32], world=2, interleave=4, page_size=8, capacity=32)
    assert chunk.padded() == 0
    plan = views(chunk.sizes, planned(implementation, chunk, 0))
    assert plan["owner_offsets"] == [[0, 0, 0]]
    assert plan["owned_slots"] == [-1] * 32
    fitting = dataclasses.replace(chunk, lengths=[32, 32])
    assert views(chunk.sizes, planned(implementation, fitting, 0))["owner_offsets"] == [[0, 32, 64]]


@every_implementation
def test_sums_of_lengths_beyond_int32_are_refused_too(implementation):
    chunk = make_chunk([8, 8, 8], [0, 0, 0], world=1, interleave=1, requests=3, rows=4)
    device = device_of(implementation)
    plan = poisoned_plan(chunk, device)
    arguments = list(chunk.plan_args(0, plan, device))
    arguments[0] = torch.tensor([2**31 - 1] * 3, dtype=torch.int32, device=device)
    op(*arguments)
    assert chunk.sizes.owner_offsets(plan).tolist() == [[0, 0]]


@every_implementation
def test_bad_data_on_the_device_counts_as_nothing(implementation):
    """A negative length, a page that is negative or too large, a length beyond the block table: no slot, no fault."""
    chunk = make_chunk([16, 8, 40], [0, 0, 0], world=1, interleave=1, page_size=8, rows=4, capacity=128)
    table = torch.tensor([[3, -1, 0, 0, 0, 0], [2**31 - 1, 0, 0, 0, 0, 0], [5, 6, 7, 8, 9, 9]], dtype=torch.int32)
    device = device_of(implementation)
    plan = poisoned_plan(chunk, device)
    arguments = list(chunk.plan_args(0, plan, device))
    arguments[0] = torch.tensor([16, -5, 40], dtype=torch.int32, device=device)
    arguments[2] = table.to(device)[:, :4]
    op(*arguments)
    slots = chunk.sizes.owned_slots(plan).tolist()
    assert slots[:8] == list(range(24, 32)) and slots[8:16] == [-1] * 8
    assert slots[16:48] == list(range(40, 72)) and slots[48:] == [-1] * 80
    assert chunk.sizes.lengths(plan).tolist() == [16, 0, 40]
    arguments[0] = torch.tensor([16, 8, 40], dtype=torch.int32, device=device)
    op(*arguments)
    assert chunk.sizes.owned_slots(plan).tolist()[16:24] == [-1] * 8


@every_implementation
def test_writes_nothing_outside_the_plan(implementation):
    chunk = CHUNKS["two-requests-cached"]
    words, device = chunk.sizes.words, device_of(implementation)
    longer = torch.full((words + 64,), POISON, dtype=torch.int32, device=device)
    op(*chunk.plan_args(0, longer[:words], device))
    assert views(chunk.sizes, longer[:words].cpu()) == chunk.plan(0)
    assert (longer[words:] == POISON).all()


@every_implementation
def test_block_table_that_is_part_of_a_larger_one(implementation):
    chunk = CHUNKS["prefix-hit"]
    device = device_of(implementation)
    requests, blocks = chunk.block_table.shape
    larger = torch.full((requests + 2, blocks + 5), -1, dtype=torch.int32, device=device)
    larger[:requests, :blocks] = chunk.block_table.to(device)
    plan = poisoned_plan(chunk, device)
    arguments = list(chunk.plan_args(3, plan, device))
    arguments[2] = larger[:requests, :blocks]
    op(*arguments)
    assert views(chunk.sizes, plan.cpu()) == chunk.plan(3)


def test_public_function_takes_lengths_of_the_host(device):
    chunk = CHUNKS["two-requests-cached"]
    given = poisoned_plan(chunk, device)
    lengths, row_starts, table = chunk.plan_args(0, given, device)[:3]
    both = {"device_lengths": lengths, "device_row_starts": row_starts}
    for options in ({}, both, {"plan": given}):
        plan = torch_sparse_mla.c4_plan_gather(chunk.lengths, chunk.new_lengths, table, chunk.sizes, rank=2, **options)
        assert views(chunk.sizes, plan.cpu()) == chunk.plan(2)
    assert plan is given


@pytest.mark.parametrize(
    "lengths, new_lengths, blocks, argument, allowed",
    [
        ([9, 9, 9], [1, 1, 1], 3, "lengths", "at most the reserved 2"),
        ([9, 9], [1], 2, "new_lengths", "as many as 'lengths'"),
        ([9, 9], [1, 1], 1, "block_table", "shape [2 requests, blocks]"),
        ([65, 9], [1, 1], 2, "lengths", "0 to 64, what the block table holds"),
        ([9, -1], [1, 0], 2, "lengths", "0 to 64"),
        ([9, 9], [1, 10], 2, "new_lengths", "0 to the request's length 9"),
        ([9, 9], [9, 8], 2, "new_lengths", "at most the reserved 16"),
        ([64, 64], [1, 1], 2, "lengths", "at most the capacity 24; reserve for more tokens"),
    ],
)
def test_public_function_refuses_lengths_that_do_not_fit(lengths, new_lengths, blocks, argument, allowed):
    sizes = GatherPlan(2, 16, 24, 4, 4, 8)
    plan = torch.full((sizes.words,), POISON, dtype=torch.int32)
    table = torch.ones(blocks, 2, dtype=torch.int32)
    with expect_rejection(OP, argument, allowed):
        torch_sparse_mla.c4_plan_gather(lengths, new_lengths, table, sizes, rank=0, plan=plan)
    assert (plan == POISON).all()


@every_implementation
@pytest.mark.parametrize(
    "position, change, argument, allowed",
    [
        (0, lambda t: t.long(), "lengths", "dtype int32"),
        (0, lambda t: t[:1], "lengths", "shape [requests] = [2]"),
        (0, lambda t: t.repeat_interleave(2)[::2], "lengths", "a contiguous tensor"),
        (1, lambda t: t[:2], "row_starts", "shape [requests + 1] = [3]"),
        (2, lambda t: t.float(), "block_table", "dtype int32"),
        (2, lambda t: t[0], "block_table", "a shape of 2 dimension(s)"),
        (2, lambda t: t.repeat_interleave(2, 1)[:, ::2], "block_table", "a last stride of 1"),
        (2, lambda t: t.repeat(2, 1), "block_table", "at most the reserved 2"),
        (3, lambda t: t[:-1], "plan", "words of GatherPlan(requests=2"),
        (4, lambda n: 3, "plan", "words of GatherPlan(requests=3"),
        (4, lambda n: 0, "plan", "the sizes of a GatherPlan"),
        (6, lambda n: n + 1, "plan", "the sizes of a GatherPlan"),
        (7, lambda n: 9, "plan", "the sizes of a GatherPlan"),
        (9, lambda n: 4, "rank", "0 <= rank < world = 4"),
        (9, lambda n: -1, "rank", "0 <= rank < world = 4"),
    ],
)
def test_rejects(implementation, position, change, argument, allowed):
    chunk = CHUNKS["two-requests-cached"]
    device = device_of(implementation)
    plan = poisoned_plan(chunk, device)
    arguments = list(chunk.plan_args(0, plan, device))
    if position == 2 and arguments[2].shape[1] == 1:
        arguments[2] = arguments[2].repeat(1, 2)
    arguments[position] = change(arguments[position])
    with expect_rejection(OP, argument, allowed):
        op(*arguments)
    assert (plan == POISON).all()


def test_rejects_a_plan_that_overlaps_an_input():
    chunk = CHUNKS["two-requests-cached"]
    plan = poisoned_plan(chunk)
    arguments = list(chunk.plan_args(0, plan))
    arguments[0] = plan[8:10]
    with expect_rejection(OP, "plan", "memory of its own"):
        op(*arguments)


@every_implementation
@pytest.mark.parametrize(
    "position, values, argument, allowed",
    [
        (0, [5, -1], "lengths", "0 to 32, what the block table holds"),
        (0, [5, 33], "lengths", "0 to 32"),
        (1, [0, 6, 7], "row_starts", "none of them above the request's length"),
        (1, [1, 2, 3], "row_starts", "0, then sums"),
        (1, [0, 2, 1], "row_starts", "sums of new lengths"),
        (2, [[-1], [1]], "block_table", "a page number"),
    ],
)
def test_checked_mode_names_what_does_not_fit(implementation, position, values, argument, allowed, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    chunk = CHUNKS["two-requests-cached"]
    device = device_of(implementation)
    plan = poisoned_plan(chunk, device)
    arguments = list(chunk.plan_args(0, plan, device))
    op(*arguments)
    plan.fill_(POISON)
    arguments[position] = torch.tensor(values, dtype=torch.int32, device=device)
    with expect_rejection(OP, argument, allowed):
        op(*arguments)
    assert (plan == POISON).all()


def test_checked_mode_names_the_capacity(monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    chunk = make_chunk([33, 32], [1, 1], world=2, interleave=4, page_size=8, capacity=32)
    with expect_rejection(OP, "lengths", "at most the capacity 32"):
        op(*chunk.plan_args(0, poisoned_plan(chunk)))


@every_implementation
def test_checked_mode_takes_pages_of_one_record(implementation, monkeypatch):
    """2**31 pages can be named then: more than an int32."""
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    chunk = make_chunk([9], [2], world=2, interleave=1, page_size=1)
    plan = poisoned_plan(chunk, device_of(implementation))
    op(*chunk.plan_args(1, plan, device_of(implementation)))
    assert views(chunk.sizes, plan.cpu()) == chunk.plan(1)


@pytest.mark.parametrize("name", ["two-requests-cached", "ranks-that-own-nothing", "no-requests"])
def test_opcheck(name):
    chunk = CHUNKS[name]
    torch.library.opcheck(op, chunk.plan_args(0, poisoned_plan(chunk)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_results_equal_eager(backend):
    chunk = CHUNKS["prefix-hit"]

    def function(lengths, row_starts, table):
        plan = chunk.sizes.empty()
        op(lengths, row_starts, table, plan, *chunk.plan_args(1, plan)[4:])
        return plan

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    plan = compiled(*chunk.plan_args(1, poisoned_plan(chunk))[:3])
    assert views(chunk.sizes, plan) == chunk.plan(1)
