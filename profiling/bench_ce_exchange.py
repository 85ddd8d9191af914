"""Benchmark of `ce_exchange_layers` with every rank of a small world on one GPU, over the direct transport.

python profiling/bench_ce_exchange.py

The ranks run one after another on one stream: every start, then every wait. So a time is that of all ranks together,
peers' memory is local memory, and nobody waits. It says what packing, storing, flags and copying cost on the
multiprocessors and how much one bulk call saves over single ones; it says nothing about a link or about waiting.
"""

import argparse
import sys
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling import harness, shapes
from profiling.bench_plan_selection import CONTEXT, INTERLEAVE, PAGE_SIZE, position_sets
from profiling.shapes import ExchangeShape
from profiling.timing import MIN_SETS, Contender, poison
from torch_sparse_mla import Channel, LoopbackGroup, SelectionPlan, ce_exchange_start, ce_exchange_wait, plan_selection

BENCH = "ce_exchange"
NUM_SETS = MIN_SETS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    arguments = parser.parse_args(argv)
    device = harness.parse_device(parser, arguments.device)
    if device.type != "cuda":
        parser.error("argument --device: got 'cpu'; allowed: cuda (on the CPU ranks share memory: nothing to measure)")
    session = harness.Session(BENCH, device, arguments.commit, {})
    print("all ranks on one GPU, in turn: " + " ".join(__doc__.split("\n\n")[2].split()))
    generator = torch.Generator(device).manual_seed(0)
    try:
        for shape in shapes.exchange_grid(arguments.quick):
            world = _World(shape, device, generator)
            session.measure(shape, world.contenders(), NUM_SETS)
            world.close()
    finally:
        status = session.finish(arguments.json)
    return status


class _World:
    """The ranks of one shape: caches, plans of every index set, workspaces and channels.

    On the CPU, for the tests, over the loopback transport.
    """

    def __init__(self, shape: ExchangeShape, device: torch.device, generator: torch.Generator) -> None:
        self.shape = shape
        requests, rows_per_request = shape.plan.requests, shape.plan.rows_per_request
        self.selection = SelectionPlan(requests, rows_per_request, shape.topk, shape.world)
        lists = position_sets(shape.plan, NUM_SETS, device, generator)
        blocks = -(-CONTEXT // (PAGE_SIZE * shape.world))
        pages = torch.randperm(requests * blocks, device=device, generator=generator, dtype=torch.int32)
        block_table = pages.view(requests, blocks)
        size = (shape.layers, requests * blocks, PAGE_SIZE, shape.record_bytes)
        self.caches, self.plans, self.workspaces = [], [], []
        for rank in range(shape.world):
            caches = torch.randint(256, size, device=device, generator=generator, dtype=torch.uint8)
            self.caches.append(list(caches))
            self.plans.append(
                [
                    plan_selection(
                        topk,
                        block_table,
                        self.selection,
                        page_size=PAGE_SIZE,
                        interleave=INTERLEAVE,
                        rank=rank,
                    )
                    for topk in lists
                ]
            )
            workspace = torch.empty(
                shape.layers, self.selection.capacity, shape.record_bytes, device=device, dtype=torch.uint8
            )
            self.workspaces.append(list(workspace))
        group = LoopbackGroup(shape.world, device)
        self.channels = [
            Channel.create(
                BENCH,
                group.rank(rank),
                self.selection.capacity,
                shape.record_bytes,
                layers=shape.layers,
                requests=requests,
                transport="direct" if device.type == "cuda" else "loopback",
            )
            for rank in range(shape.world)
        ]

    def contenders(self) -> list[Contender]:
        bulk = Contender("direct", self.exchange, self.poison, self.error, 0.0, {"union": self.shape.union})
        if self.shape.layers == 1:
            return [bulk]
        singles = Contender("direct-per-layer", self.exchange_singly, self.poison, self.error, 0.0)
        return [bulk, singles]

    def exchange(self, index_set: int) -> None:
        self._exchange(index_set, slice(None))

    def exchange_singly(self, index_set: int) -> None:
        for layer in range(self.shape.layers):
            self._exchange(index_set, slice(layer, layer + 1))

    def _exchange(self, index_set: int, layers: slice) -> None:
        for half in (ce_exchange_start, ce_exchange_wait):
            for rank, channel in enumerate(self.channels):
                plan = self.plans[rank][index_set]
                half(self.caches[rank][layers], plan, self.workspaces[rank][layers], channel.state, channel)

    def poison(self) -> None:
        for workspaces in self.workspaces:
            for workspace in workspaces:
                poison(workspace)

    def error(self) -> float:
        """1 if any byte of any workspace is wrong, for the last index set."""
        wrong = 0
        for layer in range(self.shape.layers):
            expected = torch.full_like(self.workspaces[0][layer], 0)
            filled = torch.zeros(len(expected), dtype=torch.bool, device=expected.device)
            for rank, plans in enumerate(self.plans):
                slots, places = self._owned(plans[-1], rank)
                expected[places] = self.caches[rank][layer].flatten(0, 1)[slots]
                filled[places] = True
            for workspaces in self.workspaces:
                wrong += int((workspaces[layer][filled] != expected[filled]).sum())
        return float(wrong > 0)

    def _owned(self, plan: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's selected slots, and where their records belong in a workspace."""
        offsets = self.selection.owner_offsets(plan)
        owned = self.selection.owned_slots(plan).view(self.selection.requests, -1)
        request = torch.arange(self.selection.requests, device=plan.device)[:, None]
        place = torch.arange(owned.shape[1], device=plan.device)
        places = request * self.selection.capacity_per_request + offsets[:, rank, None] + place
        return owned[owned >= 0].long(), places[owned >= 0]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


if __name__ == "__main__":
    sys.exit(main())
