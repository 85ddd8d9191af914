"""Chunks for the gather tests, and a plain-Python model of what plans, remaps and gathered buffers must hold.

The model walks over tokens one by one; nothing in it is a formula of the package. Outputs start poisoned.
"""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import strategies

from torch_sparse_mla import Channel, GatherPlan, LoopbackGroup, gather_capacity

POISON = 0x5A5A5A5A
POISON_BYTE = 0xA5
VIEWS = ("owner_offsets", "starts", "lengths", "row_requests", "causal_lengths", "owned_slots")
_names = itertools.count()

IMPLEMENTATIONS = ("reference", "op-cpu", pytest.param("op-cuda", marks=pytest.mark.gpu))
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "op-cuda" else "cpu"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A prefill chunk of several requests, of which some tokens are cached already.

    Attributes:
        lengths, new_lengths: of each request.
        block_table: [requests, blocks].
        sizes: reserved.
    """

    lengths: list[int]
    new_lengths: list[int]
    block_table: torch.Tensor
    sizes: GatherPlan

    @property
    def row_starts(self) -> list[int]:
        return list(itertools.accumulate(self.new_lengths, initial=0))

    def owned(self, rank: int) -> list[list[int]]:
        """Tokens of each request that a rank holds, in order."""
        turn, run = self.sizes.world, self.sizes.interleave
        return [[token for token in range(length) if token // run % turn == rank] for length in self.lengths]

    def padded(self) -> int:
        """0 where a slice would exceed the capacity."""
        most = max(sum(map(len, self.owned(rank))) for rank in range(self.sizes.world))
        padded = next(size for size in itertools.count(most) if size * self.sizes.world % self.sizes.page_size == 0)
        return padded if padded <= self.sizes.capacity else 0

    def plan(self, rank: int) -> dict[str, list]:
        sizes, padded = self.sizes, self.padded()
        missing = sizes.requests - len(self.lengths)
        starts = []
        for owner in range(sizes.world):
            ends = list(itertools.accumulate(map(len, self.owned(owner)), initial=0))
            starts.append(ends[:-1] + [ends[-1]] * (1 + missing) if missing else ends[:-1])
            starts[-1] = starts[-1][: sizes.requests]
        rows = [(request, length - new + row + 1) for request, (length, new) in self._both() for row in range(new)]
        rows += [(-1, 0)] * (sizes.rows - len(rows))
        slots = [
            int(self.block_table[request, local // sizes.page_size]) * sizes.page_size + local % sizes.page_size
            for request, tokens in enumerate(self.owned(rank))
            for local in range(len(tokens))
        ]
        slots = slots if padded else []
        return {
            "owner_offsets": [[owner * padded for owner in range(sizes.world + 1)]],
            "starts": starts,
            "lengths": self.lengths + [0] * missing,
            "row_requests": [request for request, _ in rows],
            "causal_lengths": [causal for _, causal in rows],
            "owned_slots": slots + [-1] * (sizes.capacity - len(slots)),
        }

    def places(self) -> dict[tuple[int, int], int]:
        """(request, token) -> slot of the gathered buffer."""
        padded = self.padded()
        return {
            key: rank * padded + number
            for rank in range(self.sizes.world)
            for number, key in enumerate(
                (request, token) for request, tokens in enumerate(self.owned(rank)) for token in tokens
            )
        }

    def remap(self, topk: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        places = self.places() if self.padded() else {}
        plan = self.plan(0)
        slots, counts = [], []
        for row, entries in enumerate(topk):
            request = plan["row_requests"][row]
            found = [places[request, token] for token in entries if (request, token) in places]
            slots.append(found + [-1] * (len(entries) - len(found)))
            counts.append(min(len(found), plan["causal_lengths"][row]))
        return slots, counts

    def plan_args(self, rank: int, plan: torch.Tensor, device: str = "cpu") -> tuple:
        sizes = self.sizes
        tensors = (torch.tensor(values, dtype=torch.int32, device=device) for values in (self.lengths, self.row_starts))
        geometry = (sizes.requests, sizes.rows, sizes.capacity, sizes.page_size, sizes.interleave, rank, sizes.world)
        return *tensors, self.block_table.to(device), plan, *geometry

    def remap_args(self) -> tuple:
        return self.sizes.requests, self.sizes.rows, self.sizes.interleave, self.sizes.world

    def _both(self) -> list[tuple[int, tuple[int, int]]]:
        return list(enumerate(zip(self.lengths, self.new_lengths, strict=True)))


def make_chunk(
    lengths: list[int],
    new_lengths: list[int],
    *,
    world: int = 4,
    interleave: int = 4,
    page_size: int = 8,
    requests: int = 0,
    rows: int = 0,
    capacity: int = 0,
    seed: int = 0,
) -> Chunk:
    """Pages are dealt out in no order, page 0 to none."""
    requests, rows = requests or max(len(lengths), 1), rows or max(sum(new_lengths), 1)
    most = gather_capacity(max(sum(lengths), 1), requests, world, interleave, page_size)
    sizes = GatherPlan(requests, rows, capacity or most, world, interleave, page_size)
    blocks = 1 + max([0, *lengths]) // (page_size * world)
    pages = 1 + torch.randperm(len(lengths) * blocks, generator=torch.Generator().manual_seed(seed))
    return Chunk(list(lengths), list(new_lengths), pages.int().view(len(lengths), blocks), sizes)


CHUNKS = {
    "one-request": make_chunk([37], [37]),
    "two-requests-cached": make_chunk([5, 12], [2, 3], rows=8),
    "ranks-that-own-nothing": make_chunk([3, 0, 2], [3, 0, 1], requests=5),
    "one-rank": make_chunk([9, 20], [9, 1], world=1, interleave=1),
    "interleave-of-five": make_chunk([31, 64, 7], [31, 4, 7], world=3, interleave=5, page_size=15),
    "prefix-hit": make_chunk([64, 64], [32, 16], page_size=16),
    "no-requests": make_chunk([], [], requests=2, rows=4),
}
every_chunk = pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)


@strategies.composite
def chunks(draw: strategies.DrawFn) -> Chunk:
    """Any small chunk: empty requests, requests without new tokens, more reserved than given."""

    def number(least: int, most: int) -> int:
        return draw(strategies.integers(least, most))

    interleave, requests = number(1, 5), number(0, 4)
    lengths = [number(0, 40) for _ in range(requests)]
    new_lengths = [number(0, length) for length in lengths]
    return make_chunk(
        lengths,
        new_lengths,
        world=number(1, 8),
        interleave=interleave,
        page_size=interleave * number(1, 4),
        requests=requests + number(0 if requests else 1, 2),
        rows=sum(new_lengths) + number(0 if sum(new_lengths) else 1, 5),
        seed=number(0, 9),
    )


def random_topk(chunk: Chunk, columns: int, seed: int = 0, causal: bool = True) -> torch.Tensor:
    """[sizes.rows, columns] distinct visible positions of each row in no order, -1 among them and beyond the request.

    With `causal` False: any numbers, later positions of the request and positions beyond it among them.
    """
    generator = torch.Generator().manual_seed(seed)
    plan = chunk.plan(0)
    topk = torch.full((chunk.sizes.rows, columns), -1, dtype=torch.int32)
    for row, (request, visible) in enumerate(zip(plan["row_requests"], plan["causal_lengths"], strict=True)):
        if not causal:
            limit = chunk.lengths[request] + 5 if request >= 0 else 9
            topk[row] = torch.randint(-3, limit, (columns,), generator=generator)
            continue
        chosen = torch.randperm(visible, generator=generator)[:columns]
        places = torch.randperm(columns, generator=generator)[: len(chosen)]
        topk[row, places] = chosen.int()
    return topk


def views(sizes: GatherPlan, plan: torch.Tensor) -> dict[str, list]:
    return {name: getattr(sizes, name)(plan).tolist() for name in VIEWS}


def poisoned_plan(chunk: Chunk, device: str = "cpu") -> torch.Tensor:
    return torch.full((chunk.sizes.words,), POISON, dtype=torch.int32, device=device)


@dataclasses.dataclass
class RankLayer:
    """One rank's part of a layer, and where the gather puts it."""

    cache: torch.Tensor
    plan: torch.Tensor
    gathered: torch.Tensor
    channel: Channel

    def arguments(self) -> tuple:
        return self.cache, self.plan, self.gathered, self.channel.state, self.channel.name


def layer_records(chunk: Chunk, record_bytes: int, seed: int) -> list[torch.Tensor]:
    """Every token's bytes, [length, record_bytes] for each request; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(256, (length, record_bytes), generator=generator, dtype=torch.uint8) for length in chunk.lengths
    ]


def sharded_cache(
    chunk: Chunk, records: list[torch.Tensor], rank: int, record_bytes: int, gap: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """[pages, page_size, record_bytes] with `gap` bytes behind each page; slots that hold no token are poisoned."""
    page_size = chunk.sizes.page_size
    pages = 1 + int(chunk.block_table.max()) if chunk.block_table.numel() else 1
    stride = page_size * record_bytes + gap
    storage = torch.full((pages * stride,), POISON_BYTE, dtype=torch.uint8)
    cache = storage.as_strided((pages, page_size, record_bytes), (stride, record_bytes, 1))
    for request, tokens in enumerate(chunk.owned(rank)):
        for local, token in enumerate(tokens):
            cache[chunk.block_table[request, local // page_size], local % page_size] = records[request][token]
    return storage.to(device).as_strided(cache.shape, cache.stride())


def expected_gathered(chunk: Chunk, records: list[torch.Tensor], record_bytes: int) -> torch.Tensor:
    """Records at their places, zeros where slices are padded, poison behind the last slice."""
    gathered = torch.full((chunk.sizes.gathered_records, record_bytes), POISON_BYTE, dtype=torch.uint8)
    gathered[: chunk.sizes.world * chunk.padded()] = 0
    if chunk.padded():
        for (request, token), place in chunk.places().items():
            gathered[place] = records[request][token]
    return gathered


def open_channels(chunk: Chunk, record_bytes: int, device: str = "cpu", **options: object) -> list[Channel]:
    group = LoopbackGroup(chunk.sizes.world, device)
    name = f"gather{next(_names)}"
    return [
        Channel.create(name, group.rank(rank), chunk.sizes.gathered_records, record_bytes, 1, **options)
        for rank in range(chunk.sizes.world)
    ]


def make_layers(
    chunk: Chunk, channels: list[Channel], record_bytes: int, seed: int, gap: int = 0, device: str = "cpu"
) -> tuple[list[RankLayer], torch.Tensor]:
    """Every rank's tensors of one layer, outputs poisoned, and what each gathered buffer must then hold."""
    records = layer_records(chunk, record_bytes, seed)
    layers = []
    for rank, channel in enumerate(channels):
        cache = sharded_cache(chunk, records, rank, record_bytes, gap, device)
        plan = poisoned_plan(chunk, device)
        torch.ops.torch_sparse_mla.c4_plan_gather(*chunk.plan_args(rank, plan, device))
        size = (chunk.sizes.gathered_records, record_bytes)
        gathered = torch.full(size, POISON_BYTE, dtype=torch.uint8, device=device)
        layers.append(RankLayer(cache, plan, gathered, channel))
    return layers, expected_gathered(chunk, records, record_bytes)


def gather(layers: list[RankLayer]) -> None:
    """All ranks of one thread."""
    for layer in layers:
        torch.ops.torch_sparse_mla.c4_prefill_gather_start(*layer.arguments())
    for layer in layers:
        torch.ops.torch_sparse_mla.c4_prefill_gather_wait(*layer.arguments())
