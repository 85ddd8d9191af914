"""The demo's picture: time per token against context, a panel for each model."""

import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

MARKERS = "osD^vP*"


def plot(runs: list[dict], path: Path, device: str) -> None:
    """Draw runs of `demo` into a PNG file: both axes logarithmic, Transformers dashed, a line for each layout."""
    models = list(dict.fromkeys(run["model"] for run in runs))
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(4.2 * len(models) + 0.6, 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    for model, axis in zip(models, axes[0], strict=True):
        _draw_panel(axis, model, [run for run in runs if run["model"] == model])
    times = [run[field] for run in runs for field in ("ms_per_token", "reference_ms_per_token")]
    axes[0][0].set_ylim(min(times) / 3, max(times) * 2)
    axes[0][0].set_ylabel("time per token (ms)")
    figure.suptitle(f"One decode step, greedy, batch 1\n{device}", fontsize=10)
    figure.savefig(path, dpi=160, format="png")
    pyplot.close(figure)


def _draw_panel(axis, model: str, runs: list[dict]) -> None:
    contexts = sorted({run["context"] for run in runs})
    reference = {run["context"]: run["reference_ms_per_token"] for run in runs}
    axis.plot(contexts, [reference[context] for context in contexts], "k--", marker="s", label="Transformers (sdpa)")
    kinds = dict.fromkeys((run["layout"], run["world"], run["strategy"]) for run in runs)
    for marker, kind in zip(itertools.cycle(MARKERS), kinds, strict=False):
        own = [run for run in runs if (run["layout"], run["world"], run["strategy"]) == kind]
        times = {run["context"]: run["ms_per_token"] for run in own}
        layout, world, strategy = kind
        label = layout if strategy == "local" else f"{layout}, {strategy} over {world}"
        axis.plot(contexts, [times[context] for context in contexts], marker=marker, alpha=0.8, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(contexts)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_title(model)
    axis.set_xlabel("context (tokens)")
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=7, loc="lower left", ncols=2)
