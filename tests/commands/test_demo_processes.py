"""`demo` under torchrun: ranks that are processes of a gloo group on the CPU."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_sparse_mla.__main__ import main
from torch_sparse_mla.commands import processes

TIMEOUT_S = 300
SMALL = ["--model", "glm_moe_dsa", "--layout", "fp8_ds_mla", "--context", "96", "--tokens", "3"]


def torchrun(world: int, *arguments: str, device: str = "cpu") -> subprocess.CompletedProcess:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", str(port)]
    command = [sys.executable, *launcher, "-m", "torch_sparse_mla", "demo", "--device", device, *arguments]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def check_runs(result: subprocess.CompletedProcess, json_file: Path, world: int, strategies: list[str]) -> None:
    assert result.returncode == 0, result.stdout + result.stderr
    unsharded, *runs = json.loads(json_file.read_text())["runs"]
    assert [run["strategy"] for run in runs] == strategies
    for run in runs:
        assert run["world"] == world and run["tokens"] == unsharded["tokens"] and run["faults"] == []
    # Rank 0 alone prints.
    assert result.stdout.count(f"{len(runs) + 1} of {len(runs) + 1} runs passed") == 1


def test_two_processes_run_every_strategy_that_they_can(tmp_path):
    json_file = tmp_path / "demo.json"
    result = torchrun(2, *SMALL, "--strategy", "all", "--json", str(json_file))
    check_runs(result, json_file, 2, ["auto", "owner_merge", "exchange", "exchange_bulk"])
    assert "2 rank(s), each a process with its shard and its share of the heads: gloo group of 2" in result.stdout
    assert "Not run: peer_read: a gloo group of 2 on the CPU: a process maps no memory of another" in result.stdout


def test_processes_refuse_another_world(monkeypatch, capsys):
    monkeypatch.setattr(processes, "launched_world", lambda: 2)
    with pytest.raises(SystemExit) as refused:
        main(["demo", "--device", "cpu", *SMALL, "--world", "4"])
    assert refused.value.code == 2
    assert "argument --world: got '4'; allowed: 2, the processes of torchrun" in capsys.readouterr().err


@pytest.mark.gpu
def test_processes_run_every_strategy_on_gpus(tmp_path):
    """One GPU that they share, or one for each."""
    json_file = tmp_path / "demo.json"
    result = torchrun(2, *SMALL, "--strategy", "all", "--json", str(json_file), device="cuda")
    check_runs(result, json_file, 2, ["auto", "owner_merge", "exchange", "exchange_bulk", "peer_read"])
    shared = torch.cuda.device_count() < 2
    assert ("gloo group of 2 processes that share a GPU" if shared else "nccl group of 2 processes") in result.stdout
