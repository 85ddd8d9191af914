"""`doctor`: every operator is in its report, and what is installed but does not work makes it fail."""

import json
import subprocess
import sys

import pytest

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
    ("arguments", "named"), [(["docter"], "doctor"), ([], "{doctor,demo}"), (["doctor", "--jsno", "x"], "--jsno")]
)
def test_main_refuses_what_it_does_not_know(arguments, named, capsys):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert named in capsys.readouterr().err


def test_console_prints_brackets_as_they_are(capsys):
    console.print_table("title", ("what",), [("shape [red] [2, 3]",)])
    assert "shape [red] [2, 3]" in capsys.readouterr().out
