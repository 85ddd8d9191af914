"""Benchmark of the prefill gather's operators: packing alone, the gather of ranks on one device, in full and of what is
new, plan and remap. Before, the bytes that a rank receives for a chunk and for a whole prompt, which no device changes.

python profiling/bench_c4_prefill_gather.py
python profiling/bench_c4_prefill_gather.py --quick
"""

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling import harness, shapes
from profiling.shapes import C4_CONTEXTS, C4_ROWS, C4_TOPK, INCREMENTAL_GATHER, GatherShape
from profiling.timing import Contender, poison
from torch_sparse_mla import Channel, GatherPlan, LoopbackGroup, c4_plan_gather, gather_capacity
from torch_sparse_mla.gather import reference
from torch_sparse_mla.gather.policy import gather_bytes, ordinary_bytes
from torch_sparse_mla.sharding import local_length

BENCH = "c4_prefill_gather"
PAGE_SIZE = 64
INTERLEAVE = 4
HEADS = 64
# Two caches and two gathered buffers in turn; the larger ones outgrow the last-level cache by themselves.
NUM_SETS = 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    arguments = parser.parse_args(argv)
    device = harness.parse_device(parser, arguments.device)
    session = harness.Session(BENCH, device, arguments.commit, {})
    print_prompts()
    generator = torch.Generator(device).manual_seed(0)
    try:
        for shape in shapes.gather_grid(device.type, arguments.quick):
            chunk = _Chunk(shape, device, generator)
            session.measure(shape, chunk.contenders(), NUM_SETS)
            chunk.close()
    finally:
        status = session.finish(arguments.json)
    return status


def print_prompts(world: int = 4, layout: str = "fp8_mla_nope") -> None:
    """When the incremental gather pays, by bytes: one layer of one prompt, a chunk of `rows` after another."""
    print(f"MiB that a rank receives in a layer, {world} ranks, {layout}: full / incremental / ordinary DCP")
    for context, rows in itertools.product(C4_CONTEXTS, C4_ROWS):
        if rows <= context:
            last, prompt = (
                " / ".join(
                    f"{size / 2**20:8.1f}" for size in received(GatherShape("", rows, context, world, layout), ends)
                )
                for ends in ([context], [*range(rows, context, rows), context])
            )
            print(
                f"  context {context:7}, rows {rows:5}: last chunk {last}; all {-(-context // rows):4} chunks {prompt}"
            )


def received(shape: GatherShape, ends: list[int]) -> tuple[int, int, int]:
    """Bytes received by chunks of `shape.rows` rows that end at `ends`: in full, incrementally, in ordinary DCP."""
    sizes = _sizes(shape)
    full = sum(sizes.host_padded([end]) for end in ends)
    new = sum(max(sizes.host_sent([end], [max(0, end - shape.rows)])) for end in ends)
    moved = (gather_bytes(records, shape.record_bytes, shape.world) for records in (full, new))
    return *moved, len(ends) * ordinary_bytes(shape.rows, HEADS, 512, shape.world)


def _sizes(shape: GatherShape) -> GatherPlan:
    capacity = gather_capacity(shape.context, 1, shape.world, INTERLEAVE, PAGE_SIZE)
    return GatherPlan(1, shape.rows, capacity, shape.world, INTERLEAVE, PAGE_SIZE)


class _Chunk:
    """A chunk at the end of one prompt, and what every rank holds of it."""

    def __init__(self, shape: GatherShape, device: torch.device, generator: torch.Generator) -> None:
        self.shape, self.device, self.generator = shape, device, generator
        self.sizes = _sizes(shape)
        blocks = -(-shape.context // (PAGE_SIZE * shape.world))
        self.table = torch.randperm(blocks, device=device, generator=generator, dtype=torch.int32).view(1, -1)
        self.pages = blocks
        self.plans = [
            c4_plan_gather([shape.context], [shape.rows], self.table, self.sizes, rank=rank)
            for rank in range(shape.world)
        ]
        self.channels: list[Channel] = []

    def contenders(self) -> list[Contender]:
        if self.shape.op == "c4_remap":
            return [self._remap()]
        if self.shape.op == "c4_plan_gather":
            return [self._plan()]
        return self._incremental() if self.shape.op == INCREMENTAL_GATHER else self._gather()

    def close(self) -> None:
        for channel in self.channels:
            channel.check()
            channel.close()

    def _remap(self) -> Contender:
        """Lists as a selector gives them: distinct tokens of the context in no order, the tail's places absent."""
        shape, op = self.shape, torch.ops.torch_sparse_mla.c4_remap.default
        size = (NUM_SETS, shape.rows, C4_TOPK)
        lists = torch.randint(0, shape.context - shape.rows, size, device=self.device, generator=self.generator)
        lists = lists.int()
        lists[..., -3:] = -1
        slots = torch.empty(size[1:], dtype=torch.int32, device=self.device)
        counts = torch.empty(shape.rows, dtype=torch.int32, device=self.device)
        sizes = (1, shape.rows, INTERLEAVE, shape.world)

        def error() -> float:
            expected = torch.empty(size[1:], dtype=torch.int32), torch.empty(shape.rows, dtype=torch.int32)
            reference.c4_remap(lists[-1].cpu(), self.plans[0].cpu(), *expected, *sizes)
            return float(not (torch.equal(slots.cpu(), expected[0]) and torch.equal(counts.cpu(), expected[1])))

        def call(index_set: int) -> None:
            op(lists[index_set], self.plans[0], slots, counts, *sizes)

        return Contender(harness.op_impl("c4_remap", self.device), call, lambda: poison(slots), error, 0.0)

    def _plan(self) -> Contender:
        shape, sizes, op = self.shape, self.sizes, torch.ops.torch_sparse_mla.c4_plan_gather.default
        vectors = [torch.tensor(v, dtype=torch.int32, device=self.device) for v in ([shape.context], [0, shape.rows])]
        plan = torch.empty_like(self.plans[1])
        geometry = (1, sizes.rows, sizes.capacity, PAGE_SIZE, INTERLEAVE, 1, shape.world)

        def error() -> float:
            expected = torch.empty(sizes.words, dtype=torch.int32)
            reference.c4_plan_gather(*(vector.cpu() for vector in vectors), self.table.cpu(), expected, *geometry)
            return float(
                any(
                    not torch.equal(getattr(sizes, name)(plan.cpu()), getattr(sizes, name)(expected))
                    for name in sizes.sections
                )
            )

        def call(index_set: int) -> None:
            op(*vectors, self.table, plan, *geometry)

        return Contender(harness.op_impl("c4_plan_gather", self.device), call, lambda: poison(plan), error, 0.0)

    def _incremental(self) -> list[Contender]:
        """The last chunk, when all before it is resident; beside the full gather of the same chunk."""
        (full,) = self._gather()
        caches, gathered = self.caches, self.gathered
        shape, world = self.shape, self.shape.world
        records = local_length(0, shape.context, world, INTERLEAVE)
        sizes = dataclasses.replace(self.sizes, resident=records)
        known = shape.context - shape.rows
        held = {"resident_starts": [0], "resident_lengths": [known]}
        lengths = ([shape.context], [shape.rows])
        plans = [c4_plan_gather(*lengths, self.table, sizes, rank=rank, **held) for rank in range(world)]
        size = (world * records, shape.record_bytes)
        resident = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(world)]
        start = torch.ops.torch_sparse_mla.c4_prefill_gather_start.default
        wait = torch.ops.torch_sparse_mla.c4_prefill_gather_wait.default
        place = torch.ops.torch_sparse_mla.c4_place_records.default

        def call(index_set: int) -> None:
            for half in (start, wait):
                for rank, channel in enumerate(self.channels):
                    half(caches[rank][index_set], plans[rank], gathered[rank], channel.state, channel.name)
            for rank in range(world):
                place(gathered[rank], plans[rank], resident[rank], 1, sizes.rows, INTERLEAVE, world)

        def error() -> float:
            wrong = False
            for owner in range(world):
                first = local_length(owner, known, world, INTERLEAVE)
                own = self._packed(owner)[: local_length(owner, shape.context, world, INTERLEAVE)]
                there = slice(owner * records + first, owner * records + len(own))
                wrong |= any(not torch.equal(buffer[there], own[first:]) for buffer in resident)
            return float(wrong)

        def clear() -> None:
            for buffer in (*gathered, *resident):
                poison(buffer)

        details = {"received_bytes": received(shape, [shape.context])[1], "resident_bytes": resident[0].nbytes}
        ours = Contender("incremental", call, clear, error, 0.0, details)
        return [ours, dataclasses.replace(full, name="full")]

    def _gather(self) -> list[Contender]:
        shape, sizes = self.shape, self.sizes
        ranks = range(shape.world)
        size = (NUM_SETS, self.pages, PAGE_SIZE, shape.record_bytes)
        caches = [
            torch.randint(256, size, device=self.device, generator=self.generator, dtype=torch.uint8) for _ in ranks
        ]
        gathered = [
            torch.empty(sizes.gathered_records, shape.record_bytes, dtype=torch.uint8, device=self.device)
            for _ in ranks
        ]
        self.caches, self.gathered = caches, gathered
        group = LoopbackGroup(shape.world, self.device)
        self.channels = [
            Channel.create(BENCH, group.rank(rank), sizes.gathered_records, shape.record_bytes, 1) for rank in ranks
        ]
        start = torch.ops.torch_sparse_mla.c4_prefill_gather_start.default
        wait = torch.ops.torch_sparse_mla.c4_prefill_gather_wait.default

        def call(index_set: int) -> None:
            for half in (start, wait):
                for rank, channel in enumerate(self.channels):
                    half(caches[rank][index_set], self.plans[rank], gathered[rank], channel.state, channel.name)

        def error() -> float:
            expected = torch.cat([self._packed(rank) for rank in ranks])
            return float(any(not torch.equal(buffer[: len(expected)], expected) for buffer in gathered))

        def clear() -> None:
            for buffer in gathered:
                poison(buffer)

        details = {
            "received_bytes": received(shape, [shape.context])[0],
            "ordinary_received_bytes": received(shape, [shape.context])[2],
        }
        ours = Contender(harness.op_impl(BENCH, self.device), call, clear, error, 0.0, details)
        if shape.world > 1:
            return [ours]

        def index_select(index_set: int) -> None:
            records = caches[0][index_set].flatten(0, 1).view(torch.int32)
            torch.index_select(records, 0, slots, out=gathered[0][: len(slots)].view(torch.int32))

        slots = self._slots(0)
        return [ours, Contender("index_select", index_select, clear, error, 0.0)]

    def _slots(self, rank: int) -> torch.Tensor:
        return self.sizes.owned_slots(self.plans[rank])[: self.sizes.host_padded([self.shape.context])].long()

    def _packed(self, rank: int) -> torch.Tensor:
        """A rank's slice of the last index set."""
        return self.caches[rank][-1].flatten(0, 1)[self._slots(rank)]


if __name__ == "__main__":
    sys.exit(main())
