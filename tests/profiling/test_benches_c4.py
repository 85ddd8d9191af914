"""The benchmarks of the C4 operators run, compare what they time with a reference, and fail where it is wrong."""

import json

import pytest
import torch

from profiling import bench_c4_prefill_gather, bench_c4_select
from profiling.shapes import INCREMENTAL_GATHER, GatherShape, SplitSelectShape

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
    generator, device = torch.Generator().manual_seed(0), torch.device("cpu")
    chunk = bench_c4_prefill_gather._Chunk(GatherShape(INCREMENTAL_GATHER, 64, 1_024, 4), device, generator)
    ranks = bench_c4_select._Ranks(SplitSelectShape(3, 1_024, pools=16), device, generator)
    for contender in (*chunk.contenders(), ranks.merge(), ranks.rows()):
        contender.poison()
        assert contender.error() == 1, contender.name
        contender.call(bench_c4_prefill_gather.NUM_SETS - 1)
        assert contender.error() == 0, contender.name
    chunk.close()
    ranks.close()
