"""The Nsight scripts, dry: the commands that they would run, and what they refuse."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NSIGHT = Path(__file__).resolve().parents[2] / "profiling" / "nsight"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "DRY_RUN": "1", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


def test_systems(tmp_path):
    result = run(str(NSIGHT / "systems.sh"), str(tmp_path / "out" / "step"), "piecewise", "--world", "4")
    assert result.returncode == 0, result.stderr
    profiled, tables = result.stdout.replace("\\", "").splitlines()
    for part in ("nsys profile", "--cuda-graph-trace=node", "--trace=cuda,nvtx", "--mode piecewise --world 4"):
        assert part in profiled
    assert "nsys stats" in tables and "nvtx_sum,nvtx_gpu_proj_sum" in tables


def test_compute(tmp_path):
    result = run(str(NSIGHT / "compute.sh"), str(tmp_path / "attend"), "sparse_ckv_decode/attend")
    assert result.returncode == 0, result.stderr
    counted, details = result.stdout.splitlines()
    for part in ("ncu", "--nvtx", "torch_sparse_mla@sparse_ckv_decode", "--clock-control none", "--mode eager"):
        assert part in counted
    assert "--import" in details


@pytest.mark.parametrize("script", ["systems.sh", "compute.sh"])
def test_refusals(script, tmp_path):
    arguments = [str(tmp_path / "out"), *(["op/phase"] if script == "compute.sh" else [])]
    refused = run(str(NSIGHT / script), *arguments, "whole")
    assert refused.returncode == 2 and "mode: got 'whole'; allowed: eager, compiled, piecewise, full" in refused.stderr
    assert run(str(NSIGHT / script)).returncode != 0
    # A PATH with what the scripts need and no Nsight.
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    missing = run(str(NSIGHT / script), *arguments, DRY_RUN="0", PATH=str(tmp_path))
    assert missing.returncode == 2 and "is not on the PATH; install Nsight" in missing.stderr


def test_the_step_runs_on_the_cpu(monkeypatch):
    monkeypatch.syspath_prepend(str(NSIGHT))
    import step

    sizes = ["--rows", "1", "--heads", "1", "--topk", "64", "--hidden", "32", "--world", "1", "--steps", "1"]
    assert step.main(["--device", "cpu", "--mode", "eager", *sizes]) == 0
