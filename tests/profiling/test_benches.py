"""The benchmarks themselves, tiny, on the CPU: they run as scripts, check what they time, and write valid results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from profiling import (
    bench_ce_exchange,
    bench_dcp_decode,
    bench_plan_selection,
    bench_records,
    bench_sparse_ckv_decode,
    exchanges,
    harness,
    inputs,
    report,
    results,
    shapes,
    sharded,
    timing,
)
from profiling.ranks import LoopbackRanks
from torch_sparse_mla import explain
from torch_sparse_mla.dcp.contract import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(inputs.POOL_BYTES, "cpu", 4 << 20)
    monkeypatch.setitem(inputs.BLOCK_RECORDS, "cpu", 251)
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(timing, "CPU_ROUND_SECONDS", 0.0)
    monkeypatch.setattr(timing, "HOST_CALLS", 5)


def only_document(folder: Path) -> dict:
    (document,) = results.load(folder)
    return document


def test_decode_benchmark_runs_as_a_script(tmp_path):
    command = [sys.executable, "profiling/bench_sparse_ckv_decode.py", "--device", "cpu", "--rows", "1", "2"]
    command += ["--heads", "2", "--topk", "24", "--commit", "abc", "--json", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    document = only_document(tmp_path)
    assert document["commit"] == "abc" and document["peers"] == {"flashmla": "runs on CUDA only"}
    assert "peer flashmla: runs on CUDA only" in run.stdout
    native = explain("sparse_ckv_decode")["kernel"] == "native C++"
    impls = ["native-cpu", "reference"] if native else ["reference"]
    assert [(case["rows"], case["impl"]) for case in document["cases"]] == [(r, i) for r in (1, 2) for i in impls]
    for case in document["cases"]:
        assert (case["heads"], case["topk"], case["layout"], case["mode"]) == (2, 24, "fp8_ds_mla", "call")
        assert case["error"] < bench_sparse_ckv_decode.TOLERANCE
        assert case["us"] > case["floor_us"] > 0


@pytest.mark.parametrize("before", [None, "1"])
def test_decode_benchmark_asks_for_a_form_while_it_calls(monkeypatch, before):
    monkeypatch.delenv("TORCH_SPARSE_MLA_NATIVE", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCH_SPARSE_MLA_NATIVE", before)
    seen = []
    bench_sparse_ckv_decode._in_form(
        "wide", lambda *arguments: seen.append((os.environ["TORCH_SPARSE_MLA_NATIVE"], arguments))
    )(1, 2)
    assert seen == [("wide", (1, 2))]
    assert os.environ.get("TORCH_SPARSE_MLA_NATIVE") == before


def test_decode_benchmark_times_the_host_on_its_default_rows(small, tmp_path):
    arguments = [
        "--device",
        "cpu",
        "--layouts",
        "nvfp4_mla_nope",
        "--topk",
        "8",
        "--heads",
        "1",
        "--json",
        str(tmp_path),
    ]
    assert bench_sparse_ckv_decode.main(arguments) == 0
    cases = only_document(tmp_path)["cases"]
    assert {case["mode"] for case in cases} == {"call", "host"}
    assert {(case["rows"], case["topk"]) for case in cases if case["mode"] == "host"} == {(1, 1)}


def test_records_benchmark(small, tmp_path):
    arguments = ["--device", "cpu", "--tokens", "1", "100", "--layouts", "bf16_mla_nope", "nvfp4_ds_mla_fp8rope"]
    assert bench_records.main([*arguments, "--json", str(tmp_path)]) == 0
    shapes = {(case["layout"], case["op"], case["tokens"]) for case in only_document(tmp_path)["cases"]}
    assert len(shapes) == 2 * 2 * 2


def test_wrong_kernel_fails_the_run_and_leaves_no_case(small, tmp_path, monkeypatch, capsys):
    def wrong(q, cache, indices, lengths, sink, out, lse, *rest):
        out.fill_(1.0)
        lse.fill_(0.0)

    monkeypatch.setattr(harness, "op_impl", lambda op, device: "native-cpu")
    monkeypatch.setattr(bench_sparse_ckv_decode.reference, "sparse_ckv_decode", wrong)
    arguments = ["--device", "cpu", "--rows", "1", "--heads", "1", "--topk", "8", "--json", str(tmp_path)]
    monkeypatch.setattr(inputs, "exact_rows", lambda q, *rest: torch.full((1, 1, 512), 2.0))
    assert bench_sparse_ckv_decode.main(arguments) == 1
    assert "FAILED" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_failing_peer_is_reported_and_the_run_goes_on(small, tmp_path, monkeypatch, capsys):
    class Broken:
        name = "flashmla"

        def __init__(self, device: torch.device):
            pass

        def unavailable(self) -> None:
            return None

        def unsupported(self, shape) -> None:
            return None

        def prepare(self, prepared):
            def call(index_set: int) -> None:
                raise RuntimeError("no kernel image")

            return timing.Contender(self.name, call, lambda: None, lambda: 0.0, 1.0)

    monkeypatch.setattr(bench_sparse_ckv_decode, "PEERS", (Broken,))
    arguments = ["--device", "cpu", "--rows", "1", "--heads", "1", "--topk", "8", "--json", str(tmp_path)]
    assert bench_sparse_ckv_decode.main(arguments) == 0
    document = only_document(tmp_path)
    assert document["peers"] == {"flashmla": "RuntimeError: no kernel image"}
    assert "flashmla" not in {case["impl"] for case in document["cases"]}


@pytest.mark.parametrize("name", ["tpu", "meta", "nonsense"])
def test_unknown_device_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        bench_sparse_ckv_decode.main(["--device", name])
    assert "allowed: cpu or cuda" in capsys.readouterr().err


def test_results_are_one_object_of_plain_json(small, tmp_path):
    bench_records.main(["--device", "cpu", "--tokens", "1", "--op", "read_ckv_records", "--json", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["bench"] == "records"


def test_plan_selection_benchmark(small, tmp_path):
    arguments = ["--device", "cpu", "--rows", "4", "8", "--worlds", "2", "--topk", "64", "--json", str(tmp_path)]
    assert bench_plan_selection.main(arguments) == 0
    cases = only_document(tmp_path)["cases"]
    assert [(case["rows"], case["world"], case["mode"]) for case in cases] == [
        (4, 2, "call"),
        (4, 2, "host"),
        (8, 2, "call"),
    ]
    # Four rows choose 64 each of 96: 64 to 96 distinct ones in each request.
    assert all(64 < case["union"] <= 96 * case["rows"] // 4 for case in cases if case["mode"] == "call")


def test_plan_selection_benchmark_fails_on_a_wrong_plan(small, tmp_path, monkeypatch, capsys):
    wrong = bench_plan_selection.reference.plan_selection

    def another_rank(*args):
        wrong(*args[:6], 1, *args[7:])

    monkeypatch.setattr(bench_plan_selection.reference, "plan_selection", another_rank)
    arguments = ["--device", "cpu", "--rows", "4", "--worlds", "2", "--topk", "8", "--json", str(tmp_path)]
    assert bench_plan_selection.main(arguments) == 1
    assert "wrong result: error 1.00e+00" in capsys.readouterr().out


def test_plan_selection_benchmark_refuses_rows_that_are_no_requests(capsys):
    with pytest.raises(SystemExit):
        bench_plan_selection.main(["--device", "cpu", "--rows", "6"])
    assert "got [6]; allowed: multiples of 4" in capsys.readouterr().err


@pytest.fixture
def ranks():
    return LoopbackRanks(torch.device("cpu"), 3)


def test_ce_exchange_benchmark_sees_a_wrong_byte(ranks):
    shape = shapes.ExchangeShape(rows=8, topk=20, record_bytes=37, world=3, layers=2)
    selections = sharded.Selections(shape, shape.layers, ranks.device, 8)
    caches = {rank: selections.random_caches(rank) for rank in ranks.own}
    (transport,) = exchanges.transports(ranks)
    exchanger = exchanges.Exchanger(selections, caches, ranks, transport)
    for contender in exchanger.contenders():
        contender.poison()
        assert contender.error() == 1.0
        for index_set in range(selections.num_sets):
            contender.call(index_set)
        assert contender.error() == 0.0
        places, _ = selections.arrivals[1]
        exchanger.workspaces[2][1][places[-1], 36] ^= 1
        assert contender.error() == 1.0
    exchanger.close()


def test_unions_of_a_benchmark_are_counted_not_expected():
    shape = shapes.ExchangeShape(rows=4, topk=20, record_bytes=37, world=2, layers=1)
    selections = sharded.Selections(shape, 1, torch.device("cpu"), 8)
    counted = [len(lists.unique()) for lists in selections.lists]
    assert len(counted) == 8 and selections.union == pytest.approx(sum(counted) / 8)
    plan = selections.plans(0)[3]
    assert int(selections.selection.counts(plan)[0]) == counted[3]


def test_packing_is_checked():
    packer = exchanges.Packer(70, 37, 3, torch.device("cpu"))
    pack, nothing, copy = packer.contenders()
    for contender in (pack, copy):
        contender.poison()
        assert contender.error() == 1.0
        contender.call(2)
        assert contender.error() == 0.0
        contender.call(1)
        assert contender.error() == 1.0
    nothing.call(0)
    packer.close()


def test_ce_exchange_benchmark_on_loopback_ranks(small, tmp_path, capsys):
    arguments = ["--device", "cpu", "--rows", "1", "8", "--widths", "37", "--topk", "20", "--worlds", "2", "--quick"]
    assert bench_ce_exchange.main([*arguments, "--beside", "--json", str(tmp_path)]) == 0
    document = only_document(tmp_path)
    assert "it says nothing about a link" in document["limits"] and document["limits"] in capsys.readouterr().out
    assert document["peers"]["nccl-all-gather"] == "takes ranks that are processes"
    exchanged, beside, packs = report.exchange_cases(document)
    assert [(c["rows"], c["layers"], c["impl"]) for c in exchanged if c["rows"] == 8] == [
        (8, 1, "loopback"),
        (8, 3, "loopback"),
        (8, 3, "loopback-per-layer"),
    ]
    assert {c["impl"] for c in beside} == {
        f"{w} {h}" for w in ("gemm", "attention") for h in ("alone", "beside loopback")
    }
    assert not packs
    section = report.section(document, "folder")
    assert "| gemm | 2 | 8 | gemm beside loopback |" in section and "Not measured: nccl-all-gather" in section


def test_time_of_a_benchmark_is_bounded(small, tmp_path, capsys):
    arguments = ["--device", "cpu", "--rows", "1", "8", "--widths", "37", "--topk", "20", "--worlds", "2", "--quick"]
    assert bench_ce_exchange.main([*arguments, "--budget-s", "1e9", "--json", str(tmp_path)]) == 0
    every = only_document(tmp_path)
    assert bench_ce_exchange.main([*arguments, "--budget-s", "-1", "--json", str(tmp_path)]) == 1
    assert "left out after 0 s: 4 shapes" in capsys.readouterr().out
    assert "left_out" not in every and only_document(tmp_path)["date"] == every["date"]


def test_dcp_decode_benchmark_on_loopback_ranks(small, tmp_path):
    arguments = ["--device", "cpu", "--rows", "4", "--heads", "2", "--topk", "20", "--worlds", "2"]
    assert bench_dcp_decode.main([*arguments, "--layouts", "fp8_ds_mla", "--json", str(tmp_path)]) == 0
    cases = {case["impl"]: case for case in only_document(tmp_path)["cases"]}
    strategies = {f"{name} loopback" for name in STRATEGIES if name != "auto"}
    assert set(cases) == strategies | {"auto", "owner_merge traffic loopback"}
    assert all(case["error"] < bench_dcp_decode.TOLERANCE for case in cases.values())
    auto = cases["auto"]
    assert f"{auto['chosen']} loopback" in strategies and auto["best"] in strategies
    assert auto["behind_best"] == pytest.approx(auto["us"] / cases[auto["best"]]["us"] - 1, abs=1e-3)
    assert "owner_merge traffic loopback" in report.section(only_document(tmp_path), "folder")


def test_dcp_decode_benchmark_sees_another_ranks_records(small, monkeypatch, tmp_path, capsys):
    """The oracle takes records from caches of its own."""
    made = sharded.StepInputs.cache

    def exchanged(self, rank, layer, into=None):
        return made(self, rank if sys._getframe(1).f_code.co_name == "selected" else 1 - rank, layer, into)

    monkeypatch.setattr(sharded.StepInputs, "cache", exchanged)
    arguments = ["--device", "cpu", "--rows", "1", "--heads", "2", "--topk", "20", "--worlds", "2"]
    assert bench_dcp_decode.main([*arguments, "--layouts", "fp8_ds_mla", "--json", str(tmp_path)]) == 1
    assert "exchange loopback: wrong result" in capsys.readouterr().out


@pytest.mark.parametrize("bench", [bench_ce_exchange, bench_dcp_decode])
def test_rows_that_are_no_requests_are_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--rows", "6"])
    assert "got [6]; allowed: 1 to 4, or multiples of 4" in capsys.readouterr().err
