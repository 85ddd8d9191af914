"""Benchmark of `ce_exchange_layers`: every transport, three layers in bulk and singly, and the collectives instead.

python profiling/bench_ce_exchange.py                                        # all ranks on one GPU
torchrun --nproc-per-node 2 profiling/bench_ce_exchange.py                   # a process and a GPU for each rank
torchrun --nproc-per-node 2 profiling/bench_ce_exchange.py --device cpu --topk 64 --rows 4     # a trial without GPUs

`pack` is the exchange of one rank alone: its records from cache to workspace, and the two launches of any exchange.
`gemm` and `attention` are computations beside which three layers travel, as when Shared layers are fetched ahead.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling import beside, harness, shapes
from profiling.exchanges import Collectives, Exchanger, Packer, Ranks, baselines, transports
from profiling.ranks import LoopbackRanks, ProcessRanks, process_device, under_torchrun
from profiling.shapes import ExchangeShape, PackShape
from profiling.sharded import MAX_EXCHANGE_SETS, Selections
from profiling.timing import MIN_SETS, cache_bytes, num_index_sets

BENCH = "ce_exchange"
MAX_PACK_SETS = 64


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", help="1 to 3, or multiples of 4 (four rows a request)")
    parser.add_argument("--topk", type=int, default=shapes.MAIN_TOPK)
    parser.add_argument("--widths", type=int, nargs="+", help="bytes of a record")
    parser.add_argument("--worlds", type=int, nargs="+", help="ranks on one device (under torchrun: its processes)")
    parser.add_argument("--beside", action="store_true", help="computations beside, also where ranks share a device")
    arguments = parser.parse_args(argv)
    if any(rows < 1 or (rows > 4 and rows % 4) for rows in arguments.rows or ()):
        parser.error(f"argument --rows: got {arguments.rows}; allowed: 1 to 4, or multiples of 4")
    if under_torchrun():
        if arguments.worlds:
            parser.error("argument --worlds: under torchrun the world is its processes")
        ranks = ProcessRanks(process_device(arguments.device))
        with ranks.quiet():
            status = _run(arguments, ranks.device, ranks)
        ranks.close()
        return status
    return _run(arguments, harness.parse_device(parser, arguments.device), None)


def _run(arguments: argparse.Namespace, device: torch.device, processes: ProcessRanks | None) -> int:
    worlds = [processes.world] if processes else arguments.worlds or shapes.EXCHANGE_WORLDS
    first = processes or LoopbackRanks(device, worlds[0])
    session = harness.Session(BENCH, device, arguments.commit, baselines(first), processes)
    session.note_ranks(first)
    rate = session.note_link(first)
    exchanges = _chosen(arguments, worlds, shapes.exchange_grid)
    widest = [shape for shape in exchanges if shape.record_bytes == exchanges[0].record_bytes]
    besides = _chosen(arguments, worlds, shapes.beside_grid) if processes or arguments.beside else []
    packs = [] if arguments.rows or arguments.widths or device.type == "cpu" else shapes.pack_grid(arguments.quick)
    # What tells most comes first.
    grid = [*widest, *besides, *packs, *(shape for shape in exchanges if shape not in widest)]
    try:
        for shape in session.within(arguments.budget_s, grid, arguments.json):
            if isinstance(shape, PackShape):
                _measure_pack(session, shape, device)
            else:
                _measure(session, shape, processes or LoopbackRanks(device, shape.world), rate)
    finally:
        status = session.finish(arguments.json)
    return status


def _chosen(arguments: argparse.Namespace, worlds: list[int], grid) -> list[ExchangeShape]:
    """The shapes of a grid, with the sizes that were asked for."""
    found: dict[ExchangeShape, None] = {}
    for shape in grid(worlds, arguments.quick):
        for rows in arguments.rows or (shape.rows,):
            for width in arguments.widths if arguments.widths and not shape.beside else (shape.record_bytes,):
                found[replace(shape, rows=rows, record_bytes=width, topk=arguments.topk)] = None
    return list(found)


def _measure(session: harness.Session, shape: ExchangeShape, ranks: Ranks, rate: float | None) -> None:
    selections = Selections(shape, shape.layers, ranks.device, MAX_EXCHANGE_SETS)
    caches = {rank: selections.random_caches(rank) for rank in ranks.own}
    makers = {name: partial(Exchanger, selections, caches, ranks, name) for name in transports(ranks)}
    exchangers = session.made_by_all(shape, ranks, makers)
    contenders = [contender for exchanger in exchangers for contender in exchanger.contenders()]
    if shape.beside:
        contenders = beside.contenders(shape, exchangers, selections.num_sets, ranks.device)
    elif isinstance(ranks, ProcessRanks):
        contenders += Collectives(selections, ranks).contenders()
    floor_us = shape.memory_bytes / session.copy_tb_per_s * 1e-6
    if isinstance(ranks, ProcessRanks):
        floor_us = shape.bytes / rate * 1e-6 if rate else None
    session.measure(shape, contenders, selections.num_sets, floor_us)
    for exchanger in exchangers:
        exchanger.close()


def _measure_pack(session: harness.Session, shape: PackShape, device: torch.device) -> None:
    sets = min(num_index_sets(MIN_SETS, shape.bytes, cache_bytes(device)), MAX_PACK_SETS)
    packer = Packer(shape.records, shape.record_bytes, sets, device)
    session.measure(shape, packer.contenders(), sets)
    packer.close()


if __name__ == "__main__":
    sys.exit(main())
