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
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling import beside, harness, shapes
from profiling.exchanges import Collectives, Exchanger, Packer, Ranks, baselines, transports
from profiling.ranks import LoopbackRanks, ProcessRanks, attempt, process_device, under_torchrun
from profiling.shapes import ExchangeShape, PackShape
from profiling.sharded import MAX_EXCHANGE_SETS, Selections
from profiling.timing import MIN_SETS, cache_bytes, num_index_sets

BENCH = "ce_exchange"
MAX_PACK_SETS = 64
LINK_BYTES = 256 << 20


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
    session.note("ranks", "processes" if processes else "on one device")
    session.note("limits", first.limits)
    print(first.limits)
    rate = _link_tb_per_s(processes) if processes else None
    if rate is not None:
        session.note("link_tb_per_s", rate)
        print(f"link {rate * 1e3:.0f} GB/s (copy to the next rank's memory, all ranks at once)")
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
    exchangers, contenders = [], []
    for transport in transports(ranks):
        made, failure = attempt(lambda name=transport: Exchanger(selections, caches, ranks, name))
        failure = ranks.agree(failure)
        if failure is None:
            exchangers.append(made)
            contenders += made.contenders()
        else:
            session.fail(f"{shape.fields()} {transport}: {failure}")
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


def _link_tb_per_s(ranks: ProcessRanks) -> float | None:
    """What a rank sends to the next one's memory while all do, in TB/s; None where memory of peers cannot be mapped."""
    if ranks.backend != "nccl" or ranks.world == 1:
        return None

    def measured() -> float:
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(LINK_BYTES, dtype=torch.uint8, device=ranks.device)
        handle = symmetric.rendezvous(own, torch.distributed.group.WORLD.group_name)
        target = handle.get_buffer((ranks.rank + 1) % ranks.world, (LINK_BYTES,), torch.uint8)
        source = torch.randint(256, (LINK_BYTES,), dtype=torch.uint8, device=ranks.device)
        target.copy_(source)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.distributed.barrier()
        events[0].record()
        for _ in range(5):
            target.copy_(source)
        events[1].record()
        torch.cuda.synchronize()
        return 5 * LINK_BYTES / (events[0].elapsed_time(events[1]) * 1e-3) * 1e-12

    rate, failure = attempt(measured)
    failure = ranks.agree(failure)
    if failure is not None:
        print(f"link not measured: {failure}")
        return None
    return ranks.mean(rate)


if __name__ == "__main__":
    sys.exit(main())
