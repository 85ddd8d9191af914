"""The report's pictures: time against size on logarithmic axes, lines labelled where they end."""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from . import results
from .report import GATHER, OURS, between_processes, decode_grids, exchange_cases, gather_form, group_by, timed, unique

INK, GREY, FAINT = "#222222", "#8a8a8a", "#e6e6e6"
PALETTE = ("#0b5fa5", "#d1495b", "#2a9d5c", "#8c5fbf", "#c98a00", "#3aa6b9", "#7a5230")
STYLES = {
    "ours": {"color": PALETTE[0], "linewidth": 2.4, "marker": "o"},
    "FlashMLA": {"color": PALETTE[1], "linewidth": 1.8, "marker": "s"},
    "reference": {"color": PALETTE[1], "linewidth": 1.8, "marker": "s"},
    "gather only": {"color": GREY, "linewidth": 1.6, "marker": None},
    "Transformers alone": {"color": INK, "linewidth": 1.8, "marker": "s"},
    "link": {"color": GREY, "linewidth": 1.2, "linestyle": (0, (4, 3)), "marker": None},
    "byte floor": {"color": GREY, "linewidth": 1.2, "linestyle": (0, (4, 3)), "marker": None},
}
LABEL_POINTS = 9
COLUMNS = 3
PANEL_INCHES = (4.0, 3.4)
RC = {
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(document: dict, path: Path) -> None:
    """Draw the picture of one results document as a PNG file."""
    makers = {
        "sparse_ckv_decode": _draw_decode,
        "records": _draw_records,
        "ce_exchange": _draw_exchange,
        "dcp_decode": _draw_steps,
        GATHER: _draw_gather if between_processes(document) else _draw_gather_on_one,
        "c4_select": _draw_select,
        "modes": _draw_modes,
        results.DEMO: _draw_demo,
    }
    with plt.rc_context(RC):
        figure = makers[document["bench"]](document)
        figure.savefig(path, dpi=150, metadata={"Software": None})
        plt.close(figure)


def _draw_decode(document: dict) -> Figure:
    grids, lists = decode_grids(document)
    cases = grids[0] if grids else max(lists, key=len)
    panels = sorted(group_by(cases, "heads").items())
    title = f"sparse_ckv_decode, {cases[0]['layout']}, top-k {cases[0]['topk']}, {document['device_name']}"
    figure, axes = _panels(len(panels), title, "rows in a call", "time of a call, µs")
    for axis, ((heads,), of_heads) in zip(axes, panels, strict=True):
        _lines(axis, _decode_lines(of_heads), f"{heads} heads")
    return figure


def _decode_lines(cases: list[dict]) -> dict[str, dict[int, float]]:
    by_impl = {impl: {case["rows"]: case["us"] for case in of} for (impl,), of in group_by(cases, "impl").items()}
    ours = next((impl for impl in OURS if impl in by_impl), None)
    named = {"ours": ours, "FlashMLA": "flashmla", "reference": "reference", "gather only": "gather"}
    lines = {label: by_impl[impl] for label, impl in named.items() if impl in by_impl}
    lines["byte floor"] = {case["rows"]: case["floor_us"] for case in cases if case["floor_us"]}
    return lines


def _draw_records(document: dict) -> Figure:
    panels = list(group_by(timed(document), "op").items())
    title = f"CKV records, {document['device_name']}"
    figure, axes = _panels(len(panels), title, "tokens in a call", "time of a call, µs")
    for axis, ((op,), cases) in zip(axes, panels, strict=True):
        impl = next((impl for impl in OURS if any(case["impl"] == impl for case in cases)), "reference")
        by_layout = group_by((case for case in cases if case["impl"] == impl), "layout")
        lines = {layout: {case["tokens"]: case["us"] for case in of} for (layout,), of in by_layout.items()}
        _lines(axis, lines, op)
    return figure


def _draw_exchange(document: dict) -> Figure:
    """The widest records, a panel for each number of ranks and layers."""
    exchanges, _, _ = exchange_cases(document)
    widest = max(case["record_bytes"] for case in exchanges)
    panels = group_by((case for case in exchanges if case["record_bytes"] == widest), "world", "layers")
    title = f"exchange of {widest}-byte records, {document['device_name']}"
    figure, axes = _panels(len(panels), title, "rows", "time of an exchange, µs")
    for axis, ((world, layers), cases) in zip(axes, panels.items(), strict=True):
        _lines(axis, _by_impl(cases), f"{world} ranks, {layers} layer{'s' if layers > 1 else ''}")
    return figure


def _draw_steps(document: dict) -> Figure:
    panels = group_by((case for case in timed(document) if "traffic" not in case["impl"]), "world", "layout")
    title = f"DCP decode step, {document['device_name']}"
    figure, axes = _panels(len(panels), title, "rows", "time of a layer, µs")
    for axis, ((world, layout), cases) in zip(axes, panels.items(), strict=True):
        _lines(axis, _by_impl(cases), f"{layout}, {world} ranks")
    return figure


def _draw_gather(document: dict) -> Figure:
    """A panel for each form and number of rows; the last line is what the link alone would take."""
    panels = sorted(group_by(timed(document), "op", "rows").items())
    title = f"prefill gather, {panels[0][1][0]['world']} ranks, {document['device_name']}"
    figure, axes = _panels(len(panels), title, "context, tokens", "time of a gather, µs")
    for axis, ((op, rows), cases) in zip(axes, panels, strict=True):
        lines = _by_impl(cases, "context")
        link = {case["context"]: case["floor_us"] for case in cases if case["floor_us"]}
        _lines(axis, lines | ({"link": link} if link else {}), f"{gather_form(op)}, {rows:,} rows")
    return figure


def _draw_gather_on_one(document: dict) -> Figure:
    """A panel for each form, number of ranks and of rows; with one rank the last line is the byte floor."""
    gathers = [case for case in timed(document) if case["op"] in (GATHER, "incremental_gather")]
    panels = group_by(gathers, "op", "world", "rows")
    title = f"prefill gather, ranks of one {document['device_name']}"
    figure, axes = _panels(len(panels), title, "context, tokens", "time of a gather, µs")
    for axis, ((op, world, rows), cases) in zip(axes, panels.items(), strict=True):
        floor = {case["context"]: case["floor_us"] for case in cases if world == 1}
        lines = _by_impl(cases, "context") | ({"byte floor": floor} if floor else {})
        _lines(axis, lines, f"{gather_form(op)}, {world} rank(s), {rows:,} rows")
    return figure


def _draw_select(document: dict) -> Figure:
    """A panel for each context, of one rank."""
    panels = dict(sorted(group_by((case for case in timed(document) if "op" not in case), "context").items()))
    figure, axes = _panels(len(panels), f"c4_select, {document['device_name']}", "rows", "time of a call, µs")
    for axis, ((context,), cases) in zip(axes, panels.items(), strict=True):
        _lines(axis, _by_impl(cases), f"{context:,} tokens of context")
    return figure


def _by_impl(cases: list[dict], size: str = "rows") -> dict[str, dict[int, float]]:
    of_impl = group_by(cases, "impl").items()
    return {("ours" if impl in OURS else impl): {case[size]: case["us"] for case in of} for (impl,), of in of_impl}


def _draw_modes(document: dict) -> Figure:
    """Two bars for each mode: the host's time, and that of the whole step."""
    figure, axis = plt.subplots(figsize=(7.0, 3.2), layout="constrained")
    axis.set_title(f"One step of four layers, {document['device_name']}", loc="left", fontsize=12, color=INK)
    names = unique(case["impl"] for case in document["cases"])
    for offset, mode, label, color in ((-0.2, "host", "host", PALETTE[1]), (0.2, "call", "step", PALETTE[0])):
        times = [next(c["us"] for c in document["cases"] if (c["impl"], c["mode"]) == (name, mode)) for name in names]
        bars = axis.bar([position + offset for position in range(len(names))], times, 0.36, color=color, label=label)
        axis.bar_label(bars, [f"{us:,.0f}" for us in times], fontsize=LABEL_POINTS, color=INK)
    axis.set_xticks(range(len(names)), names)
    axis.set_yscale("log")
    axis.set_ylabel("µs")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.legend(frameon=False)
    return figure


def _draw_demo(document: dict) -> Figure:
    panels = list(group_by(document["runs"], "model").items())
    title = f"Transformers through the operators, {document['device']}"
    figure, axes = _panels(len(panels), title, "context, tokens", "time of a token, ms")
    layouts = unique(run["layout"] for run in document["runs"])
    for axis, ((model,), runs) in zip(axes, panels, strict=True):
        lines, colors = {}, {}
        for (layout, mode, world, strategy), of in group_by(runs, "layout", "mode", "world", "strategy").items():
            name = " ".join([layout, mode, *([f"{world} ranks {strategy}"] if world > 1 else [])])
            lines[name] = {run["context"]: run["ms_per_token"] for run in of}
            colors[name] = PALETTE[layouts.index(layout) % len(PALETTE)]
        alone = [run for run in runs if run["reference_ms_per_token"] is not None]
        if alone:
            lines["Transformers alone"] = {
                context: min(run["reference_ms_per_token"] for run in of)
                for (context,), of in group_by(alone, "context").items()
            }
        _lines(axis, lines, model, colors)
    return figure


def _panels(count: int, title: str, x_label: str, y_label: str) -> tuple[Figure, list[Axes]]:
    columns = min(count, COLUMNS)
    lines = -(-count // columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines + 0.4)
    figure, grid = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    for position, axis in enumerate(axes[:count]):
        axis.set_xlabel(x_label if position + columns >= count else "")
        axis.set_ylabel(y_label if position % columns == 0 else "")
    return figure, axes[:count]


def _lines(axis: Axes, lines: dict[str, dict[int, float]], title: str, colors: dict[str, str] | None = None) -> None:
    """Draw lines of one panel: each name in its own style, its given colour, or the next of the palette."""
    axis.set_title(title, loc="left", fontsize=10, color=INK)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(True, which="major", color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.xaxis.set_major_formatter(FuncFormatter(_binary))
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_minor_formatter(NullFormatter())
    axis.tick_params(which="minor", length=0)
    ends = {}
    for position, (name, points) in enumerate(lines.items()):
        color = (colors or {}).get(name, PALETTE[position % len(PALETTE)])
        style = STYLES.get(name, {"color": color, "linewidth": 1.8, "marker": "o"})
        xs = sorted(points)
        axis.plot(xs, [points[x] for x in xs], markersize=4, clip_on=False, **style)
        ends[name] = (xs[-1], points[xs[-1]], style["color"])
    xs = unique(x for points in lines.values() for x in points)
    axis.set_xticks(sorted(xs) if len(xs) <= 8 else sorted(xs)[::2])
    _label_ends(axis, ends)


def _binary(value: float, _: int) -> str:
    """4096 as 4k, 65536 as 64k."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def _label_ends(axis: Axes, ends: dict[str, tuple[float, float, str]]) -> None:
    """Write each line's name beside its last point, moved apart where two would overlap."""
    low, high = axis.get_ylim()
    points_high = axis.get_position().height * axis.figure.get_size_inches()[1] * 72
    least_gap = LABEL_POINTS * 1.25 * math.log(high / low) / points_high
    names = sorted(ends, key=lambda name: ends[name][1])
    heights = spread([math.log(ends[name][1]) for name in names], least_gap)
    for name, height in zip(names, heights, strict=True):
        x, _, color = ends[name]
        axis.annotate(
            name,
            (x, math.exp(height)),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=LABEL_POINTS,
            color=color,
            annotation_clip=False,
        )


def spread(sorted_values: list[float], least_gap: float) -> list[float]:
    """Move values apart to at least `least_gap`, each cluster around its own middle."""
    clusters = [[value] for value in sorted_values]

    def placed(cluster: list[float]) -> list[float]:
        middle = sum(cluster) / len(cluster)
        return [middle + (position - (len(cluster) - 1) / 2) * least_gap for position in range(len(cluster))]

    position = 0
    while position + 1 < len(clusters):
        if placed(clusters[position + 1])[0] - placed(clusters[position])[-1] < least_gap - 1e-12:
            clusters[position : position + 2] = [clusters[position] + clusters[position + 1]]
            position = max(position - 1, 0)
        else:
            position += 1
    return [value for cluster in clusters for value in placed(cluster)]
