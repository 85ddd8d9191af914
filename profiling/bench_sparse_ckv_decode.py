"""Benchmark of `sparse_ckv_decode` against gather-only, the byte floor, and the peers that are installed.

python profiling/bench_sparse_ckv_decode.py                          # the default shapes of this device
python profiling/bench_sparse_ckv_decode.py --rows 1 32 --heads 16   # every combination of what is given
"""

import argparse
import os
import sys
from itertools import groupby, product
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_sparse_mla
from profiling import harness, shapes
from profiling.inputs import DecodeInputs, RecordPool, decode_inputs, relative_error
from profiling.peers import PEERS
from profiling.shapes import DecodeShape
from profiling.timing import Contender, poison
from torch_sparse_mla.decode import reference
from torch_sparse_mla.decode.contract import FEWEST_WIDE_HEADS
from torch_sparse_mla.records import LATENT_DIM

BENCH = "sparse_ckv_decode"
INVARIANT_SUFFIX = "-batch-invariant"
OURS_ON_CUDA = ("triton", "native-cuda")
# Forms that are asked for, from 33 heads on.
FORMS = {"native-cuda-narrow": "narrow", "native-cuda-wide": "wide"}
IMPLS = (
    *OURS_ON_CUDA,
    *FORMS,
    *(name + INVARIANT_SUFFIX for name in OURS_ON_CUDA),
    "native-cpu",
    "reference",
    "flashmla",
    "gather",
)
# The operator's contract: bf16 output rounding alone is 1.7e-3.
TOLERANCE = 3e-3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", help="query tokens in a call")
    parser.add_argument("--heads", type=int, nargs="+")
    parser.add_argument("--topk", type=int, nargs="+")
    parser.add_argument("--layouts", nargs="+", choices=tuple(torch_sparse_mla.LAYOUTS))
    parser.add_argument("--impl", nargs="+", choices=IMPLS, help="only these")
    arguments = parser.parse_args(argv)
    device = harness.parse_device(parser, arguments.device)
    chosen = _chosen_shapes(arguments, device)

    wanted = set(arguments.impl or IMPLS)
    peers = [peer for peer in (make(device) for make in PEERS) if peer.name in wanted]
    session = harness.Session(BENCH, device, arguments.commit, {peer.name: peer.unavailable() for peer in peers})
    pool = RecordPool(device)
    try:
        for layout, group in groupby(chosen, key=lambda shape: shape.layout):
            cache = pool.fill(layout)
            for shape in group:
                inputs = decode_inputs(shape, pool, cache)
                contenders = _contenders(inputs, wanted)
                contenders += [
                    peer.prepare(inputs) for peer in peers if not (peer.unavailable() or peer.unsupported(shape))
                ]
                session.measure(shape, contenders, len(inputs.index_sets))
        if arguments.rows is None:
            _measure_call_overhead(session, pool, wanted)
    finally:
        status = session.finish(arguments.json)
    return status


def _chosen_shapes(arguments: argparse.Namespace, device: torch.device) -> list[DecodeShape]:
    given = (arguments.layouts, arguments.topk, arguments.heads, arguments.rows)
    if not any(given):
        return shapes.decode_grid(device.type, arguments.quick)
    default = ((shapes.MAIN_LAYOUT,), (shapes.MAIN_TOPK,), (shapes.MAIN_HEADS,), shapes.FEW_ROWS)
    values = [chosen or fallback for chosen, fallback in zip(given, default, strict=True)]
    return [DecodeShape(rows, heads, topk, layout) for layout, topk, heads, rows in product(*values)]


def _contenders(inputs: DecodeInputs, wanted: set[str]) -> list[Contender]:
    device = inputs.q.device
    ours = harness.op_impl(BENCH, device)
    operator = torch.ops.torch_sparse_mla.sparse_ckv_decode.default
    found = [_decode_contender(inputs, ours, operator, False)]
    if device.type == "cuda":
        if ours == "native-cuda":
            from torch_sparse_mla.decode import triton_kernels

            found.append(_decode_contender(inputs, "triton", triton_kernels.sparse_ckv_decode, False))
            if inputs.shape.heads >= FEWEST_WIDE_HEADS:
                found += [
                    _decode_contender(inputs, name, _in_form(form, operator), False) for name, form in FORMS.items()
                ]
        if inputs.shape.layout == shapes.MAIN_LAYOUT and inputs.shape.rows_per_request == 1:
            # What invariance costs is the same question for every layout, and each one more is a compilation.
            found.append(_decode_contender(inputs, ours + INVARIANT_SUFFIX, operator, True))
        found.append(_gather_contender(inputs))
    elif ours != "reference":
        found.append(_decode_contender(inputs, "reference", reference.sparse_ckv_decode, False))
    return [contender for contender in found if contender.name in wanted]


def _in_form(form: str, operator):
    """The operator under TORCH_SPARSE_MLA_NATIVE=narrow or wide, which is looked at when it is called or captured."""

    def call(*arguments: object) -> None:
        before = os.environ.get("TORCH_SPARSE_MLA_NATIVE")
        os.environ["TORCH_SPARSE_MLA_NATIVE"] = form
        try:
            operator(*arguments)
        finally:
            del os.environ["TORCH_SPARSE_MLA_NATIVE"]
            if before is not None:
                os.environ["TORCH_SPARSE_MLA_NATIVE"] = before

    return call


def _decode_contender(inputs: DecodeInputs, name: str, function, batch_invariant: bool) -> Contender:
    """Our operator, or the reference, with every buffer allocated ahead."""
    q, shape = inputs.q, inputs.shape
    out = torch.empty(shape.rows, shape.heads, LATENT_DIM, dtype=q.dtype, device=q.device)
    lse = torch.empty(shape.rows, shape.heads, dtype=torch.float32, device=q.device)
    size = torch_sparse_mla.sparse_ckv_decode_workspace_bytes(shape.rows, shape.heads, shape.topk, batch_invariant)
    workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    lists = list(inputs.index_sets)

    def call(index_set: int) -> None:
        function(
            q,
            inputs.cache,
            lists[index_set],
            None,
            None,
            out,
            lse,
            workspace,
            inputs.softmax_scale,
            shape.layout,
            batch_invariant,
        )

    def poison_outputs() -> None:
        for tensor in (out, lse, workspace):
            poison(tensor)

    def error() -> float:
        # Rows outside the oracle's few must at least have been written.
        if not bool(torch.isfinite(out).all() & torch.isfinite(lse).all()):
            return float("nan")
        return relative_error(out[inputs.oracle_rows], inputs.oracle)

    return Contender(name, call, poison_outputs, error, TOLERANCE)


def _gather_contender(inputs: DecodeInputs) -> Contender:
    from profiling.gather_baseline import expected_sums, gather_records, num_blocks

    shape = inputs.shape
    sums = torch.empty(shape.rows, num_blocks(shape.topk), dtype=torch.int32, device=inputs.q.device)

    def call(index_set: int) -> None:
        gather_records(inputs.cache, inputs.index_sets[index_set], sums)

    def wrong_blocks() -> float:
        return float((sums != expected_sums(inputs.cache, inputs.index_sets[-1])).sum())

    return Contender("gather", call, lambda: poison(sums), wrong_blocks, 0.0)


def _measure_call_overhead(session: harness.Session, pool: RecordPool, wanted: set[str]) -> None:
    """What a call costs the host. One row, one head, one record: on the CPU nearly all of it is dispatch and checks."""
    shape = DecodeShape(1, 1, 1, shapes.MAIN_LAYOUT)
    inputs = decode_inputs(shape, pool, pool.fill(shape.layout))
    for contender in _contenders(inputs, wanted):
        if contender.name != "gather":
            session.measure_host(shape, contender)


if __name__ == "__main__":
    sys.exit(main())
