"""Inputs that a group of ranks shares: top-k lists, block tables and plans equal on every rank, and each rank's caches.

What a rank's caches hold follows from its number, so any process can make another's again, to check what arrived.
"""

import functools

import torch

from torch_sparse_mla import SelectionPlan, plan_selection, sharding, write_ckv_records
from torch_sparse_mla.records import LATENT_DIM, LAYOUTS, ROPE_DIM, quantise_records

from .bench_plan_selection import CONTEXT, INTERLEAVE, PAGE_SIZE, position_sets
from .inputs import BLOCK_RECORDS
from .shapes import ExchangeShape, StepShape
from .timing import CACHE_FACTOR, MAX_SETS, cache_bytes, num_index_sets

MAX_EXCHANGE_SETS = 64
MAX_STEP_SETS = 32
CPU_SETS = 8


class Selections:
    """Lists of several index sets. The sets read different parts of the caches, which outgrow the last-level cache.

    Attributes:
        num_sets: index sets in a rotation.
        copies: parts of each cache: index set i reads part i % copies.
        lists: int32 [sets, rows, topk].
        block_tables: int32 [requests, blocks] of each set.
        pages: of one layer's cache.
    """

    def __init__(self, shape: ExchangeShape | StepShape, layers: int, device: torch.device, max_sets: int) -> None:
        self.shape, self.layers, self.device = shape, layers, device
        plan = shape.plan
        self.selection = SelectionPlan(plan.requests, plan.rows_per_request, shape.topk, shape.world)
        blocks = -(-CONTEXT // (PAGE_SIZE * shape.world))
        cache, own_records = cache_bytes(device), layers * plan.union // shape.world
        sets = num_index_sets(shape.rows, own_records * shape.record_bytes, cache)
        self.num_sets = min(sets, max_sets if device.type == "cuda" else CPU_SETS)
        part_bytes = layers * plan.requests * blocks * PAGE_SIZE * shape.record_bytes
        self.copies = max(1, min(-(-CACHE_FACTOR * cache // part_bytes), self.num_sets, MAX_SETS))
        generator = torch.Generator(device).manual_seed(0)
        self.lists = position_sets(plan, self.num_sets, device, generator)
        part_pages = plan.requests * blocks
        self.pages = self.copies * part_pages
        order = torch.randperm(part_pages, device=device, generator=generator, dtype=torch.int32)
        tables = order.view(plan.requests, blocks) + torch.arange(
            0, self.pages, part_pages, dtype=torch.int32, device=device
        ).view(-1, 1, 1)
        self.block_tables = [tables[number % self.copies] for number in range(self.num_sets)]

    @functools.cached_property
    def union(self) -> float:
        """Distinct records of all requests: the mean of the index sets, which is measured, not expected."""
        requests = self.lists.view(self.num_sets * self.shape.plan.requests, -1)
        ordered = requests.sort(-1).values
        distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(-1)
        return float(distinct.double().mean()) * self.shape.plan.requests

    def plans(self, rank: int) -> list[torch.Tensor]:
        """The plan of every index set, as a rank has it."""
        geometry = {"page_size": PAGE_SIZE, "interleave": INTERLEAVE, "rank": rank}
        sets = zip(self.lists, self.block_tables, strict=True)
        return [plan_selection(lists, table, self.selection, **geometry) for lists, table in sets]

    def random_caches(self, rank: int) -> list[torch.Tensor]:
        """A rank's cache of each layer, bytes that say nothing."""
        generator = torch.Generator(self.device).manual_seed(1 + rank)
        size = (self.layers, self.pages, PAGE_SIZE, self.shape.record_bytes)
        return list(torch.randint(256, size, device=self.device, generator=generator, dtype=torch.uint8))

    @functools.cached_property
    def arrivals(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each owner, of the last index set with random caches: places in a workspace, and what belongs there, one
        layer after the other [layers, records, record_bytes]."""
        found = []
        geometry = {"page_size": PAGE_SIZE, "interleave": INTERLEAVE}
        for rank in range(self.shape.world):
            plan = plan_selection(self.lists[-1], self.block_tables[-1], self.selection, rank=rank, **geometry)
            slots, places = self.owned(plan, rank)
            caches = self.random_caches(rank)
            found.append((places, torch.stack([cache.flatten(0, 1)[slots] for cache in caches])))
        return found

    def owned(self, plan: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's selected slots, from its own plan, and where their records belong in a workspace."""
        offsets = self.selection.owner_offsets(plan)
        slots = self.selection.owned_slots(plan).view(self.selection.requests, -1)
        request = torch.arange(self.selection.requests, device=plan.device)[:, None]
        place = torch.arange(slots.shape[1], device=plan.device)
        places = request * self.selection.capacity_per_request + offsets[:, rank, None] + place
        return slots[slots >= 0].long(), places[slots >= 0]


class StepInputs(Selections):
    """What every rank's decode step through one group of layers takes: records of real layouts, and this step's tokens.

    The rows of a request are its last tokens, which all layers of all ranks have written; each selects its own token.

    Attributes:
        lengths: int32 [rows], global.
        latents, ropes: of this step's tokens, for each layer; None for a layout without RoPE.
    """

    shape: StepShape

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        super().__init__(shape, 1 + shape.shared_layers, device, MAX_STEP_SETS)
        self.layout = LAYOUTS[shape.layout]
        rows_per_request = shape.plan.rows_per_request
        ends = torch.arange(CONTEXT - rows_per_request + 1, CONTEXT + 1, dtype=torch.int32, device=device)
        self.lengths = ends.repeat(shape.plan.requests)
        self.lists[..., 0] = self.lengths - 1
        states = [self._states(shape.rows, 1000 + layer) for layer in range(self.layers)]
        self.latents = [state[:, :LATENT_DIM] for state in states]
        self.ropes = [state[:, LATENT_DIM:] if self.layout.rope else None for state in states]

    def queries(self, rank: int) -> list[torch.Tensor]:
        """bf16 [rows, heads, width], for each layer."""
        size = self.shape.rows * self.shape.heads
        states = [self._states(size, 2000 + 100 * layer + rank) for layer in range(self.layers)]
        return [state[:, : self.layout.query_dim].unflatten(0, (self.shape.rows, -1)).contiguous() for state in states]

    def cache(self, rank: int, layer: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """A rank's cache of a layer [pages, page_size, record_bytes]."""
        if into is None:
            size = (self.pages, PAGE_SIZE, self.shape.record_bytes)
            into = torch.empty(size, dtype=torch.uint8, device=self.device)
        count = BLOCK_RECORDS[self.device.type]
        states = self._states(count, 3000 + 100 * layer + rank)
        rope = states[:, LATENT_DIM:] if self.layout.rope else None
        block = quantise_records(states[:, :LATENT_DIM], rope, self.shape.layout)
        records = into.flatten(0, 1)
        for first in range(0, len(records), count):
            part = records[first : first + count]
            part.copy_(block[: len(part)])
        for table in self.block_tables[: self.copies]:
            slots = self._slots((self.lengths - 1).view(len(table), -1), table, rank)
            write_ckv_records(self.latents[layer], self.ropes[layer], slots.flatten(), into, self.shape.layout)
        return into

    def selected(self, layer: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last index set: records [1, rows * topk, record_bytes] that some rows selected, wherever they are, and
        their indices [rows, topk]; -1 for a token that comes after the row's own."""
        lists, table, chosen = self.lists[-1], self.block_tables[-1], torch.tensor(rows)
        positions = lists[rows].long()
        requests = chosen // self.shape.plan.rows_per_request
        owners = sharding.owner(positions, self.shape.world, INTERLEAVE)
        records = torch.empty(*positions.shape, self.shape.record_bytes, dtype=torch.uint8, device=self.device)
        for rank in range(self.shape.world):
            slots = self._slots(positions, table[requests.to(table.device)], rank)
            mine = owners == rank
            records[mine] = self.cache(rank, layer).flatten(0, 1)[slots[mine]]
        places = torch.arange(positions.numel(), dtype=torch.int32, device=self.device).view(positions.shape)
        seen = positions < self.lengths[rows].unsqueeze(1)
        return records.flatten(0, 1).unsqueeze(0), torch.where(seen, places, -1)

    def _slots(self, positions: torch.Tensor, block_table: torch.Tensor, rank: int) -> torch.Tensor:
        return sharding.local_slots(positions, block_table, PAGE_SIZE, rank, self.shape.world, INTERLEAVE)

    def _states(self, count: int, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (count, LATENT_DIM + ROPE_DIM)
        magnitudes = 0.5 + 1.5 * torch.rand(count, 1, device=self.device, generator=generator)
        return (torch.randn(size, device=self.device, generator=generator) * magnitudes).bfloat16()
