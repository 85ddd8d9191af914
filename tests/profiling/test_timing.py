"""Timing: what counts as a sample, and that a wrong or missing result is never reported as a time."""

import math

import pytest
import torch

from profiling import timing
from profiling.timing import Contender, Timing, num_index_sets, summarise, time_contenders

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(timing, "CPU_ROUND_SECONDS", 0.0)


def doubling(name: str, factor: float = 2.0, writes: bool = True) -> Contender:
    """out = factor x the index set's number, checked against 2 x the last one."""
    out = torch.zeros(4)

    def call(index_set: int) -> None:
        if writes:
            out.fill_(factor * index_set)

    return Contender(name, call, lambda: timing.poison(out), lambda: float((out - 14.0).abs().max()), 0.1)


def test_right_contenders_are_timed_in_their_order():
    outcomes = time_contenders([doubling("b"), doubling("a")], 8, CPU)
    assert list(outcomes) == ["b", "a"]
    for outcome in outcomes.values():
        assert isinstance(outcome, Timing)
        assert 0 < outcome.us_min <= outcome.us <= outcome.us_max
        assert outcome.error == 0


def test_wrong_result_is_no_time():
    outcomes = time_contenders([doubling("right"), doubling("wrong", factor=3.0)], 8, CPU)
    assert isinstance(outcomes["right"], Timing)
    assert outcomes["wrong"] == "wrong result: error 7.00e+00, allowed 1e-01"


def test_unwritten_output_is_no_time():
    assert time_contenders([doubling("idle", writes=False)], 8, CPU)["idle"].startswith("wrong result: error nan")


def test_contender_that_raises_leaves_the_others():
    def call(index_set: int) -> None:
        raise RuntimeError("no kernel for 8 heads\nlong trace")

    broken = Contender("broken", call, lambda: None, lambda: 0.0, 0.0)
    outcomes = time_contenders([broken, doubling("right")], 8, CPU)
    assert outcomes["broken"] == "RuntimeError: no kernel for 8 heads"
    assert isinstance(outcomes["right"], Timing)


def test_every_contender_is_sampled_once_a_round():
    order = []

    def counting(name: str) -> Contender:
        return Contender(name, lambda _: order.append(name), lambda: None, lambda: 0.0, 0.0)

    time_contenders([counting("a"), counting("b")], 8, CPU)
    least = timing.CPU_SAMPLES[0]
    assert order == [*"ab", *"a" * least, *"b" * least, *"a" * least, *"b" * least, *"ab"]


def test_lower_median_counts_with_its_own_extremes():
    assert summarise([[5.0, 6.0, 90.0], [1.0, 7.0, 8.0]]) == (6.0, 5.0, 90.0)


@pytest.mark.parametrize(
    ("rows", "bytes_per_set", "cache", "expected"),
    [
        (1, 1 << 20, 0, 64),
        (4, 1 << 22, 0, 16),
        (128, 1 << 28, 60 << 20, 8),
        (1, 1 << 20, 60 << 20, 120),
        (1, 656, 60 << 20, 512),
    ],
)
def test_rotation_outgrows_the_cache(rows, bytes_per_set, cache, expected):
    assert num_index_sets(rows, bytes_per_set, cache) == expected


def test_poison_is_seen_in_floats_and_bytes():
    floats, raw = torch.zeros(3), torch.zeros(3, dtype=torch.uint8)
    timing.poison(floats)
    timing.poison(raw)
    assert floats.isnan().all() and (raw == timing.POISON_BYTE).all()


def test_copy_bandwidth_is_positive(monkeypatch):
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 1 << 20)
    assert 0 < timing.copy_tb_per_s(CPU) < 10


def test_host_call_counts_microseconds():
    median, least, greatest = timing.host_call_us(lambda _: math.sqrt(2.0), CPU)
    assert 0 < least <= median <= greatest
    assert median < 1000
