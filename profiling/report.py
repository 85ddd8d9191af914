"""Turns the files in profiling/results, and nothing else, into the README's tables and pictures.

    python profiling/report.py            # rewrite the README between its report markers, draw the pictures
    python profiling/report.py --check    # change nothing; fail where the README says something else

A table of benchmark X goes between `<!-- report:X -->` and `<!-- /report -->`.
"""

import argparse
import difflib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling import results

OURS = ("native-cuda", "triton", "native-cpu")
GATHER = "c4_prefill_gather"
INVARIANT_SUFFIX = "-batch-invariant"
LABELS = {
    "triton": "ours",
    "native-cuda": "ours",
    "native-cuda-narrow": "ours, narrow form",
    "native-cuda-wide": "ours, wide form",
    "native-cpu": "native C++",
    "flashmla": "FlashMLA",
    "gather": "gather only",
    "reference": "reference",
}
# Cells list implementations in this order.
CELL_ORDER = (*OURS, "native-cuda-narrow", "native-cuda-wide", "flashmla", "reference", "gather")
MARKER = re.compile(r"<!-- report:(?P<bench>[\w-]+) -->\n(?P<body>.*?)<!-- /report -->", re.DOTALL)
OPENING = re.compile(r"<!-- report:([\w-]+) -->")
ABSENT = "-"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the README differs")
    parser.add_argument("--readme", type=Path, default=results.ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=results.RESULTS_FOLDER, metavar="DIR")
    arguments = parser.parse_args(argv)
    before = arguments.readme.read_text()
    try:
        documents = results.load(arguments.results)
        after = render(before, documents, os.path.relpath(arguments.results, arguments.readme.parent))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.check:
        diff = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "README", "results", lineterm=""))
        print("\n".join(diff) if diff else "the README says what the results say")
        return 1 if diff else 0
    arguments.readme.write_text(after)
    from profiling.pictures import draw

    for document in filter(has_picture, documents):
        draw(document, arguments.results / picture_name(document))
    return 0


def render(readme: str, documents: list[dict], results_folder: str) -> str:
    """The README with every marked section replaced.

    Raises: ValueError for results without a marker, a marker without results, or a marker that does not close.
    """
    sections: dict[str, list[str]] = {}
    for document in documents:
        sections.setdefault(document["bench"], []).append(section(document, results_folder))
    opened, closed = OPENING.findall(readme), [match["bench"] for match in MARKER.finditer(readme)]
    if opened != closed:
        raise ValueError(f"report: README markers opened: {opened}; closed with '<!-- /report -->': {closed}")
    for bench in sections.keys() - set(opened):
        raise ValueError(f"report: results hold '{bench}', but the README has no line '<!-- report:{bench} -->'")
    for bench in set(opened) - sections.keys():
        raise ValueError(
            f"report: the README has '<!-- report:{bench} -->', but no file '{bench}-<device>.json' exists"
        )

    def replace(match: re.Match) -> str:
        body = "\n\n".join(sections[match["bench"]])
        return f"<!-- report:{match['bench']} -->\n{body}\n<!-- /report -->"

    return MARKER.sub(replace, readme)


def section(document: dict, results_folder: str) -> str:
    """Markdown of one results file."""
    makers = {
        "sparse_ckv_decode": _decode_tables,
        "records": _record_tables,
        "ce_exchange": _exchange_tables,
        "dcp_decode": _step_tables,
        GATHER: _gather_tables,
        "modes": _mode_tables,
        results.DEMO: _demo_tables,
    }
    parts = [_heading(document), *makers.get(document["bench"], _plain_table)(document)]
    if has_picture(document):
        name = picture_name(document)
        parts.append(f"![{document['bench']} on {document['device']}]({results_folder}/{name})")
    return "\n\n".join(parts)


def picture_name(document: dict) -> str:
    return f"{document['bench']}-{document['device']}.png"


def has_picture(document: dict) -> bool:
    """Whether there are enough points on a line to draw one."""
    if document["bench"] == results.DEMO:
        return len({run["context"] for run in document["runs"]}) > 1
    if document["bench"] == "modes":
        return len(timed(document)) > 1
    axes = {"sparse_ckv_decode": "rows", "records": "tokens", "ce_exchange": "rows", "dcp_decode": "rows"}
    axes |= {GATHER: "context", "c4_select": "rows"}
    axis = axes.get(document["bench"])
    return axis is not None and len({case[axis] for case in timed(document) if axis in case}) > 2


def between_processes(document: dict) -> bool:
    """Whether each rank had a process of its own."""
    return document.get("ranks") == "processes"


def timed(document: dict) -> list[dict]:
    """Cases that time the work itself, not the host's share of a call."""
    return [case for case in document["cases"] if case["mode"] != "host"]


def unique(values: Iterable) -> list:
    """Distinct values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def group_by(cases: Iterable[dict], *keys: str) -> dict[tuple, list[dict]]:
    groups: dict[tuple, list[dict]] = {}
    for case in cases:
        groups.setdefault(tuple(case[key] for key in keys), []).append(case)
    return groups


def decode_grids(document: dict) -> tuple[list[list[dict]], list[list[dict]]]:
    """Decode cases as grids of rows x heads, and the rest as lists that have rows and rows a request in common."""
    groups = group_by(timed(document), "layout", "topk", "rows_per_request").values()
    grids = [cases for cases in groups if len({case["heads"] for case in cases}) > 2]
    lines: dict[tuple, list[dict]] = {}
    for cases in groups:
        if cases not in grids:
            rows = sorted({case["rows"] for case in cases})
            lines.setdefault((cases[0]["rows_per_request"], *rows), []).extend(cases)
    return grids, list(lines.values())


def _heading(document: dict) -> str:
    if document["bench"] == results.DEMO:
        return f"**{document['device']}**"
    return (
        f"**{document['device_name']}**, {document['date']}, commit {document['commit'][:7]}, "
        f"torch {document['torch']}, triton {document['triton']}.\nCopy bandwidth in the same process: "
        f"{document['copy_tb_per_s'] * 1e3:,.0f} GB/s (bytes read plus written)."
    )


def _decode_tables(document: dict) -> list[str]:
    unit = "ms" if document["device"].startswith("cpu") else "µs"
    grids, lists = decode_grids(document)
    parts = []
    for cases in grids:
        parts += _decode_grid(cases, unit)
    for cases in lists:
        parts += _decode_lines(cases, unit)
    host = [case for case in document["cases"] if case["mode"] == "host"]
    if host:
        impls = [case["impl"] for case in host]
        times = ", ".join(f"{_label(case['impl'], impls)} {case['us']:.0f} µs" for case in host)
        parts.append(f"Host time of one eager call (1 row, 1 head, 1 record): {times}.")
    if any(case.get("padded_heads", case["heads"]) != case["heads"] for case in document["cases"]):
        parts.append("FlashMLA serves 64 or 128 heads; a call with fewer pays for 64.")
    return parts + _not_measured(document)


def _not_measured(document: dict) -> list[str]:
    missing = [f"{_label(peer)} ({state})" for peer, state in document["peers"].items() if state != "ran"]
    missing += document.get("left_out", [])
    return [f"Not measured: {'; '.join(missing)}."] if missing else []


def _decode_grid(cases: list[dict], unit: str) -> list[str]:
    heads = sorted({case["heads"] for case in cases})
    shown = [impl for impl in _impls(cases) if impl != "gather"]
    lines = []
    for (rows,), of_rows in sorted(group_by(cases, "rows").items()):
        floor = min(case["floor_us"] for case in of_rows)
        by_heads = group_by(of_rows, "heads")
        cells = [_cell(by_heads.get((count,), []), shown, unit) for count in heads]
        lines.append([str(rows), _time(floor, unit), _cell(of_rows, ["gather"], unit), *cells])
    header = ["rows", "byte floor, fewest heads", LABELS["gather"], *(f"{count} heads" for count in heads)]
    parts = [f"{_decode_title(cases[0])}: {unit}, {_legend(shown)} in each cell.", _table(header, lines)]
    invariant = [case for case in cases if case["impl"].endswith(INVARIANT_SUFFIX)]
    if invariant:
        lines = []
        for (rows,), of_rows in sorted(group_by(invariant, "rows").items()):
            by_heads = group_by(of_rows, "heads")
            cells = [_cell(by_heads.get((count,), []), unique(c["impl"] for c in of_rows), unit) for count in heads]
            lines.append([str(rows), *cells])
        parts.append(f"The same with `batch_invariant=True`: {unit}.")
        parts.append(_table(["rows", *(f"{count} heads" for count in heads)], lines))
    return parts


def _decode_lines(cases: list[dict], unit: str) -> list[str]:
    rows = sorted({case["rows"] for case in cases})
    shown = _impls(cases)
    lines = []
    for (layout, topk, heads, _), line in group_by(cases, "layout", "topk", "heads", "rows_per_request").items():
        by_rows = group_by(line, "rows")
        cells = [_cell(by_rows.get((count,), []), shown, unit) for count in rows]
        lines.append([f"`{layout}`", str(topk), str(heads), *cells])
    mtp = cases[0]["rows_per_request"]
    note = f", {mtp} rows of one request share most of their records" if mtp > 1 else ""
    header = ["layout", "top-k", "heads", *(f"{count} row{'s' if count > 1 else ''}" for count in rows)]
    return [f"{unit}, {_legend(shown)} in each cell{note}.", _table(header, lines)]


def _record_tables(document: dict) -> list[str]:
    unit = "ms" if document["device"].startswith("cpu") else "µs"
    parts = []
    for (op,), cases in group_by(timed(document), "op").items():
        tokens = sorted({case["tokens"] for case in cases})
        shown = _impls(cases)
        lines = []
        for (layout,), line in group_by(cases, "layout").items():
            by_tokens = group_by(line, "tokens")
            cells = []
            for count in tokens:
                cell = by_tokens.get((count,), [])
                cells.append(_cell(cell, shown, unit) + _share(cell, shown[0]))
            lines.append([f"`{layout}`", *cells])
        parts.append(f"`{op}`: {unit}, {_legend(shown)} in each cell, and the share of copy bandwidth of the first.")
        parts.append(_table(["layout", *(f"{count} token{'s' if count > 1 else ''}" for count in tokens)], lines))
    return parts


def exchange_cases(document: dict) -> tuple[list[dict], list[dict], list[dict]]:
    """Exchanges by themselves, exchanges beside a computation, and packing."""
    cases = timed(document)
    packs = [case for case in cases if case.get("op") == "pack"]
    besides = [case for case in cases if case.get("beside")]
    return [case for case in cases if case not in packs and case not in besides], besides, packs


def _exchange_tables(document: dict) -> list[str]:
    exchanges, besides, packs = exchange_cases(document)
    parts = [document["limits"]] if "limits" in document else []
    if exchanges:
        impls = unique(case["impl"] for case in exchanges)
        lines = []
        for (world, width, rows, layers), cases in group_by(
            exchanges, "world", "record_bytes", "rows", "layers"
        ).items():
            union = next((case["union"] for case in cases if "union" in case), ABSENT)
            cells = [_cell(cases, [impl], "µs") for impl in impls]
            lines.append([str(world), str(width), str(rows), str(layers), f"{union:,.0f}", *cells])
        header = ["ranks", "record bytes", "rows", "layers", "records in the unions", *map(_label, impls)]
        placed = "; `placed` into workspaces that peers write" if any(i.endswith("-placed") for i in impls) else ""
        parts += [f"Exchanges, µs; `per-layer` moves the layers singly{placed}.", _table(header, lines)]
    if besides:
        parts += _beside_table(besides)
    if packs:
        lines = []
        for (width, records), cases in group_by(packs, "record_bytes", "records").items():
            us = {case["impl"]: case["us"] for case in cases}
            share = f"{us['copy'] / us['pack']:.0%}" if {"copy", "pack"} <= us.keys() else ABSENT
            times = [_time(us[impl], "µs") if impl in us else ABSENT for impl in ("pack", "pack-nothing", "copy")]
            lines.append([str(width), f"{records:,}", *times, share])
        parts.append(
            "One rank alone, µs: its records from cache to workspace (with the two launches of any exchange), the same "
            "with an empty plan, and a plain copy of as many bytes."
        )
        parts.append(_table(["record bytes", "records", "pack", "empty plan", "copy", "copy / pack"], lines))
    return parts + _not_measured(document)


def _beside_table(cases: list[dict]) -> list[str]:
    """How long a computation takes with three layers travelling beside it, and how much of that is exposed."""
    lines = []
    for (beside, world, rows), of_shape in group_by(cases, "beside", "world", "rows").items():
        alone = next((case for case in of_shape if case["impl"].endswith(" alone")), None)
        for case in of_shape:
            computed, exposed = case.get("compute_us"), ABSENT
            slower = ABSENT
            if alone is not None and case is not alone:
                exposed = _time(max(case["us"] - alone["us"], 0.0), "µs")
                if computed is not None and alone.get("compute_us"):
                    slower = f"{computed / alone['compute_us'] - 1:+.1%}"
            shown = ABSENT if computed is None else _time(computed, "µs")
            lines.append([beside, str(world), str(rows), case["impl"], _time(case["us"], "µs"), shown, slower, exposed])
    note = (
        f"Three layers of {cases[0]['record_bytes']}-byte records that travel beside a computation, µs: all of it, the "
        "computation by itself and how much slower than alone, and what the exchange adds to the whole."
    )
    header = ["beside", "ranks", "rows", "what runs", "all", "computation", "slower by", "exposed"]
    return [note, _table(header, lines)]


def _step_tables(document: dict) -> list[str]:
    parts = [document["limits"]] if "limits" in document else []
    for (layout, world), cases in group_by(timed(document), "layout", "world").items():
        impls = unique(case["impl"] for case in cases if case["impl"] != "auto")
        lines = []
        for (rows,), of_rows in sorted(group_by(cases, "rows").items()):
            cells = [_cell(of_rows, [impl], "µs") for impl in impls]
            auto = next((case for case in of_rows if case["impl"] == "auto"), None)
            chosen = ABSENT if auto is None else f"{auto['chosen']} {_time(auto['us'], 'µs')}"
            behind = f" ({auto['behind_best']:+.0%})" if auto is not None and "behind_best" in auto else ""
            lines.append([str(rows), f"{of_rows[0]['union']:,.0f}", *cells, chosen + behind])
        first = cases[0]
        parts.append(
            f"`{layout}`, {world} ranks, {first['heads']} heads on each, top-k {first['topk']}: µs a layer, of a Full "
            f"layer and {first['shared_layers']} Shared layers; what `auto` chose, and how far it is from the best."
        )
        parts.append(_table(["rows", "records in the unions", *impls, "auto"], lines))
    return parts


def _gather_tables(document: dict) -> list[str]:
    """Gathers between processes: what a rank has to receive, the time, and how much of the link comes to use."""
    if not between_processes(document):
        return _plain_table(document)
    cases = timed(document)
    impls = unique(case["impl"] for case in cases)
    lines = []
    for (op, rows, context), of_shape in sorted(group_by(cases, "op", "rows", "context").items()):
        cells = [_cell(of_shape, [impl], "µs") + _share(of_shape, impl) for impl in impls]
        sizes = [f"{of_shape[0][name] / 2**20:,.2f}" for name in ("received_bytes", "ordinary_received_bytes")]
        lines.append([gather_form(op), f"{rows:,}", f"{context:,}", *sizes, *cells])
    link = document.get("link_tb_per_s")
    note = f"A chunk at the end of a prompt on {cases[0]['world']} ranks, `{cases[0]['layout']}`, µs"
    if link is not None:
        note += (
            ", and the share of the link: the bytes that a rank has to receive, by the time, by the rate of a plain "
            f"copy to a peer's memory, {link * 1e3:,.0f} GB/s"
        )
    header = ["records", "rows", "context", "MiB received", "ordinary DCP, MiB", *impls]
    return [document["limits"], f"{note}.", _table(header, lines), *_not_measured(document)]


def gather_form(op: str) -> str:
    return "all" if op == GATHER else "new ones"


def _plain_table(document: dict) -> list[str]:
    """One line for each shape, one column for each implementation: for benchmarks without a table of their own."""
    impls = unique(case["impl"] for case in document["cases"])
    shapes: dict[tuple, list[dict]] = {}
    for case in document["cases"]:
        # A case starts with its shape's fields: `make_case` puts them first.
        shapes.setdefault(tuple(itertools.takewhile(lambda item: item[0] != "impl", case.items())), []).append(case)
    names = unique(name for shape in shapes for name, _ in shape)
    lines = [
        [*(str(dict(shape).get(name, ABSENT)) for name in names), *(_cell(cases, [impl], "µs") for impl in impls)]
        for shape, cases in shapes.items()
    ]
    return ["µs.", _table([*names, *map(_label, impls)], lines)]


def _mode_tables(document: dict) -> list[str]:
    """A line for each mode: what a step costs the host and from one idle device to the next, launches, memory."""
    parts = []
    for sizes, cases in group_by(document["cases"], "rows", "heads", "topk", "layout", "world", "hidden").items():
        rows, heads, topk, layout, world, hidden = sizes
        lines = []
        for (impl,), of in group_by(cases, "impl").items():
            host, step = (next(case for case in of if case["mode"] == mode) for mode in ("host", "call"))
            counts = [ABSENT if step[name] is None else str(step[name]) for name in ("host_calls", "launches")]
            memory = f"{step['graph_bytes'] / 2**20:.0f}"
            lines.append([impl, _time(host["us"], "µs"), _time(step["us"], "µs"), *counts, memory])
        sentence = (
            f"A step of four layers, {rows} rows, {heads} heads, top-k {topk}, `{layout}`, hidden width {hidden}, "
            f"{world} loopback ranks in turn, µs:"
        )
        header = ["mode", "host", "step", "launches by the host", "kernels", "graphs, MiB"]
        parts += [sentence, _table(header, lines)]
    return parts


def _demo_tables(document: dict) -> list[str]:
    runs = document["runs"]
    contexts = sorted({run["context"] for run in runs})
    lines = []
    for key, line in group_by(runs, "model", "layout", "mode", "world", "strategy").items():
        model, layout, mode, world, strategy = key
        equal = sum(run["tokens_equal"] for run in line)
        by_context = group_by(line, "context")
        lines.append(
            [
                model,
                f"`{layout}`",
                f"{mode}, {world} rank{'s' if world > 1 else ''}, {strategy}",
                f"{equal} of {len(line)}",
                f"{max(run['max_logit_diff'] for run in line):.1e}",
                _bytes_per_token(line[0]),
                *(_demo_cell(by_context.get((context,), [])) for context in contexts),
            ]
        )
    header = ["model", "layout", "how", "same tokens", "logits differ by", "bytes a token"]
    header += [f"context {context}" for context in contexts]
    note = "Milliseconds a token through the operators, and the speed-up over Transformers alone, at each context."
    return [note, _table(header, lines)]


def _demo_cell(runs: list[dict]) -> str:
    if not runs:
        return ABSENT
    speedup = f" ({runs[0]['speedup']:.2f}x)" if runs[0]["speedup"] is not None else ""
    return _significant(runs[0]["ms_per_token"]) + speedup


def _bytes_per_token(run: dict) -> str:
    reference = run["reference_bytes_per_token"]
    return f"{run['record_bytes_per_token']:,}" + (f" (was {reference:,})" if reference is not None else "")


def _impls(cases: list[dict]) -> list[str]:
    present = {case["impl"] for case in cases}
    return [impl for impl in CELL_ORDER if impl in present]


def _label(impl: str, among: Sequence[str] = ()) -> str:
    """`among`: what it is shown with. Beside our native CUDA kernel the portable one goes by its own name."""
    if impl.endswith(INVARIANT_SUFFIX):
        return f"{_label(impl.removesuffix(INVARIANT_SUFFIX), among)}, batch-invariant"
    if impl == "triton" and "native-cuda" in among:
        return "Triton"
    return LABELS.get(impl, impl)


def _legend(impls: list[str]) -> str:
    return " / ".join(_label(impl, impls) for impl in impls)


def _cell(cases: list[dict], impls: list[str], unit: str) -> str:
    """Times of some implementations; of several cases of one implementation the fastest."""
    times = [[case["us"] for case in cases if case["impl"] == impl] for impl in impls]
    return " / ".join(_time(min(of_impl), unit) if of_impl else ABSENT for of_impl in times)


def _share(cases: list[dict], impl: str) -> str:
    shares = [case["floor_us"] / case["us"] for case in cases if case["impl"] == impl and case["floor_us"]]
    if not shares:
        return ""
    return f" ({shares[0]:.0%})" if shares[0] >= 0.01 else " (<1%)"


def _decode_title(case: dict) -> str:
    return f"`{case['layout']}`, top-k {case['topk']}"


def _time(us: float, unit: str) -> str:
    return _significant(us / 1e3 if unit == "ms" else us)


def _significant(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _table(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---:" if cell[:1].isdigit() or cell == ABSENT else "---" for cell in lines[0]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *lines])


if __name__ == "__main__":
    sys.exit(main())
