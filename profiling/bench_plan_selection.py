"""Benchmark of `plan_selection`: the rows of each request choose from one pool of positions, as MTP rows do.

python profiling/bench_plan_selection.py
python profiling/bench_plan_selection.py --rows 4 --worlds 2 4
"""

import argparse
import sys
from itertools import product
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling import harness, shapes
from profiling.shapes import PlanShape
from profiling.timing import MIN_SETS, Contender, poison
from torch_sparse_mla import SelectionPlan
from torch_sparse_mla.selection import reference

BENCH = "plan_selection"
CONTEXT = 65_536
PAGE_SIZE = 64
INTERLEAVE = 1
RANK = 0
VIEWS = ("remap", "owner_offsets", "owned_slots", "counts")
# An indexer has just written the lists, so they are in the cache: a rotation need not outgrow it.
NUM_SETS = MIN_SETS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", help="multiples of --rows-per-request")
    parser.add_argument("--topk", type=int, default=shapes.MAIN_TOPK)
    parser.add_argument("--worlds", type=int, nargs="+")
    parser.add_argument("--rows-per-request", type=int, default=shapes.MTP_ROWS_PER_REQUEST)
    arguments = parser.parse_args(argv)
    device = harness.parse_device(parser, arguments.device)
    chosen = _chosen_shapes(arguments, device)
    if any(shape.rows % shape.rows_per_request for shape in chosen):
        parser.error(f"argument --rows: got {arguments.rows}; allowed: multiples of {arguments.rows_per_request}")

    session = harness.Session(BENCH, device, arguments.commit, {})
    generator = torch.Generator(device).manual_seed(0)
    try:
        for shape in chosen:
            contender = _contender(shape, device, generator)
            session.measure(shape, [contender], NUM_SETS)
            if shape.rows == chosen[0].rows:
                session.measure_host(shape, contender)
    finally:
        status = session.finish(arguments.json)
    return status


def _chosen_shapes(arguments: argparse.Namespace, device: torch.device) -> list[PlanShape]:
    default = (shapes.MAIN_TOPK, shapes.MTP_ROWS_PER_REQUEST)
    given = (arguments.topk, arguments.rows_per_request)
    if not arguments.rows and not arguments.worlds and given == default:
        return shapes.plan_grid(device.type, arguments.quick)
    rows, worlds = arguments.rows or shapes.PLAN_ROWS, arguments.worlds or (4,)
    return [PlanShape(r, arguments.topk, world, arguments.rows_per_request) for world, r in product(worlds, rows)]


def _contender(shape: PlanShape, device: torch.device, generator: torch.Generator) -> Contender:
    selection = SelectionPlan(shape.requests, shape.rows_per_request, shape.topk, shape.world)
    lists = list(position_sets(shape, NUM_SETS, device, generator))
    blocks = -(-CONTEXT // (PAGE_SIZE * shape.world))
    pages = torch.randperm(shape.requests * blocks, device=device, generator=generator, dtype=torch.int32)
    block_table = pages.view(shape.requests, blocks)
    plan = selection.empty(device)
    geometry = (shape.rows_per_request, PAGE_SIZE, INTERLEAVE, RANK, shape.world)
    op = torch.ops.torch_sparse_mla.plan_selection.default

    def error() -> float:
        """1 if any word of a view is wrong."""
        expected = selection.empty()
        reference.plan_selection(lists[-1].cpu(), block_table.cpu(), expected, *geometry)
        views = [(getattr(selection, name)(plan.cpu()), getattr(selection, name)(expected)) for name in VIEWS]
        return float(not all(torch.equal(*pair) for pair in views))

    def call(index_set: int) -> None:
        op(lists[index_set], block_table, plan, *geometry)

    union = sum(len(part.unique()) for part in lists[-1].view(shape.requests, -1))
    return Contender(harness.op_impl(BENCH, device), call, lambda: poison(plan), error, 0.0, {"union": union})


def position_sets(shape: PlanShape, num_sets: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """int32 `[sets, rows, topk]`: distinct within a row, in no order; the rows of a request share a pool."""
    requests = num_sets * shape.requests
    pools = torch.rand(requests, 1, CONTEXT, device=device, generator=generator).argsort(-1)[..., : shape.request_pool]
    keys = torch.rand(requests, shape.rows_per_request, shape.request_pool, device=device, generator=generator)
    chosen = pools.expand_as(keys).gather(-1, keys.argsort(-1)[..., : shape.topk])
    return chosen.reshape(num_sets, shape.rows, shape.topk).int()


if __name__ == "__main__":
    sys.exit(main())
