"""`bench modes`: the same four-layer step eager, compiled, in pieces of CUDA graphs and as one.

Launches, host time, time of a step, memory.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator

import torch
from torch.autograd import DeviceType

from .console import print_table
from .decode_step import DecodeStep
from .profile import profiled
from .step_modes import Prepared, add_arguments, device_of, modes_for, prepare, sizes_of, synchronise

CALLS = 60
BURST = 5
# What makes the device do something, as profilers name the calls.
LAUNCHING = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
TOLERANCE = 3e-2


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("bench", help="benchmarks that need no checkout", description=__doc__)
    parser.add_argument("what", choices=("modes",), help="modes: the same step eager, compiled, piecewise, full")
    add_arguments(parser)
    parser.add_argument(
        "--mode", action="append", metavar="NAME", help="eager, compiled, piecewise, full; default: all"
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Returns 1 where a mode's result differs from the eager one's, else 0."""
    device = device_of(options)
    step = DecodeStep(sizes_of(options, device), device)
    try:
        cases = measure_all(step, modes_for(options.mode, device, options.parser))
    finally:
        step.close()
    print_cases(cases)
    wrong = [case for case in cases if not case["error"] <= TOLERANCE]
    for case in wrong:
        print(f"FAILED {case['mode']}: the result is off by {case['error']:.1e}; allowed {TOLERANCE:.0e}")
    return 1 if wrong else 0


def measure_all(step: DecodeStep, modes: list[str]) -> list[dict]:
    """One case for each mode. The eager result is the oracle."""
    with torch.no_grad():
        expected = step.run(*step.inputs).float().clone()
    cases = []
    for name in modes:
        with _prepared(step, name) as made:
            cases.append(measure(made, step.device, expected))
    # Last: a profiler that has run may slow down what the process launches later.
    for case in cases:
        case.update(count_launches(step, case["mode"]))
    return cases


@contextlib.contextmanager
def _prepared(step: DecodeStep, name: str) -> Iterator[Prepared]:
    made = prepare(step, name)
    try:
        yield made
    finally:
        if made.step is not None:
            made.step.release()


def measure(made: Prepared, device: torch.device, expected: torch.Tensor) -> dict:
    """Host and device microseconds (median, least, greatest), memory, error of one mode."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with torch.no_grad():
        result = made.call().float()
        error = float((result - expected).norm() / expected.norm())
        host, total = _times(made, device)
    statistics_ = None if made.step is None else made.step.statistics
    return {
        "mode": made.name,
        "host_us": host,
        "step_us": total,
        "graph_bytes": 0 if statistics_ is None else statistics_.graph_bytes,
        "step_bytes": torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None,
        "captured_graphs": 0 if statistics_ is None else sum(statistics_.captures.values()),
        "error": error,
    }


def count_launches(step: DecodeStep, name: str) -> dict[str, int | None]:
    """Of one step in a mode: what the host launches, and what runs on the device."""
    if step.device.type != "cuda":
        return {"host_calls": None, "launches": None}
    with _prepared(step, name) as made:
        profiler, _ = profiled(made, step.device, 1)
    names = [event.name for event in profiler.events() if event.device_type == DeviceType.CPU]
    return {
        "host_calls": sum(name.startswith(LAUNCHING) for name in names),
        "launches": sum(event.device_type == DeviceType.CUDA for event in profiler.events()),
    }


def print_cases(cases: list[dict]) -> None:
    rows = [
        (
            case["mode"],
            _count(case["host_calls"]),
            _count(case["launches"]),
            f"{case['host_us'][0]:.1f}",
            f"{case['step_us'][0]:.1f}",
            f"{case['graph_bytes'] / 2**20:.1f}",
            "" if case["step_bytes"] is None else f"{case['step_bytes'] / 2**20:.1f}",
            f"{case['error']:.0e}",
        )
        for case in cases
    ]
    columns = (
        "mode",
        ">launches by the host",
        ">kernels",
        ">host us",
        ">step us",
        ">graphs MiB",
        ">step MiB",
        ">error",
    )
    print_table("the same step of four layers", columns, rows)


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def _times(made: Prepared, device: torch.device) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Microseconds until a call returns while the device is busy, and of a step from one idle device to the next."""
    host, total = [], []
    for _ in range(CALLS):
        synchronise(device)
        begin = time.perf_counter()
        made.call()
        synchronise(device)
        total.append((time.perf_counter() - begin) * 1e6)
    # A device that has gone idle takes longer to be told: the first call of each burst is not counted. Bursts are
    # short, so that no call waits for room in the queue.
    for _ in range(CALLS // BURST + 1):
        made.call()
        for _ in range(BURST):
            begin = time.perf_counter()
            made.call()
            host.append((time.perf_counter() - begin) * 1e6)
        synchronise(device)
    return _summary(host), _summary(total)


def _summary(samples: list[float]) -> tuple[float, float, float]:
    return statistics.median(samples), min(samples), max(samples)
