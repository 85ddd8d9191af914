"""A sparse layer's chunked prefill over several ranks, from keys and latents to attention, against one rank.

Six cases, as an engine meets them: one chunk, several chunks, two requests together, two requests that share a prefix,
a prefix hit, and ranks that own nothing. The ranks' lists, and what each attends to, must be those of one rank that
holds everything; the attention of gathered records differs by nothing, because each row reads the same bytes in the
same order. The same with rows split by rank and records that stay resident.
"""

import dataclasses
import itertools

import pytest
import torch

from torch_sparse_mla import (
    LAYOUTS,
    LoopbackGroup,
    PageGeometry,
    RowSplit,
    SplitSelector,
    Workspace,
    c4_merge_pools,
    c4_place_records,
    c4_plan_gather,
    c4_prefill_gather_start,
    c4_prefill_gather_wait,
    c4_remap,
    c4_select,
    c4_write_index_keys,
    quantise_index_queries,
    sharding,
    sparse_ckv_decode,
    write_ckv_records,
)

PAGE_SIZE, INTERLEAVE, POOLS, HEADS = 256, 4, 16, 4
LAYOUT = "bf16_mla_nope"
# Whole pages of each rank, whatever the number of ranks; and more than the longest request.
SHARED, TOKENS = 4 * PAGE_SIZE, 1_100
_names = itertools.count()

# For each chunk of a case: (global length, new tokens) of each request.
CASES = {
    "one-chunk": [[(150, 150)]],
    "several-chunks": [[(130, 130)], [(133, 3)], [(290, 157)]],
    "two-requests": [[(150, 150), (70, 70)], [(151, 1), (290, 220)]],
    "shared-prefix": [[(SHARED, SHARED), (0, 0)], [(SHARED + 34, 34), (SHARED + 44, 44)]],
    "prefix-hit": [[(256, 256)], [(261, 5)]],
    "ranks-that-own-nothing": [[(3, 3), (6, 6)], [(5, 2), (6, 0)]],
}


@dataclasses.dataclass
class Tokens:
    """What the model computes for each token of each request."""

    latents: list[torch.Tensor]
    keys: list[torch.Tensor]
    gates: list[torch.Tensor]
    queries: list[torch.Tensor]
    weights: list[torch.Tensor]
    q: list[torch.Tensor]
    bias: torch.Tensor

    @staticmethod
    def make(requests: int, shared: bool) -> "Tokens":
        generator = torch.Generator().manual_seed(7)

        def values(*size: int) -> list[torch.Tensor]:
            made = [torch.randn(TOKENS, *size, generator=generator).bfloat16() for _ in range(requests)]
            if shared:
                made[1][:SHARED] = made[0][:SHARED]
            return made

        bias = torch.randn(4, 128, generator=generator)
        return Tokens(values(512), values(128), values(128), values(32, 128), values(32), values(HEADS, 512), bias)


class World:
    """Ranks that each hold their part of the records and of the pools."""

    def __init__(self, world: int, requests: int, shared: bool, resident: bool = False) -> None:
        self.world, self.resident = world, resident
        blocks = -(-TOKENS // (PAGE_SIZE * world))
        self.table = 1 + torch.randperm(requests * blocks).int().view(requests, blocks)
        if shared:
            prefix = SHARED // (PAGE_SIZE * world)
            self.table[1, :prefix] = self.table[0, :prefix]
        pages = int(self.table.max()) + 1
        width = LAYOUTS[LAYOUT].record_bytes
        self.caches = [torch.zeros(pages, PAGE_SIZE, width, dtype=torch.uint8) for _ in range(world)]
        self.pools = [torch.full((pages, 8_448), 0xFF, dtype=torch.uint8) for _ in range(world)]
        self.rings = [torch.full((requests, 4, 2, 128), float("nan"), dtype=torch.bfloat16) for _ in range(world)]
        geometry, group = PageGeometry(), LoopbackGroup(world)
        geometry.freeze(PAGE_SIZE)
        name = f"prefill{next(_names)}"
        sizes = {
            "layout": LAYOUT,
            "interleave": INTERLEAVE,
            "max_tokens": 2 * TOKENS,
            "max_requests": 2,
            "max_rows": TOKENS,
            **({"resident_tokens": 2 * TOKENS, "resident_requests": 2, "resident_layers": 1} if resident else {}),
        }
        self.workspaces = [Workspace(geometry, group.rank(rank), name=name, **sizes) for rank in range(world)]
        for workspace in self.workspaces:
            workspace.reserve()
        for workspace, cache in zip(self.workspaces, self.caches, strict=True):
            workspace.lock()
            workspace.check_cache(cache)
        self.slots = [workspace.slot() for workspace in self.workspaces]
        self.selectors = []
        if resident:
            split = RowSplit(2, TOKENS, 2 * TOKENS, POOLS, world, INTERLEAVE, PAGE_SIZE)
            ranks = [group.rank(rank) for rank in range(world)]
            self.selectors = [SplitSelector(rank, split, heads=32, name=f"{name}.select") for rank in ranks]
            for slot in self.slots:
                slot.resident.buffers[0].fill_(0xA5)
                assert all(slot.resident.residency.admit(request, TOKENS) for request in range(requests))

    def prefill(self, tokens: Tokens, chunk: list[tuple[int, int]]) -> list[tuple[torch.Tensor, ...]]:
        """Each rank's (topk, out, lse) of a chunk's rows."""
        lengths, new = [length for length, _ in chunk], [count for _, count in chunk]
        topk = self._select(tokens, lengths, new)
        self._write_records(tokens, lengths, new)
        if self.resident:
            return self._attend_resident(tokens, lengths, new, topk)
        results = []
        for rank, slot in enumerate(self.slots):
            c4_plan_gather(lengths, new, self.table, slot.sizes, rank=rank, plan=slot.plan)
            slot.gathered.fill_(0xA5)
            c4_prefill_gather_start(self.caches[rank], slot.plan, slot.gathered, slot.channel.state, slot.channel)
        q = self._rows(tokens.q, lengths, new)
        for slot in self.slots:
            c4_prefill_gather_wait(self.caches[0], slot.plan, slot.gathered, slot.channel.state, slot.channel)
            slots, counts = c4_remap(topk, slot.plan, slot.sizes)
            out, lse = sparse_ckv_decode(
                q, slot.gathered.unsqueeze(0), slots, lengths=counts, softmax_scale=0.04, layout=LAYOUT
            )
            results.append((topk, out, lse))
        return results

    def _attend_resident(
        self, tokens: Tokens, lengths: list[int], new: list[int], topk: torch.Tensor
    ) -> list[tuple[torch.Tensor, ...]]:
        q, results = self._rows(tokens.q, lengths, new), []
        keys = range(len(new))
        chunks = [slot.resident.residency.begin(keys, lengths, new) for slot in self.slots]
        for rank, (slot, chunk) in enumerate(zip(self.slots, chunks, strict=True)):
            held = {"resident_starts": chunk.starts, "resident_lengths": chunk.resident_lengths}
            sizes, plan = slot.resident.sizes, slot.resident_plan
            c4_plan_gather(lengths, new, self.table, sizes, rank=rank, plan=plan, **held)
            slot.gathered.fill_(0xA5)
            c4_prefill_gather_start(self.caches[rank], plan, slot.gathered, slot.channel.state, slot.channel)
        for slot, chunk in zip(self.slots, chunks, strict=True):
            sizes, plan, (buffer,) = slot.resident.sizes, slot.resident_plan, slot.resident.buffers
            c4_prefill_gather_wait(self.caches[0], plan, slot.gathered, slot.channel.state, slot.channel)
            c4_place_records(slot.gathered, plan, buffer, sizes)
            slot.resident.residency.commit(chunk)
            slots, counts = c4_remap(topk, plan, sizes)
            given = {"lengths": counts, "softmax_scale": 0.04, "layout": LAYOUT}
            results.append((topk, *sparse_ckv_decode(q, buffer.unsqueeze(0), slots, **given)))
        return results

    def close(self) -> None:
        for selector in self.selectors:
            selector.close()
        for workspace in self.workspaces:
            workspace.close()

    def _select(self, tokens: Tokens, lengths: list[int], new: list[int]) -> torch.Tensor:
        starts = torch.tensor([length - count for length, count in zip(lengths, new, strict=True)], dtype=torch.int32)
        edges = torch.tensor(list(itertools.accumulate(new, initial=0)), dtype=torch.int32)
        ring_rows = torch.arange(len(new), dtype=torch.int32)
        plan = self.slots[0].sizes.empty()
        c4_plan_gather(lengths, new, self.table, self.slots[0].sizes, rank=0, plan=plan)
        rows = sum(new)
        of_row = self.slots[0].sizes.row_requests(plan)[:rows]
        positions = self.slots[0].sizes.causal_lengths(plan)[:rows] - 1
        queries = quantise_index_queries(
            self._rows(tokens.queries, lengths, new), self._rows(tokens.weights, lengths, new)
        )
        keys, gates = self._rows(tokens.keys, lengths, new), self._rows(tokens.gates, lengths, new)
        candidates = []
        for rank in range(self.world):
            geometry = {"page_size": PAGE_SIZE, "interleave": INTERLEAVE, "rank": rank, "world": self.world}
            vectors = (edges, starts, ring_rows, self.table)
            c4_write_index_keys(keys, gates, tokens.bias, *vectors, self.rings[rank], self.pools[rank], **geometry)
            if not self.resident:
                given = (*queries, self.pools[rank], self.table, of_row, positions)
                candidates.append(c4_select(*given, num_pools=POOLS, **geometry))
        if not self.resident:
            return c4_merge_pools(torch.cat(candidates), positions)[0]
        for selector, pools in zip(self.selectors, self.pools, strict=True):
            selector.plan(lengths, new, self.table)
            selector.send_keys(pools)
        for selector in self.selectors:
            selector.select(*queries, of_row, positions)
        first, *others = [selector.receive()[0] for selector in self.selectors]
        assert all(torch.equal(topk, first) for topk in others)
        return first

    def _write_records(self, tokens: Tokens, lengths: list[int], new: list[int]) -> None:
        for rank, cache in enumerate(self.caches):
            for request, (length, count) in enumerate(zip(lengths, new, strict=True)):
                positions = torch.arange(length - count, length)[None]
                table = self.table[request : request + 1]
                slots = sharding.local_slots(positions, table, PAGE_SIZE, rank, self.world, INTERLEAVE)[0]
                write_ckv_records(tokens.latents[request][length - count : length], None, slots, cache, LAYOUT)

    def _rows(self, values: list[torch.Tensor], lengths: list[int], new: list[int]) -> torch.Tensor:
        parts = zip(values, lengths, new, strict=False)
        return torch.cat([value[length - count : length] for value, length, count in parts])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("chunks", CASES.values(), ids=CASES)
def test_every_rank_attends_as_one_rank_would(chunks, world, request):
    check(chunks, world, "shared-prefix" in request.node.name)


@pytest.mark.parametrize("name", ["several-chunks", "two-requests"])
def test_rows_split_and_records_that_stay_give_the_same(name):
    check(CASES[name], 4, False, resident=True)


def check(chunks: list[list[tuple[int, int]]], world: int, shared: bool, resident: bool = False) -> None:
    requests = len(chunks[0])
    tokens = Tokens.make(requests, shared)
    one, several = World(1, requests, shared), World(world, requests, shared, resident)
    for chunk in chunks:
        ((topk, out, lse),) = one.prefill(tokens, chunk)
        for ours in several.prefill(tokens, chunk):
            for name, mine, expected in zip(("topk", "out", "lse"), ours, (topk, out, lse), strict=True):
                assert torch.equal(mine, expected), name
        assert torch.isfinite(out.float()).all()
    one.close()
    several.close()
