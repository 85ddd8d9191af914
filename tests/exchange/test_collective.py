"""The collective transport: processes in a gloo group."""

import time

import pytest
import torch
import torch.distributed as dist

from torch_sparse_mla import ExchangeError, ce_exchange_layers, ce_exchange_start, ce_exchange_wait
from torch_sparse_mla.exchange import group

from .cases import Shape, make_channel, make_rank, make_step
from .processes import die, run_ranks

TIMEOUT_S = 1.5
CALLS = [(1, None, 1.0), (3, {1}, 0.9), (2, set(), 1.0), (3, {0}, 0.3), (1, None, 0.6)]


def exchange_all(rank, shape):
    """Combined and split calls, single, layered and empty, with rank 0 slow every second time."""
    channel, case = make_channel(shape, dist.group.WORLD, "c"), make_rank(shape, rank)
    generator = torch.Generator().manual_seed(5)
    for number, (layers, owners, share) in enumerate(CALLS * 2):
        step = make_step(shape, generator, share, owners)
        case.load(step)
        if rank == 0 and number % 2:
            time.sleep(0.02)
        arguments = case.arguments(channel, layers)
        if number % 3:
            ce_exchange_layers(*arguments)
        else:
            ce_exchange_start(*arguments)
            for cache in case.caches:
                cache.zero_()
            ce_exchange_wait(*arguments)
        case.assert_arrived(step, layers)
    assert channel.state[:2].tolist() == [10, 10]
    explained = channel.explain()
    channel.close()
    channel.close()
    return explained


@pytest.mark.parametrize("world", [2, 4])
def test_processes_match_the_selection(world, tmp_path):
    explained = run_ranks(world, exchange_all, tmp_path, Shape(world=world, tokens=64))
    assert [entry["ranks"] for entry in explained] == [f"rank {rank} of {world}" for rank in range(world)]
    assert {entry["transport"] for entry in explained} == {"collective"}
    assert explained[0]["why"] == "the first of collective that works here"


def two_channels(rank, shape):
    """Two channels of one group, used in turn, keep their messages apart."""
    channels = [make_channel(shape, dist.group.WORLD, name) for name in ("target", "draft")]
    cases = [make_rank(shape, rank) for _ in channels]
    generator = torch.Generator().manual_seed(6)
    for _ in range(3):
        steps = [make_step(shape, generator) for _ in channels]
        for case, step, channel in zip(cases, steps, channels, strict=True):
            case.load(step)
            ce_exchange_start(*case.arguments(channel))
        for case, step, channel in reversed(list(zip(cases, steps, channels, strict=True))):
            ce_exchange_wait(*case.arguments(channel))
            case.assert_arrived(step)


def test_two_channels_share_a_group(tmp_path):
    run_ranks(2, two_channels, tmp_path, Shape(world=2))


def one_bad_argument(rank, shape, argument, values):
    try:
        make_channel(shape, dist.group.WORLD, "c", **{argument: values[rank]})
    except (ValueError, RuntimeError) as error:
        # The name is free again, on every rank.
        make_channel(shape, dist.group.WORLD, "c")
        return str(error)


@pytest.mark.parametrize(
    "argument, values, message",
    [
        ("transport", ["auto", "nvlink", "auto"], "argument 'transport': got 'nvlink'; allowed: one of auto, direct"),
        ("layers", [3, 3, 0], "argument 'layers': got 0; allowed: an integer from 1 to"),
        ("layers", [3, 2, 3], "allowed: equal arguments"),
        ("timeout_s", [1, 1, 2], "allowed: equal arguments"),
    ],
)
def test_a_failure_on_one_rank_raises_on_all(argument, values, message, tmp_path):
    for rank, error in enumerate(run_ranks(3, one_bad_argument, tmp_path, Shape(world=3), argument, values)):
        assert error is not None, f"rank {rank} went on"
        assert message in error


def fails_to_connect(rank, shape):
    from torch_sparse_mla.exchange.transports import collective

    class Failing(collective.CollectiveTransport):
        def __init__(self, channel):
            if channel.rank == 1:
                raise RuntimeError("out of sockets")
            super().__init__(channel)

    collective.CollectiveTransport = Failing
    with pytest.raises(RuntimeError) as caught:
        make_channel(shape, dist.group.WORLD, "c")
    return str(caught.value)


def test_a_transport_that_fails_on_one_rank_raises_on_all(tmp_path):
    errors = run_ranks(2, fails_to_connect, tmp_path, Shape(world=2))
    assert errors[0].endswith("transport collective: rank 1 failed: RuntimeError: out of sockets")
    assert errors[1] == "out of sockets"


def without_peer_memory(rank, shape):
    """Processes that could have peer memory, as far as the group can tell, on a device that has none."""
    group.ProcessRank.transports = lambda self, device_type: ("direct", "collective")
    with pytest.raises(Exception) as caught:
        make_channel(shape, dist.group.WORLD, "c", transport="direct")
    channel = make_channel(shape, dist.group.WORLD, "c")
    return str(caught.value), channel.explain()


def test_auto_falls_back_together_and_says_why_and_direct_does_not(tmp_path):
    for error, explained in run_ranks(2, without_peer_memory, tmp_path, Shape(world=2)):
        assert error
        assert explained["transport"] == "collective"
        assert "direct is not possible: " in explained["why"]


def one_rank_missing(rank, shape, how):
    channel, case = make_channel(shape, dist.group.WORLD, "c", timeout_s=TIMEOUT_S), make_rank(shape, rank)
    case.load(make_step(shape, torch.Generator().manual_seed(1)))
    ce_exchange_layers(*case.arguments(channel))
    if rank == 2:
        if how == "killed":
            die()
        time.sleep(3 * TIMEOUT_S)
        return None
    begin = time.monotonic()
    with pytest.raises(ExchangeError) as caught:
        ce_exchange_layers(*case.arguments(channel))
    channel.close()
    return str(caught.value), time.monotonic() - begin, channel.state[:2].tolist()


@pytest.mark.parametrize("how", ["killed", "withheld"])
def test_a_missing_rank_is_an_error_in_time(how, tmp_path):
    results = run_ranks(3, one_rank_missing, tmp_path, Shape(), how)
    assert results[2] is None
    for rank in range(2):
        message, seconds, state = results[rank]
        assert f"channel 'c': rank {rank}, epoch 2: rank 2 " in message
        assert seconds < 3 * TIMEOUT_S
        assert state[1] == 1


def other_call(rank, shape):
    channel, case = make_channel(shape, dist.group.WORLD, "c"), make_rank(shape, rank)
    case.load(make_step(shape, torch.Generator().manual_seed(1)))
    with pytest.raises(ExchangeError) as caught:
        ce_exchange_layers(*case.arguments(channel, 3 if rank == 1 else 2))
    return str(caught.value)


def test_another_number_of_layers_raises_on_every_rank(tmp_path):
    errors = run_ranks(3, other_call, tmp_path, Shape())
    assert "rank 0, epoch 1: rank 1 moves another number of layers; make the same calls on every rank" in errors[0]
    assert "rank 2, epoch 1: rank 1 moves another number of layers" in errors[2]
    assert "rank 1, epoch 1: rank 2 moves another number of layers" in errors[1]
