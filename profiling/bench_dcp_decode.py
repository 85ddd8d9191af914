"""Benchmark of `DcpSparseDecode`: every strategy over every transport, a Full layer and three Shared layers a step.

python profiling/bench_dcp_decode.py                                         # all ranks on one GPU
torchrun --nproc-per-node 2 profiling/bench_dcp_decode.py                    # a process and a GPU for each rank
torchrun --nproc-per-node 2 profiling/bench_dcp_decode.py --device cpu --topk 64 --rows 4      # a trial without GPUs

Times are of one layer: a step's, divided by its layers. What writes the step's tokens is not in them.
`owner_merge traffic` is that strategy without attention and merge: queries to all ranks, partial results back.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling import harness, shapes
from profiling.bench_plan_selection import INTERLEAVE, PAGE_SIZE
from profiling.exchanges import Ranks, transports
from profiling.inputs import oracle_rows, relative_error
from profiling.ranks import LoopbackRanks, ProcessRanks, attempt, process_device, under_torchrun
from profiling.shapes import StepShape
from profiling.sharded import StepInputs
from profiling.timing import Contender, poison
from torch_sparse_mla import sparse_ckv_decode_workspace_bytes
from torch_sparse_mla.dcp import DcpSparseDecode, run_loopback
from torch_sparse_mla.dcp.contract import STRATEGIES
from torch_sparse_mla.dcp.steps import finish
from torch_sparse_mla.decode import reference
from torch_sparse_mla.records import LATENT_DIM

BENCH = "dcp_decode"
WORLDS = (4,)
TIMEOUT_S = 20.0
# bf16 results of fp8 and fp4 records; partial results are rounded to bf16 once more before they are merged.
TOLERANCE = 1e-2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", help="1 to 4, or multiples of 4 (four rows a request)")
    parser.add_argument("--heads", type=int, default=shapes.MAIN_HEADS, help="local heads")
    parser.add_argument("--topk", type=int, default=shapes.MAIN_TOPK)
    parser.add_argument("--layouts", nargs="+")
    parser.add_argument("--worlds", type=int, nargs="+", help="ranks on one device (under torchrun: its processes)")
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
    worlds = [processes.world] if processes else arguments.worlds or WORLDS
    first = processes or LoopbackRanks(device, worlds[0])
    session = harness.Session(BENCH, device, arguments.commit, {}, processes)
    session.note_ranks(first)
    try:
        for shape in session.within(arguments.budget_s, _chosen(arguments, worlds), arguments.json):
            _measure(session, shape, processes or LoopbackRanks(device, shape.world))
    finally:
        status = session.finish(arguments.json)
    return status


def _chosen(arguments: argparse.Namespace, worlds: list[int]) -> list[StepShape]:
    found: dict[StepShape, None] = {}
    for shape in shapes.step_grid(worlds, arguments.quick):
        for rows in arguments.rows or (shape.rows,):
            for layout in arguments.layouts or (shape.layout,):
                sizes = {"rows": rows, "layout": layout, "heads": arguments.heads, "topk": arguments.topk}
                found[replace(shape, **sizes)] = None
    return list(found)


def _measure(session: harness.Session, shape: StepShape, ranks: Ranks) -> None:
    inputs = StepInputs(shape, ranks.device)
    caches = {rank: [inputs.cache(rank, layer) for layer in range(inputs.layers)] for rank in ranks.own}
    oracle = Oracle(inputs, ranks)
    steps = []
    for strategy, transport in ways(ranks):
        name = strategy if strategy == "auto" else f"{strategy} {transport}"
        made, failure = attempt(lambda s=strategy, t=transport: GroupStep(inputs, caches, ranks, s, t, oracle))
        failure = ranks.agree(failure)
        if failure is None:
            steps.append((name, made))
        else:
            session.fail(f"{shape.fields()} {name}: {failure}")
    before = len(session.cases)
    contenders = [step.contender(name) for name, step in steps]
    for name, step in steps:
        if name.startswith("owner_merge"):
            contenders.append(step.traffic(name.replace("owner_merge", "owner_merge traffic")))
    session.measure(shape, contenders, inputs.num_sets, parts=inputs.layers)
    _compare_auto(session.cases[before:])
    for _, step in steps:
        step.close()


def ways(ranks: Ranks) -> list[tuple[str, str]]:
    """(strategy, transport): every strategy over every transport of these ranks; `auto` as a user would have it."""
    possible = transports(ranks)
    pairs = []
    for strategy in (name for name in STRATEGIES if name != "auto"):
        for transport in possible:
            # Attention that reads peers' caches uses a transport only to say that they may be read.
            if strategy == "peer_read" and (transport == "collective" or transport != possible[0]):
                continue
            pairs.append((strategy, transport))
    return [*pairs, ("auto", "auto")]


def _compare_auto(cases: list[dict]) -> None:
    """How far `auto` is behind the best of the others, and which that is."""
    others = [case for case in cases if case["impl"] != "auto" and "traffic" not in case["impl"]]
    for case in cases:
        if case["impl"] == "auto" and others:
            best = min(others, key=lambda other: other["us"])
            case["best"], case["behind_best"] = best["impl"], round(case["us"] / best["us"] - 1, 4)
            print(f"    auto chose {case['chosen']}; {case['behind_best']:+.1%} against {best['impl']}")


class Oracle:
    """A few rows of the own ranks' first and last layers, in float64, by the reference, on the CPU."""

    def __init__(self, inputs: StepInputs, ranks: Ranks) -> None:
        self.rows, self.layers = oracle_rows(inputs.shape.rows), (0, inputs.layers - 1)
        self.expected: dict[tuple[int, int], torch.Tensor] = {}
        for layer in self.layers:
            records, indices = (tensor.cpu() for tensor in inputs.selected(layer, self.rows))
            for rank in ranks.own:
                q = inputs.queries(rank)[layer][self.rows].double().cpu()
                out = torch.empty(*q.shape[:2], LATENT_DIM, dtype=torch.float64)
                lse = torch.empty(q.shape[:2], dtype=torch.float64)
                size = sparse_ckv_decode_workspace_bytes(*q.shape[:2], indices.shape[1])
                workspace = torch.empty(size, dtype=torch.uint8)
                arguments = (q, records, indices, None, None, out, lse, workspace, q.shape[2] ** -0.5)
                reference.sparse_ckv_decode(*arguments, inputs.shape.layout)
                self.expected[rank, layer] = out

    def error(self, results: dict[int, list[torch.Tensor]]) -> float:
        return max(
            relative_error(results[rank][layer][self.rows], expected)
            for (rank, layer), expected in self.expected.items()
        )


class GroupStep:
    """One step of the own ranks through a group of layers, by one strategy."""

    def __init__(
        self,
        inputs: StepInputs,
        caches: dict[int, list[torch.Tensor]],
        ranks: Ranks,
        strategy: str,
        transport: str,
        oracle: Oracle,
    ) -> None:
        self.inputs, self.ranks, self.oracle = inputs, ranks, oracle
        shape = inputs.shape
        self.queries = {rank: inputs.queries(rank) for rank in ranks.own}
        self.steps = {
            rank: DcpSparseDecode(
                ranks.group(rank),
                layout=shape.layout,
                page_size=PAGE_SIZE,
                interleave=INTERLEAVE,
                requests=shape.plan.requests,
                rows_per_request=shape.plan.rows_per_request,
                heads=shape.heads,
                topk=shape.topk,
                softmax_scale=inputs.layout.query_dim**-0.5,
                strategy=strategy,
                shared_layers=shape.shared_layers,
                name=f"bench-{strategy}-{transport}",
                transport=transport,
                timeout_s=TIMEOUT_S,
                device=ranks.device,
            )
            for rank in ranks.own
        }
        # What peers read must be memory that they can map.
        readable = strategy in ("auto", "peer_read") and isinstance(ranks, ProcessRanks) and ranks.device.type == "cuda"
        self.caches = self._readable(caches) if readable else caches
        self._each(lambda rank, step: step.warmup_steps())
        self.chosen = next(iter(self.steps.values())).chosen
        self.results: dict[int, list[torch.Tensor]] = {}

    def contender(self, name: str) -> Contender:
        explained = next(iter(self.steps.values())).explain()
        details = {
            "union": self.inputs.union,
            "chosen": self.chosen,
            "predicted_us": {
                row["strategy"] + " over nccl" * (row["over"] == "nccl"): round(row["us_per_layer"], 2)
                for row in explained["table"]
            },
            "costs": explained["costs"],
            "over": explained["over"],
        }
        return Contender(name, self.call, self.poison, self.error, TOLERANCE, details)

    def call(self, index_set: int) -> None:
        inputs = self.inputs
        lists, table = inputs.lists[index_set], inputs.block_tables[index_set]
        results: dict[int, list[torch.Tensor]] = {rank: [] for rank in self.steps}

        def full(rank: int, step: DcpSparseDecode):
            first, *others = self.caches[rank]
            return step.full_steps(self.queries[rank][0], first, lists, table, inputs.lengths, shared_caches=others)

        def shared(layer: int):
            current = {"latent": inputs.latents[layer], "rope": inputs.ropes[layer]}
            return lambda rank, step: step.shared_steps(
                self.queries[rank][layer], self.caches[rank][layer], layer - 1, **current
            )

        for begin in (full, *(shared(layer) for layer in range(1, inputs.layers))):
            for rank, (out, _) in zip(self.steps, self._each(begin), strict=True):
                results[rank].append(out)
        self.results = results

    def traffic(self, name: str) -> Contender:
        """What travels in a step's layers. Each rank sends its number, and looks for those of the others."""
        rows, heads = self.inputs.shape.rows, self.inputs.shape.heads
        numbered = {rank: torch.full_like(q[0], rank + 1).view(rows * heads, -1) for rank, q in self.queries.items()}
        arrived: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def travel(rank: int, step: DcpSparseDecode):
            queries = yield from step.strategy.queries.run(numbered[rank])
            partials, _ = yield from step.strategy.partials.run(rows)
            arrived[rank] = (queries, partials)

        def call(index_set: int) -> None:
            for _ in range(self.inputs.layers):
                self._each(travel)

        def clear() -> None:
            for rank, step in self.steps.items():
                step.strategy.partials.buffers(rows)[0].fill_(rank + 1)
                for tensor in arrived[rank]:
                    poison(tensor)

        def error() -> float:
            numbers = torch.arange(1, self.ranks.world + 1, device=self.ranks.device)
            tensors = [tensor for pair in arrived.values() for tensor in pair]
            return float(not all(bool((tensor.flatten(1) == numbers[:, None]).all()) for tensor in tensors))

        return Contender(name, call, clear, error, 0.0)

    def poison(self) -> None:
        for outs in self.results.values():
            for out in outs:
                poison(out)

    def error(self) -> float:
        for step in self.steps.values():
            for channel in step.channels:
                channel.check()
        return self.oracle.error(self.results)

    def close(self) -> None:
        for step in self.steps.values():
            step.close()

    def _each(self, begin) -> list:
        """What a call returns, of each own rank."""
        calls = [begin(rank, step) for rank, step in self.steps.items()]
        return run_loopback(calls) if len(calls) > 1 else [finish(call) for call in calls]

    def _readable(self, caches: dict[int, list[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        copies = {}
        for rank, step in self.steps.items():
            copies[rank] = [step.empty_cache(self.inputs.pages) for _ in caches[rank]]
            for copy, cache in zip(copies[rank], caches[rank], strict=True):
                copy.copy_(cache)
        return copies


if __name__ == "__main__":
    sys.exit(main())
