"""The protocol survives every schedule, and no rule of it can be left out."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from .protocol_model import MODULUS, SETS, Call, Machine, ProtocolBroken, Rules, Segment

# Just below the wrap of a signed and of an unsigned counter, and nowhere near either.
COUNTERS = [0, (1 << 31) - 2, (1 << 31) - 1, MODULUS - 3, MODULUS - 2, MODULUS - 1]
# Rules about workspaces that peers write.
OF_SETS = ("reuse_distance", "used_on_device", "used_by_slab_too", "read_before_second_start", "placed_by_start")


@st.composite
def machines(draw, rules=Rules(), withheld=False):  # noqa: B008  (frozen)
    world = draw(st.integers(2, 3))
    ranks = st.frozensets(st.integers(0, world - 1))
    places = st.one_of(st.none(), st.integers(0, SETS - 1))
    calls = st.builds(Call, st.integers(1, 3), ranks, st.booleans(), ranks, places)
    segments = st.builds(Segment, st.lists(calls, min_size=1, max_size=2).map(tuple), st.integers(1, 3), ranks)
    return Machine(
        world,
        tuple(draw(st.lists(segments, min_size=1, max_size=3))),
        draw(st.sampled_from(COUNTERS)),
        draw(st.integers(0, 2**16)),
        rules,
        draw(st.integers(0, world - 1)) if withheld else None,
    )


@st.composite
def machines_with_sets(draw, rules):
    """Two ranks and one set in turn with the caller's own workspaces, long enough for peers to write the set."""
    world = 2
    calls = st.builds(Call, split=st.booleans(), place=st.sampled_from([None, 0]))
    captured = st.frozensets(st.integers(0, world - 1))
    segments = st.builds(Segment, st.lists(calls, min_size=1, max_size=3).map(tuple), st.integers(2, 4), captured)
    program = tuple(draw(st.lists(segments, min_size=1, max_size=2)))
    return Machine(world, program, draw(st.sampled_from(COUNTERS)), draw(st.integers(0, 2**16)), rules)


def is_broken(machine: Machine) -> bool:
    try:
        machine.run()
    except ProtocolBroken:
        return True
    return False


@hypothesis.settings(max_examples=200)
@hypothesis.given(machines())
def test_the_protocol_holds(machine):
    machine.run()
    assert machine.exchanges % machine.world == 0 and machine.exchanges > 0
    assert not machine.network
    assert len({rank.started for rank in machine.ranks} | {rank.waited for rank in machine.ranks}) == 1


@hypothesis.settings(max_examples=60)
@hypothesis.given(machines_with_sets(Rules()))
def test_the_protocol_holds_with_sets(machine):
    machine.run()
    assert not machine.network


def test_three_sets_in_turn_need_no_slab():
    """But for the first two exchanges, before which nobody knows who has read what, and after other orders."""
    calls = tuple(Call(place=place) for place in range(SETS))
    for counter in COUNTERS:
        machine = Machine(3, (Segment(calls, repeats=10),), counter)
        machine.run()
        assert machine.exchanges - machine.placed == 3 * 2
    machine = Machine(2, (Segment(calls, repeats=2), Segment(calls[:1])))
    machine.run()
    assert machine.exchanges - machine.placed == 2 * 2
    machine = Machine(2, (Segment(calls[:1], repeats=4), Segment(calls, repeats=3)))
    machine.run()
    assert machine.placed == 2 * (3 * 3 - 1)


@pytest.mark.parametrize("rule", [field.name for field in dataclasses.fields(Rules)])
def test_each_rule_is_needed(rule):
    mutant = dataclasses.replace(Rules(), **{rule: False})
    settings = hypothesis.settings(max_examples=2000, phases=[hypothesis.Phase.generate])
    kinds = machines_with_sets(mutant) if rule in OF_SETS else machines(mutant)
    assert hypothesis.find(kinds, is_broken, settings=settings)


@hypothesis.settings(max_examples=100)
@hypothesis.given(machines(withheld=True))
def test_without_one_rank_nobody_completes_an_exchange(machine):
    machine.run()
    assert machine.exchanges == 0


def test_counters_wrap_and_go_on():
    for counter in ((1 << 31) - 2, MODULUS - 2):
        machine = Machine(2, (Segment((Call(), Call(3)), repeats=20),), counter)
        machine.run()
        assert machine.exchanges == 80
        assert machine.ranks[0].waited == (counter + 40) % MODULUS
