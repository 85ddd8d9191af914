"""Sharded caches, plans and channels of all ranks of a small world, and what every workspace must hold."""

import dataclasses
import itertools

import torch

from torch_sparse_mla import Channel, LoopbackGroup, SelectionPlan, plan_selection, sharding

POISON = 0xA5
_names = itertools.count()


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a case. The defaults have several requests, rows that share tokens, and a width that 16 divides not."""

    world: int = 3
    requests: int = 2
    rows_per_request: int = 2
    topk: int = 9
    layers: int = 3
    record_bytes: int = 37
    tokens: int = 48
    page_size: int = 8
    interleave: int = 2
    page_gap: int = 0

    @property
    def selection(self) -> SelectionPlan:
        return SelectionPlan(self.requests, self.rows_per_request, self.topk, self.world)

    @property
    def pages(self) -> int:
        """Pages of a rank's cache, page 0 not in use."""
        return 1 + self.requests * self.blocks

    @property
    def blocks(self) -> int:
        return -(-self.tokens // (self.page_size * self.world)) + 1


@dataclasses.dataclass
class Step:
    """One selection: top-k lists of every request, and the records of every token in every layer."""

    topk: torch.Tensor
    records: torch.Tensor


@dataclasses.dataclass
class RankCase:
    """What one rank holds: caches, plan and workspaces of every layer."""

    shape: Shape
    rank: int
    caches: list[torch.Tensor]
    workspaces: list[torch.Tensor]
    plan: torch.Tensor

    def load(self, step: Step) -> None:
        """Write the step's records into the caches in place, plan, and poison the workspaces."""
        shape = self.shape
        device = self.plan.device
        tokens = torch.arange(shape.tokens).expand(shape.requests, -1)
        slots = sharding.local_slots(
            tokens, block_table(shape), shape.page_size, self.rank, shape.world, shape.interleave
        )
        owned = slots >= 0
        pages, offsets = (slots[owned] // shape.page_size).to(device), (slots[owned] % shape.page_size).to(device)
        for cache, records in zip(self.caches, step.records, strict=True):
            cache.fill_(POISON ^ 0xFF)
            cache[pages, offsets] = records[owned].to(device)
        plan_selection(
            step.topk.to(device),
            block_table(shape).to(device),
            shape.selection,
            page_size=shape.page_size,
            interleave=shape.interleave,
            rank=self.rank,
            plan=self.plan,
        )
        self.poison()

    def poison(self) -> None:
        for workspace in self.workspaces:
            workspace.fill_(POISON)

    def arguments(self, channel: Channel, layers: int | None = None) -> tuple:
        return self.caches[:layers], self.plan, self.workspaces[:layers], channel.state, channel.name

    def expected(self, step: Step, layers: int | None = None) -> list[torch.Tensor]:
        """Each selected record where `remap` says; poison everywhere else."""
        shape = self.shape
        remap = shape.selection.remap(self.plan).cpu().long()[: len(step.topk)]
        requests = torch.arange(len(step.topk)) // shape.rows_per_request
        request_of = requests[:, None].expand_as(step.topk)
        selected = step.topk >= 0
        assert torch.equal(remap >= 0, selected)
        workspaces = []
        for layer in range(shape.layers):
            workspace = torch.full((shape.selection.capacity, shape.record_bytes), POISON, dtype=torch.uint8)
            if layers is None or layer < layers:
                records = step.records[layer, request_of[selected], step.topk[selected].long()]
                workspace[remap[selected]] = records
            workspaces.append(workspace.to(self.plan.device))
        return workspaces

    def assert_arrived(self, step: Step, layers: int | None = None) -> None:
        """Bit for bit, and every other byte is as it was."""
        for layer, (expected, workspace) in enumerate(zip(self.expected(step, layers), self.workspaces, strict=True)):
            assert torch.equal(workspace, expected), f"rank {self.rank}, layer {layer}"


def block_table(shape: Shape) -> torch.Tensor:
    pages = 1 + torch.arange(shape.requests * shape.blocks, dtype=torch.int32)
    return pages.flip(0).view(shape.requests, shape.blocks)


def make_step(shape: Shape, generator: torch.Generator, share: float = 0.8, owners: set[int] | None = None) -> Step:
    """A random step; an entry is selected with probability `share`, and only tokens of `owners` are."""
    size = (shape.requests * shape.rows_per_request, shape.topk)
    topk = torch.randint(shape.tokens, size, generator=generator, dtype=torch.int32)
    topk = topk.masked_fill(torch.rand(size, generator=generator) > share, -1)
    if owners is not None:
        present = torch.zeros(size, dtype=torch.bool)
        for owner in owners:
            present |= sharding.owner(topk, shape.world, shape.interleave) == owner
        topk = topk.masked_fill(~present, -1)
    size = (shape.layers, shape.requests, shape.tokens, shape.record_bytes)
    return Step(topk, torch.randint(256, size, generator=generator, dtype=torch.uint8))


def owned_by_one(shape: Shape, owner: int, generator: torch.Generator) -> Step:
    """Every request's union is full, and all of it is one rank's. The shape has as many tokens as that takes."""
    tokens = torch.arange(shape.tokens, dtype=torch.int32)
    owned = tokens[sharding.owner(tokens, shape.world, shape.interleave) == owner]
    entries = shape.rows_per_request * shape.topk
    chosen = [owned[torch.randperm(len(owned), generator=generator)[:entries]] for _ in range(shape.requests)]
    topk = torch.cat(chosen).view(shape.requests * shape.rows_per_request, shape.topk)
    size = (shape.layers, shape.requests, shape.tokens, shape.record_bytes)
    return Step(topk, torch.randint(256, size, generator=generator, dtype=torch.uint8))


def make_rank(shape: Shape, rank: int, device: str = "cpu") -> RankCase:
    page_bytes = shape.page_size * shape.record_bytes
    stride = page_bytes + shape.page_gap
    storages = [torch.zeros(shape.pages * stride, dtype=torch.uint8, device=device) for _ in range(shape.layers)]
    size, strides = (shape.pages, shape.page_size, shape.record_bytes), (stride, shape.record_bytes, 1)
    caches = [storage.as_strided(size, strides) for storage in storages]
    workspaces = [
        torch.full((shape.selection.capacity, shape.record_bytes), POISON, dtype=torch.uint8, device=device)
        for _ in range(shape.layers)
    ]
    return RankCase(shape, rank, caches, workspaces, shape.selection.empty(device))


def make_channel(shape: Shape, group: object, name: str | None = None, **arguments: object) -> Channel:
    sizes = {"layers": shape.layers, "requests": shape.requests, **arguments}
    name = f"channel{next(_names)}" if name is None else name
    return Channel.create(name, group, shape.selection.capacity, shape.record_bytes, **sizes)


@dataclasses.dataclass
class World:
    """Loopback ranks and their channels."""

    shape: Shape
    ranks: list[RankCase]
    channels: list[Channel]

    def load(self, step: Step) -> None:
        for rank in self.ranks:
            rank.load(step)

    def both(self) -> list[tuple[RankCase, Channel]]:
        return list(zip(self.ranks, self.channels, strict=True))

    def assert_arrived(self, step: Step, layers: int | None = None) -> None:
        for rank in self.ranks:
            rank.assert_arrived(step, layers)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


def make_world(shape: Shape, device: str = "cpu", **arguments: object) -> World:
    group = LoopbackGroup(shape.world, device)
    name = f"channel{next(_names)}"
    channels = [make_channel(shape, group.rank(rank), name, **arguments) for rank in range(shape.world)]
    return World(shape, [make_rank(shape, rank, device) for rank in range(shape.world)], channels)


def set_counters(world: World, counter: int) -> None:
    """Let the next exchange have epoch `counter + 1`."""
    for channel in world.channels:
        channel.state[:2] = counter
        if hasattr(channel.transport, "flags"):
            # The end of an epoch that is neither of the next two; see the kernels.
            channel.transport.flags.fill_((counter & 0xFFFF) << 16)
