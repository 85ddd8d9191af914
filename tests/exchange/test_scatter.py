"""Channels in the scatter form: each rank gets records of its own from every rank."""

import pytest
import torch
import torch.distributed as dist

from torch_sparse_mla import Channel, LoopbackGroup, ce_exchange_start, ce_exchange_wait

from .captured import capture
from .processes import run_ranks
from .scatter_cases import Outgoing, check_scatter, claim_more, scatter_channels


@pytest.mark.parametrize(("world", "records", "record_bytes"), [(1, 3, 16), (2, 1, 7), (3, 40, 64), (4, 5, 1028)])
def test_each_rank_gets_its_own(world, records, record_bytes, device, generator):
    check_scatter(scatter_channels(world, records, record_bytes, device), records, record_bytes, generator)


def test_a_slot_beyond_the_list_gives_zeros(generator):
    """Owner offsets that claim more than a list holds: what is beyond is absent, not another rank's."""
    for workspaces in claim_more(scatter_channels(2, 4, 16), 4, 16, generator).values():
        # Rank 1 gets entries 8 to 15 of rank 0, whose list ends at 8; rank 0 gets the first 8.
        assert workspaces[0].any() and not workspaces[1].any()


@pytest.mark.gpu
def test_replays_follow_the_data(generator):
    channels = scatter_channels(4, 257, 64, "cuda")
    ranks = [Outgoing(channel, 257, 64) for channel in channels]

    def exchange():
        for rank in ranks:
            ce_exchange_start(*rank.call())
        for rank in ranks:
            ce_exchange_wait(*rank.call())

    exchange()
    graph = capture(exchange)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(50):
        for rank in ranks:
            rank.fill(generator)
        graph.replay() if number % 3 else exchange()
        for rank in ranks:
            wrong += (rank.workspace != rank.expected(ranks)).sum()
    assert int(wrong) == 0
    for channel in channels:
        channel.check()
        channel.close()


def scatter_between_processes(rank, records):
    channel = Channel.create("s", dist.group.WORLD, dist.get_world_size() * records, 24, layers=1, scatter=True)
    # Every process makes what all of them send, and sends its own.
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        every = [Outgoing(channel, records, 24, rank=sender) for sender in range(channel.world)]
        for outgoing in every:
            outgoing.fill(generator)
        ce_exchange_start(*every[rank].call())
        ce_exchange_wait(*every[rank].call())
        assert torch.equal(every[rank].workspace, every[rank].expected(every))
    channel.close()


def test_processes_scatter(tmp_path):
    run_ranks(3, scatter_between_processes, tmp_path, 5)


def test_ranks_must_agree_on_the_form():
    group = LoopbackGroup(2)
    Channel.create("form", group.rank(0), 4, 16, layers=1, scatter=True)
    with pytest.raises(ValueError, match="allowed: equal arguments"):
        Channel.create("form", group.rank(1), 4, 16, layers=1)


@pytest.mark.parametrize("options", [{"scatter": True, "requests": 2}, {"scatter": 2}])
def test_creation_rejects_scatter(options):
    with pytest.raises(ValueError, match=r"argument 'scatter': got .*; allowed: False, or True with 1 request"):
        Channel.create("refused", LoopbackGroup(1).rank(0), 4, 16, **options)


def test_checked_mode_looks_at_every_list(monkeypatch, generator):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    channels = scatter_channels(2, 3, 16)
    rank = Outgoing(channels[0], 3, 16)
    offset = channels[0].plan_sections["owned_slots"].offset
    rank.plan[offset + 5] = 6
    with pytest.raises(ValueError, match=r"'plan': got 6 in row 0, column 5; allowed: owned slots 0\.\.5"):
        ce_exchange_start(*rank.call())
    for channel in channels:
        channel.close()
