"""The collective transport: processes in a gloo group."""

import sys
import time
from unittest import mock

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
    assert explained[0]["why"] == f"the transport for a gloo group of {world} on cpu"


def two_channels(rank, shape):
    """Two channels of one group keep their messages apart, whichever each rank starts first and waits for first."""
    channels = [make_channel(shape, dist.group.WORLD, name) for name in ("target", "draft")]
    cases = [make_rank(shape, rank) for _ in channels]
    generator = torch.Generator().manual_seed(6)
    for number in range(4):
        steps = [make_step(shape, generator) for _ in channels]
        calls = list(zip(cases, steps, channels, strict=True))
        for case, step, channel in reversed(calls) if rank and number % 2 else calls:
            case.load(step)
            ce_exchange_start(*case.arguments(channel))
        for case, step, channel in calls if rank else reversed(calls):
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


def one_rank_fails_elsewhere(rank, shape, how):
    """Rank 1 fails where only it can: it must not leave its peer in a step that nobody answers."""
    begin = time.monotonic()
    arguments = {}
    if how == "device":
        arguments = {"device": "cpuu" if rank == 1 else None}
    elif rank == 1:
        sys.modules["torch_sparse_mla.exchange.transports.collective"] = None
    with pytest.raises(Exception) as caught:
        make_channel(shape, dist.group.WORLD, "c", **arguments)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("how, step", [("device", "arguments"), ("import", "import collective")])
def test_a_step_that_fails_on_one_rank_alone_raises_on_all_at_once(how, step, tmp_path):
    results = run_ranks(2, one_rank_fails_elsewhere, tmp_path, Shape(world=2), how)
    assert f"Channel.create: {step}: rank 1 failed: " in results[0][0]
    assert max(seconds for _, seconds in results) < 10


def two_steps(rank, shape):
    ranks = group.as_group(dist.group.WORLD)
    with pytest.raises(RuntimeError) as caught:
        ranks.agree("c", f"step {rank}", lambda: None)
    return str(caught.value)


def test_ranks_at_different_steps_fail_together(tmp_path):
    for error in run_ranks(2, two_steps, tmp_path, Shape(world=2)):
        assert "rank 0 is at step 'step 0', rank 1 at step 'step 1'" in error


def on_cuda(rank, shape):
    with pytest.raises(ValueError) as caught:
        group.ProcessRank.device = lambda self, asked: torch.device("cuda", 0)
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=False):
            make_channel(shape, dist.group.WORLD, "c", transport="loopback")
    return str(caught.value)


def test_transports_of_processes_on_cuda(tmp_path):
    for error in run_ranks(1, on_cuda, tmp_path, Shape(world=1)):
        allowed = "auto or direct or ce or collective"
        assert f"'transport': got 'loopback'; allowed: for a gloo group of 1 on cuda: {allowed}" in error


def without_peer_memory(rank, shape):
    """Processes that ask for peer memory, on a device that has none."""
    group.ProcessRank.transports = lambda self, device_type: ("direct", "collective")
    messages = []
    for transport in ("direct", "auto"):
        with pytest.raises(RuntimeError) as caught:
            make_channel(shape, dist.group.WORLD, "c", transport=transport)
        messages.append(str(caught.value))
    make_channel(shape, dist.group.WORLD, "c", transport="collective")
    return messages


def test_without_peer_memory_direct_says_what_is_missing_and_nothing_else_is_tried(tmp_path):
    for rank, messages in enumerate(run_ranks(2, without_peer_memory, tmp_path, Shape(world=2))):
        for message in messages:
            assert (
                f"Channel.create: transport direct: rank {rank} on cpu has no memory that all of a gloo group"
                in message
            )
            assert "takes PyTorch symmetric memory" in message and "does not support device type cpu" in message


def abandoned(rank, shape, how):
    """An exchange that times out, or is given up between start and wait; then the user's group, and the same name."""
    channel, case = make_channel(shape, dist.group.WORLD, "c", timeout_s=0.5), make_rank(shape, rank)
    generator = torch.Generator().manual_seed(1)
    old, other, new = (make_step(shape, generator, share) for share in (1.0, 0.2, 1.0))
    new.topk = old.topk
    case.load(other if how == "other plan" and rank else old)
    if how == "closed":
        ce_exchange_start(*case.arguments(channel))
    elif how == "other plan" or rank == 0:
        for _ in range(2):
            with pytest.raises(ExchangeError, match=r"epoch 1: rank . (did not come|has other owner offsets)"):
                ce_exchange_layers(*case.arguments(channel))
    else:
        time.sleep(1.0)
    total = torch.ones(1)
    dist.all_reduce(total)
    channel.close()
    channel = make_channel(shape, dist.group.WORLD, "c")
    case.load(new)
    ce_exchange_layers(*case.arguments(channel))
    case.assert_arrived(new)
    channel.close()
    dist.barrier()
    return int(total)


@pytest.mark.parametrize("how", ["timed out", "closed", "other plan"])
def test_an_abandoned_exchange_harms_neither_the_group_nor_the_next_channel(how, tmp_path):
    assert run_ranks(2, abandoned, tmp_path, Shape(world=2), how) == [2, 2]


def of_a_subgroup(rank, shape):
    """The other ranks of the job take no part."""
    subgroup = dist.new_group([2, 1])
    if rank == 0:
        return None
    channel, case = make_channel(shape, subgroup, "c"), make_rank(shape, dist.get_rank(subgroup))
    step = make_step(shape, torch.Generator().manual_seed(1))
    case.load(step)
    ce_exchange_layers(*case.arguments(channel))
    case.assert_arrived(step)
    return channel.explain()["ranks"]


def test_a_group_may_be_a_part_of_the_job(tmp_path):
    results = run_ranks(3, of_a_subgroup, tmp_path, Shape(world=2))
    assert results[0] is None and sorted(results[1:]) == ["rank 0 of 2", "rank 1 of 2"]


def one_rank_missing(rank, shape, how):
    channel, case = make_channel(shape, dist.group.WORLD, "c", timeout_s=TIMEOUT_S), make_rank(shape, rank)
    case.load(make_step(shape, torch.Generator().manual_seed(1)))
    ce_exchange_layers(*case.arguments(channel))
    if rank == 2:
        if how == "killed":
            die()
        time.sleep(6 * TIMEOUT_S)
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
        assert seconds < 5 * TIMEOUT_S
        assert state[1] == 1


def other_call(rank, shape, what):
    channel, case = make_channel(shape, dist.group.WORLD, "c", workspace_sets=2), make_rank(shape, rank)
    case.load(make_step(shape, torch.Generator().manual_seed(1)))
    if what == "set":
        case.workspaces = channel.workspaces[rank == 1]
    with pytest.raises(ExchangeError) as caught:
        ce_exchange_layers(*case.arguments(channel, 3 if rank == 1 and what == "layers" else 2))
    return str(caught.value)


@pytest.mark.parametrize("what", ["layers", "set"])
def test_another_number_of_layers_or_another_set_raises_on_every_rank(what, tmp_path):
    errors = run_ranks(3, other_call, tmp_path, Shape(), what)
    remedy = "or into another set of workspaces; make the same calls on every rank"
    assert f"rank 0, epoch 1: rank 1 moves another number of layers, {remedy}" in errors[0]
    assert "rank 2, epoch 1: rank 1 moves another number of layers" in errors[2]
    assert "rank 1, epoch 1: rank 2 moves another number of layers" in errors[1]
