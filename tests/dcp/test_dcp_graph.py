"""Steps of loopback ranks on a GPU: in one CUDA graph, on streams of their own, and what they launch and allocate."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from torch_sparse_mla.dcp import run_loopback
from torch_sparse_mla.dcp.steps import finish

from .cases import Model, Shape, close, fill_context, layer_steps, make_ranks, rank_steps, select, step_lengths

pytestmark = pytest.mark.gpu

STRATEGIES = ("owner_merge", "exchange", "exchange_bulk", "peer_read")
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Captured:
    """Static inputs of a step on the GPU, and a graph of all its layers on all ranks."""

    def __init__(self, shape: Shape, strategy: str, generator: torch.Generator, dtype=torch.float32) -> None:
        self.model = Model(shape, generator, "cuda")
        fill_context(self.model)
        self.shape, self.dtype = shape, dtype
        self.ranks = make_ranks(shape, strategy, device="cuda", dtype=dtype)
        self.layers = range(1 + shape.shared_layers)
        self.lengths = step_lengths(shape, 0)
        self.new = self.lengths.view(shape.requests, -1) - 1
        self.write()
        self.currents = [self.model.current(layer, self.new) for layer in self.layers]
        self.queries = [self.model.queries(dtype) for _ in self.layers]
        self.topk, self.lengths_on_device = select(shape, self.lengths, generator).cuda(), self.lengths.cuda()
        self.table = self.model.block_table.cuda()

    def write(self) -> None:
        for layer in self.layers:
            self.model.write(layer, self.new)

    def step(self) -> list:
        table, self.model.block_table = self.model.block_table, self.table
        arguments = (self.topk, self.lengths_on_device)
        results = [
            layer_steps(self.model, self.ranks, layer, self.queries[layer], *arguments, self.currents[layer])
            for layer in self.layers
        ]
        self.model.block_table = table
        return results

    def change(self, generator: torch.Generator) -> torch.Tensor:
        """New lists, queries and records. Returns the lists."""
        chosen = select(self.shape, self.lengths, generator)
        self.topk.copy_(chosen)
        self.model.states.normal_(generator=generator)
        fill_context(self.model)
        self.write()
        for layer in self.layers:
            self.queries[layer].copy_(self.model.queries(self.dtype))
            for kept, values in zip(self.currents[layer], self.model.current(layer, self.new), strict=True):
                kept.copy_(values)
        return chosen

    def check(self, results: list, chosen: torch.Tensor) -> None:
        tolerance = 1e-3 if self.dtype == torch.float32 else 2e-2
        for layer, (out, lse) in enumerate(results):
            want, want_lse = self.model.unsharded(layer, self.queries[layer], chosen, self.lengths)
            torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
        for rank in self.ranks:
            for channel in rank.channels:
                channel.check()


@every_strategy
@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (4, torch.bfloat16)], ids=["2-fp32", "4-bf16"])
def test_replays_and_eager_calls_follow_what_changes(strategy, world, dtype, generator):
    captured = Captured(Shape(world=world, heads=16), strategy, generator, dtype)
    captured.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = captured.step()
    for number in range(9):
        chosen = captured.change(generator)
        for out, lse in results:
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
        if number % 3 == 2:
            captured.check(captured.step(), chosen)
        else:
            graph.replay()
            captured.check(results, chosen)
    close(captured.ranks)


def shared_layer(captured: Captured, outs: list, lses: list) -> None:
    """The second Shared layer alone, into given results."""
    model, heads = captured.model, captured.shape.heads
    steps = [
        rank.shared_steps(
            captured.queries[2][:, number * heads : (number + 1) * heads].contiguous(),
            model.caches[number][2],
            1,
            latent=captured.currents[2][0],
            rope=captured.currents[2][1],
            out=outs[number],
            lse=lses[number],
        )
        for number, rank in enumerate(captured.ranks)
    ]
    run_loopback(steps)


# Push, wait, attention and the merge of its splits; where partial results travel, push, wait and merge once more. In
# bulk nothing travels, and the current tokens are patched in.
NODES = {"owner_merge": 7, "exchange": 4, "exchange_bulk": 3, "peer_read": 4}


@every_strategy
def test_a_shared_layer_launches_few_kernels_and_allocates_nothing(strategy, generator):
    captured = Captured(Shape(world=2, heads=16, topk=128, tokens=200), strategy, generator, torch.bfloat16)
    captured.step()
    rows = captured.shape.rows
    outs = [torch.empty(rows, 16, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    lses = [torch.empty(rows, 16, device="cuda") for _ in range(2)]
    shared_layer(captured, outs, lses)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    shared_layer(captured, outs, lses)
    # Each rank's heads of the queries are made contiguous by this test.
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shared_layer(captured, outs, lses)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    own = [name for name in kernels if "elementwise" not in name]
    assert len(own) <= 2 * NODES[strategy], own
    close(captured.ranks)


@every_strategy
def test_steps_do_not_grow_memory(strategy, generator):
    captured = Captured(Shape(world=2, heads=16), strategy, generator, torch.bfloat16)
    results = captured.step()
    # What earlier tests left in cycles is not to be freed between the two readings.
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        results = captured.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    del results
    close(captured.ranks)


def on_streams(captured: Captured, streams: list, after) -> list:
    """The Full layer of every rank, each on a stream of its own, then `after(rank, stream)`."""
    results = []
    table, captured.model.block_table = captured.model.block_table, captured.table
    for rank, stream in zip(captured.ranks, streams, strict=True):
        with torch.cuda.stream(stream):
            arguments = (captured.queries[0], captured.topk, captured.lengths_on_device, captured.currents[0])
            results.append(finish(rank_steps(captured.model, rank, 0, *arguments)))
            after(rank)
    captured.model.block_table = table
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("fenced", [True, False])
def test_a_slow_reader_holds_up_the_fence(fenced, generator):
    """Rank 0 overwrites its cache while rank 1 has not read it yet. Without the fence, rank 1 notices."""
    shape = Shape(world=2, heads=16, shared_layers=0)
    captured = Captured(shape, "peer_read", generator)
    model = captured.model
    caches = [rank.empty_cache(model.caches[0].shape[1]) for rank in captured.ranks]
    for cache, filled in zip(caches, model.caches, strict=True):
        cache.copy_(filled[0])
    model.caches = [cache.unsqueeze(0) for cache in caches]
    chosen = captured.change(generator)
    captured.check(captured.step(), chosen)
    # The slow rank looks for its peers' caches after the hop and before it reads.
    slow = captured.ranks[1].peers
    find = slow.of
    slow.of = lambda cache: (torch.cuda._sleep(200_000_000), find(cache))[1]
    streams = [torch.cuda.Stream() for _ in range(2)]
    poison = torch.full_like(caches[0], 0xFF)
    caches[0].copy_(caches[0].clone())
    torch.cuda._sleep(1)
    run_loopback([rank.fence_steps() for rank in captured.ranks])
    torch.cuda.synchronize()

    def after(rank):
        if fenced:
            rank.fence()
        if rank is captured.ranks[0]:
            caches[0].copy_(poison)

    kept = caches[0].clone()
    (_, (out, _)) = on_streams(captured, streams, after)
    caches[0].copy_(kept)
    want, _ = model.unsharded(0, captured.queries[0], chosen, captured.lengths)
    right = torch.allclose(out, want[:, 16:], rtol=1e-3, atol=1e-3)
    assert right == fenced
    close(captured.ranks)
