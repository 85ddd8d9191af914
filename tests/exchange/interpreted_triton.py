"""The push and wait kernels in Triton's interpreter, on loopback ranks. Run by `tests/test_triton_interpreted.py`.

What the interpreter cannot show: fences, races, and waiting (programs run one after another; nothing is stored late).
"""

import itertools
import os

import pytest
import torch

from torch_sparse_mla import ExchangeError, ce_exchange_layers, ce_exchange_start, ce_exchange_wait
from torch_sparse_mla.exchange import contract, triton_kernels
from torch_sparse_mla.exchange.transports import launching
from torch_sparse_mla.exchange.transports.direct import DirectTransport, loopback_memory, memory_bytes

from .cases import POISON, Shape, Step, make_step, make_world, set_counters
from .scatter_cases import check_scatter, claim_more, scatter_channels

assert os.environ.get("TRITON_INTERPRET") == "1", "needs TRITON_INTERPRET=1 before Triton is imported"

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

SHAPES = [
    Shape(),
    Shape(world=1, requests=1, layers=1),
    Shape(world=2, record_bytes=1),
    Shape(world=4, record_bytes=656, page_gap=48, layers=2),
    Shape(world=2, requests=1, layers=1, record_bytes=8208, tokens=20, page_size=4),
    Shape(world=2, layers=6, record_bytes=16),
]


def interpreted_world(shape):
    world = make_world(shape)
    for channel in world.channels:
        channel.transport = interpreted_transport(channel)
    return world


class WorldWithSets:
    """Ranks whose workspaces are the channel's. A set is poisoned as soon as it is read: later it is the channel's."""

    def __init__(self, generator, counter=0, **sizes):
        shape = Shape(**{"world": 2, "requests": 1, "layers": 1, "record_bytes": 16, **sizes})
        self.world, self.generator = make_world(shape, workspace_sets=3), generator
        self.ranks, self.channels = self.world.ranks, self.world.channels
        for channel in self.channels:
            channel.transport = interpreted_transport(channel)
            for workspace in itertools.chain(*channel.transport.workspaces):
                workspace.fill_(POISON)
        set_counters(self.world, counter)

    def load(self, number):
        """A new step, to go into a set. Returns: what must be in it, by rank."""
        step = make_step(self.world.shape, self.generator)
        for rank, channel in self.world.both():
            rank.workspaces = []
            rank.load(step)
            rank.workspaces = channel.transport.workspaces[number]
        return [rank.expected(step) for rank in self.ranks]

    def exchange(self, number):
        """Returns: whether peers wrote the set."""
        expected = self.load(number)
        start_all(self.world)
        wait_all(self.world)
        for rank, channel in self.world.both():
            channel.check()
            self.check(rank.workspaces, expected[rank.rank])
            rank.poison()
        placed = {int(channel.transport.own_words[0]) == int(channel.state[1]) for channel in self.channels}
        assert len(placed) == 1
        return placed.pop()

    @staticmethod
    def check(workspaces, expected):
        assert all(torch.equal(workspace, values) for workspace, values in zip(workspaces, expected, strict=True))


def interpreted_transport(channel):
    return DirectTransport(channel, loopback_memory(channel, memory_bytes(channel)))


def start_all(world, layers=None):
    for rank, channel in world.both():
        ce_exchange_start(*rank.arguments(channel, layers))


def wait_all(world, layers=None):
    for rank, channel in world.both():
        ce_exchange_wait(*rank.arguments(channel, layers))


def exchange(world, step, layers=None):
    world.load(step)
    start_all(world, layers)
    wait_all(world, layers)
    for channel in world.channels:
        channel.check()
    world.assert_arrived(step, layers)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"w{shape.world}-{shape.record_bytes}B-{shape.layers}")
def test_matches_the_selection(shape, generator):
    world = interpreted_world(shape)
    for _ in range(2):
        exchange(world, make_step(shape, generator))


def test_several_blocks_share_the_work(generator, monkeypatch):
    monkeypatch.setattr(triton_kernels, "UNITS_PER_TILE", 64)
    world = interpreted_world(Shape(world=2, layers=2))
    exchange(world, make_step(world.shape, generator))


def test_single_layered_and_empty_calls_mix(generator):
    world = interpreted_world(Shape())
    for layers, owners in [(1, None), (3, {1}), (2, set()), (3, None)]:
        exchange(world, make_step(world.shape, generator, 0.8, owners), layers)


@pytest.mark.parametrize("counter", [0, 2**31 - 2, -2])
def test_a_rank_that_is_one_exchange_ahead_disturbs_nothing(counter, generator):
    """Rank 0 has pushed epoch e + 1 before rank 1 reads e: another slab, and a flag that is beyond e, past the wrap."""
    world = interpreted_world(Shape(world=2, layers=1))
    set_counters(world, counter)
    (ahead, ahead_channel), (behind, behind_channel) = world.both()
    step = make_step(world.shape, generator, 1.0)
    world.load(step)
    start_all(world)
    ce_exchange_wait(*ahead.arguments(ahead_channel))
    ahead.assert_arrived(step)
    following = make_step(world.shape, generator, 1.0)
    ahead.load(following)
    ce_exchange_start(*ahead.arguments(ahead_channel))
    ce_exchange_wait(*behind.arguments(behind_channel))
    behind.assert_arrived(step)
    behind.load(following)
    ce_exchange_start(*behind.arguments(behind_channel))
    for rank, channel in world.both():
        ce_exchange_wait(*rank.arguments(channel))
        channel.check()
        rank.assert_arrived(following)


@pytest.mark.parametrize("hostile, place", [(2**31 - 1, (0, 0)), (2**31 - 1, (1, 1)), (-30, (1, 0)), (-30, (0, 2))])
def test_bad_owner_offsets_stay_within_the_capacity(hostile, place, generator, monkeypatch):
    """Same bytes as on the CPU, with memory around every workspace untouched."""
    monkeypatch.setattr(triton_kernels, "UNITS_PER_TILE", 64)
    shape = Shape(world=2, layers=1)
    interpreted, reference = interpreted_world(shape), make_world(shape)
    step = make_step(interpreted.shape, generator, 1.0)
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


class GuardedWorkspaces:
    """Puts each workspace of a rank into the middle of memory of which nothing else may be written."""

    def __init__(self, rank):
        self.size = rank.workspaces[0].numel()
        self.storages = [torch.full((3 * self.size,), POISON, dtype=torch.uint8) for _ in rank.workspaces]
        shape = rank.workspaces[0].shape
        rank.workspaces = [storage[self.size : 2 * self.size].view(shape) for storage in self.storages]

    def assert_untouched(self):
        for storage in self.storages:
            assert (storage[: self.size] == POISON).all() and (storage[2 * self.size :] == POISON).all()


@pytest.mark.parametrize("counter", [2**16 - 2, 2**31 - 2, -2, -1])
def test_counters_wrap(counter, generator):
    world = interpreted_world(Shape(world=2, layers=1))
    set_counters(world, counter)
    for _ in range(4):
        exchange(world, make_step(world.shape, generator))
    assert world.channels[0].state[0] == (counter + 4 + 2**31) % 2**32 - 2**31


def expect_error(world, message):
    with pytest.raises(ExchangeError, match=message):
        world.channels[0].check()
    # The next call finds the error without looking at the device.
    with pytest.raises(ExchangeError, match=message):
        ce_exchange_start(*world.ranks[0].arguments(world.channels[0]))


def test_a_rank_that_never_comes_is_named(generator):
    world = interpreted_world(Shape())
    world.load(make_step(world.shape, generator))
    for rank, channel in world.both()[:2]:
        ce_exchange_start(*rank.arguments(channel))
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))
    expect_error(world, r"channel '.*': rank 0, epoch 1: rank 2 did not come within 5.0 s")
    assert world.channels[0].state[:2].tolist() == [1, 0]


def test_another_number_of_layers_is_named(generator):
    world = interpreted_world(Shape(world=2))
    world.load(make_step(world.shape, generator))
    ce_exchange_start(*world.ranks[0].arguments(world.channels[0], 3))
    ce_exchange_start(*world.ranks[1].arguments(world.channels[1], 2))
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0], 3))
    expect_error(world, r"rank 0, epoch 1: rank 1 moves another number of layers")


def test_another_plan_is_named(generator):
    """Whatever lies in the slab is not the other plan's; also where the peer sends nothing at all."""
    for other in (make_step(Shape(world=2), generator, 0.2).topk, torch.full((4, 9), -1, dtype=torch.int32)):
        world = interpreted_world(Shape(world=2))
        for _ in range(2):
            exchange(world, make_step(world.shape, generator, 1.0))
        step = make_step(world.shape, generator, 1.0)
        world.ranks[0].load(step)
        world.ranks[1].load(Step(other, step.records))
        start_all(world)
        wait_all(world)
        expect_error(world, r"rank 0, epoch 3: rank 1 has other owner offsets")
        assert world.channels[0].state[:2].tolist() == [3, 2]


def test_the_state_of_another_channel_is_refused_and_left_alone(generator, monkeypatch):
    """The kernels check it: on a GPU the state is not read back."""
    world, other = interpreted_world(Shape(world=1)), interpreted_world(Shape(world=1))
    world.load(make_step(world.shape, generator))
    caches, plan, workspaces, _, name = world.ranks[0].arguments(world.channels[0])
    for operator in (ce_exchange_start, ce_exchange_wait):
        monkeypatch.setattr(contract, "_is_state_of", lambda state, channel: True)
        before = other.channels[0].state.clone()
        world.channels[0].host_words.zero_()
        operator(caches, plan, workspaces, other.channels[0].state, name)
        assert torch.equal(other.channels[0].state, before)
        expect_error(world, "argument 'state': got the state of another channel; allowed: channel.state")
    assert world.channels[0].state[:2].tolist() == [0, 0]
    other.channels[0].check()


def test_a_replay_after_close_moves_nothing_and_check_says_so(generator, monkeypatch):
    world = interpreted_world(Shape(world=1))
    world.load(make_step(world.shape, generator))
    rank, channel = world.ranks[0], world.channels[0]
    call = contract.check_ce_exchange_start(*rank.arguments(channel))
    transport = channel.transport
    channel.transport.captured = True
    channel.close()
    with pytest.raises(ExchangeError, match=r"is closed"):
        channel.check()
    transport._send(call)
    assert all((workspace == POISON).all() for workspace in rank.workspaces)
    with pytest.raises(ExchangeError, match=r"a CUDA graph that captured the channel was replayed after close"):
        channel.check()


def test_captured_starts_are_not_counted_and_end_the_guess_about_threads(generator, monkeypatch):
    """What a graph replays is unknown here, so nobody is refused for it."""
    world = interpreted_world(Shape(world=2))
    exchange(world, make_step(world.shape, generator))
    with monkeypatch.context() as patch:
        patch.setattr(launching, "is_capturing", lambda tensor: True)
        patch.setattr(launching, "run", lambda *arguments: None)
        ce_exchange_layers(*world.ranks[0].arguments(world.channels[0]))
    assert world.channels[0].transport.board.shared["issued"] == [1, 1]
    exchange(world, make_step(world.shape, generator))
    ce_exchange_start(*world.ranks[0].arguments(world.channels[0]))
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))
    expect_error(world, "rank 1 did not come within")


def test_a_launch_that_fails_is_not_counted(generator, monkeypatch):
    world = interpreted_world(Shape(world=2))
    world.load(make_step(world.shape, generator))
    with monkeypatch.context() as patch:
        patch.setattr(launching, "run", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start_all(world)
    assert world.channels[0].transport.board.shared["issued"] == [0, 0]
    exchange(world, make_step(world.shape, generator))


def test_a_wait_for_a_rank_of_the_same_stream_is_refused(generator):
    world = interpreted_world(Shape(world=2))
    exchange(world, make_step(world.shape, generator))
    ce_exchange_start(*world.ranks[0].arguments(world.channels[0]))
    with pytest.raises(ExchangeError, match="rank 1 was last seen on the calling thread and stream"):
        ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))


def test_calls_out_of_order_are_named(generator):
    world = interpreted_world(Shape(world=2))
    world.load(make_step(world.shape, generator))
    start_all(world)
    ce_exchange_start(*world.ranks[0].arguments(world.channels[0]))
    expect_error(world, r"rank 0, epoch 1: started while the exchange before was not waited for")
    world = interpreted_world(Shape(world=2))
    world.load(make_step(world.shape, generator))
    ce_exchange_wait(*world.ranks[0].arguments(world.channels[0]))
    expect_error(world, r"rank 0, epoch 0: waited for an exchange that was not started")


@pytest.mark.parametrize(("world", "record_bytes"), [(1, 64), (3, 64), (4, 5)])
def test_scatter_gives_each_rank_its_own(world, record_bytes, generator, monkeypatch):
    monkeypatch.setattr(triton_kernels, "UNITS_PER_TILE", 64)

    check_scatter(scatter_channels(world, 8, record_bytes, prepare=interpreted), 8, record_bytes, generator)


@pytest.mark.parametrize("world", [2, 3])
def test_scatter_with_bad_owner_offsets_gives_what_the_cpu_gives(world, monkeypatch):
    monkeypatch.setattr(triton_kernels, "UNITS_PER_TILE", 64)
    given, expected = (
        claim_more(scatter_channels(world, 4, 16, prepare=prepare), 4, 16, torch.Generator().manual_seed(1))
        for prepare in (interpreted, None)
    )
    for claimed, workspaces in given.items():
        assert all(torch.equal(a, b) for a, b in zip(workspaces, expected[claimed], strict=True)), claimed


def interpreted(channel):
    channel.transport = interpreted_transport(channel)


@pytest.mark.parametrize(
    "shape", [{"world": 3, "record_bytes": 37}, {"record_bytes": 656, "layers": 5, "rows_per_request": 1}]
)
def test_sets_in_turn_are_written_by_peers(shape, generator):
    """But for the first two exchanges. Nothing goes by a slab then."""
    world = WorldWithSets(generator, **shape)
    assert [world.exchange(number) for number in (0, 1)] == [False, False]
    slabs = [channel.transport.memory.own[: 2 * launching.slab_bytes(channel)] for channel in world.channels]
    for slab in slabs:
        slab.fill_(POISON)
    assert [world.exchange(number) for number in (2, 0)] == [True, True]
    assert all((slab == POISON).all() for slab in slabs)


@pytest.mark.parametrize("counter", [2**31 - 3, -4])
def test_a_set_that_was_used_of_late_goes_by_a_slab(counter, generator):
    world = WorldWithSets(generator, counter)
    for number in (0, 1, 2):
        world.exchange(number)
    expected = [(0, True), (0, False), (1, True), (0, False), (2, True), (1, True), (0, True)]
    assert [(number, world.exchange(number)) for number, _ in expected] == expected


def test_exchanges_of_other_workspaces_count(generator):
    world = WorldWithSets(generator)
    for number in (0, 1, 2, 0):
        world.exchange(number)
    for rank in world.ranks:
        rank.workspaces = [workspace.clone() for workspace in rank.workspaces]
    for _ in range(2):
        exchange(world.world, make_step(world.world.shape, generator))
    assert world.exchange(0) is True


def test_a_set_is_left_alone_until_the_second_start_after_its_own(generator):
    """Rank 1 reads what exchange 4 brought as late as it may; rank 0 has sent exchange 6."""
    world = WorldWithSets(generator)
    for number in (0, 1, 2):
        world.exchange(number)
    expected = world.load(0)
    start_all(world.world)
    wait_all(world.world)
    unread = world.ranks[1].workspaces
    world.load(1)
    start_all(world.world)
    wait_all(world.world)
    world.load(2)
    ce_exchange_start(*world.ranks[0].arguments(world.channels[0]))
    world.check(unread, expected[1])


def test_a_set_is_used_as_one(generator):
    world = WorldWithSets(generator, layers=2)
    world.load(0)
    (rank, channel), *_ = world.world.both()
    (first, second), (_, other), _ = channel.transport.workspaces
    before = channel.state.clone()
    for wrong in ([second], [first, other], [second, first], [first.clone(), second]):
        rank.workspaces = wrong
        with pytest.raises(ValueError, match=r"'workspaces': got .* allowed: the first layers of one set in order"):
            ce_exchange_start(*rank.arguments(channel, len(wrong)))
    assert torch.equal(before, channel.state)


def test_another_set_on_one_rank_is_named(generator):
    world = WorldWithSets(generator)
    for number in (0, 1, 2):
        world.exchange(number)
    world.load(0)
    world.ranks[1].workspaces = [torch.full_like(workspace, POISON) for workspace in world.ranks[1].workspaces]
    start_all(world.world)
    wait_all(world.world)
    named = "rank 1 moves another number of layers, or into another set of workspaces"
    expect_error(world.world, f"rank 0, epoch 4: {named}")
