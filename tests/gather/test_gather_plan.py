"""`GatherPlan` and its pure functions: the numbers on the page, and what must hold for any lengths."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies

from torch_sparse_mla import GatherPlan, causal_lengths, gather_capacity, sharding

from .cases import CHUNKS, chunks


@pytest.mark.parametrize("page_size, capacity", [(64, 131_200), (2_304, 131_328)])
def test_capacity_of_the_published_case(page_size, capacity):
    assert gather_capacity(524_288, 32, world=4, interleave=4, page_size=page_size) == capacity


def test_gathered_records_of_the_published_case():
    capacity = gather_capacity(524_288, 32, 4, 4, 2_304)
    assert GatherPlan(32, 8_192, capacity, 4, 4, 2_304).gathered_records == 525_312


def test_causal_lengths_of_the_published_example():
    assert causal_lengths([5, 12], [2, 3]) == [4, 5, 10, 11, 12]
    assert causal_lengths([5, 12, 3], [0, 12, 0]) == list(range(1, 13))
    assert causal_lengths([], []) == []


@pytest.mark.parametrize("lengths, new_lengths", [([5], [6]), ([5], [-1]), ([5], [1.0])])
def test_causal_lengths_refuse_what_cannot_be(lengths, new_lengths):
    with pytest.raises(ValueError, match="causal_lengths: argument 'new_lengths'"):
        causal_lengths(lengths, new_lengths)


def test_causal_lengths_need_both_of_each_request():
    with pytest.raises(ValueError):
        causal_lengths([5, 12], [2])


@hypothesis.given(
    lengths=strategies.lists(strategies.integers(0, 200), max_size=6),
    world=strategies.integers(1, 8),
    interleave=strategies.integers(1, 8),
    pages=strategies.integers(1, 5),
)
def test_any_chunk_within_the_limits_fits(lengths, world, interleave, pages):
    """The capacity is enough for whatever mix of lengths adds up to the tokens it was made for."""
    page_size = pages * interleave
    capacity = gather_capacity(max(sum(lengths), 1), max(len(lengths), 1), world, interleave, page_size)
    sizes = GatherPlan(max(len(lengths), 1), 1, capacity, world, interleave, page_size)
    padded = sizes.host_padded(lengths)
    assert max(sizes.host_totals(lengths)) <= padded <= capacity
    assert padded * world % page_size == 0
    assert padded - max(sizes.host_totals(lengths)) < sizes.padding_unit


def test_padding_is_a_share_of_a_page_not_a_page():
    sizes = GatherPlan(1, 1, 2_304, 4, 4, 2_304)
    assert sizes.padding_unit == 576
    assert sizes.host_padded([4 * 577]) == 2 * 576


@hypothesis.given(chunk=chunks())
@hypothesis.settings(max_examples=60)
def test_host_numbers_match_the_model(chunk):
    starts = chunk.sizes.host_starts(chunk.lengths)
    assert [row[: len(chunk.lengths)] for row in chunk.plan(0)["starts"]] == starts
    assert chunk.sizes.host_padded(chunk.lengths) == chunk.padded()
    totals = [sum(map(len, chunk.owned(rank))) for rank in range(chunk.sizes.world)]
    assert chunk.sizes.host_totals(chunk.lengths) == totals


@pytest.mark.parametrize("length", [2**31 - 1, 2**31 - 5, 2**30 + 3])
def test_lengths_near_the_limit_of_int32(length):
    sizes = GatherPlan(2, 1, 64, 4, 4, 64)
    totals = sizes.host_totals([length, length])
    assert sum(totals) == 2 * length
    assert totals == [2 * sharding.local_length(rank, length, 4, 4) for rank in range(4)]


def test_views_cover_the_buffer_without_overlap():
    for chunk in CHUNKS.values():
        sections = list(chunk.sizes.sections.values())
        ends = [section.offset + _words(section) for section in sections]
        for section, end, following in zip(sections, ends, itertools.islice(sections, 1, None), strict=False):
            assert section.offset % 4 == 0 and end <= following.offset < end + 4
        assert ends[-1] == chunk.sizes.words == chunk.sizes.empty().numel()


def _words(section) -> int:
    words = 1
    for size in section.shape:
        words *= size
    return words


@pytest.mark.parametrize(
    "change, named",
    [
        ({"requests": 0}, "'requests': got 0"),
        ({"rows": 0}, "'rows': got 0"),
        ({"rows": 2.0}, "'rows': got 2.0"),
        ({"capacity": 0}, "'capacity': got 0"),
        ({"capacity": 63}, "'capacity': got 63; allowed: a multiple of page_size // gcd"),
        ({"capacity": 2**29}, "'capacity': got 536870912; allowed: world . capacity"),
        ({"world": 0}, "rank, world"),
        ({"interleave": 3}, "page_size, interleave: got 64, 3"),
    ],
    ids=str,
)
def test_refuses_sizes_that_cannot_be(change, named):
    sizes = {"requests": 2, "rows": 8, "capacity": 64, "world": 4, "interleave": 4, "page_size": 64}
    with pytest.raises(ValueError, match=named):
        GatherPlan(**(sizes | change))


@pytest.mark.parametrize(
    "arguments, named",
    [((0, 1, 4, 4, 64), "max_tokens"), ((1, 0, 4, 4, 64), "max_requests"), ((1, 1, 4, 4, 6), "page_size")],
)
def test_capacity_refuses_sizes_that_cannot_be(arguments, named):
    with pytest.raises(ValueError, match=named):
        gather_capacity(*arguments)
