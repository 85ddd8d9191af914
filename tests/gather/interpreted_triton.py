"""The Triton kernels in Triton's interpreter, against the model. Run by `tests/test_triton_interpreted.py`."""

import os

import hypothesis
import pytest
import torch
from hypothesis import strategies

from torch_sparse_mla.exchange.transports.direct import DirectTransport, loopback_memory, memory_bytes
from torch_sparse_mla.gather import reference, triton_kernels, triton_kernels_place

from ..decode.rejections import expect_rejection
from .cases import (
    CHUNKS,
    POISON,
    POISON_BYTE,
    Chunk,
    chunks,
    every_chunk,
    gather,
    layer_records,
    make_chunk,
    make_layers,
    open_channels,
    poisoned_plan,
    random_topk,
    views,
)
from .resident_cases import STEPS, resident_views, steps
from .test_c4_place_records import expected, make_args

assert os.environ.get("TRITON_INTERPRET") == "1", "needs TRITON_INTERPRET=1 before Triton is imported"

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def planned(chunk: Chunk, rank: int) -> torch.Tensor:
    plan = poisoned_plan(chunk)
    triton_kernels.c4_plan_gather(*chunk.plan_args(rank, plan))
    return plan


def remapped(chunk: Chunk, topk: torch.Tensor) -> tuple[list, list]:
    slots = torch.full(topk.shape, POISON, dtype=torch.int32)
    counts = torch.full(topk.shape[:1], POISON, dtype=torch.int32)
    triton_kernels.c4_remap(topk, planned(chunk, 0), slots, counts, *chunk.remap_args())
    return slots.tolist(), counts.tolist()


@every_chunk
def test_plan_matches_model(chunk):
    for rank in range(chunk.sizes.world):
        assert views(chunk.sizes, planned(chunk, rank)) == chunk.plan(rank)


@hypothesis.given(chunk=chunks())
@hypothesis.settings(max_examples=12)
def test_any_plan_matches_model(chunk):
    rank = chunk.sizes.world - 1
    assert views(chunk.sizes, planned(chunk, rank)) == chunk.plan(rank)


def test_plan_of_more_requests_and_records_than_a_block(monkeypatch):
    monkeypatch.setattr(triton_kernels, "REQUEST_BLOCK", 4)
    monkeypatch.setattr(triton_kernels, "PLAN_BLOCK", 16)
    lengths = [(7 * request) % 23 for request in range(13)]
    chunk = make_chunk(lengths, [length // 2 for length in lengths], world=3, requests=14)
    for rank in range(3):
        assert views(chunk.sizes, planned(chunk, rank)) == chunk.plan(rank)


def test_lengths_beyond_the_capacity_make_a_plan_of_nothing():
    chunk = make_chunk([33, 32], [33, 32], world=2, interleave=4, page_size=8, capacity=32)
    assert views(chunk.sizes, planned(chunk, 0)) == chunk.plan(0)
    slots, counts = remapped(chunk, torch.zeros(65, 3, dtype=torch.int32))
    assert slots == [[-1] * 3] * 65 and counts == [0] * 65


def test_bad_lengths_and_pages_are_never_followed():
    chunk = make_chunk([16, 8], [0, 0], world=1, interleave=1, page_size=8, rows=4, capacity=128)
    plan, arguments = poisoned_plan(chunk), list(chunk.plan_args(0, poisoned_plan(chunk)))
    arguments[0] = torch.tensor([40, -5], dtype=torch.int32)
    arguments[2] = torch.tensor([[3, -1, 2**31 - 1], [0, 0, 0]], dtype=torch.int32)
    arguments[3] = plan
    triton_kernels.c4_plan_gather(*arguments)
    assert chunk.sizes.owned_slots(plan).tolist() == list(range(24, 32)) + [-1] * 120
    arguments[0] = torch.full((2,), 2**31 - 1, dtype=torch.int32)
    triton_kernels.c4_plan_gather(*arguments)
    assert chunk.sizes.owner_offsets(plan).tolist() == [[0, 0]]


@every_chunk
def test_remap_matches_model(chunk):
    topk = random_topk(chunk, 21)
    assert remapped(chunk, topk) == chunk.remap(topk.tolist())


@hypothesis.given(chunk=chunks(), columns=strategies.integers(1, 20), causal=strategies.booleans())
@hypothesis.settings(max_examples=12)
def test_any_remap_matches_model(chunk, columns, causal):
    topk = random_topk(chunk, columns, causal=causal)
    assert remapped(chunk, topk) == chunk.remap(topk.tolist())


@pytest.mark.parametrize("columns", [8, 16, 17, 35])
def test_remap_of_lists_of_several_blocks(columns, monkeypatch):
    monkeypatch.setattr(triton_kernels, "REMAP_BLOCK", 8)
    chunk = CHUNKS["prefix-hit"]
    topk = random_topk(chunk, columns)
    assert remapped(chunk, topk) == chunk.remap(topk.tolist())


def test_remap_near_the_limit_of_int32():
    chunk = make_chunk([8], [1], world=4, interleave=4, page_size=8)
    plan = planned(chunk, 0)
    chunk.sizes.lengths(plan).fill_(2**31 - 1)
    chunk.sizes.owner_offsets(plan).copy_(torch.arange(5)[None] * 2**20)
    tokens = (2**31 - 2, 2**30, 4 * 2**20)
    topk = torch.tensor([[tokens[0], 2**31 - 1, *tokens[1:]]], dtype=torch.int32)
    slots, counts = torch.empty_like(topk), torch.empty(1, dtype=torch.int32)
    triton_kernels.c4_remap(topk, plan, slots, counts, *chunk.remap_args())
    local = [(token // 16 * 4 + token % 4) + token // 4 % 4 * 2**20 for token in tokens]
    assert slots.tolist() == [[*local, -1]] and counts.tolist() == [3]


@pytest.mark.parametrize("name", ["two-requests", "one-rank", "interleave-of-five", "more-than-fits", "no-requests"])
def test_incremental_plan_and_remap_match_model(name):
    step = STEPS[name]
    for rank in {0, step.sizes.world - 1}:
        assert resident_views(step.sizes, planned(step, rank)) == step.plan(rank)
    topk = random_topk(step, 21, causal=False)[:8]
    assert remapped(step, topk) == tuple(values[:8] for values in step.remap(topk.tolist()))


@hypothesis.given(step=steps())
@hypothesis.settings(max_examples=6)
def test_any_incremental_plan_matches_model(step):
    rank = step.sizes.world - 1
    assert resident_views(step.sizes, planned(step, rank)) == step.plan(rank)


@pytest.mark.parametrize("record_bytes", [37, 528])
@pytest.mark.parametrize("name", ["two-requests", "a-prefix-hit-beside", "one-rank", "interleave-of-five"])
def test_records_are_put_in_place(name, record_bytes):
    step = STEPS[name]
    records = layer_records(step, record_bytes, 1)
    arguments = make_args(step, records, record_bytes)
    triton_kernels_place.c4_place_records(*arguments)
    assert torch.equal(arguments[2], expected(step, records, record_bytes))


def test_records_of_several_tiles_and_programs_are_put_in_place(monkeypatch):
    monkeypatch.setattr(triton_kernels_place, "MAX_PROGRAMS", 2)
    step = STEPS["a-prefix-hit-beside"]
    records = layer_records(step, 4_112, 2)
    arguments = make_args(step, records, 4_112)
    triton_kernels_place.c4_place_records(*arguments)
    assert torch.equal(arguments[2], expected(step, records, 4_112))


def test_bad_places_are_neither_written_nor_read():
    """As the reference does, whatever the plan says."""
    step = STEPS["interleave-of-five"]
    records = layer_records(step, 16, 3)
    generator = torch.Generator().manual_seed(1)
    for start in (-1, 2**31 - 1, None):
        gathered, plan, resident, *sizes = make_args(step, records, 16)
        if start is None:
            plan.copy_(torch.randint(-20, 80, plan.shape, generator=generator))
        else:
            step.sizes.resident_starts(plan)[1] = start
        storage = torch.full((3, *resident.shape), POISON_BYTE, dtype=torch.uint8)
        triton_kernels_place.c4_place_records(gathered, plan, storage[1], *sizes)
        assert (storage[0] == POISON_BYTE).all() and (storage[2] == POISON_BYTE).all()
        topk = random_topk(step, 9, causal=False)[::7].contiguous()
        found, right = ([torch.full_like(topk, POISON), torch.full_like(topk[:, 0], POISON)] for _ in range(2))
        triton_kernels.c4_remap(topk, plan, *found, *step.remap_args())
        reference.c4_remap(topk, plan, *right, *step.remap_args())
        if start is not None:
            reference.c4_place_records(gathered, plan, resident, *sizes)
            assert torch.equal(storage[1], resident)
            assert torch.equal(found[0], right[0]) and torch.equal(found[1], right[1])


@pytest.mark.parametrize("name", ["two-requests-cached", "ranks-that-own-nothing", "one-rank"])
@pytest.mark.parametrize("record_bytes, gap", [(37, 5), (528, 16)])
def test_gather_through_the_push_and_wait_kernels(name, record_bytes, gap):
    chunk = CHUNKS[name]
    channels = open_channels(chunk, record_bytes)
    for channel in channels:
        channel.transport = DirectTransport(channel, loopback_memory(channel, memory_bytes(channel)))
    for seed in (1, 2):
        layers, expected = make_layers(chunk, channels, record_bytes, seed, gap)
        gather(layers)
        for layer in layers:
            layer.channel.check()
            assert torch.equal(layer.gathered, expected)
    for channel in channels:
        channel.close()


def test_bad_arguments_are_refused_before_the_launch():
    chunk = CHUNKS["two-requests-cached"]
    plan = poisoned_plan(chunk)
    with expect_rejection("c4_plan_gather", "rank", "0 <= rank"):
        triton_kernels.c4_plan_gather(*chunk.plan_args(4, plan))
    assert (plan == POISON).all()
    topk = random_topk(chunk, 5)
    with expect_rejection("c4_remap", "counts", "dtype int32"):
        triton_kernels.c4_remap(topk, planned(chunk, 0), torch.empty_like(topk), torch.empty(8), *chunk.remap_args())
