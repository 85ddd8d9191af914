"""Accounting of intervals: every moment once, overlap, nesting."""

import pytest

from torch_sparse_mla.commands.timeline import (
    GLUE,
    IDLE,
    PROJECTIONS,
    Interval,
    account,
    intersection,
    length,
    merged,
    outermost,
    overlap_us,
    phase_of,
)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("_push_kernel", "ce_exchange/pack"),
        ("torch_sparse_mla::ce_exchange_wait", "ce_exchange/arrival"),
        ("torch_sparse_mla::plan_selection", "plan_selection/call"),
        ("Memcpy PtoP (Device -> Device)", "ce_exchange/copy"),
        ("Memcpy DtoD (Device -> Device)", "device/copy"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", PROJECTIONS),
        ("void gemv2T_kernel_val<int, float>", PROJECTIONS),
        ("aten::mm", PROJECTIONS),
        ("triton_poi_fused_add_0", GLUE),
        ("void at::native::vectorized_elementwise_kernel<4>", GLUE),
        ("aten::add", GLUE),
        ("somebody_elses", "other: somebody_elses"),
    ],
)
def test_names_become_phases(name, phase):
    assert phase_of(name) == phase


def test_unions_and_intersections():
    union = merged([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)])
    assert union == [(0, 4), (5, 6)]
    assert length(union) == 5
    assert intersection(union, [(1, 2), (3, 5.5), (9, 10)]) == 1 + 1 + 0.5
    assert intersection([], union) == 0


def test_every_moment_counts_once():
    intervals = [Interval("a", 0, 4), Interval("b", 2, 6), Interval("a", 3, 5), Interval("c", 8, 10)]
    lines = {line.phase: line for line in account(intervals, wall_us=10, steps=2)}
    assert lines["a"].us == 5 / 2 and lines["a"].alone_us == 2 / 2 and lines["a"].launches == 1
    assert lines["b"].us == 4 / 2 and lines["b"].alone_us == 1 / 2
    assert lines["a"].share == pytest.approx((2 + 3 / 2) / 10)
    assert lines[IDLE].us == 2 / 2
    assert sum(line.share for line in lines.values()) == pytest.approx(1.0)


def test_a_wall_that_the_timeline_does_not_cover_is_seen():
    lines = account([Interval("a", 0, 4), Interval("a", 5, 6)], wall_us=10, steps=1)
    assert sum(line.share for line in lines) == pytest.approx(0.6)
    assert account([], 10, 1) == []


def test_overlap_of_exchange_with_the_rest():
    intervals = [
        Interval("ce_exchange/pack", 0, 4),
        Interval("ce_exchange/copy", 3, 8),
        Interval("projections", 6, 10),
        Interval("glue", 1, 2),
    ]
    assert overlap_us(intervals) == (8, 1 + 2)


def test_only_the_outermost_of_nested_operators_count():
    inner, outer = Interval("x", 1, 2, "aten::empty"), Interval("y", 0, 3, "aten::cat")
    other_thread, wrapper = Interval("z", 1, 2, "aten::add", 1), Interval("w", 0, 9, "Torch-Compiled Region")
    kept = outermost([inner, outer, other_thread, wrapper], lambda event: event.name.startswith("aten::"))
    assert kept == [outer, other_thread]
