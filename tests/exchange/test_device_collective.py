"""The collective transport on GPUs, over NCCL, which takes one GPU for each rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_sparse_mla import ce_exchange_layers, ce_exchange_start, ce_exchange_wait

from .captured import capture, put, ready, warm_up, wrong_bytes
from .cases import Shape, make_channel, make_rank, make_step
from .processes import run_ranks

WORLDS = [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multigpu)]


def combined(rank, channel):
    ce_exchange_layers(*rank.arguments(channel))


def split(rank, channel):
    ce_exchange_start(*rank.arguments(channel, 2))
    ce_exchange_wait(*rank.arguments(channel, 2))


def eager_and_captured(rank, shape):
    torch.cuda.set_device(rank)
    channel = make_channel(shape, dist.group.WORLD, "c", transport="collective")
    case = make_rank(shape, rank, "cuda")
    generator = torch.Generator().manual_seed(9)
    steps = [ready(case, make_step(shape, generator, share)) for share in (1.0, 0.5, 0.2)]
    warm_up(case, channel, [combined, split])
    graphs = {3: capture(combined, case, channel), 2: capture(split, case, channel)}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(40):
        step, layers = steps[number % 3], 3 - number // 2 % 2
        put(case, step)
        if number % 4 == 3:
            (combined if layers == 3 else split)(case, channel)
        else:
            graphs[layers].replay()
        wrong += wrong_bytes(case, step, layers)
    channel.check()
    result = int(wrong), channel.explain()["transport"]
    channel.close()
    return result


@pytest.mark.parametrize("world", WORLDS)
def test_processes_match_the_selection(world, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    shape = Shape(world=world, requests=2, rows_per_request=2, topk=32, tokens=128, record_bytes=656)
    results = run_ranks(world, eager_and_captured, tmp_path, shape, start="spawn", backend="nccl")
    assert results == [(0, "collective")] * world
