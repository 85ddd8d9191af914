"""The push and wait kernels in Triton's interpreter, on loopback ranks. Run by `tests/test_triton_interpreted.py`.

What the interpreter cannot show: fences, races, and waiting (programs run one after another; nothing is stored late).
"""

import os

import pytest
import torch

from torch_sparse_mla import ExchangeError, ce_exchange_start, ce_exchange_wait
from torch_sparse_mla.exchange import triton_kernels
from torch_sparse_mla.exchange.transports.device_collective import DeviceCollectiveTransport
from torch_sparse_mla.exchange.transports.direct import DirectTransport, loopback_memory

from .cases import Shape, make_step, make_world, set_counters

assert os.environ.get("TRITON_INTERPRET") == "1", "needs TRITON_INTERPRET=1 before Triton is imported"

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

SHAPES = [
    Shape(),
    Shape(world=1, requests=1, layers=1),
    Shape(world=2, record_bytes=1),
    Shape(world=4, record_bytes=656, page_gap=48, layers=2),
    Shape(world=2, requests=1, layers=1, record_bytes=8208, tokens=20, page_size=4),
    Shape(world=2, layers=6, record_bytes=16),
]


def interpreted_world(shape):
    world = make_world(shape)
    for channel in world.channels:
        channel.transport = DirectTransport(channel, loopback_memory(channel))
    return world


def start_all(world, layers=None):
    for rank, channel in world.both():
        ce_exchange_start(*rank.arguments(channel, layers))


def wait_all(world, layers=None):
    for rank, channel in world.both():
        ce_exchange_wait(*rank.arguments(channel, layers))


def exchange(world, step, layers=None):
    world.load(step)
    start_all(world, layers)
    wait_all(world, layers)
    for channel in world.channels:
        channel.check()
    world.assert_arrived(step, layers)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"w{shape.world}-{shape.record_bytes}B-{shape.layers}")
def test_matches_the_selection(shape, generator):
    world = interpreted_world(shape)
    for _ in range(2):
        exchange(world, make_step(shape, generator))


def test_several_blocks_share_the_work(generator, monkeypatch):
    monkeypatch.setattr(triton_kernels, "UNITS_PER_TILE", 64)
    world = interpreted_world(Shape(world=2, layers=2))
    exchange(world, make_step(world.shape, generator))


def test_single_layered_and_empty_calls_mix(generator):
    world = interpreted_world(Shape())
    for layers, owners in [(1, None), (3, {1}), (2, set()), (3, None)]:
        exchange(world, make_step(world.shape, generator, 0.8, owners), layers)


@pytest.mark.parametrize("counter", [2**31 - 2, -2, -1])
def test_counters_wrap(counter, generator):
    world = interpreted_world(Shape(world=2, layers=1))
    set_counters(world, counter)
    for _ in range(4):
        exchange(world, make_step(world.shape, generator))
    assert world.channels[0].state[0] == (counter + 4 + 2**31) % 2**32 - 2**31


def expect_error(world, message):
    with pytest.raises(ExchangeError, match=message):
        world.channels[0].check()
    # The next call finds the error without looking at the device.
    with pytest.raises(ExchangeError, match=message):
        ce_exchange_start(*world.ranks[0].arguments(world.channels[0]))


def test_a_rank_that_never_comes_is_named(generator):
    world = interpreted_world(Shape())
    world.load(make_step(world.shape, generator))
    for rank, channel in world.both()[:2]:
        ce_exchange_start(*rank.arguments(channel))
    world.channels[0].transport.board.shared["places"][2] = None
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))
    expect_error(world, r"channel '.*': rank 0, epoch 1: rank 2 did not come within 5.0 s")
    assert world.channels[0].state[:2].tolist() == [1, 0]


def test_another_number_of_layers_is_named(generator):
    world = interpreted_world(Shape(world=2))
    world.load(make_step(world.shape, generator))
    ce_exchange_start(*world.ranks[0].arguments(world.channels[0], 3))
    ce_exchange_start(*world.ranks[1].arguments(world.channels[1], 2))
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0], 3))
    expect_error(world, r"rank 0, epoch 1: rank 1 moves another number of layers")


def test_calls_out_of_order_are_named(generator):
    world = interpreted_world(Shape(world=2))
    world.load(make_step(world.shape, generator))
    start_all(world)
    ce_exchange_start(*world.ranks[0].arguments(world.channels[0]))
    expect_error(world, r"rank 0, epoch 1: started while the exchange before was not waited for")
    world = interpreted_world(Shape(world=2))
    world.load(make_step(world.shape, generator))
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))
    expect_error(world, r"rank 0, epoch 0: waited for an exchange that was not started")


class Gathered(DeviceCollectiveTransport):
    """The all-gather of ranks in one process: `wait` finds what everybody sent by then."""

    def gather(self, size):
        self.gathered = size
        return self

    def work_wait(self):
        sent = torch.cat([peer.sent[: self.gathered] for peer in self.everybody])
        self.received[: len(sent)] = sent

    def wait(self, call):
        if self.work is not None:
            self.work_wait()
            self.work = None
        super().wait(call)


def test_the_collective_form_matches_the_selection(generator):
    world = make_world(Shape())
    transports = [Gathered(channel) for channel in world.channels]
    for channel, transport in zip(world.channels, transports, strict=True):
        channel.transport, transport.everybody = transport, transports
    for layers in (3, 1, 2):
        exchange(world, make_step(world.shape, generator), layers)
