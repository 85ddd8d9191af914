"""Benchmark of `write_ckv_records` and `read_ckv_records`, against the bandwidth of a copy.

python profiling/bench_records.py
python profiling/bench_records.py --tokens 1 4096 --layouts fp8_ds_mla
"""

import argparse
import sys
from itertools import groupby, product
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_sparse_mla
from profiling import harness, shapes
from profiling.inputs import RecordPool, relative_error
from profiling.shapes import RecordShape
from profiling.timing import Contender, cache_bytes, num_index_sets, poison
from torch_sparse_mla.records import dequantise_records, quantise_records, reference

BENCH = "records"
OPS = ("write_ckv_records", "read_ckv_records")
# bf16 output rounding is 1.7e-3.
READ_TOLERANCE = 2e-3
# The same code in all but ties and last-bit differences of a scale.
WRITE_TOLERANCE = 1e-3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--layouts", nargs="+", choices=tuple(torch_sparse_mla.LAYOUTS))
    parser.add_argument("--op", nargs="+", choices=OPS, help="only these")
    arguments = parser.parse_args(argv)
    device = harness.parse_device(parser, arguments.device)

    session = harness.Session(BENCH, device, arguments.commit, {})
    pool = RecordPool(device)
    try:
        for layout, group in groupby(_chosen_shapes(arguments, device), key=lambda shape: shape.layout):
            cache = pool.fill(layout)
            for shape in group:
                slots = _slot_sets(shape, pool, cache)
                session.measure(shape, _contenders(shape, pool, cache, slots), len(slots))
    finally:
        status = session.finish(arguments.json)
    return status


def _chosen_shapes(arguments: argparse.Namespace, device: torch.device) -> list[RecordShape]:
    given = (arguments.layouts, arguments.op, arguments.tokens)
    if not any(given):
        return shapes.record_grid(device.type, arguments.quick)
    default = ((shapes.MAIN_LAYOUT,), OPS, shapes.RECORD_TOKENS)
    values = [chosen or fallback for chosen, fallback in zip(given, default, strict=True)]
    return [RecordShape(op, tokens, layout) for layout, op, tokens in product(*values)]


def _slot_sets(shape: RecordShape, pool: RecordPool, cache: torch.Tensor) -> torch.Tensor:
    record_bytes = cache.shape[2]
    sets = num_index_sets(shape.tokens, shape.tokens * record_bytes, cache_bytes(pool.device))
    return pool.slot_sets(sets, shape.tokens, cache.shape[0] * cache.shape[1])


def _contenders(shape: RecordShape, pool: RecordPool, cache: torch.Tensor, slots: torch.Tensor) -> list[Contender]:
    ours = harness.op_impl(shape.op, pool.device)
    make = _write_contender if shape.op == "write_ckv_records" else _read_contender
    found = [make(shape, pool, cache, slots, ours, getattr(torch.ops.torch_sparse_mla, shape.op).default)]
    if pool.device.type == "cpu" and ours != "reference":
        found.append(make(shape, pool, cache, slots, "reference", getattr(reference, shape.op)))
    return found


def _write_contender(
    shape: RecordShape, pool: RecordPool, cache: torch.Tensor, slots: torch.Tensor, name: str, function
) -> Contender:
    latent, rope = pool.tokens(shape.tokens, shape.layout)
    records, last, lists = cache.flatten(0, 1), slots[-1], list(slots)

    def poison_last() -> None:
        # Bytes 0xA5 decode to finite values of every layout: a later read of the pool stays harmless.
        records[last] = torch.full_like(records[last], 0xA5)

    def error() -> float:
        written = dequantise_records(records[last], shape.layout)
        expected = dequantise_records(quantise_records(latent, rope, shape.layout), shape.layout)
        return max(relative_error(*pair) for pair in zip(written, expected, strict=True) if pair[0] is not None)

    def call(index_set: int) -> None:
        function(latent, rope, lists[index_set], cache, shape.layout)

    return Contender(name, call, poison_last, error, WRITE_TOLERANCE)


def _read_contender(
    shape: RecordShape, pool: RecordPool, cache: torch.Tensor, slots: torch.Tensor, name: str, function
) -> Contender:
    out = torch.empty(
        shape.tokens, torch_sparse_mla.LAYOUTS[shape.layout].query_dim, dtype=torch.bfloat16, device=pool.device
    )
    lists = list(slots)

    def error() -> float:
        latent, rope = dequantise_records(cache.flatten(0, 1)[slots[-1]], shape.layout)
        return relative_error(out, latent if rope is None else torch.cat([latent, rope], -1))

    def call(index_set: int) -> None:
        function(cache, lists[index_set], out, shape.layout)

    return Contender(name, call, lambda: poison(out), error, READ_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
