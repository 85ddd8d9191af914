"""Contenders of `bench_c4_prefill_gather`: our gather over a transport, and collectives that bring the same records.

A chunk ends one prompt. In full, records of the whole prompt travel; incrementally those of the chunk's own rows alone,
which are then put into resident buffers.
"""

import functools
import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from torch_sparse_mla import (
    Channel,
    GatherPlan,
    LoopbackGroup,
    Residency,
    c4_place_records,
    c4_plan_gather,
    c4_prefill_gather_start,
    c4_prefill_gather_wait,
    gather_capacity,
)
from torch_sparse_mla.exchange.channel import REUSE_DISTANCE
from torch_sparse_mla.exchange.transports.ce import MARGIN
from torch_sparse_mla.gather.plan import round_up
from torch_sparse_mla.gather.policy import gather_bytes, ordinary_bytes
from torch_sparse_mla.sharding import local_length

from .exchanges import Ranks
from .ranks import ProcessRanks
from .shapes import INCREMENTAL_GATHER, GatherShape
from .timing import Contender, cache_bytes, num_index_sets, poison

PAGE_SIZE = 64
INTERLEAVE = 4
HEADS = 64
TIMEOUT_S = 20.0


def sizes_of(shape: GatherShape) -> GatherPlan:
    """As a workspace reserves them for such a prompt, whichever form a chunk takes."""
    capacity = gather_capacity(shape.context, 1, shape.world, INTERLEAVE, PAGE_SIZE)
    resident = local_length(0, shape.context, shape.world, INTERLEAVE) if shape.op == INCREMENTAL_GATHER else 0
    return GatherPlan(1, shape.rows, capacity, shape.world, INTERLEAVE, PAGE_SIZE, resident)


def received(shape: GatherShape, ends: list[int]) -> tuple[int, int, int]:
    """Bytes received by chunks of `shape.rows` rows that end at `ends`: in full, incrementally, in ordinary DCP."""
    sizes = sizes_of(shape)
    full = sum(sizes.host_padded([end]) for end in ends)
    new = sum(max(sizes.host_sent([end], [max(0, end - shape.rows)])) for end in ends)
    moved = (gather_bytes(records, shape.record_bytes, shape.world) for records in (full, new))
    return *moved, len(ends) * ordinary_bytes(shape.rows, HEADS, 512, shape.world)


class Chunk:
    """The last chunk of one prompt, and what the own ranks hold of it.

    What a rank's cache holds follows from its number, so any process can make another's again, to check what arrived.

    Attributes:
        incremental: whether only what is new travels.
        first, records: of each rank, the first local record that it sends, and how many.
        plans: of each own rank.
        resident: of each own rank, the resident buffer; empty in full.
        slots: int64, of each own rank, where its caches hold what it sends.
        num_sets: caches in a rotation. A multiple of a channel's sets of workspaces, so that replays take them in turn.
        details: further fields of every case.
    """

    def __init__(self, shape: GatherShape, ranks: Ranks) -> None:
        self.shape, self.ranks, self.device = shape, ranks, ranks.device
        self.incremental = shape.op == INCREMENTAL_GATHER
        self.sizes = sizes_of(shape)
        blocks = -(-shape.context // (PAGE_SIZE * shape.world))
        generator = torch.Generator(self.device).manual_seed(0)
        self.table = torch.randperm(blocks, device=self.device, generator=generator, dtype=torch.int32).view(1, -1)
        known = shape.context - shape.rows if self.incremental else 0
        self.first = [local_length(rank, known, shape.world, INTERLEAVE) for rank in range(shape.world)]
        ends = [local_length(rank, shape.context, shape.world, INTERLEAVE) for rank in range(shape.world)]
        self.records = [end - first for end, first in zip(ends, self.first, strict=True)]
        held = self._held(known) if self.incremental else {}
        lengths = ([shape.context], [shape.rows])
        self.plans = {rank: c4_plan_gather(*lengths, self.table, self.sizes, rank=rank, **held) for rank in ranks.own}
        size = (shape.world * self.sizes.resident, shape.record_bytes)
        owners = ranks.own if self.incremental else []
        self.resident = {rank: torch.empty(size, dtype=torch.uint8, device=self.device) for rank in owners}
        self.slots = {rank: self._slots(rank) for rank in ranks.own}
        own_bytes = blocks * PAGE_SIZE * shape.record_bytes
        self.num_sets = round_up(num_index_sets(shape.rows, own_bytes, cache_bytes(self.device)), REUSE_DISTANCE)
        full, new, ordinary = received(shape, [shape.context])
        self.received_bytes = new if self.incremental else full
        self.details = {"received_bytes": self.received_bytes, "ordinary_received_bytes": ordinary}
        if self.incremental:
            self.details["resident_bytes"] = math.prod(size)

    @functools.cached_property
    def caches(self) -> dict[int, list[torch.Tensor]]:
        return {rank: [self._cache(rank, number) for number in range(self.num_sets)] for rank in self.ranks.own}

    @functools.cached_property
    def expected(self) -> list[torch.Tensor]:
        """What each rank sends of the last index set."""
        owners = range(self.shape.world)
        return [self._cache(owner, self.num_sets - 1).flatten(0, 1)[self._slots(owner)] for owner in owners]

    def index_select(self, rank: int, index_set: int, into: torch.Tensor) -> None:
        """What an own rank sends, packed by PyTorch."""
        records, slots = self.caches[rank][index_set].flatten(0, 1), self.slots[rank]
        torch.index_select(records.view(torch.int32), 0, slots, out=into[: len(slots)].view(torch.int32))

    def wrong(self, slices: Iterable[torch.Tensor]) -> bool:
        """Whether slices, one of each rank, begin with anything but what that rank sends of the last index set."""
        return any(not torch.equal(part[: len(sent)], sent) for part, sent in zip(slices, self.expected, strict=True))

    def wrong_resident(self, rank: int) -> bool:
        """The same of what is new in a rank's resident buffer."""
        slices = self.resident[rank].view(self.shape.world, -1, self.shape.record_bytes)
        return self.wrong([part[first:] for part, first in zip(slices, self.first, strict=True)])

    def poison(self) -> None:
        for buffer in self.resident.values():
            poison(buffer)

    def _cache(self, rank: int, index_set: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(1 + 1_000 * rank + index_set)
        size = (self.table.shape[1], PAGE_SIZE, self.shape.record_bytes)
        return torch.randint(256, size, device=self.device, generator=generator, dtype=torch.uint8)

    def _slots(self, owner: int) -> torch.Tensor:
        first = self.first[owner]
        local = torch.arange(first, first + self.records[owner], device=self.device)
        return self.table[0, local // PAGE_SIZE].long() * PAGE_SIZE + local % PAGE_SIZE

    def _held(self, known: int) -> dict[str, tuple[int, ...]]:
        """What is resident when the last chunk begins: all before it."""
        residency = Residency(self.sizes)
        residency.admit("prompt", self.shape.context)
        if known:
            residency.commit(residency.begin(["prompt"], [known], [known]))
        chunk = residency.begin(["prompt"], [self.shape.context], [self.shape.rows])
        return {"resident_starts": chunk.starts, "resident_lengths": chunk.resident_lengths}


class Gatherer:
    """The own ranks of one chunk over one transport.

    Args:
        placed: also into workspaces that the channels hand out, which over "direct" peers write.
        name: of what it gives; None: the transport's.
    """

    def __init__(self, chunk: Chunk, transport: str, *, placed: bool = False, name: str | None = None) -> None:
        self.chunk, self.transport, self.name, self.placed = chunk, transport, name or transport, placed
        ranks, size = chunk.ranks, (chunk.sizes.gathered_records, chunk.shape.record_bytes)
        # Made here, and not by the first call, which has a stream of its own.
        self.caches = chunk.caches
        self.gathered = {rank: torch.empty(size, dtype=torch.uint8, device=ranks.device) for rank in ranks.own}
        self.channels = {
            rank: Channel.create(
                f"bench-gather-{self.name}",
                ranks.group(rank),
                *size,
                layers=1,
                transport=transport,
                timeout_s=TIMEOUT_S,
                device=ranks.device,
                expected_records=self._expected_records(),
                workspace_sets=REUSE_DISTANCE if placed else 0,
            )
            for rank in ranks.own
        }

    def contenders(self) -> list[Contender]:
        ways = {self.name: self._own_buffers}
        if self.placed:
            ways[f"{self.name}-placed"] = self._workspaces
        return [
            Contender(
                name,
                lambda index_set, at=at: self._gather(index_set, at(index_set)),
                self.poison,
                lambda at=at: self._error(at(self.chunk.num_sets - 1)),
                0.0,
                dict(self.chunk.details),
            )
            for name, at in ways.items()
        ]

    def poison(self) -> None:
        """Nobody goes on, and writes a peer's workspaces, before all have poisoned theirs."""
        self.chunk.poison()
        sets = [layers for channel in self.channels.values() for layers in channel.workspaces]
        for buffer in (*self.gathered.values(), *(layers[0] for layers in sets)):
            poison(buffer)
        if self.chunk.device.type == "cuda":
            torch.cuda.synchronize(self.chunk.device)
        self.chunk.ranks.agree(None)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()

    def _own_buffers(self, index_set: int) -> dict[int, torch.Tensor]:
        return self.gathered

    def _workspaces(self, index_set: int) -> dict[int, torch.Tensor]:
        return {rank: channel.workspaces[index_set % REUSE_DISTANCE][0] for rank, channel in self.channels.items()}

    def _gather(self, index_set: int, buffers: dict[int, torch.Tensor]) -> None:
        chunk = self.chunk
        for half in (c4_prefill_gather_start, c4_prefill_gather_wait):
            for rank, channel in self.channels.items():
                half(self.caches[rank][index_set], chunk.plans[rank], buffers[rank], channel.state, channel)
        for rank, resident in chunk.resident.items():
            c4_place_records(buffers[rank], chunk.plans[rank], resident, chunk.sizes)

    def _error(self, buffers: dict[int, torch.Tensor]) -> float:
        """1 if any record of any own rank is wrong, for the last index set."""
        chunk = self.chunk
        for channel in self.channels.values():
            channel.check()
        if chunk.incremental:
            return float(any(chunk.wrong_resident(rank) for rank in chunk.resident))
        padded = chunk.sizes.host_padded([chunk.shape.context])
        shape = (chunk.shape.world, padded, chunk.shape.record_bytes)
        return float(any(chunk.wrong(buffer[: chunk.shape.world * padded].view(shape)) for buffer in buffers.values()))

    def _expected_records(self) -> int | None:
        """Copies have a fixed size: that of what a rank sends, without the margin for owners that are random."""
        if self.transport != "ce":
            return None
        chunk = self.chunk
        sent = max(chunk.records) if chunk.incremental else chunk.sizes.host_padded([chunk.shape.context])
        return max(1, math.ceil(chunk.shape.world * sent / (1 + MARGIN)))


class Packer:
    """Our packing of an own rank's part of a chunk: the gather of one rank, into a slice of so many records.

    Args:
        records: a multiple of the page size.
    """

    def __init__(self, chunk: Chunk, rank: int, records: int) -> None:
        self.chunk, self.rank = chunk, rank
        known, end = chunk.first[rank], chunk.first[rank] + chunk.records[rank]
        # The rank's records as a prompt of its own: its tokens lie in the same pages.
        resident = round_up(max(end, 1), PAGE_SIZE) if chunk.incremental else 0
        held = {"resident_starts": [0], "resident_lengths": [known]} if chunk.incremental else {}
        sizes = GatherPlan(1, 1, records, 1, INTERLEAVE, PAGE_SIZE, resident)
        self.plan = c4_plan_gather([end], [0], chunk.table, sizes, rank=0, **held)
        group, size = LoopbackGroup(1, chunk.device), (records, chunk.shape.record_bytes)
        self.channel = Channel.create("bench-gather-pack", group.rank(0), *size, layers=1, timeout_s=TIMEOUT_S)

    def pack(self, index_set: int, into: torch.Tensor) -> None:
        call = (self.chunk.caches[self.rank][index_set], self.plan, into, self.channel.state, self.channel)
        c4_prefill_gather_start(*call)
        c4_prefill_gather_wait(*call)

    def close(self) -> None:
        self.channel.check()
        self.channel.close()


class Collectives:
    """Packing and then an all-gather, and the all-gather alone.

    To their advantage: sizes are those of this very chunk, known beforehand; every rank packs into its own slice of the
    result, which the all-gather leaves where it is; and with one request all that is new has one place in each slice of
    a resident buffer, so that plain copies put it there.
    """

    def __init__(self, chunk: Chunk, ranks: ProcessRanks) -> None:
        self.chunk, self.ranks = chunk, ranks
        records = round_up(max(chunk.records), PAGE_SIZE)
        size = (ranks.world, records, chunk.shape.record_bytes)
        self.gathered = torch.empty(size, dtype=torch.uint8, device=chunk.device)
        self.own = self.gathered[ranks.rank]
        self.packer = Packer(chunk, ranks.rank, records)

    @staticmethod
    def names(backend: str) -> dict[str, str]:
        """How it packs -> name of the contender."""
        alone = f"{backend}-all-gather"
        return {"index_select": f"index_select+{alone}", "pack": f"pack+{alone}", "": alone}

    def contenders(self) -> list[Contender]:
        select = functools.partial(self.chunk.index_select, self.ranks.rank)
        packs = {"index_select": select, "pack": self.packer.pack, "": None}
        names = self.names(self.ranks.backend)
        return [self._contender(names[how], pack) for how, pack in packs.items()]

    def close(self) -> None:
        self.packer.close()

    def _contender(self, name: str, pack: Callable[[int, torch.Tensor], None] | None) -> Contender:
        chunk = self.chunk

        def call(index_set: int) -> None:
            if pack is not None:
                pack(index_set, self.own)
            dist.all_gather_into_tensor(self.gathered.flatten(0, 1), self.own)
            if pack is not None:
                self._place()

        def clear() -> None:
            poison(self.gathered)
            chunk.poison()
            if pack is None:
                self.own[: chunk.records[self.ranks.rank]] = chunk.expected[self.ranks.rank]

        def error() -> float:
            placed = chunk.incremental and pack is not None
            return float(chunk.wrong(self.gathered) or (placed and chunk.wrong_resident(self.ranks.rank)))

        return Contender(name, call, clear, error, 0.0, dict(chunk.details))

    def _place(self) -> None:
        """Nothing to do in full."""
        for resident in self.chunk.resident.values():
            slices = resident.view(self.ranks.world, -1, self.chunk.shape.record_bytes)
            for part, first, records, arrived in zip(
                slices, self.chunk.first, self.chunk.records, self.gathered, strict=True
            ):
                part[first : first + records].copy_(arrived[:records])
