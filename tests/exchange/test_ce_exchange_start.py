"""`ce_exchange_start` then `ce_exchange_wait`, every rank in turn on one thread."""

import pytest
import torch

from tests.decode.rejections import expect_rejection
from torch_sparse_mla import ExchangeError, ce_exchange_start, ce_exchange_wait

from .cases import Shape, make_step, make_world, set_counters

SHAPES = [
    Shape(),
    Shape(world=1),
    Shape(world=2, record_bytes=1),
    Shape(world=4, record_bytes=656, page_gap=48),
    Shape(world=8, requests=3, rows_per_request=1, record_bytes=368, interleave=1, tokens=64),
    Shape(world=2, requests=1, layers=1, record_bytes=65_536, tokens=20, page_size=4),
]


def start_all(world, layers=None):
    for rank, channel in world.both():
        ce_exchange_start(*rank.arguments(channel, layers))


def wait_all(world, layers=None):
    for rank, channel in world.both():
        ce_exchange_wait(*rank.arguments(channel, layers))


@pytest.fixture
def worlds():
    made = []
    yield lambda *arguments, **keywords: made.append(make_world(*arguments, **keywords)) or made[-1]
    for world in made:
        world.close()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"w{shape.world}-{shape.record_bytes}B")
def test_matches_the_selection(shape, worlds, generator, device):
    world = worlds(shape, device)
    step = make_step(shape, generator)
    world.load(step)
    start_all(world)
    wait_all(world)
    world.assert_arrived(step)


def test_single_layered_and_empty_calls_mix(worlds, generator, device):
    shape = Shape()
    world = worlds(shape, device)
    for layers, owners, share in [(1, None, 1.0), (3, {1}, 0.9), (2, set(), 1.0), (3, None, 0.3), (1, {0, 2}, 1.0)] * 3:
        step = make_step(shape, generator, share, owners)
        world.load(step)
        start_all(world, layers)
        wait_all(world, layers)
        world.assert_arrived(step, layers)


def test_union_may_fill_the_capacity(worlds, generator, device):
    shape = Shape(requests=2, rows_per_request=2, topk=9, tokens=48)
    world = worlds(shape, device)
    step = make_step(shape, generator)
    step.topk = torch.stack([torch.randperm(48, generator=generator)[:18] for _ in range(2)]).view(4, 9).int()
    world.load(step)
    assert shape.selection.counts(world.ranks[0].plan).tolist() == [18, 18]
    start_all(world)
    wait_all(world)
    world.assert_arrived(step)


def test_caches_may_change_between_start_and_wait(worlds, generator, device):
    world = worlds(Shape(), device)
    step = make_step(world.shape, generator)
    world.load(step)
    start_all(world)
    for rank in world.ranks:
        for cache in rank.caches:
            cache.fill_(7)
    wait_all(world)
    world.assert_arrived(step)


@pytest.mark.parametrize("counter", [2**31 - 2, -2, -1], ids=["int32", "uint32", "uint32-last"])
def test_counters_wrap(counter, worlds, generator, device):
    world = worlds(Shape(), device)
    set_counters(world, counter)
    for _ in range(5):
        step = make_step(world.shape, generator)
        world.load(step)
        start_all(world)
        wait_all(world)
        world.assert_arrived(step)
    assert world.channels[0].state[0] == (counter + 5 + 2**31) % 2**32 - 2**31


def test_slots_that_the_cache_lacks_arrive_as_zeros(worlds, generator, device):
    world = worlds(Shape(world=2), device)
    step = make_step(world.shape, generator, 1.0)
    world.load(step)
    offsets = world.shape.selection.owner_offsets(world.ranks[0].plan).tolist()
    slots = world.shape.selection.owned_slots(world.ranks[0].plan)
    assert offsets[0][1] >= 2
    slots[0], slots[1] = 10**6, -1
    start_all(world)
    wait_all(world)
    for rank in world.ranks:
        assert rank.workspaces[0][:2].sum() == 0
        assert rank.workspaces[0][2:].sum() > 0


def test_checked_mode_names_what_the_cache_lacks(worlds, generator, device, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    world = worlds(Shape(world=2), device)
    step = make_step(world.shape, generator, 1.0)
    world.load(step)
    start_all(world)
    wait_all(world)
    world.assert_arrived(step)
    rank = world.ranks[0]
    world.shape.selection.owned_slots(rank.plan)[1] = 10**6
    with expect_rejection("ce_exchange_start", "plan", "owned slots 0.."):
        start_all(world)
    world.load(step)
    world.shape.selection.owner_offsets(rank.plan)[1, 1] = 1000
    with expect_rejection("ce_exchange_start", "plan", "owner offsets that do not fall, from 0 to 18"):
        start_all(world)


def test_opcheck(worlds, generator):
    world = worlds(Shape(world=1))
    world.load(make_step(world.shape, generator))
    torch.library.opcheck(torch.ops.torch_sparse_mla.ce_exchange_start, world.ranks[0].arguments(world.channels[0]), {})


def test_rejects_a_second_start_before_the_wait(worlds, generator):
    world = worlds(Shape(world=2))
    world.load(make_step(world.shape, generator))
    start_all(world)
    with pytest.raises(ExchangeError, match=r"rank 0, epoch 1: started while .*; wait after every start"):
        start_all(world)
    wait_all(world)
