"""Benchmark of `c4_select` in the serving form: a chunk's rows at the end of one prompt, on one rank; both forms of a
selection over ranks, all on one device: a rank's share of the time. First, the bytes that a rank receives.

python profiling/bench_c4_select.py
python profiling/bench_c4_select.py --rows 4096 --contexts 131072
"""

import argparse
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling import harness, shapes
from profiling.shapes import C4_CONTEXTS, C4_ROWS, SelectShape, SplitSelectShape
from profiling.timing import Contender, poison
from torch_sparse_mla import (
    LoopbackGroup,
    RowSplit,
    SplitSelector,
    c4_merge_pools,
    c4_select,
    c4_select_workspace_bytes,
)
from torch_sparse_mla.indexer.pools import (
    HEAD_DIM,
    INDEX_PAGE_BYTES,
    POOLS_PER_INDEX_PAGE,
    candidates_of,
    index_bytes,
)

BENCH = "c4_select"
PAGE_SIZE = 2_304
# Keys are read again and again, from the cache in any case; a rotation would only take longer.
NUM_SETS = 1
INTERLEAVE = 4
# Few rows are dealt out to lists until so many programs run.
PROGRAMS = 128
CHECKED_ROWS = 4
# The baseline makes as many scores at once.
MAX_SCORES = 1 << 28


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--contexts", type=int, nargs="+")
    arguments = parser.parse_args(argv)
    device = harness.parse_device(parser, arguments.device)
    chosen = shapes.select_grid(device.type, arguments.quick)
    if arguments.rows or arguments.contexts:
        rows, contexts = arguments.rows or shapes.C4_ROWS, arguments.contexts or shapes.C4_CONTEXTS
        chosen = [SelectShape(r, context) for context, r in product(contexts, rows)]
    if any(shape.rows > shape.context for shape in chosen):
        parser.error(f"argument --rows: got {arguments.rows}; allowed: up to the context")
    splits = shapes.split_select_grid(device.type, arguments.quick)
    if arguments.rows or arguments.contexts:
        splits = []
    session = harness.Session(BENCH, device, arguments.commit, {"pytorch": None} if device.type == "cuda" else {})
    print_received()
    generator = torch.Generator(device).manual_seed(0)
    try:
        for shape in chosen:
            inputs = _Inputs(shape, device, generator)
            contenders = [inputs.ours()] + ([inputs.pytorch()] if device.type == "cuda" else [])
            session.measure(shape, contenders, NUM_SETS)
        for shape in splits:
            ranks = _Ranks(shape, device, generator)
            session.measure(shape, [ranks.merge(), ranks.rows()], NUM_SETS, None, parts=shape.world)
            ranks.close()
    finally:
        status = session.finish(arguments.json)
    return status


def print_received(world: int = 4, pools: int = 512) -> None:
    """When splitting the rows pays, by bytes."""
    print(f"MiB that a rank receives in a layer, {world} ranks, {pools} pools a row: candidates / rows split")
    for context, rows in product(C4_CONTEXTS, (32, *C4_ROWS)):
        split = _split(SplitSelectShape(rows, context, world, pools=pools))
        sizes = (
            size // world * (world - 1) for size in (split.candidate_bytes(rows), split.gathered_bytes([context], rows))
        )
        print(f"  context {context:7}, rows {rows:5}: {' / '.join(f'{size / 2**20:7.2f}' for size in sizes)}")


def _split(shape: SplitSelectShape) -> RowSplit:
    return RowSplit(1, shape.rows, shape.context, shape.pools, shape.world, INTERLEAVE, PAGE_SIZE)


class _Inputs:
    """Whole numbers from -2 to 2, so that every implementation has the same scores and the result can be compared."""

    def __init__(self, shape: SelectShape, device: torch.device, generator: torch.Generator) -> None:
        def whole(*size: int) -> torch.Tensor:
            return torch.randint(-2, 3, size, device=device, generator=generator).float()

        self.shape = shape
        count = shape.context // 4
        blocks = -(-shape.context // PAGE_SIZE)
        per_page = PAGE_SIZE // 4
        self.values, self.weights = whole(shape.rows, shape.heads, HEAD_DIM), whole(shape.rows, shape.heads) / 4
        keys = whole(blocks * per_page, HEAD_DIM)
        scales = torch.rand(len(keys), device=device, generator=generator).mul(4).floor().sub(2).exp2()
        self.keys, self.scales = keys[:count], scales[:count]
        self.table = torch.randperm(blocks, device=device, generator=generator, dtype=torch.int32).view(1, -1)
        self.pools = _paged(keys, scales, self.table)
        self.positions = torch.arange(shape.context - shape.rows, shape.context, dtype=torch.int32, device=device)
        self.of_row = torch.zeros_like(self.positions)
        lists = max(1, min(PROGRAMS // shape.rows, count // 512))
        self.candidates = torch.empty(lists, shape.rows, shape.pools, dtype=torch.int64, device=device)
        needed = c4_select_workspace_bytes(shape.rows, shape.pools, lists)
        self.workspace = torch.empty(needed, dtype=torch.uint8, device=device)
        self.best = torch.empty(shape.rows, min(shape.pools, count), dtype=torch.int64, device=device)

    def ours(self) -> Contender:
        op = torch.ops.torch_sparse_mla.c4_select.default
        queries = self.values.to(torch.float8_e4m3fn).view(torch.uint8)
        inputs = (queries, self.weights, self.pools, self.table, self.of_row, self.positions)

        def call(index_set: int) -> None:
            op(*inputs, self.candidates, self.workspace, PAGE_SIZE, 4, 0, 1)

        def error() -> float:
            merged = self.candidates.transpose(0, 1).flatten(1)[self._checked()].sort(1, descending=True).values
            return self._error(merged)

        details = {"lists": len(self.candidates)}
        return Contender(harness.op_impl(BENCH, self.values.device), call, self._poison, error, 0.0, details)

    def pytorch(self) -> Contender:
        """Matrix products in bfloat16 and `topk`, some rows at a time: what one would write without the operator."""
        queries, keys = self.values.bfloat16(), self.keys.bfloat16()
        step = max(1, MAX_SCORES // (self.shape.heads * len(keys)))
        hidden = torch.arange(len(keys), device=keys.device) * 4 + 3

        def call(index_set: int) -> None:
            for first in range(0, self.shape.rows, step):
                rows = slice(first, first + step)
                products = (queries[rows] @ keys.T).relu_()
                scores = (self.weights[rows].bfloat16().unsqueeze(1) @ products).squeeze(1).float() * self.scales
                scores.masked_fill_(hidden > self.positions[rows, None], float("-inf"))
                torch.topk(scores, self.best.shape[1], dim=1, out=(scores.new_empty(0), self.best[rows]))

        # A bfloat16 sum ties and differs: this one is timed, not compared.
        return Contender("pytorch", call, lambda: poison(self.best), lambda: 0.0, 0.0)

    def _poison(self) -> None:
        poison(self.candidates)
        poison(self.workspace)

    def _checked(self) -> torch.Tensor:
        return torch.linspace(0, self.shape.rows - 1, min(CHECKED_ROWS, self.shape.rows)).long()

    def _error(self, merged: torch.Tensor) -> float:
        """1 if any candidate of a few rows is wrong."""
        for place, row in enumerate(self._checked().tolist()):
            products = (self.values[row].double() @ self.keys.double().T).relu()
            scores = (self.weights[row].double() @ products * self.scales).float()
            count = (int(self.positions[row]) + 1) // 4
            numbers = torch.arange(count, device=scores.device)
            expected = candidates_of(scores[:count], numbers).sort(descending=True).values[: self.shape.pools]
            if not torch.equal(merged[place, : len(expected)], expected):
                return 1.0
        return 0.0


def _paged(keys: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Whole pages of keys and scales, as the pages of a table."""
    blocks, codes = table.shape[1], POOLS_PER_INDEX_PAGE * HEAD_DIM
    pages = torch.empty(blocks * (PAGE_SIZE // 256), INDEX_PAGE_BYTES, dtype=torch.uint8, device=keys.device)
    pages[:, :codes] = keys.to(torch.float8_e4m3fn).view(torch.uint8).view(-1, codes)
    pages[:, codes:] = scales.view(-1, POOLS_PER_INDEX_PAGE).view(torch.uint8)
    pools = torch.empty(blocks, index_bytes(PAGE_SIZE), dtype=torch.uint8, device=keys.device)
    pools[table[0].long()] = pages.view(blocks, -1)
    return pools


class _Ranks:
    """All ranks of a split selection on one device, with the numbers of one prompt dealt out to them."""

    def __init__(self, shape: SplitSelectShape, device: torch.device, generator: torch.Generator) -> None:
        self.shape = shape
        inputs = self.inputs = _Inputs(shape.one_rank, device, generator)
        self.queries = (inputs.values.to(torch.float8_e4m3fn).view(torch.uint8), inputs.weights)
        per_page, count = PAGE_SIZE // 4, len(inputs.keys) // shape.world
        blocks = -(-count // per_page)
        self.table = torch.arange(blocks, dtype=torch.int32, device=device).view(1, -1)
        missing = blocks * per_page - count
        # In runs of one pool.
        self.pools = [
            _paged(
                torch.nn.functional.pad(inputs.keys[rank :: shape.world][:count], (0, 0, 0, missing)),
                torch.nn.functional.pad(inputs.scales[rank :: shape.world][:count], (0, missing)),
                self.table,
            )
            for rank in range(shape.world)
        ]
        group = LoopbackGroup(shape.world, device)
        self.selectors = [
            SplitSelector(group.rank(rank), _split(shape), heads=shape.heads, device=device)
            for rank in range(shape.world)
        ]
        for selector in self.selectors:
            selector.plan([shape.context], [shape.rows], self.table)
        self.results: dict[str, list[torch.Tensor]] = {
            form: [torch.empty(shape.rows, 4 * shape.pools + 3, dtype=torch.int32, device=device) for _ in self.pools]
            for form in ("merge", "rows")
        }

    def merge(self) -> Contender:
        """Every rank's own pools for all rows; the all-gather of candidates is a copy on this device."""
        inputs, world = self.inputs, self.shape.world

        def call(index_set: int) -> None:
            geometry = {"num_pools": self.shape.pools, "page_size": PAGE_SIZE, "interleave": INTERLEAVE, "world": world}
            rows = (inputs.of_row, inputs.positions)
            own = [
                c4_select(*self.queries, pools, self.table, *rows, rank=rank, **geometry)
                for rank, pools in enumerate(self.pools)
            ]
            for topk in self.results["merge"]:
                c4_merge_pools(torch.cat(own), inputs.positions, topk=topk)

        return self._contender("merge", call, _split(self.shape).candidate_bytes(self.shape.rows))

    def rows(self) -> Contender:
        inputs = self.inputs

        def call(index_set: int) -> None:
            for selector, pools in zip(self.selectors, self.pools, strict=True):
                selector.send_keys(pools)
            for selector in self.selectors:
                selector.select(*self.queries, inputs.of_row, inputs.positions)
            for selector, topk in zip(self.selectors, self.results["rows"], strict=True):
                selector.receive(topk)

        return self._contender("rows", call, _split(self.shape).gathered_bytes([self.shape.context], self.shape.rows))

    def close(self) -> None:
        for selector in self.selectors:
            selector.close()

    def _contender(self, form: str, call: Callable[[int], None], gathered: int) -> Contender:
        def clear() -> None:
            for topk in self.results[form]:
                poison(topk)

        def error() -> float:
            one = self._as_one_rank()
            return float(any(not torch.equal(topk, one) for topk in self.results[form]))

        details = {"received_bytes": gathered // self.shape.world * (self.shape.world - 1)}
        return Contender(form, call, clear, error, 0.0, details)

    def _as_one_rank(self) -> torch.Tensor:
        inputs = self.inputs
        rows = (inputs.of_row, inputs.positions)
        geometry = {"num_pools": self.shape.pools, "page_size": PAGE_SIZE}
        return c4_merge_pools(c4_select(*self.queries, inputs.pools, inputs.table, *rows, **geometry), rows[1])[0]


if __name__ == "__main__":
    sys.exit(main())
