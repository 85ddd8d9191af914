"""`doctor --plan`: the bytes that prefill gathers need in a configuration, before anything is allocated."""

import argparse
import dataclasses

from ..contract import check_layout, reject
from ..gather import GatherPlan, gather_capacity
from ..gather.policy import gather_bytes, ordinary_bytes
from ..gather.workspace import lane_bytes, resident_bytes, staged_lane_bytes
from ..indexer.pools import TOKENS_PER_INDEX_PAGE
from ..indexer.row_split import RowSplit
from .console import print_table

DEFAULTS = {
    "world": 4,
    "page_size": 64,
    "interleave": 4,
    "max_tokens": 524_288,
    "max_requests": 32,
    "max_rows": 8_192,
    "lanes": 1,
    "micro_batches": 1,
    "heads": 64,
    "resident_tokens": 524_288,
    "resident_requests": 32,
    "layers": 11,
    "pools": 512,
    "layout": "fp8_mla_nope",
}


def setting(text: str) -> tuple[str, int | str]:
    """One KEY=VALUE of the command line."""
    key, separator, value = text.partition("=")
    if not separator or key not in DEFAULTS:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: KEY=VALUE with KEY one of {', '.join(DEFAULTS)}")
    if key == "layout":
        return key, value
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a positive integer for {key}")
    return key, int(value)


def plan(settings: list[tuple[str, int | str]]) -> dict:
    """Sizes of a configuration as plain data. Raises ValueError for one that cannot be."""
    given = DEFAULTS | dict(settings)
    layout = check_layout("doctor --plan", given["layout"])
    world, page_size = given["world"], given["page_size"]
    if given["heads"] % world:
        reject("doctor --plan", "heads", given["heads"], f"a multiple of world = {world}")
    geometry = (world, given["interleave"], page_size)
    capacity = gather_capacity(given["max_tokens"], given["max_requests"], *geometry)
    sizes = GatherPlan(given["max_requests"], given["max_rows"], capacity, *geometry)
    lane = lane_bytes(sizes, layout.record_bytes)
    slots = given["lanes"] * given["micro_batches"]
    held = gather_capacity(given["resident_tokens"], given["resident_requests"], *geometry)
    resident_sizes = dataclasses.replace(sizes, resident=held)
    resident = resident_bytes(resident_sizes, layout.record_bytes, given["layers"])
    gathered = gather_bytes(1, layout.record_bytes, world)
    ordinary = ordinary_bytes(1, given["heads"], layout.query_dim, world)
    return {
        "settings": given,
        "capacity_records": capacity,
        "gathered_records": sizes.gathered_records,
        "padding_records": sizes.padding_unit,
        "record_bytes": layout.record_bytes,
        "lane_bytes": {"gathered": lane.gathered, "plan": lane.plan, "channel": lane.channel, "total": lane.total},
        "slots": slots,
        "total_bytes": slots * lane.total,
        "resident_records": held,
        "resident_layer_bytes": resident // given["layers"],
        "resident_bytes": given["lanes"] * resident + slots * 4 * resident_sizes.words,
        "split_selector_bytes": _split_selector_bytes(given),
        "staged_lane_bytes": staged_lane_bytes(capacity, layout.record_bytes, world, 2),
        # A slice holds a world-th of the context: the gather receives this much for each of its tokens.
        "context_per_row": round(ordinary / (gathered / world), 1) if gathered else None,
    }


def _split_selector_bytes(given: dict) -> int | None:
    """None where the pages hold no whole index pages, or these no whole runs: rows cannot be split then."""
    world, interleave, page_size = given["world"], given["interleave"], given["page_size"]
    if page_size % TOKENS_PER_INDEX_PAGE or TOKENS_PER_INDEX_PAGE % interleave or (world > 1 and interleave % 4):
        return None
    limits = (given["max_requests"], given["max_rows"], given["max_tokens"], given["pools"])
    return RowSplit(*limits, world, interleave, page_size).reserved_bytes()


def print_plan(report: dict) -> None:
    rows = [(name, str(value)) for name, value in report["settings"].items()]
    print_table("Configuration", ("setting", ">value"), rows)
    lane, layers, split = report["lane_bytes"], report["settings"]["layers"], report["split_selector_bytes"]
    sizes = [
        ("records of a rank's slice (capacity)", f"{report['capacity_records']:,}"),
        ("records of the gathered buffer", f"{report['gathered_records']:,}"),
        ("a slice is padded to a multiple of", f"{report['padding_records']:,}"),
        ("gathered buffer, bytes", f"{lane['gathered']:,}"),
        ("plan, bytes", f"{lane['plan']:,}"),
        ("channel's slabs on a GPU, bytes", f"{lane['channel']:,}"),
        ("one slot, bytes", f"{lane['total']:,}"),
        (f"all {report['slots']} slot(s) on each rank, bytes", f"{report['total_bytes']:,}"),
        ("resident buffer of one layer (incremental gather), bytes", f"{report['resident_layer_bytes']:,}"),
        (f"resident buffers of {layers} layers, all lanes, with plans, bytes", f"{report['resident_bytes']:,}"),
        ("selector with rows split by rank, bytes", "-" if split is None else f"{split:,}"),
        ("for comparison: a lane with a staging copy and depth 1, bytes", f"{report['staged_lane_bytes']:,}"),
        ("gathers pay up to this context per query row, by bytes", f"{report['context_per_row']}"),
    ]
    print_table("Prefill gather", ("what", ">value"), sizes)
