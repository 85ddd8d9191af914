"""The dispatcher by itself: padding, modes, fallbacks with reasons. No GPU, no graph."""

import pytest

from torch_sparse_mla.graphs import Batch, Choice, CUDAGraphMode, Dispatcher, GraphSupport

SIZES = (8, 1, 4, 4)


def dispatcher(mode: str, captured: bool = True, **options: object) -> Dispatcher:
    made = Dispatcher(CUDAGraphMode[mode], SIZES, **options)
    if captured:
        for kind, rows in made.to_capture():
            made.captured[kind].add(rows)
    return made


def test_sizes_are_sorted_and_captured_from_the_largest():
    made = dispatcher("FULL_AND_PIECEWISE", captured=False)
    assert made.sizes == (1, 4, 8)
    assert list(made.to_capture()) == [(mode, rows) for rows in (8, 4, 1) for mode in ("full", "piecewise")]


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8)])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_pads_to_the_next_captured_size(rows, padded, mode):
    for uniform in (True, False):
        assert dispatcher(mode).choose(Batch(rows, uniform)) == Choice(mode.lower(), padded)


def test_more_rows_than_captured_run_without_a_graph():
    choice = dispatcher("FULL").choose(Batch(9))
    assert choice == Choice("none", 9, "more rows than the largest capture size 8")


def test_no_rows_are_the_smallest_size():
    assert dispatcher("FULL").choose(Batch(0)) == Choice("full", 1)


@pytest.mark.parametrize(
    ("mode", "uniform", "expected"),
    [
        ("NONE", True, Choice("none", 3)),
        ("FULL_DECODE_ONLY", True, Choice("full", 4)),
        ("FULL_DECODE_ONLY", False, Choice("none", 3)),
        ("FULL_AND_PIECEWISE", True, Choice("full", 4)),
        ("FULL_AND_PIECEWISE", False, Choice("piecewise", 4)),
    ],
)
def test_mixed_batches(mode, uniform, expected):
    assert dispatcher(mode).choose(Batch(3, uniform)) == expected


def test_falls_from_full_to_piecewise_to_none_with_a_reason():
    made = dispatcher("FULL_AND_PIECEWISE")
    made.captured["full"].discard(4)
    assert made.choose(Batch(3)) == Choice("piecewise", 4, "no full graph of 4 rows was captured")
    made.captured["piecewise"].discard(4)
    assert made.choose(Batch(3)) == Choice("none", 3, "no full graph of 4 rows was captured")
    assert made.choose(Batch(3, False)) == Choice("none", 3, "no piecewise graph of 4 rows was captured")


@pytest.mark.parametrize(
    ("level", "rows_per_request", "uniform", "mode", "why"),
    [
        (GraphSupport.UNIFORM_BATCH, 4, True, "full", None),
        (GraphSupport.UNIFORM_BATCH, 1, False, "none", "a::b may be captured for uniform batches only"),
        (GraphSupport.UNIFORM_SINGLE_TOKEN, 1, True, "full", None),
        (GraphSupport.UNIFORM_SINGLE_TOKEN, 4, True, "none", "a::b may be captured for one row a request only"),
        (GraphSupport.NEVER, 1, True, "none", "a::b may not be captured"),
    ],
)
def test_full_keeps_to_what_operators_declare(level, rows_per_request, uniform, mode, why):
    made = dispatcher("FULL", support=(level, "a::b"), rows_per_request=rows_per_request)
    made.captured["full"].update(made.sizes)
    choice = made.choose(Batch(4, uniform))
    assert choice.mode == mode
    assert choice.reason is None if why is None else choice.reason.startswith(why)


def test_never_captures_what_may_not_be():
    made = dispatcher("FULL_AND_PIECEWISE", captured=False, support=(GraphSupport.NEVER, "a::b"))
    assert {mode for mode, _ in made.to_capture()} == {"piecewise"}


@pytest.mark.parametrize("sizes", [(), (0,), (1, -4), (1.0,), (True,), ("8",), (1 << 21,)])
def test_refuses_sizes(sizes):
    with pytest.raises(ValueError, match=r"capture_sizes: got .*; allowed: at least one integer, each from 1 to"):
        Dispatcher(CUDAGraphMode.FULL, sizes)
