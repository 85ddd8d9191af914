"""The collective transport of CUDA, as far as it can be tested without a GPU: private group, end, errors."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from torch_sparse_mla import ExchangeError, ce_exchange_start
from torch_sparse_mla.exchange.transports import nccl

from .cases import Shape, make_step
from .host_operations import message_world


@pytest.fixture
def world():
    world = message_world(Shape(world=2), "collective")
    yield world
    world.close()


def test_the_private_group_is_left_alone_by_the_watchdog_of_pytorch(world, monkeypatch):
    """It would end the process. The environment is as before, whether a variable was set or not."""
    made = []

    class FakeGroup:
        class Options:
            pass

        def __init__(self, store, rank, size, options):
            made.append((rank, size, options._timeout.days, {key: os.environ[key] for key in nccl.UNSUPERVISED}))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeGroup, raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: dist.HashStore())
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    group = SimpleNamespace(group=None)
    channel = SimpleNamespace(group=group, rank=1, world=2, state=world.channels[0].state)
    nccl._private_group(channel, "generation")
    assert made == [(1, 2, 365, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"})]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


def test_ranks_that_do_not_connect_are_an_error_in_time(world, monkeypatch):
    transport = world.channels[0].transport
    monkeypatch.setattr(nccl, "CONNECT_S", 0.1)
    monkeypatch.setattr(transport, "_gather", lambda size: SimpleNamespace(is_completed=lambda: False))
    with pytest.raises(RuntimeError, match=r"NCCL did not connect the ranks within 0\.1 s"):
        transport.connect()


def test_close_aborts_the_communicator_once_and_before_it_waits_for_the_device(world, monkeypatch):
    transport, calls = world.channels[0].transport, []
    monkeypatch.setattr(transport.nccl, "abort", lambda: calls.append("abort"))
    monkeypatch.setattr(nccl.PackedTransport, "close", lambda self: calls.append("close"))
    transport.close()
    transport.close()
    assert calls == ["abort", "close", "close"]


def test_an_abort_that_graphs_hold_up_does_not_hold_up_close(world, monkeypatch):
    transport, gone = world.channels[0].transport, threading.Event()
    monkeypatch.setattr(nccl, "ABORT_S", 0.1)
    monkeypatch.setattr(transport.nccl, "abort", gone.wait)
    transport.captured = True
    begin = time.monotonic()
    world.channels[0].close()
    assert time.monotonic() - begin < 20
    gone.set()


def test_an_error_of_nccl_is_an_exchange_error(world, generator, monkeypatch):
    """Raised before anything is open: the channel may be closed at once."""
    world.load(make_step(world.shape, generator))
    rank, channel = world.both()[0]
    monkeypatch.setattr(channel.transport, "_pack", lambda call: None)

    def fail(size):
        raise RuntimeError("NCCL error: remote process exited\nand much more")

    monkeypatch.setattr(channel.transport, "_gather", fail)
    message = r"ce_exchange_start: channel '.*': rank 0: NCCL: NCCL error: remote process exited$"
    with pytest.raises(ExchangeError, match=message):
        ce_exchange_start(*rank.arguments(channel))
    assert not channel.transport.open
