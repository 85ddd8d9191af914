"""Benchmark of the modes of `torch_sparse_mla.compile`: the same four-layer decode step in each of them.

python profiling/bench_modes.py

What `python -m torch_sparse_mla bench modes` prints, as a results file. A case "host" is the time until a call returns,
a case "call" from one idle device to the next.
"""

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling import results
from profiling.timing import copy_tb_per_s, warm_up
from torch_sparse_mla.commands import bench_modes, step_modes
from torch_sparse_mla.commands.decode_step import DecodeStep

BENCH = "modes"
DETAILS = ("launches", "host_calls", "graph_bytes", "step_bytes", "captured_graphs", "error")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    step_modes.add_arguments(parser)
    parser.add_argument(
        "--mode", action="append", metavar="NAME", help="eager, compiled, piecewise, full; default: all"
    )
    parser.add_argument(
        "--json", type=Path, default=results.RESULTS_FOLDER, metavar="DIR", help="folder for the results"
    )
    parser.add_argument("--commit", help="commit to record (default: asked of git)")
    parser.set_defaults(parser=parser)
    options = parser.parse_args(argv)
    device = step_modes.device_of(options)
    sizes = step_modes.sizes_of(options, device)
    modes = step_modes.modes_for(options.mode, device, parser)
    warm_up(device)
    document = results.document(BENCH, device, copy_tb_per_s(device), options.commit, {})
    step = DecodeStep(sizes, device)
    try:
        measured = bench_modes.measure_all(step, modes)
        num_bytes = sum(step.bytes_by_phase(sizes.rows).values())
    finally:
        step.close()
    bench_modes.print_cases(measured)
    wrong = [case for case in measured if not case["error"] <= bench_modes.TOLERANCE]
    for case in wrong:
        print(f"FAILED {case['mode']}: the result is off by {case['error']:.1e}")
    document["cases"] = [
        case for mode in measured if mode not in wrong for case in cases_of(mode, sizes, num_bytes, document)
    ]
    if document["cases"]:
        print(f"wrote {results.write(document, options.json)}")
    return 1 if wrong else 0


def cases_of(measured: dict, sizes: step_modes.StepSizes, num_bytes: int, document: dict) -> list[dict]:
    fields = {
        "rows": sizes.rows,
        "heads": sizes.heads,
        "topk": sizes.topk,
        "layout": sizes.layout,
        "world": sizes.world,
        "context": sizes.context,
        "hidden": sizes.hidden,
        "layers": 4,
    }
    floor_us = num_bytes / document["copy_tb_per_s"] * 1e-6
    details = {name: measured[name] for name in DETAILS}
    # Operations are not counted: at these sizes weights and records have to be read, and little else.
    return [
        results.make_case(fields, measured["mode"], "host", measured["host_us"], num_bytes, 0, None, **details),
        results.make_case(fields, measured["mode"], "call", measured["step_us"], num_bytes, 0, floor_us, **details),
    ]


if __name__ == "__main__":
    sys.exit(main())
