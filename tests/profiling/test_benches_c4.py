"""The benchmarks of the C4 operators run, compare what they time with a reference, and fail where it is wrong."""

import functools
import itertools
import json
import types

import pytest
import torch
import torch.distributed as dist

from profiling import bench_c4_prefill_gather, bench_c4_select, shapes
from profiling.gathers import PAGE_SIZE, Chunk, Collectives, Gatherer, Packer
from profiling.ranks import LoopbackRanks
from profiling.shapes import INCREMENTAL_GATHER, GatherShape, SplitSelectShape
from profiling.timing import poison
from torch_sparse_mla.exchange.channel import REUSE_DISTANCE
from torch_sparse_mla.gather.plan import round_up

BENCHES = {"c4_select": bench_c4_select, "c4_prefill_gather": bench_c4_prefill_gather}


@pytest.mark.parametrize("name", BENCHES)
def test_runs_on_the_cpu_and_writes_its_results(name, tmp_path):
    assert BENCHES[name].main(["--device", "cpu", "--quick", "--commit", "abc1234", "--json", str(tmp_path)]) == 0
    (file,) = tmp_path.glob(f"{name}-*.json")
    cases = json.loads(file.read_text())["cases"]
    assert cases and all(case["error"] == 0 and case["us"] > 0 and case["bytes"] > 0 for case in cases)


def test_a_wrong_remap_fails_the_run(tmp_path, monkeypatch):
    right = bench_c4_prefill_gather.reference.c4_remap

    def other_positions(topk, *arguments):
        right(topk.flip(1), *arguments)

    monkeypatch.setattr(bench_c4_prefill_gather.reference, "c4_remap", other_positions)
    assert bench_c4_prefill_gather.main(["--device", "cpu", "--quick", "--json", str(tmp_path)]) == 1


def test_a_wrong_order_of_candidates_fails_the_run(tmp_path, monkeypatch):
    right = bench_c4_select.candidates_of
    monkeypatch.setattr(bench_c4_select, "candidates_of", lambda scores, pools: right(-scores, pools))
    assert bench_c4_select.main(["--device", "cpu", "--quick", "--json", str(tmp_path)]) == 1


def test_refuses_more_rows_than_tokens(capsys):
    with pytest.raises(SystemExit):
        bench_c4_select.main(["--device", "cpu", "--rows", "9000", "--contexts", "8192"])
    assert "allowed: up to the context" in capsys.readouterr().err


def test_bytes_show_when_each_form_pays(capsys):
    bench_c4_prefill_gather.print_prompts()
    printed = capsys.readouterr().out
    assert "context  131072, rows  4096: last chunk     49.5 /      1.5 /    384.8; all   32 chunks    816.8" in printed
    # One chunk is the whole prompt: nothing is saved.
    assert "context    8192, rows  8192: last chunk      3.1 /      3.1 /    769.5; all    1 chunks      3.1" in printed
    bench_c4_select.print_received()
    printed = capsys.readouterr().out
    assert "context  131072, rows  4096:   48.00 /    9.26" in printed
    assert "context  131072, rows    32:    0.38 /    3.31" in printed


def test_a_result_that_was_not_written_is_an_error():
    """Also in workspaces of the channels, which a GPU's peers write; three ranks have slices of different sizes."""
    generator, device = torch.Generator().manual_seed(0), torch.device("cpu")
    split = bench_c4_select._Ranks(SplitSelectShape(3, 1_024, pools=16), device, generator)
    contenders = [(contender, bench_c4_select.NUM_SETS - 1) for contender in (split.merge(), split.rows())]
    gatherers = []
    for op, world in itertools.product((bench_c4_prefill_gather.BENCH, INCREMENTAL_GATHER), (1, 3)):
        chunk = Chunk(GatherShape(op, 50, 512, world), LoopbackRanks(device, world))
        assert chunk.num_sets % REUSE_DISTANCE == 0
        gatherers.append(Gatherer(chunk, "loopback", placed=True, name=f"{op}-{world}"))
        contenders += [(contender, chunk.num_sets - 1) for contender in gatherers[-1].contenders()]
    for contender, last in contenders:
        contender.call(0)
        contender.poison()
        assert contender.error() == 1, contender.name
        contender.call(last)
        assert contender.error() == 0, contender.name
    for made in (split, *gatherers):
        made.close()


@pytest.mark.parametrize("op", [bench_c4_prefill_gather.BENCH, INCREMENTAL_GATHER])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_packs_what_it_sends(op, world):
    """By both ways of packing: what all others look for, the next ranks' records neither in it nor behind it."""
    chunk = Chunk(GatherShape(op, 50, 512, world), LoopbackRanks(torch.device("cpu"), world))
    records = round_up(max(chunk.records), PAGE_SIZE)
    into = torch.empty(records, chunk.shape.record_bytes, dtype=torch.uint8)
    for rank in range(world):
        packer = Packer(chunk, rank, records)
        for pack in (packer.pack, functools.partial(chunk.index_select, rank)):
            poison(into)
            pack(0, into)
            assert not torch.equal(into[: chunk.records[rank]], chunk.expected[rank])
            poison(into)
            pack(chunk.num_sets - 1, into)
            assert torch.equal(into[: chunk.records[rank]], chunk.expected[rank])
        packer.close()
    assert sum(chunk.records) == (50 if chunk.incremental else 512)


@pytest.mark.parametrize("op", [bench_c4_prefill_gather.BENCH, INCREMENTAL_GATHER])
def test_what_a_collective_did_not_bring_is_an_error(op):
    """One rank is enough to see it: what it does not pack, gather or put in place is not there."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        chunk = Chunk(GatherShape(op, 50, 512, 1), LoopbackRanks(torch.device("cpu"), 1))
        collectives = Collectives(chunk, types.SimpleNamespace(rank=0, world=1, backend="gloo"))
        for contender in collectives.contenders():
            contender.call(0)
            contender.poison()
            # The all-gather alone finds its own slice packed, and with one rank that is all.
            assert contender.error() == float("+" in contender.name), contender.name
            contender.call(chunk.num_sets - 1)
            assert contender.error() == 0, contender.name
            chunk.poison()
            assert contender.error() == float(chunk.incremental and "+" in contender.name), contender.name
        collectives.close()
    finally:
        dist.destroy_process_group()


def test_shapes_between_processes_fit_one_table():
    """Every context in full and with all chunks; a quick run has some of them."""
    grid, quick = (shapes.ranks_gather_grid("cuda", quick, 2) for quick in (False, True))
    assert {shape.context for shape in grid} == set(shapes.C4_CONTEXTS) and set(quick) < set(grid)
    assert len(grid) == len(set(grid)) == 3 * len(shapes.C4_CONTEXTS)
    assert all(shape.world == 2 and shape.rows < shape.context for shape in grid)
