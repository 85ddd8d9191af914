"""Benchmark of the prefill gather's operators; and the bytes that a rank receives for a chunk and for a whole prompt.

python profiling/bench_c4_prefill_gather.py                                     # all ranks on one GPU
python profiling/bench_c4_prefill_gather.py --quick
torchrun --nproc-per-node 2 profiling/bench_c4_prefill_gather.py                # a process and a GPU for each rank
torchrun --nproc-per-node 2 profiling/bench_c4_prefill_gather.py --device cpu   # a trial without GPUs

On one device: packing alone, the gather in full and of what is new, plan and remap. With processes: the gather in both
forms over every transport that peers' memory allows, beside packing and an all-gather, and the all-gather alone.
"""

import argparse
import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling import harness, shapes
from profiling.exchanges import transports
from profiling.gathers import INTERLEAVE, PAGE_SIZE, Chunk, Collectives, Gatherer, received
from profiling.ranks import LoopbackRanks, ProcessRanks, process_device, under_torchrun
from profiling.shapes import C4_CONTEXTS, C4_ROWS, C4_TOPK, INCREMENTAL_GATHER, GatherShape
from profiling.timing import Contender, poison
from torch_sparse_mla.gather import reference

BENCH = "c4_prefill_gather"
# Lists of a remap in turn.
NUM_SETS = 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    arguments = parser.parse_args(argv)
    if under_torchrun():
        ranks = ProcessRanks(process_device(arguments.device))
        with ranks.quiet():
            status = _run_between(arguments, ranks)
        ranks.close()
        return status
    return _run_on_one(arguments, harness.parse_device(parser, arguments.device))


def _run_on_one(arguments: argparse.Namespace, device: torch.device) -> int:
    session = harness.Session(BENCH, device, arguments.commit, {})
    print_prompts()
    grid = shapes.gather_grid(device.type, arguments.quick)
    try:
        for shape in session.within(arguments.budget_s, grid, arguments.json):
            if shape.op == "c4_remap":
                session.measure(shape, [remapping(shape, device)], NUM_SETS)
            elif shape.op == "c4_plan_gather":
                session.measure(shape, [planning(shape, device)], NUM_SETS)
            else:
                _measure_on_one(session, shape, LoopbackRanks(device, shape.world))
    finally:
        status = session.finish(arguments.json)
    return status


def _run_between(arguments: argparse.Namespace, ranks: ProcessRanks) -> int:
    names = Collectives.names(ranks.backend).values()
    session = harness.Session(BENCH, ranks.device, arguments.commit, dict.fromkeys(names), ranks)
    session.note_ranks(ranks)
    rate = session.note_link(ranks)
    print_prompts(ranks.world)
    grid = shapes.ranks_gather_grid(ranks.device.type, arguments.quick, ranks.world)
    try:
        for shape in session.within(arguments.budget_s, grid, arguments.json):
            _measure_between(session, shape, ranks, rate)
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


def _measure_on_one(session: harness.Session, shape: GatherShape, ranks: LoopbackRanks) -> None:
    """What is new beside the full gather of the same chunk; packing beside `index_select`."""
    chunks = {harness.op_impl(BENCH, ranks.device): Chunk(shape, ranks)}
    if shape.op == INCREMENTAL_GATHER:
        chunks = {"incremental": Chunk(shape, ranks), "full": Chunk(replace(shape, op=BENCH), ranks)}
    transport, *_ = transports(ranks)
    gatherers = [Gatherer(chunk, transport, name=name) for name, chunk in chunks.items()]
    contenders = [contender for gatherer in gatherers for contender in gatherer.contenders()]
    if shape.world == 1:
        chunk, gathered = gatherers[0].chunk, gatherers[0].gathered[0]
        select = partial(chunk.index_select, 0, into=gathered)
        contenders.append(replace(contenders[0], name="index_select", call=select, details=None))
    try:
        session.measure(shape, contenders, gatherers[0].chunk.num_sets)
    finally:
        for gatherer in gatherers:
            gatherer.close()


def _measure_between(session: harness.Session, shape: GatherShape, ranks: ProcessRanks, rate: float | None) -> None:
    """`rate`: of the link, in TB/s, where it is known."""
    chunk = Chunk(shape, ranks)
    # The collective transport of GPUs is packing and NCCL too, and its unpacking comes on top.
    names = [name for name in transports(ranks) if name != "collective" or ranks.device.type == "cpu"]
    makers = {name: partial(Gatherer, chunk, name, placed=name == "direct") for name in names}
    made = session.made_by_all(shape, ranks, makers | {"collectives": partial(Collectives, chunk, ranks)})
    floor_us = chunk.received_bytes / rate * 1e-6 if rate else None
    try:
        session.measure(shape, [c for one in made for c in one.contenders()], chunk.num_sets, floor_us)
    finally:
        for one in made:
            one.close()


def remapping(shape: GatherShape, device: torch.device) -> Contender:
    """Lists as a selector gives them: distinct tokens of the context in no order, the tail's places absent."""
    chunk, op = Chunk(shape, LoopbackRanks(device, shape.world)), torch.ops.torch_sparse_mla.c4_remap.default
    generator = torch.Generator(device).manual_seed(0)
    size = (NUM_SETS, shape.rows, C4_TOPK)
    lists = torch.randint(0, shape.context - shape.rows, size, device=device, generator=generator)
    lists = lists.int()
    lists[..., -3:] = -1
    slots = torch.empty(size[1:], dtype=torch.int32, device=device)
    counts = torch.empty(shape.rows, dtype=torch.int32, device=device)
    sizes = (1, shape.rows, INTERLEAVE, shape.world)

    def error() -> float:
        expected = torch.empty(size[1:], dtype=torch.int32), torch.empty(shape.rows, dtype=torch.int32)
        reference.c4_remap(lists[-1].cpu(), chunk.plans[0].cpu(), *expected, *sizes)
        return float(not (torch.equal(slots.cpu(), expected[0]) and torch.equal(counts.cpu(), expected[1])))

    def call(index_set: int) -> None:
        op(lists[index_set], chunk.plans[0], slots, counts, *sizes)

    return Contender(harness.op_impl("c4_remap", device), call, lambda: poison(slots), error, 0.0)


def planning(shape: GatherShape, device: torch.device) -> Contender:
    chunk, op = Chunk(shape, LoopbackRanks(device, shape.world)), torch.ops.torch_sparse_mla.c4_plan_gather.default
    sizes = chunk.sizes
    vectors = [torch.tensor(v, dtype=torch.int32, device=device) for v in ([shape.context], [0, shape.rows])]
    plan = torch.empty_like(chunk.plans[1])
    geometry = (1, sizes.rows, sizes.capacity, PAGE_SIZE, INTERLEAVE, 1, shape.world)

    def error() -> float:
        expected = torch.empty(sizes.words, dtype=torch.int32)
        reference.c4_plan_gather(*(vector.cpu() for vector in vectors), chunk.table.cpu(), expected, *geometry)
        return float(
            any(
                not torch.equal(getattr(sizes, name)(plan.cpu()), getattr(sizes, name)(expected))
                for name in sizes.sections
            )
        )

    def call(index_set: int) -> None:
        op(*vectors, chunk.table, plan, *geometry)

    return Contender(harness.op_impl("c4_plan_gather", device), call, lambda: poison(plan), error, 0.0)


if __name__ == "__main__":
    sys.exit(main())
