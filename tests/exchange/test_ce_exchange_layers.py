"""`ce_exchange_layers`: several layers, one selection, one exchange."""

import pytest
import torch

from torch_sparse_mla import ce_exchange, ce_exchange_layers

from .cases import Shape, make_step, make_world
from .threads import on_threads


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_equals_one_exchange_for_each_layer(layers, generator):
    bulk, single = make_world(Shape(layers=layers)), make_world(Shape(layers=layers))
    step = make_step(bulk.shape, generator)
    for world in (bulk, single):
        world.load(step)
    on_threads(bulk, lambda rank, channel: ce_exchange_layers(*rank.arguments(channel)))

    def one_by_one(rank, channel):
        for cache, workspace in zip(rank.caches, rank.workspaces, strict=True):
            ce_exchange(cache, rank.plan, workspace, channel.state, channel)

    on_threads(single, one_by_one)
    for ours, theirs in zip(bulk.ranks, single.ranks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.workspaces, theirs.workspaces, strict=True))
    bulk.assert_arrived(step)
    assert bulk.channels[0].state[0] == 1
    assert single.channels[0].state[0] == layers
    bulk.close()
    single.close()


def test_opcheck(generator):
    world = make_world(Shape(world=1))
    world.load(make_step(world.shape, generator))
    arguments = world.ranks[0].arguments(world.channels[0])
    torch.library.opcheck(torch.ops.torch_sparse_mla.ce_exchange_layers, arguments, {})
    world.close()
