"""The gather in CUDA graphs on the GPU: replays with other lengths, lists and records; no synchronisation."""

import dataclasses

import pytest
import torch

from .cases import (
    POISON,
    POISON_BYTE,
    Chunk,
    layer_records,
    make_chunk,
    make_layers,
    open_channels,
    poisoned_plan,
    random_topk,
    views,
)
from .resident_cases import make_step, resident_views
from .test_c4_place_records import expected

pytestmark = pytest.mark.gpu

plan_gather = torch.ops.torch_sparse_mla.c4_plan_gather.default
remap = torch.ops.torch_sparse_mla.c4_remap.default
gather = torch.ops.torch_sparse_mla.c4_prefill_gather.default


def chunks() -> list[Chunk]:
    """Of equal sizes reserved, with other lengths."""
    first = make_chunk([90, 41, 64], [20, 41, 3], rows=70)
    others = [([12, 0, 64], [5, 0, 30]), ([90, 90, 15], [1, 1, 1]), ([3, 3, 3], [3, 3, 3])]
    return [first, *(dataclasses.replace(first, lengths=lengths, new_lengths=new) for lengths, new in others)]


def test_plan_and_remap_replay_with_other_lengths_and_lists():
    cases = chunks()
    first = cases[0]
    plan = poisoned_plan(first, "cuda")
    arguments = first.plan_args(2, plan, "cuda")
    topk = random_topk(first, 40).cuda()
    slots, counts = torch.empty_like(topk), torch.empty(70, dtype=torch.int32, device="cuda")

    def call() -> None:
        plan_gather(*arguments)
        remap(topk, plan, slots, counts, *first.remap_args())

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for turn in (0, 1, 2, 3, 1, 0, 3):
        chunk = cases[turn]
        lists = random_topk(chunk, 40, seed=turn)
        for target, source in zip(arguments[:2], chunk.plan_args(2, plan)[:2], strict=True):
            target.copy_(source)
        topk.copy_(lists)
        for output in (plan, slots, counts):
            output.fill_(POISON)
        graph.replay()
        assert views(chunk.sizes, plan.cpu()) == chunk.plan(2)
        assert (slots.tolist(), counts.tolist()) == chunk.remap(lists.tolist())


def test_gather_replays_with_other_records():
    chunk = make_chunk([90, 41], [20, 41], world=1, interleave=1)
    channels = open_channels(chunk, 528, "cuda")
    (layer,), _ = make_layers(chunk, channels, 528, seed=1, device="cuda")
    gather(*layer.arguments())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather(*layer.arguments())
    for seed in (2, 3, 4):
        (other,), expected = make_layers(chunk, channels, 528, seed=seed, device="cuda")
        layer.cache.copy_(other.cache)
        layer.gathered.fill_(POISON_BYTE)
        graph.replay()
        assert torch.equal(layer.gathered.cpu(), expected)
    channels[0].check()
    channels[0].close()


def test_no_allocation_and_no_synchronisation():
    chunk = chunks()[0]
    channels = open_channels(chunk, 528, "cuda")
    layers, expected = make_layers(chunk, channels, 528, seed=1, device="cuda")
    plan = poisoned_plan(chunk, "cuda")
    arguments = chunk.plan_args(2, plan, "cuda")
    topk = random_topk(chunk, 40).cuda()
    slots, counts = torch.empty_like(topk), torch.empty(70, dtype=torch.int32, device="cuda")

    def call() -> None:
        plan_gather(*arguments)
        remap(topk, plan, slots, counts, *chunk.remap_args())
        for half in ("start", "wait"):
            for layer in layers:
                getattr(torch.ops.torch_sparse_mla, f"c4_prefill_gather_{half}")(*layer.arguments())

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for layer in layers:
        assert torch.equal(layer.gathered.cpu(), expected)
        layer.channel.check()
        layer.channel.close()


def test_incremental_plan_place_and_remap_replay_with_other_chunks():
    """Of equal reserved sizes: other lengths, places and records that are resident."""
    first = make_step([90, 41, 64], [20, 41, 3], [70, 0, 50], [1, 0, 2], rows=70)
    others = [
        ([12, 0, 64], [5, 0, 30], [3, 0, 34]),
        ([90, 41, 15], [1, 1, 1], [89, 40, 14]),
        ([3, 3, 3], [3, 3, 3], [0, 0, 0]),
    ]
    steps = [first, *(dataclasses.replace(first, lengths=a, new_lengths=b, known=c) for a, b, c in others)]
    sizes, width = first.sizes, 528
    plan = poisoned_plan(first, "cuda")
    arguments = first.plan_args(0, plan, "cuda")
    topk = random_topk(first, 40).cuda()
    slots, counts = torch.empty_like(topk), torch.empty(70, dtype=torch.int32, device="cuda")
    gathered = torch.empty(sizes.gathered_records, width, dtype=torch.uint8, device="cuda")
    resident = torch.empty(sizes.world * sizes.resident, width, dtype=torch.uint8, device="cuda")
    place = torch.ops.torch_sparse_mla.c4_place_records.default

    def call() -> None:
        plan_gather(*arguments)
        place(gathered, plan, resident, *first.remap_args()[:4])
        remap(topk, plan, slots, counts, *first.remap_args())

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for turn in (0, 1, 2, 3, 1, 0, 3):
        step = steps[turn]
        records = layer_records(step, width, turn)
        for at in (0, 1, 11, 12):
            arguments[at].copy_(step.plan_args(0, plan)[at])
        gathered.copy_(step.transit(records, width))
        lists = random_topk(step, 40, seed=turn)
        topk.copy_(lists)
        for output in (plan, slots, counts):
            output.fill_(POISON)
        resident.fill_(POISON_BYTE)
        graph.replay()
        assert resident_views(sizes, plan.cpu()) == step.plan(0)
        assert torch.equal(resident.cpu(), expected(step, records, width))
        assert (slots.tolist(), counts.tolist()) == step.remap(lists.tolist())
