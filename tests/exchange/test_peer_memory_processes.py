"""Transports of CUDA between processes: that share one GPU, through PyTorch symmetric memory, or have one each."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_sparse_mla import ExchangeError, ce_exchange_layers, ce_exchange_start, ce_exchange_wait

from .captured import Reader, capture, put, ready, warm_up, wrong_bytes
from .cases import Shape, make_channel, make_rank, make_step
from .processes import die, in_turn, run_ranks

SHAPE = {"requests": 2, "rows_per_request": 2, "topk": 32, "tokens": 128, "record_bytes": 656}
TIMEOUT_S = 20.0


@pytest.fixture(params=["direct", "ce"])
def transport(request):
    return request.param


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return lambda world, function, *arguments: run_ranks(world, function, tmp_path, *arguments, start="spawn")


def combined(rank, channel):
    ce_exchange_layers(*rank.arguments(channel))


def split(rank, channel):
    ce_exchange_start(*rank.arguments(channel, 2))
    ce_exchange_wait(*rank.arguments(channel, 2))


def use_gpu(rank):
    """Its own where there is one for every rank; ranks share the first one else."""
    torch.cuda.set_device(rank if torch.cuda.device_count() >= dist.get_world_size() else 0)


def eager_and_captured(rank, shape, transport):
    """Both forms, with data that changes and a rank that is late at times. Returns (wrong bytes, explain)."""
    use_gpu(rank)
    sizes = {"device": "cuda", "timeout_s": TIMEOUT_S, "transport": transport, "expected_records": 40}
    channel = make_channel(shape, dist.group.WORLD, "c", **sizes)
    case = make_rank(shape, rank, "cuda")
    generator = torch.Generator().manual_seed(9)
    steps = [ready(case, make_step(shape, generator, share)) for share in (1.0, 0.5, 0.2)]
    warm_up(case, channel, [combined, split])
    graphs = {3: capture(combined, case, channel), 2: capture(split, case, channel)}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(40):
        step, layers = steps[number % 3], 3 - number // 2 % 2
        put(case, step)
        if rank == number % shape.world and number % 5 == 0:
            time.sleep(0.01)
        if number % 4 == 3:
            (combined if layers == 3 else split)(case, channel)
        else:
            graphs[layers].replay()
        wrong += wrong_bytes(case, step, layers)
    channel.check()
    explained = channel.explain()
    channel.close()
    again = make_channel(shape, dist.group.WORLD, "c", **sizes)
    put(case, steps[0])
    combined(case, again)
    again.check()
    wrong += wrong_bytes(case, steps[0], 3)
    result = int(wrong), explained
    dist.barrier()
    again.close()
    return result


def sets_that_peers_write(rank, shape):
    """Returns wrong bytes, and whether the last exchange went straight into a set."""
    use_gpu(rank)
    sizes = {"device": "cuda", "timeout_s": TIMEOUT_S, "transport": "direct", "workspace_sets": 3}
    channel = make_channel(shape, dist.group.WORLD, "c", **sizes)
    case = make_rank(shape, rank, "cuda")
    generator = torch.Generator().manual_seed(9)
    steps = [ready(case, make_step(shape, generator, share)) for share in (1.0, 0.5, 0.2)]
    reader = Reader(case, channel)
    reader.put(steps[0])
    warm_up(case, channel, [lambda *_, act=act: act() for act in reader.program()])
    graphs = [capture(act) for act in reader.program()]
    for number in range(40):
        kind = number * 7 // 3 % len(graphs)
        reader.put(steps[number % 3])
        if rank == number % shape.world and number % 5 == 0:
            time.sleep(0.01)
        reader.program()[kind]() if number % 4 == 3 else graphs[kind].replay()
    for number in (0, 1, 2):
        reader.exchange(number, 1)
    channel.check()
    words = channel.transport.own_words.tolist()
    result = int(reader.wrong), words[0] == int(channel.state[1])
    dist.barrier()
    channel.close()
    return result


def assert_right(results, transport):
    assert [wrong for wrong, _ in results] == [0] * len(results)
    assert {explained["transport"] for _, explained in results} == {transport}


@pytest.mark.multigpu
@pytest.mark.parametrize("transport", ["collective"], indirect=True)
def test_processes_with_a_gpu_each_match_the_selection(transport, ranks):
    """Over NCCL, which wants a GPU for every rank."""
    assert_right(ranks(2, eager_and_captured, Shape(world=2, **SHAPE), transport), transport)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["collective"], indirect=True)
def test_nccl_of_one_rank_replays_and_closes(transport, ranks):
    results = ranks(1, eager_and_captured, Shape(world=1, **SHAPE), transport)
    assert results[0][0] == 0
    assert results[0][1]["collective"].startswith("NCCL all-gather")


def two_ranks_of_one_gpu(rank, shape):
    torch.cuda.set_device(0)
    with pytest.raises(RuntimeError) as caught:
        make_channel(shape, dist.group.WORLD, "c", device="cuda", transport="collective")
    return str(caught.value)


@pytest.mark.gpu
def test_nccl_refuses_two_ranks_of_one_gpu_on_both(ranks):
    errors = ranks(2, two_ranks_of_one_gpu, Shape(world=2, **SHAPE))
    assert all("NCCL" in error for error in errors)


def two_channels(rank, shape, transport):
    use_gpu(rank)
    generator = torch.Generator().manual_seed(10)
    lanes = []
    for name in ("target", "draft"):
        sizes = {"device": "cuda", "timeout_s": TIMEOUT_S, "transport": transport}
        channel = make_channel(shape, dist.group.WORLD, name, **sizes)
        lanes.append((make_rank(shape, rank, "cuda"), channel, torch.cuda.Stream()))
    for _ in range(5):
        steps = [make_step(shape, generator) for _ in lanes]
        for (case, _, _), step in zip(lanes, steps, strict=True):
            case.load(step)
        torch.cuda.synchronize()
        for case, channel, stream in lanes if rank == 0 else lanes[::-1]:
            with torch.cuda.stream(stream):
                combined(case, channel)
        for (case, channel, _), step in zip(lanes, steps, strict=True):
            channel.check()
            case.assert_arrived(step)
    dist.barrier()
    for _, channel, _ in lanes:
        channel.close()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_processes_match_the_selection(world, ranks):
    """Over either transport; in sets that peers write until they are read; and with two channels on two streams, which
    ranks issue in different order: neither waits for the other."""
    shape = Shape(world=world, **SHAPE)
    jobs = [(eager_and_captured, shape, "direct"), (eager_and_captured, shape, "ce"), (sets_that_peers_write, shape)]
    jobs += [(two_channels, shape, "direct"), (two_channels, shape, "ce")]
    direct, ce, sets, *_ = zip(*ranks(world, in_turn, jobs), strict=True)
    assert_right(direct, "direct")
    assert_right(ce, "ce")
    assert sets == ((0, True),) * world


def one_rank_missing(rank, shape, transport, how):
    """A combined call, or the replay of a captured one, that rank 1 does not make."""
    use_gpu(rank)
    channel = make_channel(shape, dist.group.WORLD, "c", device="cuda", timeout_s=1.0, transport=transport)
    case = make_rank(shape, rank, "cuda")
    case.load(make_step(shape, torch.Generator().manual_seed(1)))
    # Other kernels compile, which takes the ranks unequal times.
    dist.barrier()
    combined(case, channel)
    torch.cuda.synchronize()
    graph = capture(combined, case, channel)
    dist.barrier()
    if rank == 1 and how == "killed":
        die()
    if rank == 1:
        return time.sleep(4.0)
    begin = time.monotonic()
    graph.replay() if how == "replay" else combined(case, channel)
    with pytest.raises(ExchangeError) as caught:
        channel.check()
    seconds = time.monotonic() - begin
    channel.close()
    return str(caught.value), seconds


def check_the_missing_rank_is_named(results):
    assert results[1] is None
    message, seconds = results[0]
    assert "channel 'c': rank 0, epoch 2: rank 1 did not come within 1.0 s" in message
    assert seconds < 30


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["killed", "replay"])
def test_a_missing_rank_is_named_after_the_timeout(how, transport, ranks):
    check_the_missing_rank_is_named(ranks(2, one_rank_missing, Shape(world=2, **SHAPE), transport, how))


@pytest.mark.multigpu
@pytest.mark.parametrize("how", ["killed", "withheld", "replay"])
@pytest.mark.parametrize("transport", ["collective"], indirect=True)
def test_a_rank_that_nccl_misses_is_named_after_the_timeout(how, transport, ranks):
    check_the_missing_rank_is_named(ranks(2, one_rank_missing, Shape(world=2, **SHAPE), transport, how))
