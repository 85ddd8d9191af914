"""A step of all loopback ranks in one CUDA graph."""

import pytest
import torch

from .cases import Model, Shape, close, fill_context, layer_steps, make_ranks, select, step_lengths

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["owner_merge", "exchange", "exchange_bulk"])
def test_replays_follow_what_changes(strategy, generator):
    shape = Shape(world=2)
    model = Model(shape, generator, "cuda")
    fill_context(model)
    ranks = make_ranks(shape, strategy, device="cuda")
    lengths = step_lengths(shape, 0)
    new = lengths.view(shape.requests, -1) - 1
    layers = range(1 + shape.shared_layers)
    for layer in layers:
        model.write(layer, new)
    currents = [model.current(layer, new) for layer in layers]
    queries = [model.queries() for _ in layers]
    topk, on_device = select(shape, lengths, generator).cuda(), lengths.cuda()
    # Both are kept: the graph reads the one on the device.
    model_table, device_table = model.block_table, model.block_table.cuda()
    model.block_table = device_table

    def step():
        return [layer_steps(model, ranks, layer, queries[layer], topk, on_device, currents[layer]) for layer in layers]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    model.block_table = model_table
    for _ in range(5):
        chosen = select(shape, lengths, generator)
        topk.copy_(chosen)
        for q in queries:
            q.copy_(model.queries())
        for out, lse in results:
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
        graph.replay()
        for layer, (out, lse) in enumerate(results):
            want, want_lse = model.unsharded(layer, queries[layer], chosen, lengths)
            torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
        for rank in ranks:
            for channel in rank.channels:
                channel.check()
    close(ranks)
