"""`profile`: where the microseconds of a four-layer decode step go, by torch.profiler alone.

For each mode a table of phases (time, launches, bytes, share of the byte floor), how much of the exchange runs beside
other work, a picture of one step, and a Chrome trace. Kernels of graph replays are resolved by name.
"""

import argparse
import importlib.util
import json
import math
import statistics
import time
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .console import print_table
from .decode_step import DecodeStep
from .step_modes import Prepared, add_arguments, device_of, modes_for, prepare, sizes_of, synchronise
from .timeline import IDLE, Interval, account, outermost, overlap_us, phase_of

STEPS = 20
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
# Of the wall, by the host's clock, that the timeline from the first kernel to the last one may fail to cover.
MOST_UNACCOUNTED = 0.05
# What lies before the first kernel and behind the last is not covered: in so long a time it weighs little.
LEAST_WALL_US = 50_000


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("profile", help="where a decode step's time goes", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--mode", action="append", metavar="NAME", help="eager, compiled, piecewise, full; default: all"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"profiled steps, at least; default: {STEPS}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write pictures, Chrome traces and profile.json")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Profile. Returns 1 where a table leaves more than 5 % of the wall time without a name, else 0."""
    device = device_of(options)
    sizes = sizes_of(options, device)
    modes = modes_for(options.mode, device, options.parser)
    if options.steps < 1:
        options.parser.error(f"argument --steps: got {options.steps}; allowed: 1 or more")
    if options.out is not None:
        if importlib.util.find_spec("matplotlib") is None:
            options.parser.error("argument --out: pictures need matplotlib; run 'pip install matplotlib'")
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            options.parser.error(f"argument --out: got '{options.out}'; allowed: a directory to write into ({error})")
    step = DecodeStep(sizes, device)
    try:
        bandwidth = copy_bytes_per_us(device)
        print(
            f"four layers, {sizes.rows} rows, {sizes.heads} heads, top-k {sizes.topk}, {sizes.layout}, {sizes.world} "
            f"loopback rank(s) in turn on {device}; copy {bandwidth * 1e-6:.2f} TB/s (read plus written)"
        )
        reports = [profile_mode(step, name, options, bandwidth) for name in modes]
    finally:
        step.close()
    if options.out is not None:
        (options.out / "profile.json").write_text(json.dumps(reports, indent=2) + "\n")
    unnamed = [report for report in reports if report["unaccounted"] > MOST_UNACCOUNTED]
    for report in unnamed:
        print(f"FAILED {report['mode']}: {report['unaccounted']:.1%} of the wall time has no name")
    return 1 if unnamed else 0


def profile_mode(step: DecodeStep, name: str, options: argparse.Namespace, bandwidth: float) -> dict:
    """Profile one mode, print its table, write its files."""
    made = prepare(step, name)
    try:
        plain_us = wall_us(made, step.device, options.steps) / options.steps
        steps = max(options.steps, math.ceil(LEAST_WALL_US / plain_us))
        profiler, profiled_us = profiled(made, step.device, steps)
    finally:
        if made.step is not None:
            made.step.release()
    intervals = intervals_of(profiler, step.device)
    lines = account(intervals, profiled_us, steps)
    exchange, beside = overlap_us(intervals)
    floors = {phase: size / bandwidth for phase, size in step.bytes_by_phase(step.sizes.rows).items()}
    report = {
        "mode": name,
        "device": str(step.device),
        "steps": steps,
        "wall_us": profiled_us / steps,
        "wall_us_without_profiler": plain_us,
        "phases": [line._asdict() | {"floor_us": floors.get(line.phase)} for line in lines],
        "unaccounted": abs(1.0 - sum(line.share for line in lines)),
        "exchange_us": exchange / steps,
        "exchange_beside_other_work_us": beside / steps,
    }
    _print(report)
    if options.out is not None:
        from .profile_plot import plot

        profiler.export_chrome_trace(str(options.out / f"profile-{name}.trace.json"))
        plot(intervals, steps, options.out / f"profile-{name}.png", report)
    return report


def profiled(made: Prepared, device: torch.device, steps: int) -> tuple[profile, float]:
    """Run steps under the profiler. Returns it, and the wall time of all of them in microseconds."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, acc_events=True) as profiler:
        elapsed = wall_us(made, device, steps)
    return profiler, elapsed


def wall_us(made: Prepared, device: torch.device, steps: int) -> float:
    with torch.no_grad():
        synchronise(device)
        begin = time.perf_counter()
        for _ in range(steps):
            made.call()
        synchronise(device)
    return (time.perf_counter() - begin) * 1e6


def intervals_of(profiler: profile, device: torch.device) -> list[Interval]:
    """Kernels and copies of a GPU; on the CPU the operators that no other one calls."""
    events = [
        Interval(phase_of(event.name), event.time_range.start, event.time_range.end, event.name, event.thread)
        for event in profiler.events()
        if (event.device_type == DeviceType.CUDA) == (device.type == "cuda") and event.time_range.elapsed_us() > 0
    ]
    if device.type == "cuda":
        # Ranges of the user annotation kind span kernels and are none.
        return [event for event in events if not event.name.startswith(("ProfilerStep", "graph/", "## "))]
    return outermost(events, lambda event: event.name.startswith(("aten::", "torch_sparse_mla::")))


def copy_bytes_per_us(device: torch.device) -> float:
    """Bandwidth of a large copy, bytes read plus bytes written."""
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    samples = []
    for _ in range(6):
        synchronise(device)
        begin = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        samples.append((time.perf_counter() - begin) * 1e6)
    return 2 * source.numel() / statistics.median(samples[1:])


def _print(report: dict) -> None:
    rows = []
    for line in report["phases"]:
        floor = line["floor_us"]
        share = f"{floor / line['us']:.0%}" if floor and line["us"] else ""
        launches = "" if line["phase"] == IDLE else f"{line['launches']:.0f}"
        floor_text = f"{floor:.1f}" if floor else ""
        rows.append((line["phase"], f"{line['us']:.1f}", f"{line['share']:.1%}", launches, floor_text, share))
    title = (
        f"{report['mode']}: {report['wall_us']:.1f} us a step under the profiler, "
        f"{report['wall_us_without_profiler']:.1f} us without"
    )
    columns = ("phase", ">us a step", ">of wall", ">launches", ">floor us", ">floor / time")
    print_table(title, columns, rows)
    print(
        f"exchange {report['exchange_us']:.1f} us a step, of which other work runs beside "
        f"{report['exchange_beside_other_work_us']:.1f} us; without a name: {report['unaccounted']:.1%} of the wall"
    )
