"""The pack and unpack kernels in Triton's interpreter, under the transports "ce" and "collective" of CUDA.

Streams, copy engines and NCCL are stood in for (`host_operations.py`); flags, headers and layout are real.
"""

import pytest
import torch

from torch_sparse_mla.exchange import triton_kernels
from torch_sparse_mla.exchange.transports.stream_operations import Await, Write

from .cases import Shape, make_step, make_world, owned_by_one, set_counters
from .interpreted_triton import GuardedWorkspaces, exchange, start_all, wait_all

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

SMALL = {"world": 2, "requests": 1, "topk": 4, "tokens": 12, "page_size": 2, "layers": 1}
WIDTHS = [1, 37, 304, 368, 432, 656, 1152, 65_536]


def overflow_of(channel):
    layout = channel.transport.layout
    return channel.transport.memory.own[layout.overflow : layout.flags]


@pytest.mark.parametrize(
    "transport, record_bytes",
    [("ce", width) for width in WIDTHS] + [("collective", width) for width in (37, 656, 65_536)],
)
def test_matches_the_selection(record_bytes, transport, worlds, generator):
    world = worlds(Shape(**{**SMALL, "record_bytes": record_bytes}), transport)
    exchange(world, make_step(world.shape, generator))


@pytest.mark.parametrize("record_bytes", WIDTHS)
def test_what_does_not_fit_arrives_all_the_same(record_bytes, worlds, generator):
    """Copies that have room for one record."""
    world = worlds(Shape(**{**SMALL, "record_bytes": record_bytes}), "ce", expected_records=1)
    assert world.channels[0].transport.layout.fitting == 1
    exchange(world, make_step(world.shape, generator, 1.0))
    assert any(bool(overflow_of(channel).any()) for channel in world.channels)


@pytest.mark.parametrize("world, record_bytes", [(1, 37), (2, 37), (2, 16), (4, 16)])
def test_one_rank_owns_everything(record_bytes, world, transport, worlds, generator):
    """More than the expected share and its margin, in every request."""
    world = worlds(Shape(world=world, record_bytes=record_bytes, topk=8, tokens=world * 16), transport)
    for owner in (0, world.shape.world - 1):
        exchange(world, owned_by_one(world.shape, owner, generator))
    if transport == "ce" and world.shape.world > 1:
        assert bool(overflow_of(world.channels[0]).any())


def test_several_blocks_share_the_work(transport, worlds, generator, monkeypatch):
    monkeypatch.setattr(triton_kernels, "UNITS_PER_TILE", 64)
    world = worlds(Shape(world=2, requests=1, layers=2, record_bytes=16), transport, expected_records=12)
    exchange(world, make_step(world.shape, generator))


def test_single_layered_and_empty_calls_mix(transport, worlds, generator):
    """Six layers take two launches."""
    world = worlds(Shape(requests=1, layers=6, record_bytes=16), transport)
    for layers, owners in [(1, None), (6, {1}), (2, set()), (5, None)]:
        exchange(world, make_step(world.shape, generator, 0.8, owners), layers)


def test_pages_with_gaps_and_records_longer_than_a_tile(transport, worlds, generator):
    shape = Shape(world=2, requests=1, layers=1, record_bytes=8208, tokens=20, page_size=4, page_gap=48)
    exchange(worlds(shape, transport), make_step(shape, generator))


@pytest.mark.parametrize("counter", [2**31 - 2, -2, -1])
def test_counters_wrap(counter, transport, worlds, generator):
    world = worlds(Shape(world=2, layers=1), transport)
    set_counters(world, counter)
    for _ in range(4):
        exchange(world, make_step(world.shape, generator))
    assert world.channels[0].state[0] == (counter + 4 + 2**31) % 2**32 - 2**31


def test_steps_do_not_depend_on_the_data(worlds, generator):
    """What a graph freezes: addresses, values and sizes. Where a rank owns nothing, its message goes all the same."""
    world = worlds(Shape(world=3, requests=1, layers=1), "ce")
    done = []
    for owners in (None, set(), {2}):
        exchange(world, make_step(world.shape, generator, 1.0, owners))
        done.append([channel.transport.operations.done for channel in world.channels])
        for channel in world.channels:
            channel.transport.operations.done = []
    assert done[0] == done[1] == done[2]
    for steps in done[0]:
        kinds = [type(step).__name__ if isinstance(step, (Await, Write)) else "copy" for step in steps]
        waits = ["Write", "Await", "Await", "Write"]
        assert kinds == [*waits, "copy", "copy", "Write", "Write", *waits]


def test_flags_are_taken_back_and_leave_is_given(worlds, generator):
    """Before any exchange, between start and wait, and after it: of every peer, in rows of came and leave."""
    world = worlds(Shape(world=3), "ce")
    world.load(make_step(world.shape, generator))
    signals = [channel.transport.signals for channel in world.channels]
    peers = [[peer for peer in range(3) if peer != rank] for rank in range(3)]
    for _ in range(2):
        assert [flags[:, of].tolist() for flags, of in zip(signals, peers, strict=True)] == [[[0, 0], [1, 1]]] * 3
        start_all(world)
        assert [flags[:, of].tolist() for flags, of in zip(signals, peers, strict=True)] == [[[1, 1], [0, 0]]] * 3
        wait_all(world)


def test_copies_are_as_long_as_the_layers_of_the_call(worlds, generator):
    world = worlds(Shape(world=2, record_bytes=16), "ce")
    for layers in (1, 3):
        exchange(world, make_step(world.shape, generator), layers)
    # 36 records of 2 ranks: a share of 18, an eighth more, one for rounding.
    copies = [step for step in world.channels[0].transport.operations.done if not isinstance(step, (Await, Write))]
    assert [size for _, _, size in copies] == [16 + layers * 21 * 16 for layers in (1, 3)]
    explained = world.channels[0].explain()
    assert explained["message"] == "1024 bytes to each rank: 21 of 36 records of a layer"
    assert explained["overflow"] == "up to 15 records of a layer beyond the message, stored by the pack kernel"


def test_explain_of_the_collective(worlds):
    explained = worlds(Shape(world=2, record_bytes=16), "collective").channels[0].explain()
    assert explained["message"] == "1744 bytes to each rank: 36 of 36 records of a layer"
    assert explained["collective"] == "NCCL all-gather; its size is fixed by the capacity"


@pytest.mark.parametrize("hostile, place", [(2**31 - 1, (0, 0)), (2**31 - 1, (1, 1)), (-30, (1, 0)), (-30, (0, 2))])
@pytest.mark.parametrize("expected", [1, None])
def test_bad_owner_offsets_stay_within_the_capacity(
    expected, hostile, place, transport, worlds, generator, monkeypatch
):
    """Same bytes as on the CPU, with memory around every workspace untouched."""
    monkeypatch.setattr(triton_kernels, "UNITS_PER_TILE", 64)
    shape = Shape(world=2, layers=1, record_bytes=5)
    interpreted, reference = worlds(shape, transport, expected_records=9), make_world(shape)
    step = make_step(shape, generator, 1.0)
    guarded = []
    for world in (interpreted, reference):
        world.load(step)
        for rank in world.ranks:
            guarded += [GuardedWorkspaces(rank)]
            world.shape.selection.owner_offsets(rank.plan)[place] = hostile
        start_all(world)
        wait_all(world)
    for channel in interpreted.channels:
        channel.check()
    for guard in guarded:
        guard.assert_untouched()
    for ours, theirs in zip(interpreted.ranks, reference.ranks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.workspaces, theirs.workspaces, strict=True))
