"""What `auto` would choose from measured figures of links and kernels, where every strategy was measured too.

The figures are those of profiling/results: two H200s for exchanges and whole steps, one H200 for kernels. No figure is
there of the attention alone for owner_merge and peer_read: it is what is left of a step without its moves. Nor is there
one of what patching costs: it is what is left of the step of one row.
"""

import functools
import json
import pathlib

import pytest

from torch_sparse_mla import LAYOUTS
from torch_sparse_mla.dcp import LinkCosts
from torch_sparse_mla.dcp.costs import Sizes, predict

RESULTS = pathlib.Path(__file__).parents[2] / "profiling" / "results"
AIM = 1.05
SHAPE = ("rows", "layout")


def cases(name: str, **wanted: object) -> list[dict]:
    found = json.loads((RESULTS / f"{name}.json").read_text())["cases"]
    return [case for case in found if wanted.items() <= case.items()]


def us(name: str, **wanted: object) -> float:
    (case,) = cases(name, **wanted)
    return case["us"]


def step_us(shape: dict, impl: str) -> float:
    return us("dcp_decode-nvidia-h200-x2", impl=impl, **shape)


def link() -> tuple[float, float]:
    """Hop, and time of a byte, from the smallest and the largest exchange of one layer, written where it is read."""
    exchanges = cases("ce_exchange-nvidia-h200-x2", impl="direct-placed", layers=1, record_bytes=656)
    least, most = (pick(exchanges, key=lambda case: case["bytes"]) for pick in (min, max))
    us_per_byte = (most["us"] - least["us"]) / (most["bytes"] - least["bytes"])
    return least["us"] - least["bytes"] * us_per_byte, us_per_byte


def sizes_of(case: dict) -> Sizes:
    layout = LAYOUTS[case["layout"]]
    return Sizes(
        world=case["world"],
        requests=case["rows"] // case["rows_per_request"],
        rows_per_request=case["rows_per_request"],
        heads=case["heads"],
        topk=case["topk"],
        record_bytes=layout.record_bytes,
        query_bytes=layout.query_dim * 2,
        partial_bytes=512 * 2 + 4,
        shared_layers=case["shared_layers"],
    )


def plan_us(rows: int) -> float:
    """Of the next larger shape."""
    plans = cases("plan_selection-nvidia-h200", world=1, mode="graph")
    return min((case for case in plans if case["rows"] >= rows), key=lambda case: case["rows"])["us"]


@functools.cache
def patch_us() -> float:
    (case,) = (case for case in STEPS if case["rows"] == 1 and case["layout"] == "fp8_ds_mla")
    sizes = sizes_of(case)
    rows = {row.strategy: row.us_per_layer for row in predict(sizes, costs_of(case, sizes, 0.0))}
    measured = step_us({key: case[key] for key in SHAPE}, "exchange_bulk direct")
    return (1 + sizes.shared_layers) * (measured - rows["exchange_bulk"])


def costs_of(case: dict, sizes: Sizes, patch: float) -> LinkCosts:
    shape = {key: case[key] for key in SHAPE}
    hop, us_per_byte = link()
    timed = {"impl": "native-cuda", "heads": 16, "topk": 2048, "rows_per_request": 1}
    attend = cases("sparse_ckv_decode-nvidia-h200", **timed, **shape)
    plan = plan_us(case["rows"])
    if attend:
        attend_local = attend[0]["us"]
    else:
        # A layout whose attention was not timed by itself: what is left of a step of the exchange.
        moved = next(row for row in predict(sizes, LinkCosts(0, us_per_byte, 0, 0)) if row.strategy == "exchange")
        attend_local = step_us(shape, "exchange direct") - hop - moved.us_per_layer - plan / (1 + sizes.shared_layers)
    return LinkCosts(
        hop_us=hop,
        us_per_byte=us_per_byte,
        attend_local_us=attend_local,
        attend_owner_us=step_us(shape, "owner_merge direct") - step_us(shape, "owner_merge traffic direct"),
        attend_peers_us=step_us(shape, "peer_read direct") - hop,
        plan_us=plan,
        patch_us=patch,
    )


STEPS = cases("dcp_decode-nvidia-h200-x2", impl="auto")


@pytest.mark.parametrize("case", STEPS, ids=[f"{case['rows']}-{case['layout']}" for case in STEPS])
def test_auto_is_within_5_percent_of_the_best(case):
    shape, sizes = {key: case[key] for key in SHAPE}, sizes_of(case)
    table = predict(sizes, costs_of(case, sizes, patch_us()))
    chosen = min(table, key=lambda row: row.us_per_layer)
    measured = {row.strategy: step_us(shape, f"{row.strategy} direct") for row in table}
    assert measured[chosen.strategy] <= AIM * min(measured.values()), (chosen, measured)


def test_owner_merge_is_predicted_as_it_was_measured():
    """Its moves are what was overestimated, two to one."""
    for case in STEPS:
        sizes = sizes_of(case)
        rows = {row.strategy: row.us_per_layer for row in predict(sizes, costs_of(case, sizes, patch_us()))}
        measured = step_us({key: case[key] for key in SHAPE}, "owner_merge direct")
        assert rows["owner_merge"] == pytest.approx(measured, rel=0.1), case["rows"]


def test_there_are_steps_on_both_sides_of_the_crossover():
    best = set()
    for case in STEPS:
        impls = cases("dcp_decode-nvidia-h200-x2", **{key: case[key] for key in SHAPE})
        direct = [other for other in impls if other["impl"].endswith(" direct") and "traffic" not in other["impl"]]
        best.add(min(direct, key=lambda other: other["us"])["impl"])
    assert {"owner_merge direct", "exchange_bulk direct"} <= best
