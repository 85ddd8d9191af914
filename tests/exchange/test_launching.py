"""How many programs a launch has: of static sizes, and of what the ranks share."""

import types

import pytest
import torch
import torch.distributed as dist

from torch_sparse_mla import Channel, LoopbackGroup
from torch_sparse_mla.exchange import triton_kernels as kernels
from torch_sparse_mla.exchange.group import as_group
from torch_sparse_mla.exchange.transports import launching

from .processes import run_ranks

SMS = 132
MANY = 1 << 20


@pytest.fixture
def channels(monkeypatch):
    made = []
    monkeypatch.setattr(launching, "num_sms", lambda device: SMS)

    def make(world, sharing=1, layers=6, capacity=MANY):
        group = LoopbackGroup(world)
        ranks = [Channel.create("launching", group.rank(rank), capacity, 656, layers) for rank in range(world)]
        made.extend(ranks)
        ranks[0].sharing = sharing
        return ranks[0]

    yield make
    for channel in made:
        channel.close()


def grids(kind, channel, place=(-1, 0)):
    operands = launching.Operands.to_compile(channel)
    return [launch.grid for launch in kind(channel, operands, torch.zeros(1, dtype=torch.int64), place)]


def programs(grid):
    blocks, layers = grid
    return blocks * layers


def test_a_rank_alone_moves_with_all_that_runs_at_once(channels):
    most = kernels.BLOCKS_PER_SM * SMS
    assert grids(launching.push_launches, channels(1)) == [(most // 4, 4), (most // 2, 2)]


def test_what_goes_to_peers_leaves_half_of_the_gpu(channels):
    assert [programs(grid) for grid in grids(launching.push_launches, channels(2))] == [SMS * 4, SMS * 4]


@pytest.mark.parametrize("place", [(-1, 0), (0, 64)], ids=["", "placed"])
@pytest.mark.parametrize("sharing", [1, 2, 4, 8])
def test_waiting_kernels_leave_whole_multiprocessors_alone(sharing, place, channels):
    """However the blocks of all ranks are spread, an eighth of the multiprocessors has none: attention, whose blocks
    take all of one, finds it, where it comes before the push that another rank of the GPU waits for."""
    for grid in grids(launching.wait_launches, channels(8, sharing), place):
        assert SMS // 2 < sharing * programs(grid) <= SMS - SMS // 8


def test_few_records_take_few_programs(channels):
    rows = kernels.tile(656, 4)["ROWS"]
    channel = channels(1, capacity=3 * rows + 1, layers=1)
    assert grids(launching.push_launches, channel) == grids(launching.wait_launches, channel) == [(4, 1)]


def test_there_is_always_a_program(channels, monkeypatch):
    monkeypatch.setattr(launching, "num_sms", lambda device: 1)
    assert grids(launching.wait_launches, channels(8, 8)) == [(1, 4), (1, 2)]


@pytest.mark.parametrize(
    ("record_bytes", "unit"), [(656, 4), (304, 4), (1152, 4), (16, 4), (65_536, 4), (37, 1), (1, 1)]
)
def test_a_tile_holds_whole_records(record_bytes, unit):
    form = kernels.tile(record_bytes, unit)
    elements = 16 if unit == 4 else 1
    assert form["RECORD"] * elements == record_bytes
    assert form["ROWS"] * form["RECORD"] <= form["VECTORS"] or form["ROWS"] == 1
    assert (form["ROWS"] + 1) * form["RECORD"] > form["VECTORS"]


def sharing_of(rank, gpus):
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=gpus[rank])
    return as_group(dist.group.WORLD).sharing("c", torch.device("cuda", 0))


def test_processes_know_who_shares_their_gpu(tmp_path):
    assert run_ranks(3, sharing_of, tmp_path, ["first", "second", "first"]) == [2, 1, 2]


def test_loopback_ranks_share_one():
    assert LoopbackGroup(3).rank(1).sharing("c", torch.device("cuda", 0)) == 3
