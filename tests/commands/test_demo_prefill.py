"""`demo --prefill`: what it prints and writes, what it refuses, and that a wrong operator makes it fail."""

import argparse
import contextlib
import io
import json

import pytest
import torch

from torch_sparse_mla.__main__ import main
from torch_sparse_mla.commands import demo, demo_prefill, prefill_cases
from torch_sparse_mla.integrations import prefill_ranks, tiny_models

from ..exchange.processes import run_ranks
from ..integrations.broken_prefill import forget_the_tail, lose_a_record, shift_slots
from ..integrations.models import shared_model

RUN = ["demo", "--device", "cpu", "--prefill", "--world", "2", "--layout", "bf16_mla_nope"]
CASES = [
    "one chunk",
    "several chunks",
    "two concurrent",
    "shared prefix",
    "later prefix hit",
    "ranks own nothing",
]


@pytest.fixture
def small(monkeypatch):
    """Shorter prompts (a prefix has the length that pages have), and a model that is there already."""
    monkeypatch.setattr(prefill_cases, "LONG", 140)
    monkeypatch.setattr(prefill_cases, "CONCURRENT", (80, 50))
    monkeypatch.setattr(prefill_cases, "SHARING", (40, 30))
    model = shared_model("glm5_next")
    monkeypatch.setattr(tiny_models, "build", lambda name, **options: model)


@pytest.fixture
def two_cases(small, monkeypatch):
    """Those of several chunks and of two requests, shorter still."""
    make_cases = prefill_cases.make_cases
    monkeypatch.setattr(prefill_cases, "CHUNK_ROWS", 50)
    monkeypatch.setattr(prefill_cases, "LONG", 90)
    monkeypatch.setattr(prefill_cases, "CONCURRENT", (40, 30))
    monkeypatch.setattr(prefill_cases, "make_cases", lambda *args: make_cases(*args)[1:3])


def test_demo_runs_the_six_cases(small, tmp_path, capsys):
    json_file = tmp_path / "prefill.json"
    assert main([*RUN, "--tokens", "3", "--json", str(json_file)]) == 0
    printed = capsys.readouterr().out
    assert "6 of 6 cases passed" in printed and "2 rank(s), in this process" in printed
    assert "5 gather" in printed and "1 ordinary (cost)" in printed
    document = json.loads(json_file.read_text())
    assert document["dtype"] == "float32" and document["kernel"]
    runs = document["runs"]
    assert [run["case"] for run in runs] == CASES
    for run in runs:
        assert run["faults"] == [] and run["layout"] == "bf16_mla_nope" and run["world"] == 2
        assert run["tokens"] == run["unsharded_tokens"] == run["oracle_tokens"]
        assert [len(tokens) for tokens in run["tokens"]] == [3] * len(run["prompts"])
        assert run["decode_steps"] == 2 and run["rows_beyond"] == 0
        assert 0 < run["max_logit_diff"] <= run["logit_limit"] == 0.01
        assert run["other_selections"] <= 0.01 * run["selections"] + 1
    # Chunks: two requests share one, a prefix of 512 goes first, and only the later hit has too few rows to gather.
    assert [len(run["chunks"]) for run in runs] == [1, 2, 2, 5, 1, 1]
    assert [chunk["lengths"] for chunk in runs[2]["chunks"]] == [[65, 50], [80]]
    assert runs[3]["chunks"][-1]["lengths"] == [552, 542]
    paths = {run["case"]: {chunk["path"] for chunk in run["chunks"]} for run in runs}
    assert paths.pop("later prefix hit") == {"ordinary"} and set.union(*paths.values()) == {"gather"}
    # 512 tokens of one rank, in records of 1,024 bytes and four layers; the same in bf16 queries and partial results.
    chunk = runs[3]["chunks"][3]
    assert chunk["lengths"] == [512] and chunk["gather_bytes"] == 4 * 256 * 1024
    assert chunk["ordinary_bytes"] == 4 * chunk["rows"] * 8 * (2 * 512 + 2 * 512 + 4)
    # What did not gather moved what ordinary DCP moves.
    later = runs[4]["chunks"][0]
    assert later["rows"] == 11 and later["ordinary_bytes"] == 4 * 11 * 8 * (2 * 512 + 2 * 512 + 4)
    assert f"{later['ordinary_bytes'] / 1024:,.0f} / {later['ordinary_bytes'] / 1024:,.0f}" in printed
    assert chunk["candidate_bytes"] == 2 * chunk["rows"] * 16 * 8


def lose_a_ranks_pools(q, weights, pools, *others, rank, **options):
    candidates = select(q, weights, pools, *others, rank=rank, **options)
    return candidates if rank == 0 else torch.full_like(candidates, -(2**63))


def forget_the_open_pool(keys, gates, bias, row_starts, starts, ring_rows, table, ring, *others, **options):
    ring.zero_()
    write(keys, gates, bias, row_starts, starts, ring_rows, table, ring, *others, **options)


def skip_a_record(latent, rope, slots, cache, layout):
    store(latent, rope, torch.where(slots == slots.max(), -1, slots), cache, layout)


def scale_output(q, *others, **options):
    out, lse = attend(q, *others, **options)
    return 1.05 * out, lse


select, write, store = prefill_ranks.c4_select, prefill_ranks.c4_write_index_keys, prefill_ranks.write_ckv_records
attend = prefill_ranks.sparse_ckv_decode


@pytest.mark.parametrize(
    ("name", "broken", "only_over_ranks"),
    [
        ("c4_merge_pools", forget_the_tail, False),
        ("c4_write_index_keys", forget_the_open_pool, False),
        ("write_ckv_records", skip_a_record, False),
        ("sparse_ckv_decode", scale_output, False),
        ("c4_prefill_gather_wait", lose_a_record, True),
        ("c4_remap", shift_slots, True),
        ("c4_select", lose_a_ranks_pools, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_demo_fails_with_a_broken_operator(name, broken, only_over_ranks, two_cases, monkeypatch, capsys):
    """Of one rank and of several, or of several alone: then one rank notices it too."""
    make_cases, run_cases, correct = prefill_cases.make_cases, prefill_cases.run_cases, getattr(prefill_ranks, name)

    def run(*args, world, **options):
        monkeypatch.setattr(prefill_ranks, name, broken if world > 1 or not only_over_ranks else correct)
        return run_cases(*args, world=world, **options)

    monkeypatch.setattr(prefill_cases, "make_cases", lambda *args: make_cases(*args)[:1])
    monkeypatch.setattr(prefill_cases, "run_cases", run)
    assert main([*RUN, "--tokens", "2"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED bf16_mla_nope, several chunks: " in printed and "0 of 1 cases passed" in printed
    if only_over_ranks:
        assert "several chunks: against one rank: " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "glm5_next"], "--model: got ['glm5_next']; allowed: none (with --prefill"),
        (["--context", "128"], "--context: got [128]; allowed: none"),
        (["--mode", "eager"], "--mode: got ['eager']; allowed: none"),
        (["--strategy", "exchange"], "--strategy: got ['exchange']; allowed: none"),
        (["--dtype", "bfloat16"], "--dtype: got 'bfloat16'; allowed: none"),
        (["--plot", "x.png"], "--plot: got"),
        (["--layout", "fp8_ds_mla"], "--layout: got 'fp8_ds_mla'; allowed: bf16_mla_nope, fp8_mla_nope"),
        (["--world", "3"], "--world: got '3'; allowed: 1, 2, 4, 8, 16"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_demo_refuses_what_says_nothing_about_prefills(arguments, message, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["demo", "--device", "cpu", "--prefill", *arguments])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def run_demo(rank, options):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = demo_prefill.run(options, torch.device("cpu"), ["bf16_mla_nope"], "two processes")
    return code, printed.getvalue()


def test_two_processes_are_two_ranks(two_cases, tmp_path):
    json_file = tmp_path / "prefill.json"
    options = argparse.Namespace(world=2, tokens=2, prompt=demo.TEXT, seed=0, dtype="float32", json=json_file)
    for code, printed in run_ranks(2, run_demo, tmp_path, options):
        assert code == 0, printed
        assert "2 rank(s), each a process: two processes" in printed and "2 of 2 cases passed" in printed
    runs = json.loads(json_file.read_text())["runs"]
    assert [run["case"] for run in runs] == CASES[1:3]
    assert all(run["processes"] and run["tokens"] == run["unsharded_tokens"] for run in runs)


@pytest.mark.gpu
def test_demo_runs_the_six_cases_on_a_gpu(tmp_path):
    json_file = tmp_path / "prefill.json"
    assert main(["demo", "--device", "cuda", "--prefill", "--tokens", "4", "--json", str(json_file)]) == 0
    assert all(run["faults"] == [] for run in json.loads(json_file.read_text())["runs"])
