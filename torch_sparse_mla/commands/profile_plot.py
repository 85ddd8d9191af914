"""The picture of `profile`: one step on the device, a lane for each phase, exchange against compute."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .timeline import EXCHANGE_PHASES, Interval

INK, GREY, FAINT = "#222222", "#8a8a8a", "#e6e6e6"
EXCHANGE, COMPUTE, OTHER = "#d1495b", "#0b5fa5", "#8a8a8a"


def plot(intervals: Sequence[Interval], steps: int, path: Path, report: dict) -> None:
    """Draw the last of the profiled steps. Each takes as many intervals as any other."""
    ordered = sorted(intervals, key=lambda interval: interval.begin)
    one = ordered[-(len(ordered) // steps) :]
    origin = one[0].begin
    phases = list(dict.fromkeys(interval.phase for interval in one))
    figure, axis = plt.subplots(figsize=(11, 0.4 * len(phases) + 1.6), layout="constrained")
    for lane, phase in enumerate(phases):
        bars = [(i.begin - origin, i.end - i.begin) for i in one if i.phase == phase]
        axis.broken_barh(bars, (lane - 0.36, 0.72), facecolors=_color(phase), linewidth=0)
    axis.set_yticks(range(len(phases)), phases, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel("us")
    axis.grid(True, axis="x", color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.set_title(
        f"One step, {report['mode']}, {report['device']}: {report['exchange_us']:.0f} us of exchange (red), beside "
        f"{report['exchange_beside_other_work_us']:.0f} us of which other work runs",
        loc="left",
        fontsize=10,
        color=INK,
    )
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def _color(phase: str) -> str:
    if phase.startswith(EXCHANGE_PHASES):
        return EXCHANGE
    return COMPUTE if "/" in phase or phase == "projections" else OTHER
