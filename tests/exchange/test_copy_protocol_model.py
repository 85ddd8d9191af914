"""The protocol of the copy-engine transport survives every schedule, and no rule of it can be left out."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from .copy_protocol_model import CopyCall, CopyMachine, CopyRules
from .protocol_model import MODULUS, Segment
from .test_protocol_model import COUNTERS, is_broken


@st.composite
def machines(draw, rules=CopyRules(), calm=False, withheld=False):  # noqa: B008  (frozen)
    """`calm`: every rank comes and is heard. Else ranks may give a foreign state, and watchdogs give up too early."""
    world = draw(st.integers(2, 3))
    ranks = st.frozensets(st.integers(0, world - 1))
    foreign = st.just(frozenset()) if calm or withheld else ranks
    calls = st.builds(CopyCall, st.integers(1, 3), ranks, st.booleans(), foreign=foreign)
    segments = st.builds(Segment, st.lists(calls, min_size=1, max_size=2).map(tuple), st.integers(1, 3), ranks)
    return CopyMachine(
        world,
        tuple(draw(st.lists(segments, min_size=1, max_size=3))),
        draw(st.sampled_from(COUNTERS)),
        draw(st.integers(0, 2**16)),
        rules,
        draw(st.integers(0, world - 1)) if withheld else None,
        impatient=not calm and not withheld and draw(st.booleans()),
    )


@hypothesis.settings(max_examples=300)
@hypothesis.given(machines(calm=True))
def test_the_protocol_holds(machine):
    machine.run()
    assert machine.exchanges % machine.world == 0 and machine.exchanges > 0
    assert not machine.network
    assert len({rank.started for rank in machine.ranks} | {rank.waited for rank in machine.ranks}) == 1


@hypothesis.settings(max_examples=300)
@hypothesis.given(machines())
def test_what_goes_wrong_is_an_error_and_never_wrong_bytes_nor_a_hang(machine):
    machine.run()


@hypothesis.settings(max_examples=100)
@hypothesis.given(machines(withheld=True))
def test_without_one_rank_every_other_names_it_and_goes_on(machine):
    machine.run()
    assert machine.exchanges == 0
    (withheld,) = (rank for rank, stream in enumerate(machine.streams) if stream is None)
    errors = {rank.error for number, rank in enumerate(machine.ranks) if number != withheld}
    assert errors == {("timed out", withheld)}


@pytest.mark.parametrize("rule", [field.name for field in dataclasses.fields(CopyRules)])
def test_each_rule_is_needed(rule):
    mutant = dataclasses.replace(CopyRules(), **{rule: False})
    # Only watchdogs that give up too early need distrust: found sooner among these alone.
    distrust = rule == "distrust_what_was_given_up"
    others = () if distrust else (machines(mutant, calm=True), machines(mutant, withheld=True))
    kinds = st.one_of(machines(mutant), *others)
    settings = hypothesis.settings(max_examples=2000, phases=[hypothesis.Phase.generate])
    assert hypothesis.find(kinds, is_broken, settings=settings)


def test_counters_wrap_and_go_on():
    for counter in ((1 << 31) - 2, MODULUS - 2):
        machine = CopyMachine(2, (Segment((CopyCall(), CopyCall(3)), repeats=20),), counter)
        machine.run()
        assert machine.exchanges == 80
        assert machine.ranks[0].waited == (counter + 40) % MODULUS
