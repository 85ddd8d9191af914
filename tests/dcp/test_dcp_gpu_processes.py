"""Ranks that are processes on GPUs: sharing one, through peer memory; and the moves over NCCL."""

import dataclasses
import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_sparse_mla.dcp.costs import Sizes
from torch_sparse_mla.dcp.gather import Gather, Partials
from torch_sparse_mla.dcp.rank import Rank
from torch_sparse_mla.dcp.steps import finish
from torch_sparse_mla.records import LAYOUTS

from ..exchange.processes import in_turn, run_ranks
from .cases import COSTS, Model, Shape, fill_context, make_rank, rank_steps, run_step, select, step_lengths

pytestmark = pytest.mark.gpu
TIMEOUT_S = 30.0


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return lambda world, function, *arguments, **options: run_ranks(
        world, function, tmp_path, *arguments, start="spawn", **options
    )


def own_caches(model, step, rank) -> None:
    """Move this rank's caches into memory that peers can read."""
    layers = []
    for cache in model.caches[rank]:
        layers.append(step.empty_cache(cache.shape[0]))
        layers[-1].copy_(cache)
    model.caches[rank] = layers


def eager_then_captured(rank, shape, strategy, options):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    generator = torch.Generator().manual_seed(3)
    model = Model(shape, generator, f"cuda:{torch.cuda.current_device()}")
    fill_context(model)
    step = make_rank(shape, strategy, dist.group.WORLD, "dcp", timeout_s=TIMEOUT_S, **options)
    if strategy in ("auto", "peer_read"):
        own_caches(model, step, rank)
    chosen = step.warmup()
    own = slice(rank * shape.heads, (rank + 1) * shape.heads)

    def run_layer(layer, *arguments):
        return finish(rank_steps(model, step, layer, *arguments))

    for number in range(2):
        for (out, lse), (want, want_lse) in run_step(model, number, run_layer):
            torch.testing.assert_close(out, want[:, own], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(lse, want_lse[:, own], rtol=1e-3, atol=1e-3)
    replay(model, step, shape, own, generator)
    torch.cuda.synchronize()
    dist.barrier()
    explained = step.explain()
    step.close()
    return chosen, explained


def replay(model, step, shape, own, generator):
    """One step of all layers in a graph, replayed with other lists and queries."""
    lengths = step_lengths(shape, 1)
    new = lengths.view(shape.requests, -1) - 1
    layers = range(1 + shape.shared_layers)
    queries = [model.queries() for _ in layers]
    currents = [model.current(layer, new) for layer in layers]
    topk, on_device = select(shape, lengths, generator).to(model.device), lengths.to(model.device)
    table, moved = model.block_table, model.block_table.to(model.device)

    def run():
        model.block_table = moved
        results = [
            finish(rank_steps(model, step, layer, queries[layer], topk, on_device, currents[layer])) for layer in layers
        ]
        model.block_table = table
        return results

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for _ in range(3):
        chosen = select(shape, lengths, generator)
        topk.copy_(chosen)
        for q in queries:
            q.copy_(model.queries())
        for out, _ in results:
            out.fill_(torch.nan)
        graph.replay()
        for layer, (out, lse) in enumerate(results):
            want, want_lse = model.unsharded(layer, queries[layer], chosen, lengths)
            torch.testing.assert_close(out, want[:, own], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(lse, want_lse[:, own], rtol=1e-3, atol=1e-3)
    for channel in step.channels:
        channel.check()


def options_of(strategy, **more):
    return {"device": "cuda", "costs": None if strategy == "auto" else COSTS} | more


def test_two_processes_share_a_gpu(ranks):
    shape, strategies = Shape(world=2), ("owner_merge", "exchange_bulk", "peer_read", "auto")
    jobs = [(eager_then_captured, shape, strategy, options_of(strategy)) for strategy in strategies]
    for strategy, results in zip(strategies, zip(*ranks(2, in_turn, jobs), strict=True), strict=True):
        assert len({chosen for chosen, _ in results}) == 1
        assert strategy in ("auto", results[0][0])
        for _, explained in results:
            assert {channel["transport"] for channel in explained["channels"]} == {"direct"}
            assert ("peer_read" in explained["not_considered"]) == (strategy not in ("auto", "peer_read"))


def cache_of_ones_own(rank, shape):
    torch.cuda.set_device(0)
    model = Model(shape, torch.Generator().manual_seed(3), "cuda:0")
    fill_context(model)
    step = make_rank(shape, "peer_read", dist.group.WORLD, "dcp", device="cuda", timeout_s=TIMEOUT_S)
    step.warmup()
    with pytest.raises(ValueError, match=r"'cache': got memory that peers cannot read; allowed: a cache from empty_c"):
        run_step(model, 0, lambda layer, *rest: finish(rank_steps(model, step, layer, *rest)))
    dist.barrier()


def test_peer_read_refuses_a_cache_that_peers_cannot_read(ranks):
    ranks(2, cache_of_ones_own, Shape(world=2))


def static_rank(group, world: int, rank: int) -> Rank:
    sizes = Sizes(world, 2, 2, 16, 64, 656, 1152, 1028, 0)
    options = {"transport": "collective", "timeout_s": TIMEOUT_S, "device": "cuda"}
    layout = LAYOUTS["fp8_ds_mla"]
    return Rank(group, rank, world, layout, 64, 1, torch.bfloat16, 0.1, sizes, options, sends_messages=True)


def moves_over_nccl(rank, world):
    """Both moves in one graph, replayed with other values; expectations from what every rank would make."""
    torch.cuda.set_device(rank)
    static, device = static_rank(dist.group.WORLD, world, rank), torch.device("cuda", rank)
    queries, partials = Gather("q", static, 64, 1152, device), Partials("p", static, device)
    rows = 3
    q = torch.zeros(rows * 16, 576, dtype=torch.bfloat16, device=device)
    out, lse = partials.buffers(rows)

    def fill(seed):
        made = []
        for number in range(world):
            generator = torch.Generator().manual_seed(100 * seed + number)
            values = [torch.randn(tensor.shape, generator=generator).to(tensor.dtype) for tensor in (q, out, lse)]
            made.append([value.to(device) for value in values])
        for tensor, value in zip((q, out, lse), made[rank], strict=True):
            tensor.copy_(value)
        return made

    def run():
        return finish(queries.run(q)), finish(partials.run(rows))

    fill(0)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered, (arrived_out, arrived_lse) = run()
    for seed in range(1, 4):
        made = fill(seed)
        graph.replay()
        mine = slice(rank * rows, (rank + 1) * rows)
        assert torch.equal(gathered, torch.stack([values[0] for values in made]))
        assert torch.equal(arrived_out, torch.stack([values[1][mine] for values in made]))
        assert torch.equal(arrived_lse, torch.stack([values[2][mine] for values in made]))


def test_one_rank_of_nccl(tmp_path):
    """What one GPU can say of the NCCL form: the collectives are captured, on buffers that stay."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=60))
    try:
        moves_over_nccl(0, 1)
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()


OWNER_MERGES = {
    "auto": ("auto", COSTS),
    "auto-measured": ("auto", None),
    "auto-nccl": ("auto", dataclasses.replace(COSTS, moves_us=2.0, moves_nccl_us=1.0)),
    "collective": ("collective", COSTS),
}


@pytest.mark.multigpu
def test_two_gpus(ranks):
    """The moves over NCCL, owner_merge over either, and the other strategies."""
    shape = Shape(world=2)
    jobs = [(moves_over_nccl, 2)]
    jobs += [
        (eager_then_captured, shape, "owner_merge", options_of("owner_merge", transport=transport, costs=costs))
        for transport, costs in OWNER_MERGES.values()
    ]
    others_asked = ("exchange_bulk", "peer_read", "auto")
    jobs += [(eager_then_captured, shape, name, options_of(name)) for name in others_asked]
    _, *results = zip(*ranks(2, in_turn, jobs, backend="nccl"), strict=True)
    merges, others = results[: len(OWNER_MERGES)], results[len(OWNER_MERGES) :]
    for strategy, of_ranks in zip(others_asked, others, strict=True):
        assert len({chosen for chosen, _ in of_ranks}) == 1
        assert strategy in ("auto", of_ranks[0][0])
    for (transport, costs), of_ranks in zip(OWNER_MERGES.values(), merges, strict=True):
        for _, explained in of_ranks:
            ways = [row["over"] for row in explained["table"] if row["strategy"] == "owner_merge"]
            two = transport == "auto" and (costs is None or costs.moves_nccl_us is not None)
            assert ways == (["channel", "nccl"] if two else ["channel"])
            assert explained["over"] == of_ranks[0][1]["over"]
