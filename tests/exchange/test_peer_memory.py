"""Transports that write peer memory, on one GPU: loopback ranks, whose peers' memory is on the same device."""

import importlib
import time
from collections import Counter

import pytest
import torch
import triton
from torch.profiler import ProfilerActivity, profile

from torch_sparse_mla import ExchangeError, LoopbackGroup, ce_exchange_layers, ce_exchange_start, ce_exchange_wait

from ..decode import cases as decode_cases
from .captured import Reader, capture, put, ready, wrong_bytes
from .cases import POISON, Shape, make_channel, make_step, make_world, owned_by_one, set_counters

pytestmark = pytest.mark.gpu

SHAPE = Shape(world=4, requests=2, rows_per_request=4, topk=64, tokens=256, record_bytes=656, page_size=16)
REPLAYS = 1000


@pytest.fixture(params=["direct", "ce"])
def transport(request):
    return request.param


@pytest.fixture
def worlds(transport):
    made = []

    def make(shape=SHAPE, **keywords):
        made.append(make_world(shape, "cuda", transport=transport, **keywords))
        return made[-1]

    yield make
    for world in made:
        world.close()


def exchange_in_turn(world, layers):
    """Every start, then every wait, on the current stream."""
    for rank, channel in world.both():
        ce_exchange_start(*rank.arguments(channel, layers))
    for rank, channel in world.both():
        ce_exchange_wait(*rank.arguments(channel, layers))


def check(world):
    for channel in world.channels:
        channel.check()


def steps_for(world, generator, count=5):
    steps = [make_step(world.shape, generator, share, owners) for share, owners in MIXED[:count]]
    return [[ready(rank, step) for rank in world.ranks] for step in steps]


MIXED = [(1.0, None), (0.7, {1}), (1.0, set()), (0.3, None), (0.9, {0, 2})]


@pytest.mark.parametrize("expected", [None, 8], ids=["", "overflowing"])
@pytest.mark.parametrize("shape", [SHAPE, Shape()], ids=["vectors", "bytes"])
def test_replays_with_changing_data_sizes_and_eager_calls(shape, expected, worlds, generator):
    """1,000 exchanges; graphs of one and of three layers and eager calls take turns, and the counters wrap."""
    world = worlds(shape, expected_records=expected)
    steps = steps_for(world, generator)
    set_counters(world, -(REPLAYS // 2))
    exchange_in_turn(world, 1)
    exchange_in_turn(world, 3)
    graphs = {layers: capture(exchange_in_turn, world, layers) for layers in (1, 3)}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(REPLAYS):
        step, layers = steps[number % len(steps)], (1, 3)[number // 3 % 2]
        for rank, values in zip(world.ranks, step, strict=True):
            put(rank, values)
        if number % 7 == 3:
            exchange_in_turn(world, 2)
            layers = 2
        else:
            graphs[layers].replay()
        for rank, values in zip(world.ranks, step, strict=True):
            wrong += wrong_bytes(rank, values, layers)
    check(world)
    assert int(wrong) == 0
    assert {int(channel.state[1]) for channel in world.channels} == {REPLAYS + 2 - REPLAYS // 2}


def test_one_rank_owns_everything(worlds, generator):
    """Far more than a copy has room for; replayed with another owner, and then with nobody owning anything."""
    world = worlds(Shape(world=4, requests=2, topk=32, tokens=256, record_bytes=656))
    steps = [owned_by_one(world.shape, owner, generator) for owner in (3, 0)]
    steps.append(make_step(world.shape, generator, 1.0, set()))
    world.load(steps[0])
    exchange_in_turn(world, 3)
    check(world)
    world.assert_arrived(steps[0])
    graph = capture(exchange_in_turn, world, 3)
    for step in steps[1:]:
        world.load(step)
        graph.replay()
        check(world)
        world.assert_arrived(step)


@pytest.mark.parametrize("slow", [0, 2])
def test_ranks_on_streams_with_one_delayed(slow, worlds, generator):
    """Combined calls, each rank captured on a stream of its own; one starts late, another reads late."""
    world = worlds()
    steps = steps_for(world, generator)
    streams = [torch.cuda.Stream() for _ in world.ranks]
    torch.cuda.synchronize()
    for (rank, channel), stream in zip(world.both(), streams, strict=True):
        with torch.cuda.stream(stream):
            ce_exchange_layers(*rank.arguments(channel))
    torch.cuda.synchronize()
    graphs = [capture(ce_exchange_layers, *rank.arguments(channel)) for rank, channel in world.both()]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in world.ranks]
    # A module that is loaded while a kernel waits for a peer would wait for that kernel: use every kernel once before.
    put(world.ranks[0], steps[0][0])
    wrong[0] += wrong_bytes(world.ranks[0], steps[0][0], 3) * 0
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    for number in range(60):
        step = steps[number % len(steps)]
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if rank == slow:
                    torch.cuda._sleep(200_000)
                put(world.ranks[rank], step[rank])
                graphs[rank].replay()
                if rank == (slow + 1) % 4:
                    torch.cuda._sleep(100_000)
                wrong[rank] += wrong_bytes(world.ranks[rank], step[rank], 3)
    check(world)
    assert [int(count) for count in wrong] == [0] * 4


@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize("transport", ["direct"], indirect=True)
def test_sets_that_peers_write_hold_until_they_are_read(slow, worlds, generator):
    """Each rank on a stream of its own, one late at times; graphs in any order and eager calls; counters that wrap."""
    world = worlds(workspace_sets=3)
    set_counters(world, -90)
    steps = steps_for(world, generator)
    readers = [Reader(rank, channel) for rank, channel in world.both()]
    streams = [torch.cuda.Stream() for _ in readers]
    kinds = len(readers[0].program())
    graphs = []
    torch.cuda.synchronize()

    def everywhere(act):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                act(number)

    # Every kernel once, and all of a rank's memory, before any rank waits for one that has not begun.
    everywhere(lambda number: readers[number].put(steps[0][number]))
    everywhere(lambda number: [readers[number].read(each, 3) for each in range(3)])
    torch.cuda.synchronize()
    for reader in readers:
        reader.wrong.zero_()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    for kind in range(kinds):
        everywhere(lambda number, kind=kind: readers[number].program()[kind]())
        torch.cuda.synchronize()
    for reader in readers:
        graphs.append([capture(act) for act in reader.program()])
    for turn in range(90):
        step, kind = steps[turn % len(steps)], turn * 7 // 3 % kinds

        def act(number, step=step, kind=kind, turn=turn):
            if number == slow and turn % 3 == 0:
                torch.cuda._sleep(300_000)
            readers[number].put(step[number])
            if turn % 5 == 4:
                readers[number].program()[kind]()
            else:
                graphs[number][kind].replay()

        everywhere(act)
    check(world)
    assert [int(reader.wrong) for reader in readers] == [0] * 4
    assert {int(channel.state[0]) for channel in world.channels} == {int(world.channels[0].state[1])}


@pytest.mark.parametrize("transport", ["direct"], indirect=True)
def test_attention_before_a_push_finds_room_beside_a_wait(worlds, generator):
    """A rank waits with all the programs that it may have, on a GPU that a peer's attention needs before its push."""
    world = worlds(Shape(world=2, requests=2, rows_per_request=4, topk=512, tokens=1024, record_bytes=656), timeout_s=3)
    step = make_step(world.shape, generator)
    attention = decode_cases.make_case(rows=128, heads=16, topk=256).to("cuda")
    world.load(step)
    exchange_in_turn(world, 3)
    decode_cases.call("op-cuda", "sparse_ckv_decode", attention.args())
    streams = [torch.cuda.Stream() for _ in world.ranks]
    for _ in range(5):
        world.load(step)
        torch.cuda.synchronize()
        for (rank, channel), stream in zip(world.both(), streams, strict=True):
            with torch.cuda.stream(stream):
                if rank.rank == 1:
                    # The other one's wait is there by then.
                    torch.cuda._sleep(2_000_000)
                    decode_cases.call("op-cuda", "sparse_ckv_decode", attention.args())
                ce_exchange_layers(*rank.arguments(channel))
        check(world)
        world.assert_arrived(step)


def test_overlapping_work_does_not_disturb(worlds, generator):
    world = worlds()
    step = make_step(world.shape, generator)
    world.load(step)
    for rank, channel in world.both():
        ce_exchange_start(*rank.arguments(channel))
    matrix = torch.randn(512, 512, device="cuda")
    for _ in range(5):
        matrix = matrix @ matrix * 0.01
    for rank, channel in world.both():
        ce_exchange_wait(*rank.arguments(channel))
    check(world)
    world.assert_arrived(step)


def test_two_channels_on_two_streams(worlds, generator):
    lanes = [worlds(), worlds()]
    streams = [torch.cuda.Stream() for _ in lanes]
    for _ in range(20):
        steps = [make_step(SHAPE, generator) for _ in lanes]
        for lane, step in zip(lanes, steps, strict=True):
            lane.load(step)
        torch.cuda.synchronize()
        for lane, stream in zip(lanes, streams, strict=True):
            with torch.cuda.stream(stream):
                exchange_in_turn(lane, 3)
        torch.cuda.synchronize()
        for lane, step in zip(lanes, steps, strict=True):
            lane.assert_arrived(step)


@pytest.mark.parametrize("transport", ["direct"], indirect=True)
def test_one_exchange_of_three_layers_is_two_kernels(worlds, generator):
    world = worlds(Shape(world=1, record_bytes=656))
    rank, channel = world.both()[0]
    rank.load(make_step(world.shape, generator))
    ce_exchange_layers(*rank.arguments(channel))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        ce_exchange_layers(*rank.arguments(channel))
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted(names) == ["_push_kernel", "_wait_kernel"]


NODES = {"direct": {"KERNEL": 2}, "ce": {"KERNEL": 2, "MEMCPY": 3, "BATCH_MEM_OP": 3}}


def test_nodes_of_a_captured_exchange(worlds, transport, generator):
    """Of each of four ranks: nothing but these, no node of the host and none that allocates."""
    world = worlds()
    world.load(make_step(world.shape, generator))
    exchange_in_turn(world, 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        exchange_in_turn(world, 3)
    assert node_types(graph) == {kind: 4 * count for kind, count in NODES[transport].items()}


def node_types(graph):
    driver = importlib.import_module("cuda.bindings.driver")

    def call(name, *arguments):
        code, *given = getattr(driver, name)(*arguments)
        assert code == driver.CUresult.CUDA_SUCCESS
        return given

    raw = driver.CUgraph(graph.raw_cuda_graph())
    *_, count = call("cuGraphGetNodes", raw)
    nodes, _ = call("cuGraphGetNodes", raw, count)
    prefix = "CU_GRAPH_NODE_TYPE_"
    return Counter(call("cuGraphNodeGetType", node)[0].name.removeprefix(prefix) for node in nodes)


def test_nothing_is_allocated(worlds, generator):
    world = worlds()
    world.load(make_step(world.shape, generator))
    exchange_in_turn(world, 3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    exchange_in_turn(world, 3)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_withheld_rank_is_named_after_the_timeout(worlds, generator):
    world = worlds(timeout_s=0.2)
    world.load(make_step(world.shape, generator))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    rank, channel = world.both()[0]
    with torch.cuda.stream(stream):
        ce_exchange_layers(*rank.arguments(channel))
    message = r"rank 0, epoch 1: rank 1 did not come within 0.2 s"
    with pytest.raises(ExchangeError, match=message):
        channel.check()
    with pytest.raises(ExchangeError, match=message):
        ce_exchange_start(*rank.arguments(channel))
    assert channel.state[:2].tolist() == [1, 0]
    world.close()
    again = worlds()
    step = make_step(again.shape, generator)
    again.load(step)
    exchange_in_turn(again, 3)
    again.assert_arrived(step)


def test_a_started_exchange_that_nobody_waits_for_yet_is_no_timeout(worlds, generator):
    world = worlds(timeout_s=0.2)
    step = make_step(world.shape, generator)
    world.load(step)
    for rank, channel in world.both():
        ce_exchange_start(*rank.arguments(channel))
    torch.cuda.synchronize()
    time.sleep(0.6)
    for rank, channel in world.both():
        ce_exchange_wait(*rank.arguments(channel))
    check(world)
    world.assert_arrived(step)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("transport", ["ce"], indirect=True)
def test_a_captured_wait_without_its_start_is_refused(worlds, generator):
    """Copies run on a stream of their own, which a graph has to join. The channel goes on."""
    world = worlds(Shape(world=2))
    step = make_step(world.shape, generator)
    world.load(step)
    exchange_in_turn(world, 3)
    torch.cuda.synchronize()
    rank, channel = world.both()[0]
    with pytest.raises(ExchangeError, match="captures one of start and wait captures both"):
        capture(ce_exchange_wait, *rank.arguments(channel))
    rank.poison()
    exchange_in_turn(world, 3)
    check(world)
    world.assert_arrived(step)


def test_create_refuses_to_be_captured():
    with (
        pytest.raises(RuntimeError, match="make channel 'late' before a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        make_channel(SHAPE, LoopbackGroup(1, "cuda").rank(0), "late")


def test_replay_after_close_moves_nothing(worlds, generator):
    world = worlds(Shape(world=1, record_bytes=656))
    rank, channel = world.both()[0]
    rank.load(make_step(world.shape, generator))
    ce_exchange_layers(*rank.arguments(channel))
    graph = capture(ce_exchange_layers, *rank.arguments(channel))
    channel.close()
    rank.poison()
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((workspace == POISON).all()) for workspace in rank.workspaces)
    with pytest.raises(ExchangeError, match="a CUDA graph that captured the channel was replayed after close"):
        channel.check()


def test_a_replay_after_every_rank_closed_waits_for_nobody(worlds, generator):
    world = worlds(Shape(world=2, record_bytes=656), timeout_s=60)
    world.load(make_step(world.shape, generator))
    exchange_in_turn(world, 3)
    graph = capture(exchange_in_turn, world, 3)
    world.close()
    for rank in world.ranks:
        rank.poison()
    torch.cuda.synchronize()
    begin = time.monotonic()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 10
    for rank, channel in world.both():
        assert all(bool((workspace == POISON).all()) for workspace in rank.workspaces)
        with pytest.raises(ExchangeError, match="a CUDA graph that captured the channel was replayed after close"):
            channel.check()


def test_another_plan_is_named(worlds, generator):
    world = worlds()
    steps = steps_for(world, generator, 2)
    for number, rank in enumerate(world.ranks):
        put(rank, steps[1 if number == 2 else 0][number])
    exchange_in_turn(world, 3)
    with pytest.raises(ExchangeError, match="rank 1, epoch 1: rank 2 has other owner offsets"):
        world.channels[1].check()


def test_the_state_of_another_channel_is_refused_and_left_alone(worlds, generator):
    world = worlds(Shape(world=1, record_bytes=656))
    rank, channel = world.both()[0]
    other = worlds(Shape(world=1, record_bytes=656)).channels[0]
    rank.load(make_step(world.shape, generator))
    before = other.state.clone()
    caches, plan, workspaces, _, name = rank.arguments(channel)
    ce_exchange_start(caches, plan, workspaces, other.state, name)
    with pytest.raises(ExchangeError, match="got the state of another channel"):
        channel.check()
    assert torch.equal(other.state, before)


def test_the_first_exchange_compiles_nothing(worlds, generator, monkeypatch):
    """A record width that no other test uses, and layers for two launches."""
    world = worlds(Shape(world=2, record_bytes=848, layers=6))
    step = make_step(world.shape, generator)
    world.load(step)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **given: compiled.append(given["repr"]))
    exchange_in_turn(world, 6)
    check(world)
    world.assert_arrived(step)
    assert compiled == []
