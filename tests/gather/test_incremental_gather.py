"""The incremental gather, chunk after chunk, against the full one: every record that a row may read is the same.

An engine of many requests is played: prompts in chunks, prefix hits, requests that end and whose places others take,
rolled back tokens with other records, chunks that are abandoned or never gathered. Everything starts poisoned.
"""

import dataclasses
import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies

from torch_sparse_mla import (
    Channel,
    ExchangeError,
    GatherPlan,
    LoopbackGroup,
    Residency,
    c4_place_records,
    c4_plan_gather,
    c4_prefill_gather_start,
    c4_prefill_gather_wait,
    c4_remap,
    gather_capacity,
    sharding,
)

from .cases import POISON_BYTE

LAYERS, MAX_LENGTH, WIDTH, REQUESTS, ROWS = 2, 40, 16, 3, 60
_names = itertools.count()


@dataclasses.dataclass
class Request:
    """Attributes: records of every layer, [layers, MAX_LENGTH, width]; tokens that its cache holds; its pages."""

    records: torch.Tensor
    length: int
    pages: torch.Tensor


class Engine:
    """Ranks with caches, resident buffers of `resident` records a slice, and a channel."""

    def __init__(self, world: int, interleave: int, page_size: int, resident: int, device: str = "cpu") -> None:
        self.world, self.device = world, device
        self.blocks = -(-MAX_LENGTH // (page_size * world)) + 1
        geometry = (world, interleave, page_size)
        capacity = gather_capacity(REQUESTS * MAX_LENGTH, REQUESTS, *geometry)
        self.full = GatherPlan(REQUESTS, ROWS, capacity, *geometry)
        self.sizes = dataclasses.replace(self.full, resident=resident)
        group, name = LoopbackGroup(world, device), f"incremental{next(_names)}"
        self.channels = [
            Channel.create(name, group.rank(rank), self.full.gathered_records, WIDTH, 1) for rank in range(world)
        ]
        shape = (world, LAYERS, 1 + 20 * self.blocks, page_size, WIDTH)
        self.caches = torch.full(shape, POISON_BYTE, dtype=torch.uint8)
        self.buffers = self.poisoned(world, LAYERS, world * resident)
        self.residencies = [Residency(self.sizes) for _ in range(world)]
        self.generator = torch.Generator().manual_seed(0)
        self.requests: dict[int, Request] = {}
        self.numbers = itertools.count()

    def poisoned(self, *shape: int) -> torch.Tensor:
        return torch.full((*shape, WIDTH), POISON_BYTE, dtype=torch.uint8, device=self.device)

    def new_records(self, count: int) -> torch.Tensor:
        return torch.randint(256, (LAYERS, count, WIDTH), generator=self.generator, dtype=torch.uint8)

    def add(self, max_length: int, parent: int | None, cached: int) -> int | None:
        """A request, with the first `cached` tokens of another one in its own pages; None where it is not admitted."""
        number = next(self.numbers)
        admitted = {residency.admit(number, max_length) for residency in self.residencies}
        assert len(admitted) == 1
        if admitted == {False}:
            return None
        pages = 1 + number % 20 * self.blocks + torch.randperm(self.blocks, generator=self.generator).int()
        request = Request(self.new_records(max_length), 0, pages)
        if parent is not None:
            request.records[:, :cached] = self.requests[parent].records[:, :cached]
        self.requests[number] = request
        self.write(number, cached)
        return number

    def write(self, key: int, length: int) -> None:
        """The engine's KV write of tokens up to `length`."""
        request = self.requests[key]
        tokens = torch.arange(request.length, length)[None]
        for rank in range(self.world):
            geometry = (self.sizes.page_size, rank, self.world, self.sizes.interleave)
            slots = sharding.local_slots(tokens, request.pages[None], *geometry)[0]
            mine = slots >= 0
            self.caches[rank].flatten(1, 2)[:, slots[mine]] = request.records[:, tokens[0][mine]]
        request.length = length

    def roll_back(self, key: int, length: int) -> None:
        """Tokens from `length` on are rejected; others will come in their place."""
        request = self.requests[key]
        request.length = min(request.length, length)
        request.records[:, length:] = self.new_records(request.records.shape[1] - length)
        for residency in self.residencies:
            residency.truncate(key, length)

    def release(self, key: int) -> None:
        for residency in self.residencies:
            residency.release(key)
        del self.requests[key]

    def chunk(self, new: dict[int, int], layers: int = LAYERS) -> None:
        """A prefill chunk of some requests; abandoned where not every layer is gathered."""
        keys = list(new)
        for key, count in new.items():
            self.write(key, self.requests[key].length + count)
        lengths = [self.requests[key].length for key in keys]
        begun = [residency.begin(keys, lengths, list(new.values())) for residency in self.residencies]
        known = begun[0].resident_lengths
        held = {"resident_starts": begun[0].starts, "resident_lengths": known}
        plans = self.plans(self.sizes, keys, lengths, list(new.values()), held)
        sent = sum(lengths) - sum(known)
        assert all(int(self.sizes.owner_offsets(plan)[0, -1]) == sent for plan in plans)
        for layer in range(layers):
            gathered = self.gather(plans, self.sizes, layer)
            for rank, plan in enumerate(plans):
                c4_place_records(gathered[rank], plan, self.buffers[rank, layer], self.sizes)
        if layers < LAYERS:
            for residency, chunk in zip(self.residencies, begun, strict=True):
                residency.abandon(chunk)
            return
        for residency, chunk in zip(self.residencies, begun, strict=True):
            residency.commit(chunk)
        self.compare(plans, self.plans(self.full, keys, lengths, list(new.values()), {}), lengths)

    def plans(self, sizes: GatherPlan, keys: list, lengths: list[int], new: list[int], held: dict) -> list:
        table = torch.stack([self.requests[key].pages for key in keys]).to(self.device)
        return [c4_plan_gather(lengths, new, table, sizes, rank=rank, **held) for rank in range(self.world)]

    def gather(self, plans: list[torch.Tensor], sizes: GatherPlan, layer: int) -> torch.Tensor:
        gathered = self.poisoned(self.world, sizes.gathered_records)
        for half in (c4_prefill_gather_start, c4_prefill_gather_wait):
            for rank, channel in enumerate(self.channels):
                cache = self.caches[rank, layer].to(self.device)
                half(cache, plans[rank], gathered[rank], channel.state, channel)
        return gathered

    def compare(self, plans: list[torch.Tensor], full_plans: list[torch.Tensor], lengths: list[int]) -> None:
        """Lists of any positions, those beyond the request among them: the same are absent, and the same is read."""
        topk = torch.randint(-2, max(lengths) + 3, (ROWS, 25), generator=self.generator).int().to(self.device)
        for layer in range(LAYERS):
            gathered = self.gather(full_plans, self.full, layer)
            for rank in range(self.world):
                slots, counts = c4_remap(topk, plans[rank], self.sizes)
                full_slots, full_counts = c4_remap(topk, full_plans[rank], self.full)
                assert torch.equal(counts, full_counts) and torch.equal(slots < 0, full_slots < 0)
                there = slots >= 0
                found = self.buffers[rank, layer][slots[there].long()]
                assert torch.equal(found, gathered[rank][full_slots[there].long()])

    def close(self) -> None:
        for channel in self.channels:
            channel.check()
            channel.close()


@hypothesis.given(world=strategies.integers(1, 4), interleave=strategies.integers(1, 4), data=strategies.data())
@hypothesis.settings(max_examples=20)
def test_any_life_of_requests_reads_what_a_full_gather_brings(world, interleave, data):
    def number(least: int, most: int) -> int:
        return data.draw(strategies.integers(least, most))

    engine = Engine(world, interleave, interleave * number(1, 4), resident=-(-70 // world) + number(0, 8))
    for _ in range(number(3, 14)):
        keys = sorted(engine.requests)
        action = data.draw(
            strategies.sampled_from(("add", "chunk", "chunk", "abandon", "miss", "roll back", "release"))
        )
        key = data.draw(strategies.sampled_from(keys)) if keys else None
        if key is None or action == "add":
            cached = 0 if key is None else number(0, engine.requests[key].length)
            engine.add(max(cached, number(1, MAX_LENGTH)), key, cached)
        elif action in ("chunk", "abandon"):
            chosen = data.draw(strategies.permutations(keys))[: number(1, REQUESTS)]
            room = {key: engine.requests[key].records.shape[1] - engine.requests[key].length for key in chosen}
            new = {key: number(0, min(most, ROWS // REQUESTS)) for key, most in room.items()}
            engine.chunk(new, LAYERS if action == "chunk" else 1)
        elif action == "miss":
            request = engine.requests[key]
            engine.write(key, number(request.length, request.records.shape[1]))
        elif action == "roll back":
            engine.roll_back(key, number(0, engine.requests[key].length))
        else:
            engine.release(key)
    engine.close()


def test_chunk_after_chunk_of_two_requests(device):
    engine = Engine(4, 4, 8, 32, device)
    first, second = engine.add(40, None, 0), engine.add(40, None, 0)
    for new in ({first: 17, second: 3}, {second: 20}, {first: 1, second: 1}, {first: 22}, {second: 16, first: 0}):
        engine.chunk(new)
    engine.close()


def test_a_place_that_another_request_had_is_read_only_where_it_was_written_anew(device):
    """The second request is shorter, and its place is where the first one's records still lie."""
    engine = Engine(2, 4, 8, 24, device)
    first = engine.add(40, None, 0)
    engine.chunk({first: 20})
    engine.chunk({first: 20})
    engine.release(first)
    second = engine.add(40, None, 0)
    assert engine.residencies[0].begin([second], [0], [0]).starts == (0,)
    engine.residencies[0].abandon(next(iter(engine.residencies[0]._open)))
    engine.chunk({second: 9})
    engine.chunk({second: 3})
    engine.close()


def test_a_prefix_hit_brings_its_prefix_once(device):
    engine = Engine(4, 4, 8, 24, device)
    first = engine.add(40, None, 0)
    engine.chunk({first: 36})
    second = engine.add(40, first, 32)
    chunk = engine.residencies[0].resident_lengths([second], [32], [0])
    assert chunk == [0]
    engine.chunk({second: 4, first: 2})
    assert engine.residencies[0].resident_lengths([second, first], [36, 38], [0, 0]) == [36, 38]
    engine.close()


def test_rolled_back_tokens_are_brought_again(device):
    engine = Engine(2, 4, 8, 24, device)
    key = engine.add(40, None, 0)
    engine.chunk({key: 21})
    engine.roll_back(key, 17)
    engine.chunk({key: 2})
    engine.roll_back(key, 0)
    engine.chunk({key: 20})
    engine.close()


def test_ranks_that_disagree_about_what_is_resident_are_told():
    """One rank abandoned a chunk that the others committed: its slices have another size."""
    engine = Engine(2, 4, 8, 24)
    key = engine.add(40, None, 0)
    engine.chunk({key: 20})
    engine.residencies[1].truncate(key, 19)
    engine.write(key, 24)
    begun = [residency.begin([key], [24], [4]) for residency in engine.residencies]
    plans = [
        c4_plan_gather(
            [24],
            [4],
            engine.requests[key].pages[None],
            engine.sizes,
            rank=rank,
            resident_starts=chunk.starts,
            resident_lengths=chunk.resident_lengths,
        )
        for rank, chunk in enumerate(begun)
    ]
    with pytest.raises(ExchangeError, match=r"rank \d has other owner offsets"):
        engine.gather(plans, engine.sizes, 0)
    for channel in engine.channels:
        channel.close()
