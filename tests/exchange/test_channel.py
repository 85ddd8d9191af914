"""The life of a channel: create, find by name, explain, close."""

import threading

import pytest
import torch

from tests.decode.rejections import expect_rejection
from torch_sparse_mla import Channel, ExchangeError, LoopbackGroup, ce_exchange_start, ce_exchange_wait
from torch_sparse_mla.exchange.transports import loopback

from .cases import Shape, make_channel, make_rank, make_step, make_world

SIZES = {"name": "sizes", "capacity_records": 8, "record_bytes": 16, "layers": 3, "transport": "auto"}


@pytest.mark.parametrize(
    "argument, value, allowed",
    [
        ("name", "", "a string that is not empty"),
        ("capacity_records", 0, "an integer from 1 to"),
        ("capacity_records", 9, "a multiple of the 2 requests"),
        ("record_bytes", 0, "from 1 to 65536"),
        ("record_bytes", 65_537, "from 1 to 65536"),
        ("record_bytes", 16.0, "from 1 to 65536"),
        ("layers", 0, "an integer from 1 to"),
        ("requests", 9, "an integer from 1 to 8"),
        ("expected_records", 0, "an integer from 1 to 8"),
        ("expected_records", 9, "an integer from 1 to 8"),
        ("workspace_sets", -1, "an integer from 0 to 30"),
        ("workspace_sets", 2.0, "an integer from 0 to 30"),
        ("workspace_sets", True, "an integer from 0 to 30"),
        ("timeout_s", 0, "above 0"),
        ("timeout_s", "1", "above 0"),
        ("name", 7, "a string that is not empty"),
        ("device", "cpuu", "None, cpu or cuda"),
        ("device", "meta", "None, cpu or cuda"),
        ("device", [], "None, cpu or cuda"),
        ("capacity_records", 2**29, "a capacity that a plan can have (torch_sparse_mla.SelectionPlan: "),
        ("transport", "", "one of auto, direct, ce, collective, loopback"),
        ("transport", "Direct", "one of auto, direct, ce, collective, loopback"),
        ("transport", "ce", "for a loopback group of 1 on cpu: auto or loopback"),
        ("transport", "direct", "for a loopback group of 1 on cpu: auto or loopback"),
    ],
)
def test_create_rejects(argument, value, allowed):
    with expect_rejection("Channel.create", argument, allowed):
        Channel.create(group=LoopbackGroup(1).rank(0), **{**SIZES, "requests": 2, argument: value})
    Channel.create(group=LoopbackGroup(1).rank(0), **SIZES).close()


def test_create_rejects_what_is_no_group():
    with expect_rejection("Channel.create", "group", "LoopbackGroup(world).rank(rank)"):
        Channel.create(group=None, **SIZES)
    with pytest.raises(ValueError, match=r"LoopbackGroup: rank: got 2; allowed: 0 to 1"):
        LoopbackGroup(2).rank(2)
    with pytest.raises(ValueError, match=r"LoopbackGroup: rank: got '0'; allowed: 0 to 1"):
        LoopbackGroup(2).rank("0")
    for device in ("meta", "gpu"):
        with expect_rejection("LoopbackGroup", "device", "cpu or cuda"):
            LoopbackGroup(2, device)
    with pytest.raises(ValueError, match=r"LoopbackGroup: world: got 0; allowed: 1 or more"):
        LoopbackGroup(0)


def test_create_rejects_a_name_in_use():
    group = LoopbackGroup(1).rank(0)
    channel = Channel.create(group=group, **SIZES)
    for other in (group, LoopbackGroup(1).rank(0)):
        with expect_rejection("Channel.create", "name", "a name that no open channel has"):
            Channel.create(group=other, **SIZES)
    channel.close()
    Channel.create(group=group, **SIZES).close()


def test_ranks_with_other_arguments_fail_together():
    shape = Shape(world=2)
    group = LoopbackGroup(2)
    channel, case = make_channel(shape, group.rank(0), "unequal"), make_rank(shape, 0)
    case.plan.zero_()
    with pytest.raises(ValueError, match=r"rank 1 gave .*layers=2.*, rank 0 gave .*layers=3.*allowed: equal"):
        make_channel(shape, group.rank(1), "unequal", layers=2)
    with pytest.raises(ExchangeError, match=r"rank 1 could not make its channel: arguments: .*rank 1 gave"):
        ce_exchange_start(*case.arguments(channel))
    channel.close()
    for rank in range(2):
        make_channel(shape, group.rank(rank), "unequal").close()


def test_a_transport_that_fails_frees_the_name_and_fails_the_ranks_before(monkeypatch):
    from torch_sparse_mla.exchange.transports import loopback

    shape = Shape(world=2)
    group = LoopbackGroup(2)
    channel, case = make_channel(shape, group.rank(0), "failing"), make_rank(shape, 0)
    case.plan.zero_()
    with monkeypatch.context() as patch:
        patch.setattr(loopback.LoopbackTransport, "__init__", lambda self, channel: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_channel(shape, group.rank(1), "failing")
    with pytest.raises(ExchangeError, match=r"rank 1 could not make its channel"):
        ce_exchange_start(*case.arguments(channel))
    channel.close()
    for rank in range(2):
        make_channel(shape, group.rank(rank), "failing").close()


def test_a_bad_argument_of_a_later_rank_fails_the_ranks_before():
    shape = Shape(world=2)
    group = LoopbackGroup(2)
    channel, case = make_channel(shape, group.rank(0), "bad"), make_rank(shape, 0)
    case.plan.zero_()
    with expect_rejection("Channel.create", "layers", "an integer from 1 to"):
        make_channel(shape, group.rank(1), "bad", layers=0)
    with pytest.raises(ExchangeError, match=r"rank 1 could not make its channel: arguments: .*'layers': got 0"):
        ce_exchange_start(*case.arguments(channel))
    channel.close()


def test_a_second_channel_of_a_rank_does_not_end_the_first():
    world = make_world(Shape(world=1))
    rank, channel = world.ranks[0], world.channels[0]
    rank.plan.zero_()
    with expect_rejection("Channel.create", "name", "a name that no open channel has"):
        make_channel(world.shape, channel.group, channel.configuration.name)
    ce_exchange_start(*rank.arguments(channel))
    world.close()


def test_of_two_threads_that_make_one_name_one_fails(monkeypatch):
    """The second comes while the first is between its check and its entry in the table of names."""
    first, errors = Channel.__init__, []

    def create_again(self, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "__init__", first)
            thread = threading.Thread(target=create)
            thread.start()
            thread.join()
        first(self, *arguments)

    def create():
        try:
            Channel.create(group=LoopbackGroup(1).rank(0), **SIZES).close()
        except ValueError as error:
            errors.append(str(error))

    monkeypatch.setattr(Channel, "__init__", create_again)
    channel = Channel.create(group=LoopbackGroup(1).rank(0), **SIZES)
    assert len(errors) == 1 and "a name that no open channel has" in errors[0]
    channel.close()


def test_use_after_close_raises_and_close_may_be_repeated():
    world = make_world(Shape(world=1))
    rank, channel = world.ranks[0], world.channels[0]
    channel.close()
    channel.close()
    with expect_rejection("ce_exchange_start", "channel", "the name of an open channel"):
        ce_exchange_start(*rank.arguments(channel))
    with pytest.raises(ValueError, match=f"got '{channel.name}', which is closed"):
        ce_exchange_start(*rank.arguments(channel))
    with pytest.raises(ExchangeError, match="is closed"):
        channel.check()


def test_closing_an_old_channel_leaves_its_successor_open():
    group = LoopbackGroup(1).rank(0)
    first = Channel.create(group=group, **SIZES)
    first.close()
    second = Channel.create(group=group, **SIZES)
    first.close()
    with expect_rejection("Channel.create", "name", "a name that no open channel has"):
        Channel.create(group=group, **SIZES)
    second.close()


def test_explain():
    channel = Channel.create(group=LoopbackGroup(2).rank(1), **SIZES)
    assert channel.explain() == {
        "channel": "sizes:1",
        "transport": "loopback",
        "why": "the transport for a loopback group of 2 on cpu",
        "ranks": "rank 1 of 2",
        "device": "cpu",
        "slab": "3 layers x 8 records x 16 bytes",
        "timeout": "5.0 s",
    }
    channel.check()
    channel.close()


def test_state_is_the_channels_counters():
    channel = Channel.create(group=LoopbackGroup(1).rank(0), **SIZES)
    assert channel.state.dtype == torch.int32 and channel.state[:7].tolist() == [0] * 7
    channel.close()


def test_a_channel_hands_out_sets_of_workspaces(generator):
    world = make_world(Shape(world=2), workspace_sets=2)
    for channel in world.channels:
        workspaces = [workspace for layers in channel.workspaces for workspace in layers]
        assert [len(layers) for layers in channel.workspaces] == [3, 3]
        assert all(workspace.shape == world.ranks[0].workspaces[0].shape for workspace in workspaces)
        assert len({workspace.data_ptr() for workspace in workspaces}) == 6
        assert channel.explain()["workspaces"] == "2 sets as large as the slab"
    for number in (0, 1, 0):
        step = make_step(world.shape, generator)
        for rank, channel in world.both():
            rank.workspaces = channel.workspaces[number]
        world.load(step)
        for half in (ce_exchange_start, ce_exchange_wait):
            for rank, channel in world.both():
                half(*rank.arguments(channel))
        world.assert_arrived(step)
    world.close()
    assert all(channel.workspaces == [] for channel in world.channels)


def test_a_set_is_used_as_one_and_by_every_rank(generator):
    """As over peers' memory, where a peer would write another set than the one that is waited for."""
    world = make_world(Shape(world=2), workspace_sets=2)
    world.load(make_step(world.shape, generator))
    (rank, channel), (other, its_channel) = world.both()
    own = rank.workspaces
    first, second = channel.workspaces
    for mixed in ([first[0], second[1], first[2]], [first[1], first[0], first[2]], [first[0], own[1], own[2]]):
        rank.workspaces = mixed
        with pytest.raises(ValueError, match=r"'workspaces': got .* allowed: the first layers of one set in order"):
            ce_exchange_start(*rank.arguments(channel))
    assert channel.state[:2].tolist() == [0, 0]
    rank.workspaces, other.workspaces = second, its_channel.workspaces[0]
    ce_exchange_start(*rank.arguments(channel))
    ce_exchange_start(*other.arguments(its_channel))
    with pytest.raises(ExchangeError, match="rank 1 moves another number of layers, or into another set"):
        ce_exchange_wait(*rank.arguments(channel))
    world.close()


def test_workspaces_that_cannot_be_made_close_the_transport(monkeypatch):
    closed = []
    monkeypatch.setattr(loopback.LoopbackTransport, "close", lambda transport: closed.append(transport))
    monkeypatch.setattr(Channel, "new_workspaces", lambda channel: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Channel.create(group=LoopbackGroup(1).rank(0), workspace_sets=1, **SIZES)
    assert len(closed) == 1
    monkeypatch.undo()
    Channel.create(group=LoopbackGroup(1).rank(0), workspace_sets=1, **SIZES).close()
