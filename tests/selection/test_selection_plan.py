"""`SelectionPlan`: sizes and places of the views, by arithmetic alone."""

import math
import re

import hypothesis
import pytest
import torch
from hypothesis import strategies

from torch_sparse_mla import SelectionPlan, selection_plan_words
from torch_sparse_mla.selection.plan import PARTITIONS

from .cases import VIEWS

sizes = strategies.tuples(
    strategies.integers(0, 40), strategies.integers(1, 16), strategies.integers(1, 2100), strategies.integers(1, 8)
)


@hypothesis.given(sizes=sizes)
def test_sections_lie_behind_one_another_and_are_aligned(sizes):
    selection = SelectionPlan(*sizes)
    end = 0
    for section in selection.sections.values():
        assert section.offset % 4 == 0
        assert end <= section.offset < end + 4
        end = section.offset + math.prod(section.shape)
    assert selection.words == end == selection_plan_words(*sizes)


@hypothesis.given(sizes=sizes)
def test_state_is_a_small_multiple_of_the_entries(sizes):
    selection = SelectionPlan(*sizes)
    if selection.capacity_per_request >= 64:
        assert selection.words <= (23 + sizes[3]) * selection.capacity + 16
    for cells in (selection.cells, selection.spare_cells):
        assert cells & (cells - 1) == 0, "positions and hashes are cut to a power of two"
    assert selection.cells >= 8 * selection.capacity_per_request
    assert selection.spare_cells * PARTITIONS >= selection.capacity_per_request
    assert selection.table_words >= selection.capacity_per_request, "the union kernel keeps numbers there"


def test_views_are_views_of_the_buffer():
    selection = SelectionPlan(requests=3, rows_per_request=2, topk=5, world=4)
    plan = selection.empty()
    assert (plan.shape, plan.dtype) == ((selection.words,), torch.int32)
    plan.copy_(torch.arange(len(plan)))
    shapes = {"remap": (6, 5), "owner_offsets": (3, 5), "owned_slots": (30,), "counts": (3,)}
    for name in VIEWS:
        view = getattr(selection, name)(plan)
        assert view.shape == shapes[name]
        assert view.data_ptr() == plan.data_ptr() + 4 * selection.sections[name].offset
        assert view.flatten().tolist() == list(range(view.flatten()[0], view.flatten()[0] + view.numel()))


def test_sizes_of_the_documented_case():
    selection = SelectionPlan(requests=1, rows_per_request=4, topk=2048, world=4)
    assert selection.capacity_per_request == selection.capacity == 8192
    assert round(selection.words * 4 / 1000) == 426


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((-1, 1, 1, 1), "requests: got -1; allowed: an integer, 0 or more"),
        ((1, 0, 1, 1), "rows_per_request: got 0; allowed: an integer, 1 or more"),
        ((1, 1, 0, 1), "topk: got 0; allowed: an integer, 1 or more"),
        ((1, 1, 1, 0), "world: got 0; allowed: an integer, 1 or more"),
        ((1.5, 1, 1, 1), "requests: got 1.5; allowed: an integer"),
        ((1, None, 1, 1), "rows_per_request: got None; allowed: an integer"),
        ((30_000, 4, 2048, 4), "reserve fewer requests"),
    ],
)
def test_rejects_sizes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=rf"torch_sparse_mla\.SelectionPlan: .*{re.escape(message)}"):
        SelectionPlan(*sizes)
