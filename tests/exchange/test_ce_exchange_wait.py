"""`ce_exchange_wait`: what it does when somebody does not come, leaves, or makes another call."""

import threading
import time

import pytest
import torch

from torch_sparse_mla import ExchangeError, ce_exchange_layers, ce_exchange_start, ce_exchange_wait

from .cases import Shape, make_step, make_world
from .threads import on_threads


@pytest.fixture
def world(generator):
    made = make_world(Shape(), timeout_s=0.3)
    made.load(make_step(made.shape, generator))
    yield made
    made.close()


def test_opcheck(generator):
    world = make_world(Shape(world=1))
    world.load(make_step(world.shape, generator))
    arguments = world.ranks[0].arguments(world.channels[0])
    ce_exchange_start(*arguments)
    torch.library.opcheck(torch.ops.torch_sparse_mla.ce_exchange_wait, arguments, {})
    world.close()


def test_rejects_a_wait_without_a_start(world):
    with pytest.raises(ExchangeError, match="rank 0, epoch 0: waited for an exchange that was not started"):
        ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))


def test_on_one_thread_a_peer_that_did_not_start_cannot_come(generator):
    world = make_world(Shape(), timeout_s=60)
    world.load(make_step(world.shape, generator))
    for call in (ce_exchange_start, ce_exchange_wait):
        for rank, channel in world.both():
            call(*rank.arguments(channel))
    arguments = world.ranks[0].arguments(world.channels[0])
    ce_exchange_start(*arguments)
    begin = time.monotonic()
    with pytest.raises(ExchangeError, match="rank 1 was last seen on the calling thread and did not start"):
        ce_exchange_wait(*arguments)
    assert time.monotonic() - begin < 30
    for rank, channel in world.both()[1:]:
        ce_exchange_start(*rank.arguments(channel))
    ce_exchange_wait(*arguments)
    world.close()


def test_a_peer_that_nobody_saw_yet_may_come_from_another_thread(world):
    """The channels were made on this thread, which says nothing about where ranks will call."""
    others = [threading.Thread(target=late_call, args=pair) for pair in world.both()[1:]]
    for thread in others:
        thread.start()
    ce_exchange_layers(*world.ranks[0].arguments(world.channels[0]))
    for thread in others:
        thread.join()
    assert [channel.state[:2].tolist() for channel in world.channels] == [[1, 1]] * 3


def late_call(rank, channel):
    time.sleep(0.05)
    ce_exchange_layers(*rank.arguments(channel))


def test_a_withheld_rank_is_named_after_the_timeout(world):
    messages = {}

    def run(rank, channel):
        if rank.rank == 2:
            return
        with pytest.raises(ExchangeError) as caught:
            ce_exchange_layers(*rank.arguments(channel))
        messages[rank.rank] = str(caught.value)

    on_threads(world, run)
    for rank in range(2):
        assert f"rank {rank}, epoch 1: rank 2 did not come within 0.3 s" in messages[rank]
        assert world.channels[rank].state[:2].tolist() == [1, 0]


def test_a_rank_that_closes_ends_the_wait(world):
    def run(rank, channel):
        if rank.rank == 2:
            time.sleep(0.05)
            channel.close()
        else:
            with pytest.raises(ExchangeError, match=r"epoch 1: rank 2 closed its channel"):
                ce_exchange_layers(*rank.arguments(channel))

    on_threads(world, run)


def test_another_number_of_layers_is_named(world):
    for rank, channel in world.both():
        ce_exchange_start(*rank.arguments(channel, 1 if rank.rank == 1 else 2))
    with pytest.raises(ExchangeError, match="rank 0, epoch 1: rank 1 moves another number of layers"):
        ce_exchange_wait(*world.ranks[0].arguments(world.channels[0], 2))


def test_another_plan_is_named(world, generator):
    world.ranks[1].load(make_step(world.shape, generator))
    for rank, channel in world.both():
        ce_exchange_start(*rank.arguments(channel))
    with pytest.raises(ExchangeError, match="rank 0, epoch 1: rank 1 has other owner offsets"):
        ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))
