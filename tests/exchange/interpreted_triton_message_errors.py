"""What goes wrong between ranks whose messages are packed, with the kernels in Triton's interpreter: see
`interpreted_triton_messages.py`. The watchdog is real, too."""

import contextlib
import time

import pytest
import torch

from torch_sparse_mla import ExchangeError, ce_exchange_layers, ce_exchange_start, ce_exchange_wait
from torch_sparse_mla.exchange import contract
from torch_sparse_mla.exchange.channel import ERRORS, OTHER_CALL, OTHER_EPOCH, OTHER_PLAN
from torch_sparse_mla.exchange.transports import launching

from .cases import POISON, Shape, Step, make_step
from .interpreted_triton import exchange, expect_error, start_all, wait_all

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

SHORT_S, DEADLINE_S = 0.2, 30


@pytest.mark.parametrize("word, code", [(0, OTHER_EPOCH), (1, OTHER_CALL), (2, OTHER_PLAN)])
def test_a_header_that_is_not_of_this_exchange_is_an_error(word, code, worlds, generator):
    """A message that is there, with its flag: rank 2's is not what rank 0 waits for."""
    world = worlds(Shape(), "ce")
    exchange(world, make_step(world.shape, generator))
    world.load(make_step(world.shape, generator))
    start_all(world)
    transport = world.channels[0].transport
    header = transport.memory.own[2 * transport.layout.message :][:16].view(torch.int32)
    header[word] -= 1
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))
    assert all((workspace[: len(workspace)] == POISON).any() for workspace in world.ranks[0].workspaces)
    expect_error(world, "rank 0, epoch 2: " + ERRORS[code].format(peer=2))
    assert world.channels[0].state[:2].tolist() == [2, 1]


def test_another_number_of_layers_is_named(transport, worlds, generator):
    world = worlds(Shape(world=2), "ce")
    world.load(make_step(world.shape, generator))
    for (rank, channel), layers in zip(world.both(), (3, 2), strict=True):
        ce_exchange_start(*rank.arguments(channel, layers))
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0], 3))
    expect_error(world, r"rank 0, epoch 1: rank 1 moves another number of layers")


def test_another_plan_is_named(transport, worlds, generator):
    for other in (make_step(Shape(world=2), generator, 0.2).topk, torch.full((4, 9), -1, dtype=torch.int32)):
        world = worlds(Shape(world=2), transport)
        exchange(world, make_step(world.shape, generator, 1.0))
        step = make_step(world.shape, generator, 1.0)
        world.ranks[0].load(step)
        world.ranks[1].load(Step(other, step.records))
        start_all(world)
        wait_all(world)
        expect_error(world, r"rank 0, epoch 2: rank 1 has other owner offsets")


def test_a_withheld_rank_is_named_after_the_timeout(transport, worlds, generator):
    """Rank 1 came, rank 2 did not. Nothing waits on the channel again, and the late rank ends with an error too."""
    world = worlds(Shape(), transport, timeout_s=SHORT_S)
    world.load(make_step(world.shape, generator))
    for rank, channel in world.both()[:2]:
        ce_exchange_start(*rank.arguments(channel))
    begin = time.monotonic()
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))
    assert SHORT_S < time.monotonic() - begin < DEADLINE_S
    expect_error(world, r"channel '.*': rank 0, epoch 1: rank 2 did not come within 0.2 s")
    assert world.channels[0].state[:2].tolist() == [1, 0]
    late, channel = world.both()[2]
    for message in (None, "rank 2, epoch 2: rank 0 did not come"):
        ce_exchange_start(*late.arguments(channel))
        if not channel.host_words[0]:
            ce_exchange_wait(*late.arguments(channel))
        with pytest.raises(ExchangeError, match=message) if message else contextlib.nullcontext():
            channel.check()


def test_a_rank_that_never_unpacks_gives_no_leave(worlds, generator):
    """Its peer may not overwrite the message, and says who holds it up."""
    world = worlds(Shape(world=2), "ce", timeout_s=SHORT_S)
    step = make_step(world.shape, generator)
    world.load(step)
    start_all(world)
    (ahead, ahead_channel), (behind, behind_channel) = world.both()
    ce_exchange_wait(*ahead.arguments(ahead_channel))
    ahead.load(make_step(world.shape, generator))
    message = behind_channel.transport.memory.own.clone()
    ce_exchange_start(*ahead.arguments(ahead_channel))
    with pytest.raises(ExchangeError, match=r"rank 0, epoch 2: rank 1 did not come within 0\.2 s"):
        ahead_channel.check()
    layout = behind_channel.transport.layout
    assert torch.equal(message[: layout.flags], behind_channel.transport.memory.own[: layout.flags])
    ce_exchange_wait(*behind.arguments(behind_channel))
    behind_channel.check()
    behind.assert_arrived(step)


def test_a_message_that_was_given_up_is_not_trusted(worlds, generator):
    """Its header is there, the rest need not be."""
    world = worlds(Shape(world=2), "ce")
    world.load(make_step(world.shape, generator))
    start_all(world)
    transport = world.channels[0].transport
    transport.signals[0].zero_()
    type(transport).force_flags(transport)
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))
    expect_error(world, r"rank 0, epoch 1: rank 1 did not come")


def test_release_leaves_alone_what_came(worlds):
    world = worlds(Shape(world=4), "ce")
    transport = world.channels[0].transport
    signals = transport.signals
    signals.copy_(torch.tensor([[0, 1, 0, 1], [1, 0, 1, 1]]))
    type(transport).force_flags(transport)
    assert signals.tolist() == [[2, 1, 2, 1], [1, 2, 1, 1]]


def test_an_exchange_that_nobody_waits_for_yet_is_no_timeout(transport, worlds, generator):
    world = worlds(Shape(world=2), transport, timeout_s=SHORT_S)
    step = make_step(world.shape, generator)
    world.load(step)
    start_all(world)
    time.sleep(3 * SHORT_S)
    wait_all(world)
    for channel in world.channels:
        channel.check()
    world.assert_arrived(step)


def test_calls_out_of_order_are_refused_at_once(transport, worlds, generator):
    world = worlds(Shape(world=2), transport)
    step = make_step(world.shape, generator)
    world.load(step)
    rank, channel = world.both()[0]
    with pytest.raises(ExchangeError, match=r"ce_exchange_wait: .*waited for an exchange that was not started"):
        ce_exchange_wait(*rank.arguments(channel))
    start_all(world)
    with pytest.raises(ExchangeError, match=r"ce_exchange_start: .*started while the exchange before was not waited"):
        ce_exchange_start(*rank.arguments(channel))
    wait_all(world)
    world.assert_arrived(step)
    channel.transport.operations.capture = 7
    with pytest.raises(ExchangeError, match="a CUDA graph that captures one of start and wait captures both"):
        ce_exchange_wait(*rank.arguments(channel))


def test_a_capture_between_start_and_wait_changes_nothing(worlds, generator):
    """Also one that failed halfway: an open exchange in a capture that is gone is nobody's."""
    world = worlds(Shape(world=2), "ce")
    for capture in (5, 6):
        step = make_step(world.shape, generator)
        world.load(step)
        start_all(world)
        world.channels[0].transport.open.add(capture)
        wait_all(world)
        world.assert_arrived(step)


def replay(rank, transport, call):
    """What a graph does, twice: nothing of the host's part. It moves nothing."""
    rank.poison()
    for _ in range(2):
        transport._pack_and_move(call)
        transport._await_messages(call)
        transport._unpack(call)
    assert all((workspace == POISON).all() for workspace in rank.workspaces)


def test_a_replay_after_an_error_waits_for_nobody_and_moves_nothing(worlds, generator):
    """Not even for the watchdog."""
    world = worlds(Shape(world=2), "ce", timeout_s=3600)
    for rank in world.ranks:
        rank.load(make_step(world.shape, generator, 1.0))
    start_all(world)
    rank, channel = world.both()[0]
    ce_exchange_wait(*rank.arguments(channel))
    with pytest.raises(ExchangeError, match="rank 1 has other owner offsets"):
        channel.check()
    replay(rank, channel.transport, contract.check_ce_exchange_layers(*rank.arguments(channel)))
    with pytest.raises(ExchangeError, match="rank 1 has other owner offsets"):
        channel.check()


def test_a_replay_after_close_waits_for_nobody_moves_nothing_and_check_says_so(worlds, generator):
    world = worlds(Shape(world=2), "ce", timeout_s=3600)
    step = make_step(world.shape, generator)
    exchange(world, step)
    rank, channel = world.both()[0]
    call = contract.check_ce_exchange_layers(*rank.arguments(channel))
    transport, held = channel.transport, channel.transport.memory
    transport.captured = True
    channel.close()
    with pytest.raises(ExchangeError, match=r"is closed"):
        channel.check()
    assert not transport.watchdog.thread.is_alive()
    transport.memory = held
    theirs = world.channels[1].transport.memory.own.clone()
    replay(rank, transport, call)
    with pytest.raises(ExchangeError, match=r"a CUDA graph that captured the channel was replayed after close"):
        channel.check()
    # The peer gets the last message once more, and a flag; its next exchange finds out.
    layout = transport.layout
    assert torch.equal(theirs[: layout.flags], world.channels[1].transport.memory.own[: layout.flags])


def test_the_state_of_another_channel_is_refused_and_left_alone(transport, worlds, generator, monkeypatch):
    world, other = worlds(Shape(world=1), transport), worlds(Shape(world=1), transport)
    world.load(make_step(world.shape, generator))
    caches, plan, workspaces, _, name = world.ranks[0].arguments(world.channels[0])
    monkeypatch.setattr(contract, "_is_state_of", lambda state, channel: True)
    for operator in (ce_exchange_start, ce_exchange_wait):
        before = other.channels[0].state.clone()
        world.channels[0].host_words.zero_()
        operator(caches, plan, workspaces, other.channels[0].state, name)
        assert torch.equal(other.channels[0].state, before)
        expect_error(world, "argument 'state': got the state of another channel; allowed: channel.state")
    other.channels[0].check()


def test_a_launch_that_fails_leaves_nothing_open(transport, worlds, generator, monkeypatch):
    world = worlds(Shape(world=2), transport)
    world.load(make_step(world.shape, generator))
    with monkeypatch.context() as patch:
        patch.setattr(launching, "launches", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start_all(world)
    exchange(world, make_step(world.shape, generator))


def test_a_combined_call_on_one_thread_is_refused(transport, worlds, generator):
    world = worlds(Shape(world=2), "ce")
    exchange(world, make_step(world.shape, generator))
    with pytest.raises(ExchangeError, match="rank 1 was last seen on the calling thread and stream"):
        ce_exchange_layers(*world.ranks[0].arguments(world.channels[0]))
