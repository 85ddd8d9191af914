"""`profile` and `bench modes` on the CPU: what they print and write, what they refuse, and that they can fail."""

import json

import pytest

from profiling import bench_modes as bench_script
from profiling import results
from torch_sparse_mla.__main__ import main
from torch_sparse_mla.commands import bench_modes, profile, step_modes

TINY = ["--device", "cpu", "--rows", "2", "--heads", "2", "--topk", "64", "--hidden", "64", "--world", "2"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Traced and split, not compiled: Inductor is tested elsewhere."""
    monkeypatch.setitem(profile.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(bench_modes, "CALLS", 3)
    prepare = step_modes.prepare
    for module in (profile, bench_modes):
        monkeypatch.setattr(module, "prepare", lambda step, name: prepare(step, name, backend="eager"))


def test_profile_names_the_time_and_writes_files(tmp_path, capsys):
    assert main(["profile", *TINY, "--steps", "4", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    reports = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert [report["mode"] for report in reports] == ["eager", "compiled"]
    for report in reports:
        phases = {line["phase"]: line for line in report["phases"]}
        launches = {
            "write_ckv_records/write": 14,
            "ce_exchange/pack": 4,
            "ce_exchange/arrival": 4,
            "plan_selection/call": 2,
            "sparse_ckv_decode/attend": 8,
        }
        assert {phase: phases[phase]["launches"] for phase in launches} == launches
        assert report["unaccounted"] <= profile.MOST_UNACCOUNTED
        assert report["exchange_us"] > 0 and report["exchange_beside_other_work_us"] == 0
        assert phases["sparse_ckv_decode/attend"]["floor_us"] > 0
        name = f"profile-{report['mode']}"
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        trace = json.loads((tmp_path / "out" / f"{name}.trace.json").read_text())
        assert any(event.get("name") == "torch_sparse_mla::sparse_ckv_decode" for event in trace["traceEvents"])
        assert f"{report['mode']}: " in printed


def test_profile_fails_where_time_has_no_name(monkeypatch, capsys):
    everything = profile.intervals_of
    monkeypatch.setattr(profile, "intervals_of", lambda *arguments: everything(*arguments)[:40])
    assert main(["profile", *TINY, "--steps", "4", "--mode", "eager"]) == 1
    assert "FAILED eager: " in capsys.readouterr().out


def test_bench_modes_prints_a_line_for_each_mode(capsys):
    assert main(["bench", "modes", *TINY]) == 0
    printed = capsys.readouterr().out
    assert "eager" in printed and "compiled" in printed and "FAILED" not in printed


def test_bench_modes_fails_on_a_wrong_result(monkeypatch, capsys):
    measure = bench_modes.measure
    monkeypatch.setattr(bench_modes, "measure", lambda made, device, expected: measure(made, device, expected * 1.1))
    assert main(["bench", "modes", *TINY, "--mode", "compiled"]) == 1
    assert "FAILED compiled: the result is off by" in capsys.readouterr().out


def test_bench_modes_times_every_mode_before_it_profiles_one(monkeypatch):
    """A profiler that has run may slow down what the process launches later."""
    called = []
    for name in ("measure", "count_launches"):
        kept = getattr(bench_modes, name)
        monkeypatch.setattr(bench_modes, name, lambda *given, n=name, kept=kept: called.append(n) or kept(*given))
    assert main(["bench", "modes", *TINY]) == 0
    assert called == ["measure", "measure", "count_launches", "count_launches"]


def test_bench_script_writes_a_results_file(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_script, "copy_tb_per_s", lambda device: 0.01)
    assert bench_script.main([*TINY, "--json", str(tmp_path), "--commit", "abc"]) == 0
    (document,) = results.load(tmp_path)
    assert [(case["impl"], case["mode"]) for case in document["cases"]] == [
        (impl, mode) for impl in ("eager", "compiled") for mode in ("host", "call")
    ]
    assert all(case["layers"] == 4 and case["world"] == 2 for case in document["cases"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "--device", "cpu", "--mode", "full"], "got 'full'; allowed on cpu: all, eager, compiled"),
        (["bench", "modes", "--device", "cpu", "--mode", "x"], "got 'x'; allowed on cpu: all, eager, compiled"),
        (["bench", "decode"], "invalid choice: 'decode'"),
        (["profile", "--device", "cpu", "--steps", "0"], "argument --steps: got 0; allowed: 1 or more"),
        (["profile", "--device", "cpu", "--topk", "64", "--context", "32"], "got 32; allowed: at least the top-k, 64"),
        (["profile", "--out", __file__], f"argument --out: got '{__file__}'; allowed: a directory to write into"),
        (["profile", "--rows", "0"], "got '0'; allowed: an integer from 1"),
        (["profile", "--layout", "fp8"], "invalid choice: 'fp8'"),
    ],
)
def test_refusals(arguments, message, capsys):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_profile_on_a_gpu_accounts_for_every_mode(tmp_path, capsys):
    sizes = ["--rows", "4", "--topk", "512", "--hidden", "1024"]
    assert main(["profile", *sizes, "--out", str(tmp_path)]) == 0
    reports = {report["mode"]: report for report in json.loads((tmp_path / "profile.json").read_text())}
    assert list(reports) == ["eager", "compiled", "piecewise", "full"]
    for report in reports.values():
        phases = {line["phase"]: line["launches"] for line in report["phases"]}
        assert (phases["ce_exchange/pack"], phases["sparse_ckv_decode/attend"]) == (4, 8)
        assert not [phase for phase in phases if phase.startswith("other: ")], phases
    assert reports["full"]["wall_us"] < reports["piecewise"]["wall_us"] < reports["eager"]["wall_us"]
