"""`doctor`: every operator is in its report, and what is installed but does not work makes it fail."""

import json
import subprocess
import sys

import pytest

from torch_sparse_mla import GatherPlan
from torch_sparse_mla.__main__ import main
from torch_sparse_mla._ops import OPS
from torch_sparse_mla.commands import console, doctor


def test_doctor_reports_every_operator(tmp_path):
    report_file = tmp_path / "report.json"
    command = [sys.executable, "-m", "torch_sparse_mla", "doctor", "--json", str(report_file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(report_file.read_text())
    assert set(report["ops"]) == set(OPS)
    for name, devices in report["ops"].items():
        assert name in result.stdout
        assert devices["cpu"]["kernel"] in ("reference", "native C++")
        assert set(devices) == {"cpu", "cuda"} and all(kernel["why"] for kernel in devices.values())
    assert report["self_test"]["cpu"] == "passed"
    assert report["broken"] == []
    native = report["native_library"]
    assert (native["path"] is None) != (native["reason"] is None)
    assert any(line.startswith("native library") for line in report["missing"]) == (native["path"] is None)


def test_doctor_fails_where_the_operator_gives_a_wrong_result(monkeypatch, capsys):
    def scaled(*args, **kwargs):
        out, lse = doctor_decode(*args, **kwargs)
        return out * 1.05, lse

    doctor_decode = doctor.sparse_ckv_decode
    monkeypatch.setattr(doctor, "sparse_ckv_decode", scaled)
    assert main(["doctor"]) == 1
    assert "self-test on cpu: wrong result" in capsys.readouterr().out


def test_doctor_fails_where_the_native_library_does_not_load(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "native_library", None)
    monkeypatch.setattr(doctor, "native_error", "_native.so does not load: undefined symbol: x")
    assert main(["doctor"]) == 1
    assert "undefined symbol: x; build it again" in capsys.readouterr().out


def test_doctor_names_the_remedy_for_a_missing_package(monkeypatch, capsys):
    versions = doctor._package_version
    monkeypatch.setattr(doctor, "_package_version", lambda name: None if name == "matplotlib" else versions(name))
    assert main(["doctor"]) == 0
    assert "matplotlib: pictures; run 'pip install matplotlib'" in capsys.readouterr().out


def test_doctor_works_without_rich(monkeypatch, capsys):
    monkeypatch.setattr(console, "Console", None)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "sparse_ckv_decode" in printed and "┃" not in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["docter"], "doctor"), ([], "{doctor,demo,profile,bench}"), (["doctor", "--jsno", "x"], "--jsno")],
)
def test_main_refuses_what_it_does_not_know(arguments, named, capsys):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert named in capsys.readouterr().err


def test_console_prints_brackets_as_they_are(capsys):
    console.print_table("title", ("what",), [("shape [red] [2, 3]",)])
    assert "shape [red] [2, 3]" in capsys.readouterr().out


def test_plan_prints_the_bytes_of_a_configuration(tmp_path, capsys):
    report = tmp_path / "plan.json"
    settings = ["page_size=2304", "world=4", "max_tokens=524288", "max_requests=32", "lanes=2"]
    assert main(["doctor", "--json", str(report), "--plan", *settings]) == 0
    printed = capsys.readouterr().out
    for number in ("131,328", "525,312", "277,364,736"):
        assert number in printed
    plan = json.loads(report.read_text())
    assert (plan["capacity_records"], plan["gathered_records"], plan["slots"]) == (131_328, 525_312, 2)
    lane = plan["lane_bytes"]
    assert lane["gathered"] == 525_312 * 528 and plan["total_bytes"] == 2 * lane["total"]
    assert plan["context_per_row"] == 248.7
    # Resident buffers are sized as the gathered one: 11 layers, two lanes.
    assert plan["resident_records"] == 131_328 and plan["resident_layer_bytes"] == 277_364_736
    words = GatherPlan(32, 8_192, 131_328, 4, 4, 2_304, 131_328).words
    assert plan["resident_bytes"] == 2 * (11 * 277_364_736 + 4 * words)
    # 576 index pages of a slice fit 524,288 tokens of 32 requests; numbers, candidates and scratch of 2,048 rows.
    assert plan["split_selector_bytes"] > 3 * 4 * 576 * 8_448
    for name in ("resident_layer_bytes", "resident_bytes", "split_selector_bytes"):
        assert f"{plan[name]:,}" in printed


def test_plan_without_whole_index_pages_cannot_split_rows(tmp_path, capsys):
    report = tmp_path / "plan.json"
    assert main(["doctor", "--json", str(report), "--plan", "resident_tokens=1000", "layers=3"]) == 0
    plan = json.loads(report.read_text())
    assert plan["split_selector_bytes"] is None
    assert plan["resident_layer_bytes"] == 4 * plan["resident_records"] * 528
    assert f"{plan['resident_bytes']:,}" in capsys.readouterr().out


def test_plan_of_one_rank_has_no_channel_to_pay_for(capsys):
    assert main(["doctor", "--plan", "world=1"]) == 0
    assert "None" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("pages=4", "KEY=VALUE with KEY one of world"),
        ("world", "KEY=VALUE"),
        ("world=0", "a positive integer for world"),
    ],
)
def test_plan_refuses_what_it_does_not_know(setting, allowed, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["doctor", "--plan", setting])
    assert refused.value.code == 2 and allowed in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "named"), [("page_size=6", "page_size"), ("layout=fp8", "layout"), ("heads=66", "heads")]
)
def test_plan_refuses_a_configuration_that_cannot_be(setting, named, capsys):
    assert main(["doctor", "--plan", setting]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and not captured.out
