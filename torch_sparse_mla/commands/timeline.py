"""Where the time of profiled steps went: intervals of work by phase, and what lies between them. Plain Python."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .. import trace

IDLE = "between kernels"
PROJECTIONS = "projections"
GLUE = "glue"
EXCHANGE_PHASES = ("ce_exchange/",)
# On the CPU an operator is one event.
_OPERATOR_PHASES = {
    "write_ckv_records": "write_ckv_records/write",
    "sparse_ckv_decode": "sparse_ckv_decode/attend",
    "ce_exchange_start": "ce_exchange/pack",
    "ce_exchange_wait": "ce_exchange/arrival",
}
_MATRIX = re.compile(r"nvjet|gemm|gemv|cutlass|cublas|splitKreduce|aten::(mm|matmul|addmm|bmm|linear)$", re.IGNORECASE)
_GLUE = re.compile(r"^triton_|at::native|at_cuda_detail|vectorized_|elementwise|reduce_kernel|^aten::|^void ")


class Interval(NamedTuple):
    """Work on the device: microseconds from any origin."""

    phase: str
    begin: float
    end: float
    name: str = ""
    stream: int = 0


class PhaseTime(NamedTuple):
    """A line of the table: microseconds and launches of one step.

    Attributes:
        us: in which the phase ran, alone or with others. alone_us: in which it did not share the device.
        share: its part of the wall, where every moment counts once.
    """

    phase: str
    us: float
    alone_us: float
    share: float
    launches: float


def phase_of(name: str) -> str:
    """The phase of a kernel or CPU operator by name: of the package, a matrix product, glue, or its own name."""
    if name.startswith("torch_sparse_mla::"):
        op = name.removeprefix("torch_sparse_mla::")
        return _OPERATOR_PHASES.get(op, f"{op}/call")
    phase = trace.phase_of_kernel(name)
    if phase is not None:
        return phase
    if _MATRIX.search(name):
        return PROJECTIONS
    return GLUE if _GLUE.search(name) else f"other: {name[:40]}"


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of (begin, end) pairs, sorted, without overlap."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        elif end > begin:
            union.append((begin, end))
    return union


def length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)


def intersection(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Length of what two unions share."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]), 0.0)
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return total


def account(intervals: Sequence[Interval], wall_us: float, steps: int) -> list[PhaseTime]:
    """Each phase's time in a step, longest first, then the time between the first and the last in which nothing runs.

    Where phases overlap, each has its own time, and the moment is split evenly for the shares. So shares sum to the
    part of the wall that the timeline covers: 1 where nothing is missing.
    """
    if not intervals:
        return []
    by_phase: dict[str, list[Interval]] = {}
    for interval in intervals:
        by_phase.setdefault(interval.phase, []).append(interval)
    unions = {phase: merged((i.begin, i.end) for i in of) for phase, of in by_phase.items()}
    shares, alone = _split_evenly(unions)
    lines = [
        PhaseTime(
            phase,
            length(unions[phase]) / steps,
            alone[phase] / steps,
            shares[phase] / wall_us,
            len(of) / steps,
        )
        for phase, of in by_phase.items()
    ]
    busy = length(merged((i.begin, i.end) for i in intervals))
    idle = max(i.end for i in intervals) - min(i.begin for i in intervals) - busy
    lines.sort(key=lambda line: -line.us)
    return [*lines, PhaseTime(IDLE, idle / steps, idle / steps, idle / wall_us, 0)]


def overlap_us(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Time of exchange, and how much of it other work runs beside."""
    exchange = merged((i.begin, i.end) for i in intervals if i.phase.startswith(EXCHANGE_PHASES))
    others = merged((i.begin, i.end) for i in intervals if not i.phase.startswith(EXCHANGE_PHASES))
    return length(exchange), intersection(exchange, others)


def outermost(intervals: Sequence[Interval], keep: Callable[[Interval], bool]) -> list[Interval]:
    """Of nested intervals on one stream those that are kept and lie in no other that is."""
    kept: list[Interval] = []
    for interval in sorted(filter(keep, intervals), key=lambda i: (i.stream, i.begin, -i.end)):
        if not kept or kept[-1].stream != interval.stream or interval.begin >= kept[-1].end:
            kept.append(interval)
    return kept


def _split_evenly(unions: dict[str, list[tuple[float, float]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Each phase's part of the time in which anything runs, and the time in which it runs alone."""
    edges = sorted(
        (moment, kind, phase)
        for phase, union in unions.items()
        for begin, end in union
        for moment, kind in ((begin, 1), (end, 0))
    )
    shares, alone = dict.fromkeys(unions, 0.0), dict.fromkeys(unions, 0.0)
    running: set[str] = set()
    last = 0.0
    for moment, kind, phase in edges:
        for active in running:
            shares[active] += (moment - last) / len(running)
        if len(running) == 1:
            alone[next(iter(running))] += moment - last
        last = moment
        (running.add if kind else running.discard)(phase)
    return shares, alone
