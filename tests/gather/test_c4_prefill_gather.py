"""`c4_prefill_gather` over loopback ranks and over processes: every byte of gathered buffers, and what it refuses."""

import dataclasses
import threading

import hypothesis
import pytest
import torch
import torch.distributed as dist

import torch_sparse_mla
from torch_sparse_mla import Channel, ExchangeError

from ..decode.rejections import expect_rejection
from ..exchange.processes import run_ranks
from .cases import (
    CHUNKS,
    POISON,
    POISON_BYTE,
    Chunk,
    RankLayer,
    chunks,
    every_chunk,
    gather,
    layer_records,
    make_chunk,
    make_layers,
    open_channels,
    random_topk,
)

OP = "c4_prefill_gather"
op = torch.ops.torch_sparse_mla.c4_prefill_gather.default
WIDTHS = (1, 16, 37, 304, 368, 432, 528, 656, 1_152, 65_536)


def close(channels: list[Channel]) -> None:
    for channel in channels:
        channel.check()
        channel.close()


def assert_gathered(layers: list[RankLayer], expected: torch.Tensor) -> None:
    for rank, layer in enumerate(layers):
        assert torch.equal(layer.gathered.cpu(), expected), f"rank {rank}"


@every_chunk
def test_every_rank_gets_every_record(chunk, device):
    channels = open_channels(chunk, 37, device)
    layers, expected = make_layers(chunk, channels, 37, seed=1, device=device)
    gather(layers)
    assert_gathered(layers, expected)
    close(channels)


@hypothesis.given(chunk=chunks())
@hypothesis.settings(max_examples=60)
def test_any_chunk(chunk):
    channels = open_channels(chunk, 16)
    layers, expected = make_layers(chunk, channels, 16, seed=2)
    gather(layers)
    assert_gathered(layers, expected)
    close(channels)


@pytest.mark.parametrize("record_bytes", WIDTHS)
def test_records_of_every_width(record_bytes, device):
    chunk = CHUNKS["two-requests-cached"]
    channels = open_channels(chunk, record_bytes, device)
    layers, expected = make_layers(chunk, channels, record_bytes, seed=3, device=device)
    gather(layers)
    assert_gathered(layers, expected)
    close(channels)


@pytest.mark.parametrize("gap", [16, 5])
def test_pages_that_are_followed_by_other_data(gap, device):
    """An index tail lies behind each page: slots count page sizes, not byte strides over record widths."""
    chunk = CHUNKS["prefix-hit"]
    channels = open_channels(chunk, 48, device)
    layers, expected = make_layers(chunk, channels, 48, seed=4, gap=gap * 48, device=device)
    gather(layers)
    assert_gathered(layers, expected)
    layers, expected = make_layers(chunk, channels, 48, seed=5, gap=gap, device=device)
    gather(layers)
    assert_gathered(layers, expected)
    close(channels)


def test_one_plan_serves_several_layers(device):
    chunk = CHUNKS["interleave-of-five"]
    channels = open_channels(chunk, 64, device)
    first, _ = make_layers(chunk, channels, 64, seed=6, device=device)
    plans = [layer.plan for layer in first]
    for seed in (7, 8, 9):
        layers, expected = make_layers(chunk, channels, 64, seed=seed, device=device)
        layers = [dataclasses.replace(layer, plan=plan) for layer, plan in zip(layers, plans, strict=True)]
        gather(layers)
        assert_gathered(layers, expected)
    close(channels)


def test_chunks_of_one_prompt_see_ever_more(device):
    """Chunked prefill: the second chunk gathers the first one's records too, in the same buffers."""
    sizes = make_chunk([96], [32], page_size=16).sizes
    table = torch.randperm(8)[:2].int().view(1, 2) + 1
    channels = open_channels(make_chunk([96], [32], page_size=16), 32, device)
    for length in (32, 64, 96):
        chunk = Chunk([length], [32], table, sizes)
        layers, expected = make_layers(chunk, channels, 32, seed=10, device=device)
        gather(layers)
        assert_gathered(layers, expected)
    close(channels)


def test_a_smaller_chunk_after_a_larger_one_reads_nothing_of_it(device):
    """Same buffers: the padding of the later chunk is zero although records lay there."""
    large = make_chunk([90, 70], [90, 70])
    small = Chunk([21], [21], large.block_table[:1], large.sizes)
    channels = open_channels(large, 48, device)
    layers, expected = make_layers(large, channels, 48, seed=11, device=device)
    gather(layers)
    assert_gathered(layers, expected)
    buffers = [layer.gathered for layer in layers]
    layers, expected = make_layers(small, channels, 48, seed=12, device=device)
    layers = [dataclasses.replace(layer, gathered=buffer) for layer, buffer in zip(layers, buffers, strict=True)]
    gather(layers)
    live = small.sizes.world * small.padded()
    for layer in layers:
        assert torch.equal(layer.gathered[:live].cpu(), expected[:live])
    close(channels)


def test_a_refused_plan_moves_nothing_and_no_rank_skips_the_exchange(device):
    chunk = make_chunk([33, 32], [33, 32], world=2, interleave=4, page_size=8, capacity=32)
    channels = open_channels(chunk, 16, device)
    layers, expected = make_layers(chunk, channels, 16, seed=13, device=device)
    gather(layers)
    assert (expected == POISON_BYTE).all()
    assert_gathered(layers, expected)
    close(channels)


def test_lengths_that_differ_between_ranks_are_an_error():
    """Rank-dependent metadata: told, instead of a hang or of records at other places."""
    chunk = CHUNKS["two-requests-cached"]
    channels = open_channels(chunk, 16)
    layers, _ = make_layers(chunk, channels, 16, seed=14)
    chunk.sizes.owner_offsets(layers[2].plan).copy_(torch.arange(5)[None] * 2)
    with pytest.raises(ExchangeError, match="has other owner offsets"):
        gather(layers)
    for channel in channels:
        channel.close()


def test_combined_calls_on_a_thread_for_each_rank():
    chunk = CHUNKS["two-requests-cached"]
    channels = open_channels(chunk, 37)
    layers, expected = make_layers(chunk, channels, 37, seed=15)
    threads = [threading.Thread(target=op, args=layer.arguments()) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert_gathered(layers, expected)
    close(channels)


def test_combined_call_of_one_rank_alone(device):
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 37, device)
    (layer,), expected = make_layers(chunk, channels, 37, seed=16, device=device)
    torch_sparse_mla.c4_prefill_gather(layer.cache, layer.plan, layer.gathered, channels[0].state, channels[0])
    assert_gathered([layer], expected)
    close(channels)


def test_combined_calls_on_one_thread_are_refused_not_hung():
    chunk = CHUNKS["two-requests-cached"]
    channels = open_channels(chunk, 37)
    layers, _ = make_layers(chunk, channels, 37, seed=17)
    gather(layers)
    with pytest.raises(ExchangeError, match=r"c4_prefill_gather: channel .* last seen on the calling thread"):
        op(*layers[0].arguments())
    for channel in channels:
        channel.close()


def _gather_in_a_process(rank: int, chunk: Chunk, record_bytes: int) -> list[torch.Tensor]:
    channel = Channel.create("gather", dist.group.WORLD, chunk.sizes.gathered_records, record_bytes, 1)
    gathered = []
    for seed in (1, 2, 3):
        layers, _ = make_layers(chunk, [channel] * chunk.sizes.world, record_bytes, seed)
        op(*layers[rank].arguments())
        gathered.append(layers[rank].gathered)
    channel.close()
    return [buffer.numpy() for buffer in gathered]


@pytest.mark.parametrize("name", ["two-requests-cached", "ranks-that-own-nothing"])
def test_processes(name, tmp_path):
    chunk = CHUNKS[name]
    results = run_ranks(chunk.sizes.world, _gather_in_a_process, tmp_path, chunk, 37)
    loopback = open_channels(chunk, 37)
    for layer, seed in enumerate((1, 2, 3)):
        _, expected = make_layers(chunk, loopback, 37, seed)
        for rank, gathered in enumerate(results):
            assert torch.equal(torch.from_numpy(gathered[layer]), expected), f"rank {rank}, layer {layer}"
    close(loopback)


def test_remapped_lists_find_the_records(device):
    """Pack, move and remap together: each slot of each list holds the bytes of the token that was listed."""
    chunk = make_chunk([70, 41, 8], [30, 41, 2], rows=80)
    channels = open_channels(chunk, 24, device)
    layers, _ = make_layers(chunk, channels, 24, seed=18, device=device)
    gather(layers)
    topk = random_topk(chunk, 20)
    records, plan = layer_records(chunk, 24, 18), chunk.plan(0)
    for layer in layers:
        slots, counts = torch_sparse_mla.c4_remap(topk.to(device), layer.plan, chunk.sizes)
        for row, request in enumerate(plan["row_requests"]):
            tokens = [token for token in topk[row].tolist() if token >= 0]
            assert counts[row] == len(tokens)
            if tokens:
                found = layer.gathered[slots[row, : len(tokens)].long()].cpu()
                assert torch.equal(found, records[request][tokens])
    close(channels)


@dataclasses.dataclass
class Call:
    cache: torch.Tensor
    plan: torch.Tensor
    gathered: torch.Tensor
    state: torch.Tensor
    channel: str


@pytest.mark.parametrize(
    "change, argument, allowed",
    [
        ({"cache": lambda t: t.view(torch.int8)}, "cache", "dtype uint8"),
        ({"cache": lambda t: t[:, :, :8]}, "cache", "the record width of channel"),
        ({"cache": lambda t: t[0]}, "cache", "shape [pages, page_size >= 1, 16]"),
        ({"cache": lambda t: t[:, ::2]}, "cache", "strides [any, 16, 1]"),
        ({"cache": lambda t: t[:1].expand(3, -1, -1)}, "cache", "128 or more"),
        ({"gathered": lambda t: t[:-1]}, "gathered", "capacity_records, record_bytes of channel"),
        ({"gathered": lambda t: t.view(torch.int8)}, "gathered", "dtype uint8"),
        ({"gathered": lambda t: t.t().contiguous().t()}, "gathered", "a contiguous tensor"),
        ({"plan": lambda t: t[:20]}, "plan", "a GatherPlan buffer of capacity"),
        ({"plan": lambda t: t.long()}, "plan", "dtype int32"),
        ({"state": lambda t: t.clone().add_(1)}, "state", "the state of channel"),
        ({"state": lambda t: t[:4]}, "state", "shape [words]"),
        ({"channel": lambda n: "nobody"}, "channel", "the name of an open channel"),
    ],
)
def test_rejects(change, argument, allowed):
    chunk = CHUNKS["two-requests-cached"]
    channels = open_channels(chunk, 16)
    layers, _ = make_layers(chunk, channels, 16, seed=19)
    call = Call(*layers[0].arguments())
    for name, function in change.items():
        setattr(call, name, function(getattr(call, name)))
    before = channels[0].state.clone()
    with expect_rejection(OP, argument, allowed):
        op(call.cache, call.plan, call.gathered, call.state, call.channel)
    assert (layers[0].gathered == POISON_BYTE).all() and torch.equal(channels[0].state, before)
    for channel in channels:
        channel.close()


def test_rejects_a_channel_of_several_requests():
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 16, requests=2)
    layers, _ = make_layers(chunk, channels, 16, seed=20)
    with expect_rejection(OP, "channel", "a channel of 1 request"):
        op(*layers[0].arguments())
    channels[0].close()


def test_rejects_a_buffer_that_overlaps_the_cache():
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 16)
    (layer,), _ = make_layers(chunk, channels, 16, seed=21)
    inside = layer.gathered.view(1, -1, 16)
    with expect_rejection(OP, "gathered", "memory of its own"):
        op(inside, layer.plan, layer.gathered, channels[0].state, channels[0].name)
    channels[0].close()


@pytest.mark.parametrize("word, value, allowed", [(1, 129, "slices of 0 to 128 records"), (-1, 9_999, "slots -1..")])
def test_checked_mode_refuses_a_plan_that_is_none(word, value, allowed, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    chunk = make_chunk([64, 64], [1, 1], world=1, interleave=1, page_size=8, capacity=128)
    channels = open_channels(chunk, 16)
    (layer,), expected = make_layers(chunk, channels, 16, seed=22)
    op(*layer.arguments())
    assert torch.equal(layer.gathered, expected)
    layer.plan[word] = value
    with expect_rejection(OP, "plan", allowed):
        op(*layer.arguments())
    channels[0].close()


def test_opcheck():
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 37)
    (layer,), _ = make_layers(chunk, channels, 37, seed=23)
    torch.library.opcheck(op, layer.arguments())
    assert (layer.plan != POISON).any()
    channels[0].close()


def test_compiled_results_equal_eager():
    torch._dynamo.reset()
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 37)
    (layer,), expected = make_layers(chunk, channels, 37, seed=24)

    def function(cache, plan, gathered, state):
        torch_sparse_mla.c4_prefill_gather(cache, plan, gathered, state, channels[0].name)
        return gathered.float().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert compiled(layer.cache, layer.plan, layer.gathered, channels[0].state) == expected.float().sum()
    assert_gathered([layer], expected)
    channels[0].close()
