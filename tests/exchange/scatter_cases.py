"""Ranks that scatter: each holds a list of records for every rank, in shuffled slots."""

import itertools

import torch

from torch_sparse_mla import Channel, LoopbackGroup, ce_exchange_start, ce_exchange_wait

from .cases import POISON

_names = itertools.count()


class Outgoing:
    """What one rank sends: `records` records to every rank, whose slots in the cache are shuffled."""

    def __init__(self, channel: Channel, records: int, record_bytes: int, rank: int | None = None) -> None:
        world, device = channel.world, channel.device
        self.channel, self.records = channel, records
        self.rank = channel.rank if rank is None else rank
        self.cache = torch.zeros(1, world * records, record_bytes, dtype=torch.uint8, device=device)
        self.workspace = torch.full((world * records, record_bytes), POISON, dtype=torch.uint8, device=device)
        self.slots = torch.randperm(world * records, generator=torch.Generator().manual_seed(self.rank))
        plan = torch.zeros(channel.plan_words, dtype=torch.int32)
        for name, values in (
            ("owner_offsets", torch.arange(world + 1) * records),
            ("owned_slots", self.slots),
            ("counts", torch.tensor([world * records])),
        ):
            offset = channel.plan_sections[name].offset
            plan[offset : offset + len(values)] = values
        self.plan = plan.to(device)

    def fill(self, generator: torch.Generator) -> None:
        """New records; the workspace is poisoned."""
        self.cache.copy_(torch.randint(256, self.cache.shape, generator=generator, dtype=torch.uint8))
        self.workspace.fill_(POISON)

    def sent_to(self, receiver: int) -> torch.Tensor:
        slots = self.slots[receiver * self.records :][: self.records].to(self.cache.device)
        return self.cache[0, slots]

    def expected(self, ranks: list["Outgoing"]) -> torch.Tensor:
        return torch.cat([sender.sent_to(self.rank) for sender in ranks])

    def call(self) -> tuple:
        return [self.cache], self.plan, [self.workspace], self.channel.state, self.channel


def scatter_channels(world: int, records: int, record_bytes: int, device: str = "cpu", prepare=None) -> list[Channel]:
    group, name = LoopbackGroup(world, device), f"scatter{next(_names)}"
    channels = [
        Channel.create(name, group.rank(rank), world * records, record_bytes, layers=1, scatter=True)
        for rank in range(world)
    ]
    for channel in channels:
        if prepare is not None:
            prepare(channel)
    return channels


def check_scatter(channels: list[Channel], records: int, record_bytes: int, generator: torch.Generator) -> None:
    ranks = [Outgoing(channel, records, record_bytes) for channel in channels]
    for _ in range(3):
        for rank in ranks:
            rank.fill(generator)
        for rank in ranks:
            ce_exchange_start(*rank.call())
        for rank in ranks:
            ce_exchange_wait(*rank.call())
        for rank in ranks:
            assert torch.equal(rank.workspace, rank.expected(ranks)), f"rank {rank.rank}"
    for channel in channels:
        channel.check()
        channel.close()


def claim_more(
    channels: list[Channel], records: int, record_bytes: int, generator: torch.Generator
) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Exchanges with plans by which rank 0 owns more than its lists hold, or all that int32 can say.

    Returns: the ranks' workspaces, by what was claimed.
    """
    ranks = [Outgoing(channel, records, record_bytes) for channel in channels]
    results = {}
    for claimed in ((0, 2 * records), (0, 2**31 - 1), (-5, 2**31 - 1)):
        for rank in ranks:
            rank.fill(generator)
            offset = rank.channel.plan_sections["owner_offsets"].offset
            rank.plan[offset : offset + 2] = torch.tensor(claimed)
            rank.plan[offset + 2 : offset + len(ranks) + 1] = claimed[1]
        for rank in ranks:
            ce_exchange_start(*rank.call())
        for rank in ranks:
            ce_exchange_wait(*rank.call())
        for rank in ranks:
            rank.channel.check()
        results[claimed] = [rank.workspace.clone() for rank in ranks]
    for channel in channels:
        channel.close()
    return results
