"""Inputs that a group of ranks shares: top-k lists, block tables and plans equal on every rank, and each rank's caches.

What a rank's caches hold follows from its number, so any process can make another's again, to check what arrived.
"""

import functools

import torch

from torch_sparse_mla import SelectionPlan, plan_selection

from .bench_plan_selection import CONTEXT, INTERLEAVE, PAGE_SIZE, position_sets
from .shapes import ExchangeShape, StepShape
from .timing import CACHE_FACTOR, MAX_SETS, cache_bytes, num_index_sets

MAX_EXCHANGE_SETS = 128


class Selections:
    """Lists of several index sets. The sets read different parts of the caches, which outgrow the last-level cache.

    Attributes:
        num_sets: index sets in a rotation.
        copies: parts of each cache: index set i reads part i % copies.
        lists: int32 [sets, rows, topk].
        block_tables: int32 [requests, blocks] of each set.
        pages: of one layer's cache.
    """

    def __init__(self, shape: ExchangeShape | StepShape, layers: int, device: torch.device) -> None:
        self.shape, self.layers, self.device = shape, layers, device
        plan = shape.plan
        self.selection = SelectionPlan(plan.requests, plan.rows_per_request, shape.topk, shape.world)
        blocks = -(-CONTEXT // (PAGE_SIZE * shape.world))
        cache, own_records = cache_bytes(device), layers * plan.union // shape.world
        sets = num_index_sets(shape.rows, own_records * shape.record_bytes, cache)
        self.num_sets = min(sets, MAX_EXCHANGE_SETS) if device.type == "cuda" else min(sets, 8)
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
        return round(float(distinct.double().mean()) * self.shape.plan.requests, 1)

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
