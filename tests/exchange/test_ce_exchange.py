"""`ce_exchange`, one layer in one call, and what all exchange operators refuse."""

import dataclasses
import time

import pytest
import torch

from tests.decode.rejections import expect_rejection, whole_range
from torch_sparse_mla import ExchangeError, ce_exchange, ce_exchange_layers, ce_exchange_start, ce_exchange_wait

from .cases import Shape, make_step, make_world
from .threads import on_threads


@pytest.fixture
def worlds():
    made = []
    yield lambda *arguments, **keywords: made.append(make_world(*arguments, **keywords)) or made[-1]
    for world in made:
        world.close()


def single(rank, channel):
    ce_exchange(rank.caches[0], rank.plan, rank.workspaces[0], channel.state, channel)


def test_matches_the_selection(worlds, generator):
    world = worlds(Shape())
    step = make_step(world.shape, generator)
    world.load(step)
    on_threads(world, single, slow=1, delay_s=0.05)
    world.assert_arrived(step, layers=1)


def test_a_rank_alone_needs_no_peer(worlds, generator, device):
    world = worlds(Shape(world=1), device)
    step = make_step(world.shape, generator)
    world.load(step)
    single(world.ranks[0], world.channels[0])
    world.assert_arrived(step, layers=1)


def test_a_slow_reader_is_not_overwritten(worlds, generator):
    """Many exchanges in a row with new data; the peers of a slow reader have started the next when it comes to read."""
    world = worlds(Shape(layers=1), timeout_s=20)
    steps = [make_step(world.shape, generator) for _ in range(12)]

    def run(rank, channel):
        for number, step in enumerate(steps):
            rank.load(step)
            if number % 3 == rank.rank:
                ce_exchange_start(*rank.arguments(channel))
                time.sleep(0.02)
                ce_exchange_wait(*rank.arguments(channel))
            else:
                single(rank, channel)
            rank.assert_arrived(step)

    on_threads(world, run)


def test_opcheck(worlds, generator):
    world = worlds(Shape(world=1))
    world.load(make_step(world.shape, generator))
    rank, channel = world.ranks[0], world.channels[0]
    arguments = (rank.caches[0], rank.plan, rank.workspaces[0], channel.state, channel.name)
    torch.library.opcheck(torch.ops.torch_sparse_mla.ce_exchange, arguments, {})


def test_rejects_a_combined_call_of_a_rank_whose_peers_share_its_thread(worlds, generator, device):
    """Where its peers call is known after the first exchange."""
    world = worlds(Shape(), device)
    world.load(make_step(world.shape, generator))
    for call in (ce_exchange_start, ce_exchange_wait):
        for rank, channel in world.both():
            call(*rank.arguments(channel))
    message = r"ce_exchange: channel .* rank 0.* rank 1 was last seen on the calling thread"
    with pytest.raises(ExchangeError, match=message):
        single(*world.both()[0])
    assert world.channels[0].state[:2].tolist() == [1, 1]


BAD_ARGUMENTS = {
    "cache width": ("cache", lambda a: a["cache"][..., :-1], "the record width of channel"),
    "cache dtype": ("cache", lambda a: a["cache"].view(torch.int8), "dtype uint8"),
    "cache strides": ("cache", lambda a: a["cache"].transpose(0, 1), "strides [any, 37, 1]"),
    "plan of another capacity": ("plan", lambda a: a["plan"][:-4], "words of a plan for channel"),
    "plan dtype": ("plan", lambda a: a["plan"].long(), "dtype int32"),
    "workspace too short": ("workspace", lambda a: a["workspace"][:-1], "capacity_records, record_bytes of channel"),
    "workspace with gaps": ("workspace", lambda a: gapped(a["workspace"]), "a contiguous tensor"),
    "workspace in the cache": ("workspace", lambda a: overlapping(a), "memory of its own"),
    "state of another shape": ("state", lambda a: a["state"][1:], "shape [words] = [8]"),
    "state of another channel": ("state", lambda a: torch.zeros_like(a["state"]), "the state of channel"),
    "unknown channel": ("channel", lambda a: "nobody", "the name of an open channel"),
}


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]]


def overlapping(arguments: dict) -> torch.Tensor:
    workspace = arguments["workspace"]
    return whole_range(arguments["cache"])[: workspace.numel()].view(workspace.shape)


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_rejects(name, worlds, generator):
    """Nothing is written or counted, and the next call is served."""
    world = worlds(Shape(world=1))
    step = make_step(world.shape, generator)
    world.load(step)
    rank, channel = world.ranks[0], world.channels[0]
    arguments = {
        "cache": rank.caches[0],
        "plan": rank.plan,
        "workspace": rank.workspaces[0],
        "state": channel.state,
        "channel": channel.name,
    }
    argument, change, allowed = BAD_ARGUMENTS[name]
    before = {key: whole_range(value).clone() for key, value in arguments.items() if key != "channel"}
    with expect_rejection("ce_exchange", argument, allowed):
        torch.ops.torch_sparse_mla.ce_exchange(*{**arguments, argument: change(arguments)}.values())
    for key, value in before.items():
        assert torch.equal(whole_range(arguments[key]), value), key
    torch.ops.torch_sparse_mla.ce_exchange(*arguments.values())
    rank.assert_arrived(step, layers=1)


def test_a_rejected_call_does_not_cost_the_peers_their_exchange(worlds, generator):
    world = worlds(Shape())
    for _ in range(2):
        step = make_step(world.shape, generator)
        world.load(step)

        def run(rank, channel):
            if rank.rank == 1:
                with expect_rejection("ce_exchange_layers", "caches", "1 to 3, those of channel"):
                    ce_exchange_layers(rank.caches * 2, rank.plan, rank.workspaces * 2, channel.state, channel)
            single(rank, channel)

        on_threads(world, run)
        world.assert_arrived(step, layers=1)


def test_rejects_layers_that_do_not_fit_together(worlds, generator):
    world = worlds(Shape(world=1))
    rank, channel = world.ranks[0], world.channels[0]
    caches, plan, workspaces, state, name = rank.arguments(channel)
    for bad, argument, allowed in (
        ({"caches": [], "workspaces": []}, "caches", "1 to 3"),
        ({"workspaces": workspaces[:2]}, "workspaces", "3, as many as caches"),
        ({"workspaces": [workspaces[0]] * 3}, r"workspaces\[1\]", "memory of its own"),
        ({"caches": [*caches[:2], caches[2][:-1]]}, r"caches\[2\]", "those of the first layer"),
    ):
        given = {"caches": caches, "plan": plan, "workspaces": workspaces, "state": state, "channel": name, **bad}
        with expect_rejection("ce_exchange_start", argument, allowed):
            ce_exchange_start(*given.values())


def test_fakes_accept_fake_cuda_tensors(worlds):
    from torch._subclasses.fake_tensor import FakeTensorMode

    world = worlds(Shape())
    rank, channel = world.ranks[0], world.channels[0]
    with FakeTensorMode():
        fake = dataclasses.replace(
            rank,
            caches=[torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device="cuda") for c in rank.caches],
            workspaces=[torch.empty(w.shape, dtype=w.dtype, device="cuda") for w in rank.workspaces],
            plan=torch.empty(rank.plan.shape, dtype=torch.int32, device="cuda"),
        )
        state = torch.empty(channel.state.shape, dtype=torch.int32, device="cuda")
        ops = torch.ops.torch_sparse_mla
        assert ops.ce_exchange_start(fake.caches, fake.plan, fake.workspaces, state, channel.name) is None
        with expect_rejection("ce_exchange_wait", "plan", "words of a plan"):
            ops.ce_exchange_wait(fake.caches, state, fake.workspaces, state, channel.name)
