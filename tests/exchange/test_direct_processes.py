"""The direct transport between processes that share one GPU, through PyTorch symmetric memory."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_sparse_mla import ExchangeError, ce_exchange_layers, ce_exchange_start, ce_exchange_wait

from .captured import capture, put, ready, warm_up, wrong_bytes
from .cases import Shape, make_channel, make_rank, make_step
from .processes import die, run_ranks

pytestmark = pytest.mark.gpu

SHAPE = {"requests": 2, "rows_per_request": 2, "topk": 32, "tokens": 128, "record_bytes": 656}
TIMEOUT_S = 20.0


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


def eager_and_captured(rank, shape):
    """Both forms, with data that changes and a rank that is late at times. Returns (wrong bytes, explain)."""
    torch.cuda.set_device(0)
    channel = make_channel(shape, dist.group.WORLD, "c", device="cuda", timeout_s=TIMEOUT_S)
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
    again = make_channel(shape, dist.group.WORLD, "c", device="cuda", timeout_s=TIMEOUT_S)
    put(case, steps[0])
    combined(case, again)
    again.check()
    wrong += wrong_bytes(case, steps[0], 3)
    result = int(wrong), explained
    dist.barrier()
    again.close()
    return result


@pytest.mark.parametrize("world", [2, 4])
def test_processes_match_the_selection(world, ranks):
    results = ranks(world, eager_and_captured, Shape(world=world, **SHAPE))
    assert [wrong for wrong, _ in results] == [0] * world
    assert {explained["transport"] for _, explained in results} == {"direct"}


def two_channels(rank, shape):
    torch.cuda.set_device(0)
    generator = torch.Generator().manual_seed(10)
    lanes = []
    for name in ("target", "draft"):
        channel = make_channel(shape, dist.group.WORLD, name, device="cuda", timeout_s=TIMEOUT_S)
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


def test_two_channels_on_two_streams(ranks):
    """Ranks issue the two in different order: neither waits for the other."""
    ranks(2, two_channels, Shape(world=2, **SHAPE))


def one_rank_dies(rank, shape):
    torch.cuda.set_device(0)
    channel = make_channel(shape, dist.group.WORLD, "c", device="cuda", timeout_s=1.0)
    case = make_rank(shape, rank, "cuda")
    case.load(make_step(shape, torch.Generator().manual_seed(1)))
    # The first calls compile, which takes the ranks unequal times.
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        die()
    begin = time.monotonic()
    combined(case, channel)
    with pytest.raises(ExchangeError) as caught:
        channel.check()
    channel.close()
    return str(caught.value), time.monotonic() - begin


def test_a_killed_rank_is_named_after_the_timeout(ranks):
    results = ranks(2, one_rank_dies, Shape(world=2, **SHAPE))
    assert results[1] is None
    message, seconds = results[0]
    assert "channel 'c': rank 0, epoch 1: rank 1 did not come within 1.0 s" in message
    assert seconds < 30
