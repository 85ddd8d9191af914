"""Benchmarks whose ranks are processes, on the CPU; and the run of everything that takes several."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from profiling import results, run_ranks
from profiling.run_ranks import Step, run_step, run_steps

ROOT = Path(__file__).resolve().parents[2]


def torchrun(world: int, *arguments: str) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_ce_exchange_between_processes(tmp_path):
    shape = ["--rows", "4", "--widths", "37", "--topk", "20", "--quick", "--device", "cpu", "--commit", "abc"]
    run = torchrun(2, "profiling/bench_ce_exchange.py", *shape, "--json", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    (document,) = results.load(tmp_path)
    assert document["device"].endswith("-x2") and document["ranks"] == "processes"
    assert document["peers"]["gloo-all-gather"] == document["peers"]["gloo-all-to-all"] == "ran"
    impls = [case["impl"] for case in document["cases"] if case["layers"] == 3 and "beside" not in case]
    assert impls == ["collective", "collective-per-layer", "gloo-all-gather", "gloo-all-to-all"]
    # One rank alone prints.
    assert run.stdout.count(" collective-per-layer ") == 1
    assert "of each sample the slowest rank counts" in run.stdout


def test_dcp_decode_between_processes(tmp_path):
    shape = ["--rows", "1", "--heads", "2", "--topk", "20", "--layouts", "bf16_mla", "--device", "cpu"]
    run = torchrun(2, "profiling/bench_dcp_decode.py", *shape, "--json", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    (document,) = results.load(tmp_path)
    impls = {case["impl"] for case in document["cases"]}
    assert {"owner_merge collective", "exchange collective", "exchange_bulk collective", "auto"} < impls


def test_c4_prefill_gather_between_processes(tmp_path):
    run = torchrun(2, "profiling/bench_c4_prefill_gather.py", "--quick", "--device", "cpu", "--json", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    (document,) = results.load(tmp_path)
    assert document["device"].endswith("-x2") and document["ranks"] == "processes"
    packed = ["index_select+gloo-all-gather", "pack+gloo-all-gather", "gloo-all-gather"]
    assert document["peers"] == dict.fromkeys(packed, "ran")
    cases = document["cases"]
    assert [case["impl"] for case in cases] == 2 * ["collective", *packed]
    # 1,024 tokens on two ranks, of which 128 are new: half of them from the peer.
    assert [case["received_bytes"] for case in cases[::4]] == [512 * 528, 64 * 528]
    assert cases[4]["resident_bytes"] == 1_024 * 528 and "resident_bytes" not in cases[0]
    assert all(case["error"] == 0 and case["ordinary_received_bytes"] == 128 * 32 * 2_052 for case in cases)
    assert "2 ranks, fp8_mla_nope: full / incremental / ordinary DCP" in run.stdout


def options(tmp_path: Path, **changes: object) -> argparse.Namespace:
    given = {"ranks": 2, "device": "cpu", "quick": True, "limit_s": 60, "only": None, "commit": None, "json": tmp_path}
    return argparse.Namespace(**(given | changes))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_failure_hides_no_other_step(tmp_path, capsys):
    steps = [
        Step("first", python("print('well done')"), 20),
        Step("second", python("print('what went wrong'); raise SystemExit(3)"), 20),
        Step("third", [str(tmp_path / "absent")], 20),
        Step("fourth", python("print('well done again')"), 20, lambda: {"passed": 7}),
    ]
    assert run_steps(steps, options(tmp_path)) == 1
    (path,) = (tmp_path / "ranks").iterdir()
    assert path.name == "steps-cpu-x2.json"
    written = {step["name"]: step for step in json.loads(path.read_text())["steps"]}
    assert [step["status"].split(":")[0] for step in written.values()] == ["ok", "failed", "failed", "ok"]
    assert written["second"]["status"] == "failed: exit status 3" and written["second"]["tail"] == ["what went wrong"]
    assert written["fourth"]["details"] == {"passed": 7} and written["first"]["tail"] == []
    assert "well done again" in capsys.readouterr().out
    assert run_steps(steps[:1], options(tmp_path)) == 0


GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {code!r}], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(100)", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)"]
)
def test_a_step_ends_at_its_limit_with_all_its_processes(code, tmp_path, monkeypatch, capsys):
    """Ranks are in process groups of their own, and one that does not heed the signal is killed."""
    monkeypatch.setattr(run_ranks, "GRACE_S", 1)
    began = time.monotonic()
    outcome = run_step(Step("slow", python(GRANDCHILD.format(code=code)), 1.5), 60)
    assert outcome.status == "failed: stopped after its limit of 2 s" and time.monotonic() - began < 30
    child = int(capsys.readouterr().out.split("child ")[1].split()[0])
    until = time.monotonic() + 10
    while Path(f"/proc/{child}/stat").exists() and time.monotonic() < until:
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        with pytest.raises(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_no_step_begins_when_the_time_is_over(tmp_path):
    steps = [Step("late", python("print()"), 20)]
    assert run_steps(steps, options(tmp_path, limit_s=-1)) == 1
    outcome = run_step(steps[0], 0)
    assert outcome.status == "not run: no time was left"


def test_counts_of_tests_come_from_their_report(tmp_path):
    junit = tmp_path / "tests.xml"
    test = tmp_path / "test_some.py"
    test.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n"
        # Of no case at all: in the report as one that did not run.
        "@pytest.mark.parametrize('case', [])\ndef test_c(case): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={junit}", str(test)]
    outcome = run_step(Step("tests", command, 60, lambda: run_ranks._test_counts(junit)), 60)
    assert outcome.status == "failed: exit status 1" and [
        name.split(".")[-1] for name in outcome.details["not_passed"]
    ] == ["test_b"]
    assert {key: outcome.details[key] for key in ("tests", "passed", "failures", "skipped")} == {
        "tests": 3,
        "passed": 1,
        "failures": 1,
        "skipped": 1,
    }
    missing = run_step(Step("tests", python(""), 20, lambda: run_ranks._test_counts(junit)), 60)
    assert "unreadable" in missing.details


def test_steps_of_a_run_on_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(run_ranks, "_slug", lambda options: "nvidia-h200")
    steps = {step.name: step for step in run_ranks.plan_steps(options(tmp_path, device="cuda", ranks=4, quick=False))}
    assert list(steps) == ["build", "tests", "ce_exchange", "dcp_decode", "c4_prefill", "demo"]
    chosen = [argument for argument in steps["tests"].arguments if argument.startswith("tests/")]
    assert "tests/dcp/test_dcp_gpu_processes.py" in chosen
    # Of the other files only what wants several GPUs.
    others = [name for name in chosen if "processes" not in name]
    assert others == ["tests/records/test_write_ckv_records.py::test_launches_on_the_tensors_device"]
    for name in chosen:
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text()
    for name in ("ce_exchange", "dcp_decode", "c4_prefill", "demo"):
        assert "--nproc-per-node 4" in " ".join(steps[name].arguments)
    for name in ("ce_exchange", "dcp_decode", "c4_prefill"):
        budget = steps[name].arguments[steps[name].arguments.index("--budget-s") + 1]
        assert float(budget) < steps[name].limit_s
    assert str(tmp_path / "demo-nvidia-h200-x4.json") in steps["demo"].arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0", "--device", "cpu"], "argument --ranks: got 0"),
        (["--ranks", "99"], "argument --ranks: got 99; allowed: 1 to"),
        (["--ranks", "2", "--device", "cpu", "--only", "test"], "argument --only: got test; allowed: build, tests"),
    ],
)
def test_a_run_that_cannot_be_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        run_ranks.main(arguments)
    assert message in capsys.readouterr().err


def test_what_is_written_names_no_folder_of_the_machine(tmp_path):
    outcome = run_step(Step("one", python(f"print({str(ROOT)!r} + '/x'); raise SystemExit(1)"), 20), 20)
    assert outcome.tail == ["./x"] and str(ROOT) not in outcome.command and sys.prefix not in outcome.command
